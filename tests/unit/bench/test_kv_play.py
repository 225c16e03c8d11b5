"""Workloads of shared prefixes over HTTP: what a server is asked, and what is taken from its answers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from fourfold.bench.kv.play import ChatAgents, Rounds, Traced, play
from fourfold.bench.kv.workloads import MooncakeTrace
from fourfold.bench.load.dataset import RequestShape
from fourfold.bench.load.report import LoadReport, report
from fourfold.errors import FourfoldError

from .fake_server import Reply, Seen, completion, event, serving


def chat_events(text: str, usage: dict[str, Any]) -> list[bytes]:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": "length"}
    return [event({"choices": [choice]}), event({"choices": [], "usage": usage}), event("[DONE]")]


def played(workload: Rounds, reply: Reply) -> tuple[LoadReport, Seen]:
    async def main() -> tuple[LoadReport, Seen]:
        async with serving(reply) as (server, seen):
            return report(await play(server, RequestShape("m"), workload)), seen

    return asyncio.run(main())


def test_agents_go_on_with_the_answers_they_got() -> None:
    def reply(path: str, body: dict[str, Any]) -> tuple[int, list[bytes | float]]:
        length = sum(len(m["content"].split()) for m in body["messages"])
        known = 5 if len(body["messages"]) == 2 else length - 3
        usage = {"prompt_tokens": length, "prompt_tokens_details": {"cached_tokens": known}}
        return 200, [0.05, *chat_events(f"said {length}", usage)]

    found, seen = played(ChatAgents(agents=3, turns=2, system=5, user=2, answer=4), reply)
    assert (found.requests, seen.most) == (6, 3)
    # 5 + 2 words, then the answer's 2 and the next 2.
    assert found.prompt_tokens == 3 * (7 + 11)
    assert found.cached_tokens == 3 * (5 + 8)
    bodies = [body for _, _, body in seen.requests]
    assert {path for path, _, _ in seen.requests} == {"/v1/chat/completions"}
    assert {body["max_tokens"] for body in bodies} == {4}
    first, later = bodies[:3], bodies[3:]
    assert len({body["messages"][0]["content"] for body in bodies}) == 1
    assert len({body["messages"][1]["content"] for body in first}) == 3
    for body in later:
        assert [m["role"] for m in body["messages"]] == ["system", "user", "assistant", "user"]
        assert body["messages"][2]["content"] == "said 7"
        assert body["messages"][:2] in [each["messages"] for each in first]


def test_a_trace_asks_by_token_ids_that_models_have(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    rows = [{"output_length": 160, "hash_ids": ids} for ids in ([1, 2], [1, 3])]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    trace = MooncakeTrace(path, 16, 24, 2, ids=(1000, 1010))
    found, seen = played(Traced(trace), lambda path, body: (200, completion(["a"])))
    one, two = (body["prompt"] for _, _, body in seen.requests)
    assert len(one) == len(two) == 24
    assert one[:16] == two[:16]
    assert one[16:] != two[16:]
    assert set(one) <= set(range(1000, 1010))
    assert found.cached_tokens is None, "this server does not say"


def test_what_llama_server_says_of_its_cache() -> None:
    events = [
        *completion(["a"], {"prompt_tokens": 9})[:-2],
        event({"choices": [], "timings": {"cache_n": 6}}),
    ]
    found, _ = played(ChatAgents(1, 1, 1, 1, 1), lambda path, body: (200, [*events, event("[DONE]")]))
    assert found.cached_tokens == 6


def test_a_failed_request_ends_it() -> None:
    with pytest.raises(FourfoldError, match=r"2 agents, .*: request 1 failed: HTTP 500"):
        played(ChatAgents(2, 1, 5), lambda path, body: (500, [b"no"]))
