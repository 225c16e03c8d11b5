"""Keys, request ids, cross-origin requests, and who shares a cache with whom."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.errors import ConfigError
from fourfold.server.app import create_app
from fourfold.server.gate import ApiKeys, cache_salt
from fourfold.server.settings import ServerSettings
from fourfold.text.tokenizer import Tokenizer

from .fakes import FakeClient

pytestmark = pytest.mark.anyio

Serve = Callable[[ServerSettings], AbstractAsyncContextManager[httpx.AsyncClient]]


@pytest.fixture
def served(engine: FakeClient, tokenizer: Tokenizer) -> Serve:
    @asynccontextmanager
    async def serve(settings: ServerSettings) -> AsyncIterator[httpx.AsyncClient]:
        app = create_app(engine, tokenizer, settings)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
            yield http

    return serve


async def test_keys_protect_everything_but_health(served: Serve, engine: FakeClient) -> None:
    async with served(ServerSettings(api_keys=("one", "two"))) as http:
        assert (await http.get("/health")).status_code == 200
        paths = (
            "/v1/models",
            "/metrics",
            "/version",
            "/ping",
            "/debug/kv",
            "/openapi.json",
            "/docs",
            "/nowhere",
        )
        for path in paths:
            response = await http.get(path)
            assert response.status_code == 401, path
            assert response.json()["error"]["code"] == "invalid_api_key"
        for bad in ("Bearer three", "Bearer ", "Bearer on", "Bearer onee", "one", "Basic one", "Bearer café"):
            headers = {"authorization": bad.encode()}
            response = await http.post("/v1/completions", json={"prompt": "a"}, headers=headers)
            assert response.status_code == 401, bad
        assert not engine.requests
        for headers in (
            {"authorization": "Bearer one"},
            {"authorization": "bearer two"},
            {"x-api-key": "one"},
        ):
            response = await http.post("/v1/completions", json={"prompt": "a"}, headers=headers)
            assert response.status_code == 200


async def test_salt_comes_from_the_key(served: Serve, engine: FakeClient) -> None:
    """Design rule 3: never by what the body claims; a body may narrow it."""
    salts: dict[tuple[str, str | None], str] = {}
    async with served(ServerSettings(api_keys=("one", "two"))) as http:
        for key in ("one", "two"):
            for body_salt in (None, "", "A", "B"):
                body = {"prompt": "a", "cache_salt": body_salt}
                for _ in range(2):
                    await http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
                assert engine.requests[-1].cache_salt == engine.requests[-2].cache_salt
                salts[key, body_salt] = engine.requests[-1].cache_salt
        assert len(set(salts.values())) == 8
        # A body that names another tenant's salt does not get it.
        body = {"prompt": "a", "cache_salt": salts["two", None]}
        await http.post("/v1/completions", json=body, headers={"authorization": "Bearer one"})
        assert engine.requests[-1].cache_salt not in salts.values()
    assert not any("one" in salt or "two" in salt for salt in salts.values())


async def test_without_keys_all_share(http: httpx.AsyncClient, engine: FakeClient) -> None:
    await http.post("/v1/completions", json={"prompt": "a"})
    assert engine.requests[-1].cache_salt == ""


@given(a=st.text(), b=st.text(), c=st.text(), d=st.text())
def test_salts_collide_only_when_equal(a: str, b: str, c: str, d: str) -> None:
    try:
        same = cache_salt(a, b) == cache_salt(c, d)
    except UnicodeEncodeError:
        return
    assert same == ((a, b) == (c, d))


@given(keys=st.lists(st.text(min_size=1), min_size=1, max_size=4), candidate=st.text())
def test_only_the_keys_are_known(keys: list[str], candidate: str) -> None:
    try:
        known = ApiKeys(keys)
        tenant = known.tenant(candidate)
    except UnicodeEncodeError:
        return
    assert (tenant is not None) == (candidate in keys)


async def test_request_ids(http: httpx.AsyncClient) -> None:
    response = await http.get("/version", headers={"x-request-id": "abc-123"})
    assert response.headers["x-request-id"] == "abc-123"
    for bad in ("", "a b", "x" * 129):
        response = await http.get("/version", headers={"x-request-id": bad})
        assert len(response.headers["x-request-id"]) == 32
    assert (await http.get("/nowhere")).headers["x-request-id"]
    response = await http.post("/v1/completions", json={"prompt": "a", "stream": True})
    assert response.headers["x-request-id"]


async def test_cross_origin(served: Serve) -> None:
    async with served(ServerSettings()) as http:
        response = await http.get("/version", headers={"origin": "https://a.example"})
        assert "access-control-allow-origin" not in response.headers
    async with served(ServerSettings(cors_origins=("https://a.example",), api_keys=("k",))) as http:
        preflight = {
            "origin": "https://a.example",
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type",
        }
        response = await http.options("/v1/completions", headers=preflight)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == "https://a.example"
        response = await http.get("/v1/models", headers={"origin": "https://a.example"})
        assert response.status_code == 401
        assert response.headers["access-control-allow-origin"] == "https://a.example"
        response = await http.get("/health", headers={"origin": "https://b.example"})
        assert "access-control-allow-origin" not in response.headers


async def test_access_log(served: Serve, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "fourfold.access")
    async with served(ServerSettings(access_log=True)) as http:
        await http.get("/version", headers={"x-request-id": "me"})
    assert caplog.records[0].getMessage().startswith("GET /version 200 ")
    assert caplog.records[0].getMessage().endswith(" me")


@pytest.mark.parametrize(
    "values",
    [
        {"port": -1}, {"port": 65536}, {"drain_timeout": -1}, {"first_event_grace": float("nan")},
        {"max_body_bytes": 0},
        {"max_sequences": 0}, {"api_keys": ("",)}, {"api_keys": ("a\nb",)}, {"api_keys": ("é",)},
        {"served_model_names": ("",)},
    ],
)  # fmt: skip
def test_bad_settings(values: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        ServerSettings(**values)  # type: ignore[arg-type]
