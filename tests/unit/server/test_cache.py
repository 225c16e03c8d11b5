"""Pins and KV events over HTTP, with an engine that says what it is told to."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from fourfold.engine.operations import (
    BlockMoved,
    BlockRemoved,
    BlockStored,
    CacheOutcome,
    EventPage,
    ListPins,
    PinPrefix,
    ReadEvents,
    UnpinPrefix,
)
from fourfold.errors import OverloadedError
from fourfold.types import PinInfo

from .fakes import FakeClient
from .test_traces import KEYS, auth, keyed

pytestmark = pytest.mark.anyio

INFO = PinInfo(name="n", tokens=32, blocks=2)


def _refusal(response: httpx.Response) -> tuple[int, str | None]:
    return response.status_code, response.json()["error"]["param"]


async def test_a_prompt_is_computed_and_then_pinned(http: httpx.AsyncClient, engine: FakeClient) -> None:
    engine.outcome = CacheOutcome([INFO])
    engine.cached = 2
    answer = await http.post("/v1/cache/pin", json={"prompt": "abcd", "name": "n"})
    assert answer.json() == {
        "object": "cache.pin", "name": "n", "tokens": 32, "blocks": 2,
        "usage": {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}},
    }  # fmt: skip
    (computed,) = engine.requests
    assert computed.sampling.max_tokens == 1
    asked, made = engine.operations
    assert asked == ListPins("")
    assert made == PinPrefix("", computed.cache_salt, "n", list(computed.prompt_ids))


async def test_the_same_tokens_as_the_endpoints_make(http: httpx.AsyncClient, engine: FakeClient) -> None:
    engine.outcome = CacheOutcome([INFO])
    system = {"role": "system", "content": "Hello"}
    for body in (
        {"prompt": "Hello world"},
        {"prompt": [1, 2, 3]},
        {"messages": [system]},
        {"messages": [system], "add_generation_prompt": True},
    ):
        assert (await http.post("/v1/cache/pin", json=body)).status_code == 200
    text, ids, chat, begun = (list(one.prompt_ids) for one in engine.requests)
    await http.post("/v1/completions", json={"prompt": "Hello world"})
    assert list(engine.requests[-1].prompt_ids) == text
    assert ids == [1, 2, 3]
    await http.post("/v1/chat/completions", json={"messages": [system, {"role": "user", "content": "ab"}]})
    # The pinned messages are a prefix of a conversation that goes on from them.
    assert list(engine.requests[-1].prompt_ids)[: len(chat)] == chat
    assert len(begun) > len(chat)
    names = [one.name for one in engine.operations if isinstance(one, PinPrefix)]
    assert len(set(names)) == 4


@pytest.mark.parametrize(
    "body,param",
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [2**40]}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": [1] * 500}, "prompt"),
        ({"messages": []}, "messages"),
        ({"prompt": "a", "name": ""}, "name"),
        ({"prompt": "a", "name": "x" * 257}, "name"),
        ({"prompt": "a", "cache_salt": 3}, "cache_salt"),
    ],
)
async def test_bad_pins(
    http: httpx.AsyncClient, engine: FakeClient, body: dict[str, Any], param: str
) -> None:
    assert _refusal(await http.post("/v1/cache/pin", json=body)) == (400, param)
    assert not engine.operations
    assert not engine.requests


async def test_what_the_engine_refuses(http: httpx.AsyncClient, engine: FakeClient) -> None:
    engine.outcome = CacheOutcome(refused="this engine has no prefix cache", param=None)
    answer = await http.post("/v1/cache/pin", json={"prompt": "a"})
    assert _refusal(answer) == (400, None)
    # Nothing was computed for nothing.
    assert not engine.requests
    engine.outcome = CacheOutcome()
    engine.reply = lambda _: OverloadedError("full")
    assert (await http.post("/v1/cache/pin", json={"prompt": "a"})).status_code == 429
    engine.mute = True
    assert (await http.get("/v1/cache/pins")).status_code == 503
    assert (await http.get("/v1/cache/events")).status_code == 503


async def test_unpin_and_list(http: httpx.AsyncClient, engine: FakeClient) -> None:
    engine.outcome = CacheOutcome([INFO])
    gone = await http.post("/v1/cache/unpin", json={"name": "n"})
    line = {"object": "cache.pin", "name": "n", "tokens": 32, "blocks": 2}
    assert gone.json() == {**line, "deleted": True}
    assert (await http.get("/v1/cache/pins")).json() == {"object": "list", "data": [line]}
    assert engine.operations == [UnpinPrefix("", "n"), ListPins("")]
    engine.outcome = CacheOutcome()
    missing = await http.post("/v1/cache/unpin", json={"name": "n"})
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "pin_not_found")
    assert _refusal(await http.post("/v1/cache/unpin", json={})) == (400, "name")


async def test_everything_is_asked_for_as_the_key_s_owner(engine: FakeClient) -> None:
    page = EventPage(epoch="e", last=0, lost=0, numbered=[], more=False)
    engine.outcome = CacheOutcome([INFO], events=page)
    seen: list[list[str]] = []
    async with keyed(engine) as http:
        assert (await http.get("/v1/cache/events")).status_code == 401
        for key in KEYS:
            engine.operations.clear()
            for body in ({"prompt": "a"}, {"prompt": "a", "cache_salt": "s"}):
                assert (await http.post("/v1/cache/pin", json=body, headers=auth(key))).status_code == 200
            await http.post("/v1/cache/unpin", json={"name": "n"}, headers=auth(key))
            await http.get("/v1/cache/pins", headers=auth(key))
            await http.get("/v1/cache/events", headers=auth(key))
            await http.get("/v1/cache/events?cache_salt=s", headers=auth(key))
            owners = {one.owner for one in engine.operations if not isinstance(one, ReadEvents)}
            salts = [one.salt for one in engine.operations if isinstance(one, PinPrefix | ReadEvents)]
            # What is read is what the same key's requests are cached under.
            assert salts[0] == salts[2] == engine.requests[-2].cache_salt
            assert salts[1] == salts[3] == engine.requests[-1].cache_salt
            assert owners == {salts[0]}
            seen.append(salts)  # type: ignore[arg-type]
    assert not set(seen[0]) & set(seen[1])


async def test_events(http: httpx.AsyncClient, engine: FakeClient) -> None:
    stored = BlockStored(b"\1" * 16, b"\0" * 16, "s", (5, 6))
    numbered = [(8, stored), (9, BlockMoved(b"\1" * 16, "disk", True)), (11, BlockRemoved(b"\1" * 16, "s"))]
    engine.outcome = CacheOutcome(
        events=EventPage(epoch="e1", last=20, lost=3, numbered=numbered, more=True)  # type: ignore[arg-type]
    )
    page = (await http.get("/v1/cache/events?after=4&limit=3")).json()
    assert engine.operations == [ReadEvents(4, 3, None)]
    digest = "01" * 16
    assert page == {
        "object": "list", "epoch": "e1", "last": 20, "lost": 3, "next": 11, "has_more": True,
        "data": [
            {"number": 8, "type": "stored", "digest": digest, "parent": "00" * 16, "salt": "s",
             "token_ids": [5, 6], "tier": "device"},
            {"number": 9, "type": "moved", "digest": digest, "tier": "disk", "present": True},
            {"number": 11, "type": "removed", "digest": digest, "salt": "s", "tier": "device"},
        ],
    }  # fmt: skip
    engine.outcome = CacheOutcome(events=EventPage(epoch="e1", last=20, lost=0, numbered=[], more=False))
    assert (await http.get("/v1/cache/events?after=4")).json()["next"] == 20


@pytest.mark.parametrize("value", ["-1", "x", "", "1.5", "1_0", "٣", "9" * 5000, str(2**63), " 1"])
async def test_bad_event_numbers(http: httpx.AsyncClient, engine: FakeClient, value: str) -> None:
    for name in ("after", "limit"):
        answer = await http.get("/v1/cache/events", params={name: value})
        assert _refusal(answer) == (400, name)
        assert len(answer.text) < 500
    assert _refusal(await http.get("/v1/cache/events?limit=1025")) == (400, "limit")
    assert _refusal(await http.get("/v1/cache/events?limit=0")) == (400, "limit")
    assert not engine.operations
