"""Timeouts and weights on their way from a request to the engine, and what becomes of those it refuses."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from fourfold.errors import ConfigError, DeadlineError
from fourfold.server.app import create_app
from fourfold.server.settings import ServerSettings
from fourfold.text.tokenizer import Tokenizer

from .fakes import FakeClient

pytestmark = pytest.mark.anyio

BODY: dict[str, Any] = {"prompt": "Hello", "max_tokens": 3}


def client(engine: FakeClient, tokenizer: Tokenizer, **settings: Any) -> httpx.AsyncClient:
    app = create_app(engine, tokenizer, ServerSettings(**settings))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


async def test_the_body_goes_before_headers_and_those_before_settings(
    engine: FakeClient, tokenizer: Tokenizer
) -> None:
    headers = {"X-Request-Timeout": "20", "X-TTFT-Timeout": "2.5"}
    async with client(engine, tokenizer, request_timeout=60, ttft_timeout=5) as http:
        await http.post("/v1/completions", json=BODY)
        await http.post("/v1/completions", json=BODY, headers=headers)
        await http.post("/v1/completions", json=BODY | {"timeout": 9, "ttft_timeout": 0.5}, headers=headers)
    seen = [(each.timeout, each.ttft_timeout) for each in engine.requests]
    assert seen == [(60, 5), (20, 2.5), (9, 0.5)]


async def test_no_limit_by_default(http: httpx.AsyncClient, engine: FakeClient) -> None:
    await http.post("/v1/completions", json=BODY)
    assert (engine.requests[0].timeout, engine.requests[0].ttft_timeout) == (None, None)


@pytest.mark.parametrize("value", [0, -1, 1e9, "soon"])
async def test_absurd_times_in_bodies(http: httpx.AsyncClient, value: object) -> None:
    answer = await http.post("/v1/completions", json=BODY | {"timeout": value})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "timeout"


@pytest.mark.parametrize("value", ["0", "-3", "nan", "inf", "soon", "1" * 400])
async def test_absurd_times_in_headers(http: httpx.AsyncClient, value: str) -> None:
    answer = await http.post("/v1/completions", json=BODY, headers={"X-Request-Timeout": value})
    assert answer.status_code == 400
    assert "x-request-timeout" in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_refused_at_once_and_ended_late(
    http: httpx.AsyncClient, engine: FakeClient, stream: bool
) -> None:
    engine.reply = lambda _: DeadlineError("timeout is 1 s, but it would take about 3.2 s", 2.2)
    answer = await http.post("/v1/completions", json=BODY | {"stream": stream})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "3")
    assert answer.json()["error"]["code"] == "deadline_unreachable"
    engine.reply = lambda _: DeadlineError("no token within 1 s", passed=True)
    answer = await http.post("/v1/completions", json=BODY | {"stream": stream})
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "timeout"


async def test_tenants_users_and_weights(engine: FakeClient, tokenizer: Tokenizer) -> None:
    async with client(engine, tokenizer, api_keys=("gold", "iron"), key_weights=(("gold", 3.0),)) as http:
        for key in ("gold", "iron"):
            headers = {"Authorization": f"Bearer {key}"}
            await http.post("/v1/completions", json=BODY | {"user": "u" * 1000}, headers=headers)
    gold, iron = engine.requests
    assert gold.tenant != iron.tenant
    assert (gold.weight, iron.weight) == (3.0, 1.0)
    assert gold.user == iron.user == "u" * 256
    assert "gold" not in repr(gold)


@pytest.mark.parametrize(
    "settings",
    [
        {"request_timeout": 0}, {"ttft_timeout": -1}, {"key_weights": (("unknown", 1.0),)},
        {"api_keys": ("k",), "key_weights": (("k", 0.0),)},
        {"api_keys": ("k",), "key_weights": (("k", float("nan")),)},
    ],
)  # fmt: skip
def test_bad_settings(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ServerSettings(**settings)
