"""Traces, views and the metrics of them: over HTTP, with an engine that says what it is told to."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from fourfold.errors import EngineDeadError, InvalidRequestError, OverloadedError
from fourfold.server import debug, generate, traces
from fourfold.server.app import create_app
from fourfold.server.settings import ServerSettings
from fourfold.server.traces import Record, Records
from fourfold.timeline import HotPrefix, TreeView
from fourfold.types import EngineStats, TierStats

from .fakes import FakeClient
from .sse import stream
from .test_admin import _metrics as metrics_of

pytestmark = pytest.mark.anyio

KEYS = ("alice", "bob")


def auth(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@asynccontextmanager
async def keyed(engine: FakeClient) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(engine, engine.tokenizer, ServerSettings(api_keys=KEYS))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        yield client


async def complete(http: httpx.AsyncClient, key: str | None = None, **body: Any) -> dict[str, Any]:
    headers = auth(key) if key else {}
    response = await http.post("/v1/completions", json={"prompt": "abcd", **body}, headers=headers)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def test_by_response_id_sequence_id_and_request_id(http: httpx.AsyncClient) -> None:
    response = await http.post(
        "/v1/chat/completions",
        json={"messages": [{"role": "user", "content": "ab"}], "n": 2},
        headers={"X-Request-Id": "my/own"},
    )
    answer = response.json()
    plain = answer["id"].removeprefix("chatcmpl-")
    for name in (answer["id"], plain, f"{plain}-1", "my/own", "my%2Fown"):
        found = await http.get(f"/v1/requests/{name}/trace")
        assert found.status_code == 200, name
        trace = found.json()
        assert (trace["object"], trace["id"], trace["request_id"]) == ("request.trace", plain, "my/own")
        assert [one["index"] for one in trace["sequences"]] == [0, 1]
        assert [one["finish_reason"] for one in trace["sequences"]] == ["stop", "stop"]
        held = trace["sequences"][0]["events"][1]
        assert (held["event"], held["steps"], held["until"]) == ("held", 2, 0.5)
        assert "neighbour" in held["meaning"]


async def test_by_x_request_id_the_newest(http: httpx.AsyncClient) -> None:
    for _ in range(2):
        response = await http.post(
            "/v1/completions", json={"prompt": "abcd"}, headers={"X-Request-Id": "again"}
        )
    trace = (await http.get("/v1/requests/again/trace")).json()
    assert response.json()["id"].endswith(trace["id"])


async def test_only_the_key_that_asked_may_read_it(engine: FakeClient) -> None:
    async with keyed(engine) as http:
        mine = (await complete(http, "alice"))["id"]
        assert (await http.get(f"/v1/requests/{mine}/trace", headers=auth("alice"))).status_code == 200
        other = await http.get(f"/v1/requests/{mine}/trace", headers=auth("bob"))
        nobody = await http.get(f"/v1/requests/cmpl-{'0' * 32}/trace", headers=auth("bob"))
        # Nothing tells a request of another from one that never was.
        assert other.status_code == nobody.status_code == 404
        assert other.json()["error"]["message"].replace(mine, "X") == nobody.json()["error"][
            "message"
        ].replace(f"cmpl-{'0' * 32}", "X")
        assert (await http.get(f"/v1/requests/{mine}/trace")).status_code == 401


async def test_two_tenants_may_use_one_request_id(engine: FakeClient) -> None:
    async with keyed(engine) as http:
        ids = {}
        for key in KEYS:
            response = await http.post(
                "/v1/completions", json={"prompt": "a"}, headers={**auth(key), "X-Request-Id": "same"}
            )
            ids[key] = response.json()["id"]
        for key in KEYS:
            trace = (await http.get("/v1/requests/same/trace", headers=auth(key))).json()
            assert ids[key].endswith(trace["id"])


@pytest.mark.parametrize("name", ["nothing", "cmpl-", "-", "a" * 5000, "%00", "chatcmpl-xyz-1", "ü"])
async def test_unknown_ids(http: httpx.AsyncClient, name: str) -> None:
    response = await http.get(f"/v1/requests/{name}/trace")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "request_not_found"
    assert len(response.text) < 1000


async def test_forgotten_in_the_engine(http: httpx.AsyncClient, engine: FakeClient) -> None:
    answer = await complete(http)
    engine.known.clear()
    assert (await http.get(f"/v1/requests/{answer['id']}/trace")).status_code == 404


async def test_live(http: httpx.AsyncClient, engine: FakeClient) -> None:
    engine.gate.clear()
    running = asyncio.create_task(complete(http))
    while not engine.active:
        await asyncio.sleep(0.01)
    (request,) = (await http.get("/debug/requests")).json()["requests"]
    assert (request["state"], request["generated_tokens"], request["age"]) == ("decode", 5, 1.5)
    trace = await http.get(f"/v1/requests/{request['id']}/trace")
    # The fake engine has no timeline of what is open; that is not the same as an unknown request.
    assert trace.json()["sequences"] == [{"index": 0, "state": "unknown", "finish_reason": None}]
    engine.gate.set()
    assert (await running)["id"].endswith(request["id"].removesuffix("-0"))
    assert (await http.get("/debug/requests")).json() == {"requests": [], "others": 0}


async def test_return_trace(http: httpx.AsyncClient, engine: FakeClient) -> None:
    answer = await complete(http, return_trace=True, n=2, stop=["wor"])
    assert [one["finish_reason"] for one in answer["trace"]["sequences"]] == ["stop", "stop"]
    assert answer["id"].endswith(answer["trace"]["id"])
    # What ended at a stop string was aborted in the engine: the trace says how the client saw it end.
    assert {line.finish_reason for line in engine.known.values()} == {"abort"}
    assert "trace" not in await complete(http)
    assert "trace" not in await complete(http, return_trace=False)
    chat = {"messages": [{"role": "user", "content": "ab"}], "return_trace": True}
    body = (await http.post("/v1/chat/completions", json=chat)).json()
    assert body["trace"]["sequences"][0]["totals"]["prompt_tokens"] > 0
    bad = await http.post("/v1/completions", json={"prompt": "a", "return_trace": "yes"})
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "return_trace")


@pytest.mark.parametrize("usage", [False, True])
async def test_return_trace_in_a_stream(http: httpx.AsyncClient, usage: bool) -> None:
    body: dict[str, Any] = {"prompt": "abcd", "return_trace": True}
    if usage:
        body["stream_options"] = {"include_usage": True}
    *before, last = await stream(http, "/v1/completions", **body)
    assert last["choices"] == []
    assert last["trace"]["sequences"][0]["events"][0]["event"] == "queued"
    assert ("usage" in last) == usage
    assert not any("trace" in event for event in before)


async def test_an_answer_is_not_lost_with_its_trace(
    http: httpx.AsyncClient, engine: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.mute = True
    answer = await complete(http, return_trace=True)
    assert answer["choices"][0]["text"] == "Hello world"
    assert answer["trace"] == {"error": "the engine died"}
    engine.mute = False

    async def hang(_: object) -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr(engine, "timelines", hang)
    monkeypatch.setattr(generate, "TRACE_SECONDS", 0.01)
    monkeypatch.setattr(debug, "ENGINE_ANSWER_SECONDS", 0.01)
    answer = await complete(http, return_trace=True)
    assert "did not answer" in answer["trace"]["error"]
    assert (await http.get(f"/v1/requests/{answer['id']}/trace")).status_code == 503


async def test_others_requests_are_only_counted(engine: FakeClient) -> None:
    async with keyed(engine) as http:
        engine.gate.clear()
        tasks = [asyncio.create_task(complete(http, key)) for key in ("alice", "bob", "bob")]
        while len(engine.active) < 3:
            await asyncio.sleep(0.01)
        for key, own in (("alice", 1), ("bob", 2)):
            for path in ("/debug/requests", "/debug/status"):
                seen = (await http.get(path, headers=auth(key))).json()
                assert (len(seen["requests"]), seen["others"]) == (own, 3 - own)
        engine.gate.set()
        await asyncio.gather(*tasks)


async def test_prefixes_are_asked_for_the_caller_only(engine: FakeClient, http: httpx.AsyncClient) -> None:
    engine.numbers = EngineStats(free_blocks=60, cached_blocks=3, in_transfer_blocks=1, total_blocks=64)
    engine.tree = TreeView(
        nodes=3, tokens=40, domains=1, pinned_tokens=16,
        hottest=[HotPrefix(salt="", tokens=40, hits=7, head=[261, 262], tail=[97], pinned=True)],
    )  # fmt: skip
    ledger = (await http.get("/debug/kv")).json()
    assert engine.asked_salts is None
    assert (ledger["in_transfer"], ledger["balanced"], ledger["stale"]) == (1, True, None)
    assert ledger["tree"] == {
        "nodes": 3,
        "tokens": 40,
        "domains": 1,
        "pinned_tokens": 16,
        "complete": True,
        "hottest": [
            {
                "tokens": 40, "hits": 7, "pinned": True, "in_use": False, "token_ids": [261, 262],
                "text": "abcd", "last_token_ids": [97], "last_text": engine.tokenizer.decode([97], False),
            }
        ],
    }  # fmt: skip
    async with keyed(engine) as other:
        seen = []
        for key in KEYS:
            assert (await other.get("/debug/kv", headers=auth(key))).status_code == 200
            seen.append(engine.asked_salts)
            await complete(other, key)
            # What may be seen is what this key's requests are cached under.
            assert seen[-1] == [engine.requests[-1].cache_salt]
        assert seen[0] != seen[1]


async def test_a_ledger_of_the_last_heartbeat_says_so(http: httpx.AsyncClient, engine: FakeClient) -> None:
    engine.mute = True
    ledger = (await http.get("/debug/kv")).json()
    assert (ledger["total"], ledger["tree"], ledger["stale"]) == (64, None, "the engine died")
    status = (await http.get("/debug/status")).json()
    assert (status["engine"]["total_blocks"], status["requests"]) == (64, [])
    assert (status["stale"], status["kv"]["tree"]) == ("the engine died", None)
    assert (await http.get("/debug/requests")).status_code == 503


async def test_status(http: httpx.AsyncClient, engine: FakeClient) -> None:
    engine.numbers = EngineStats(free_blocks=64, total_blocks=64, generation_tokens=5, running=2)
    status = (await http.get("/debug/status")).json()
    assert status["engine"]["generation_tokens"] == 5
    assert status["engine"]["prompt_tokens"] == 0
    assert status["kv"]["total"] == 64
    assert status["clock"] < (await http.get("/debug/status")).json()["clock"]


async def test_metrics(http: httpx.AsyncClient, engine: FakeClient) -> None:
    engine.numbers = EngineStats(
        preemptions_by_reason={"kv_blocks": 2, "priority": 1}, cached_tokens_by_tier={"ram": 30},
        prefill_tokens=70, in_transfer_blocks=2, total_blocks=64, tree_blocks=9, evicted_blocks=5,
        pinned_blocks=3, copied_tokens=17, tiers=TierStats(host_blocks=6, disk_bad_files=1),
    )  # fmt: skip
    engine.queue_seconds = 0.003
    await complete(http, n=2)
    for error in (OverloadedError("full"), EngineDeadError("dead"), InvalidRequestError("no", "prompt")):
        engine.reply = lambda _, error=error: error
        await http.post("/v1/completions", json={"prompt": "abcd"})
    metrics = await metrics_of(http)
    expected = {
        "fourfold:preemptions_total,reason=kv_blocks": 2,
        "fourfold:preemptions_total,reason=priority": 1,
        "fourfold:cached_tokens_total,tier=ram": 30,
        "fourfold:prefill_tokens_total": 70,
        "fourfold:kv_blocks_in_transfer": 2,
        "fourfold:kv_blocks_pinned": 3,
        "fourfold:prefix_tree_blocks": 9,
        "fourfold:evicted_blocks_total": 5,
        "fourfold:copied_tokens_total": 17,
        "fourfold:kv_tier_host_blocks": 6,
        "fourfold:kv_tier_disk_bad_files_total": 1,
        "fourfold:refused_sequences_total,reason=queue_full": 1,
        "fourfold:refused_sequences_total,reason=engine_dead": 1,
        "fourfold:refused_sequences_total,reason=invalid_request_error": 1,
        "vllm:request_queue_time_seconds_count": 2,
        "vllm:request_queue_time_seconds_bucket,le=0.0025": 0,
        "vllm:request_queue_time_seconds_bucket,le=0.005": 2,
        "vllm:request_prefill_time_seconds_count": 2,
        "vllm:request_decode_time_seconds_count": 2,
        "vllm:request_inference_time_seconds_count": 2,
    }
    assert {name: metrics.get(name) for name in expected} == expected
    parts = [metrics[f"vllm:{name}_seconds_sum"] for name in ("request_queue_time", "request_inference_time")]
    assert sum(parts) <= metrics["vllm:e2e_request_latency_seconds_sum"]


def test_records_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "MAX_RECORDS", 3)
    records = Records()
    ids = [uuid.uuid4().hex for _ in range(5)]
    for number, name in enumerate(ids):
        records.add(Record(name, "t", f"r{number % 4}", 1))
    assert [records.find(name, "t") is not None for name in ids] == [False, False, True, True, True]
    assert [bool(records.find(f"r{number}", "t")) for number in range(4)] == [True, False, True, True]
    assert len(records._by_request) == 3
