"""Pins and KV events with the real engine: over HTTP, and under pressure on the pool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from fourfold.engine.operations import PinPrefix, UnpinPrefix

from .engines import engine, finish, request
from .running import Server

SYSTEM = {"role": "system", "content": "You answer in one word and never in two. " * 4}


def test_over_http(tiny_server: Server) -> None:
    with httpx.Client(base_url=tiny_server.url, timeout=30) as http:
        prompt = list(range(3, 103))
        pinned = http.post("/v1/cache/pin", json={"prompt": prompt, "name": "mine", "cache_salt": "pins"})
        assert pinned.status_code == 200, pinned.text
        try:
            assert pinned.json()["tokens"] == 96
            assert pinned.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            (listed,) = http.get("/v1/cache/pins").json()["data"]
            assert (listed["name"], listed["blocks"]) == ("mine", 3)
            assert tiny_server.kv()["pinned"] == 3
            ask: dict[str, Any] = {"prompt": prompt, "max_tokens": 1, "cache_salt": "pins"}
            usage = http.post("/v1/completions", json=ask).json()["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == 99
            page = http.get("/v1/cache/events", params={"cache_salt": "pins"}).json()
            assert page["lost"] == 0
            stored = [event for event in page["data"] if event["type"] == "stored"]
            assert [token for event in stored for token in event["token_ids"]] == prompt[:96]
            assert [event["parent"] for event in stored[1:]] == [event["digest"] for event in stored[:-1]]
            rest = http.get("/v1/cache/events", params={"cache_salt": "pins", "after": page["next"]}).json()
            assert (rest["data"], rest["epoch"]) == ([], page["epoch"])
        finally:
            assert http.post("/v1/cache/unpin", json={"name": "mine"}).json()["deleted"]
        assert http.get("/v1/cache/pins").json()["data"] == []
        tiny_server.await_idle()


def test_pinned_messages_are_found_by_the_conversation(tiny_server: Server) -> None:
    with httpx.Client(base_url=tiny_server.url, timeout=30) as http:
        pinned = http.post("/v1/cache/pin", json={"messages": [SYSTEM]}).json()
        try:
            chat = {"messages": [SYSTEM, {"role": "user", "content": "Hi"}], "max_tokens": 1}
            usage = http.post("/v1/chat/completions", json=chat).json()["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] >= pinned["tokens"] > 0
        finally:
            http.post("/v1/cache/unpin", json={"name": pinned["name"]}).raise_for_status()


def test_what_is_pinned_outlives_a_pool_s_worth_of_other_prompts(tiny_model: Path) -> None:
    prompt = list(range(3, 99))
    with engine(tiny_model, num_kv_blocks=16) as made:
        for keep in (True, False):
            finish(made, [request("a", prompt, 1)])
            if keep:
                made.operate(PinPrefix("", "", "p", prompt))
            for i in range(6):
                made.add(request(f"o{i}", [i + 100] * 200, 1))
            while made.has_work:
                made.step()
            events = []
            made.add(request("b", prompt, 1))
            while made.has_work:
                events += made.step()
            assert events[0].cached_tokens == (95 if keep else 0)
            made.operate(UnpinPrefix("", "p"))
        assert made.stats().live_blocks == 0
