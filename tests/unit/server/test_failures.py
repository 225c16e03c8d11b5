"""What goes wrong in the engine, before and after the first byte, and clients that leave."""

from __future__ import annotations

import asyncio
import socket
import time
from typing import Any

import httpx
import pytest

from fourfold.errors import (
    EngineDeadError,
    EngineFaultError,
    FourfoldError,
    InvalidRequestError,
    OverloadedError,
)
from fourfold.server.app import create_app
from fourfold.server.settings import ServerSettings
from fourfold.text.tokenizer import Tokenizer

from .conftest import Live, Start
from .fakes import FakeClient
from .sse import events, texts

pytestmark = pytest.mark.anyio

CASES: list[tuple[FourfoldError, int, str | None]] = [
    (InvalidRequestError("needs 20 blocks, the pool has 8", "prompt", "too_big"), 400, None),
    (OverloadedError("the queue is full", 2.3), 429, "3"),
    (EngineDeadError("the engine died"), 503, "1"),
    (EngineFaultError("logits were not finite"), 500, None),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(("error", "status", "retry"), CASES)
async def test_before_the_first_token(
    http: httpx.AsyncClient,
    engine: FakeClient,
    error: FourfoldError,
    status: int,
    retry: str | None,
    n: int,
    stream: bool,
) -> None:
    """Streams too are refused with a status; the siblings of the sequence that failed are aborted."""
    engine.step = 0.001
    engine.reply = lambda request: error if request.request_id.endswith(f"-{n - 1}") else "Hello world"
    if n > 1:
        # Nothing of the others comes before the failure.
        engine.step = 0.05
    body = {"prompt": "a", "n": n, "stream": stream}
    response = await http.post("/v1/completions", json=body)
    assert response.status_code == status
    assert response.headers.get("retry-after") == retry
    assert response.json()["error"]["message"] == str(error)
    assert not engine.active
    engine.reply = lambda _: "ab"
    assert (await http.post("/v1/completions", json=body)).status_code == 200


@pytest.mark.parametrize("n", [1, 2])
async def test_in_the_middle_of_a_stream(http: httpx.AsyncClient, engine: FakeClient, n: int) -> None:
    engine.fail_after = (2, EngineDeadError("the engine died"))
    response = await http.post("/v1/completions", json={"prompt": "a", "stream": True, "n": n})
    assert response.status_code == 200
    *chunks, last = events(response.text)
    assert last["error"]["message"] == "the engine died"
    assert last["error"]["code"] == "engine_dead"
    assert texts(chunks)[0] == "Hello w"
    assert not engine.active
    assert 'fourfold:sequences_in_flight{model_name="tiny"} 0.0' in (await http.get("/metrics")).text


async def test_late_first_token(engine: FakeClient, tokenizer: Tokenizer) -> None:
    """A stream that waits for long gets its headers and roles; what then fails comes as an event."""
    app = create_app(engine, tokenizer, ServerSettings(first_event_grace=0.05))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        body = {"messages": [{"role": "user", "content": "a"}], "stream": True, "n": 2}
        engine.step = 0.1
        chunks = events((await http.post("/v1/chat/completions", json=body)).text)
        assert texts(chunks) == {0: "Hello world", 1: "Hello world"}
        roles = [choice["delta"].get("role") for chunk in chunks for choice in chunk["choices"]]
        assert roles[:2] == ["assistant"] * 2
        assert set(roles[2:]) == {None}
        engine.fail_after = (0, OverloadedError("full"))
        *_, last = events((await http.post("/v1/chat/completions", json=body)).text)
        assert last["error"]["code"] == "queue_full"


async def _settled(engine: FakeClient) -> None:
    for _ in range(200):
        if not engine.active:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("sequences were left in the engine")


def _send(live: Live, body: str) -> socket.socket:
    host, port = live.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=5)
    connection.sendall(
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
    )
    return connection


@pytest.mark.parametrize("stream", ["true", "false"])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("queued", [False, True])
async def test_client_leaves(live: Start, engine: FakeClient, stream: str, n: int, queued: bool) -> None:
    """B43: streaming, not streaming, and while still queued."""
    engine.step = 0.02
    engine.reply = lambda _: "abcd" * 50
    if queued:
        engine.gate.clear()
    server = live()
    connection = _send(server, f'{{"prompt": "a", "max_tokens": 100, "stream": {stream}, "n": {n}}}')
    deadline = time.monotonic() + 20
    while len(engine.active) < n and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    assert len(engine.active) == n
    if stream == "true" and not queued:
        assert b"200 OK" in await asyncio.to_thread(connection.recv, 1000)
    connection.close()
    await _settled(engine)
    assert len(engine.aborted) == n
    engine.gate.set()
    response = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 1})
    assert response.status_code == 200
    metrics = httpx.get(f"{server.url}/metrics").text
    assert 'fourfold:sequences_in_flight{model_name="tiny"} 0.0' in metrics
    assert f'finished_reason="abort",model_name="tiny"}} {n}.0' in metrics


async def test_client_leaves_while_it_sends(live: Start, engine: FakeClient) -> None:
    server = live()
    connection = _send(server, "")
    connection.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"pro')
    connection.close()
    assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"}).status_code == 200


async def test_body_over_the_limit_on_a_socket(live: Start) -> None:
    server = live(ServerSettings(max_body_bytes=1000, drain_timeout=1))
    response = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a" * 2000})
    assert response.status_code == 413


async def test_many_streams_at_once(live: Start, engine: FakeClient) -> None:
    """64 concurrent streams, nothing lost, nothing mixed up."""
    engine.step = 0.001
    engine.reply = lambda request: f"ab{request.sampling.seed}cd" * 8
    server = live()
    async with httpx.AsyncClient(base_url=server.url, limits=httpx.Limits(), timeout=30) as http:

        async def one(seed: int) -> str:
            body: dict[str, Any] = {"prompt": "a", "max_tokens": 120, "stream": True, "seed": seed}
            response = await http.post("/v1/completions", json=body)
            return texts(events(response.text))[0]

        answers = await asyncio.gather(*(one(seed) for seed in range(64)))
    assert answers == [f"ab{seed}cd" * 8 for seed in range(64)]
    assert not engine.active
