"""Timelines: consistent with what came out and what the backend was asked to do, under any load; bounded."""

from __future__ import annotations

import itertools
import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.engine import recorder as recorder_module
from fourfold.engine.loop import Engine
from fourfold.engine.recorder import Recorder
from fourfold.errors import InvalidRequestError, OverloadedError
from fourfold.timeline import Timeline
from fourfold.types import EngineEvent

from .fake_backend import FakeBackend
from .helpers import make_engine, request, run, tokens
from .test_random_mixes import MAX_LEN, random_request


def timeline(engine: Engine, request_id: str) -> Timeline:
    found = engine.recorder.timeline(request_id)
    assert found is not None
    return found


def check_timeline(line: Timeline, events: list[EngineEvent]) -> None:
    """`events` are all that came for the request."""
    totals = line.totals
    names = [entry.event for entry in line.events]
    assert line.dropped == 0
    assert names[0] == "queued"
    assert names[-1] == "finished"
    assert (line.state, line.finish_reason) == ("finished", events[-1].finish_reason)
    last = 0.0
    for entry in line.events:
        assert entry.at >= last
        assert entry.until is None or entry.until >= entry.at
        last = entry.at if entry.until is None else entry.until
    assert totals.total_seconds == last
    decoded = [entry for entry in line.events if entry.event == "decode"]
    answer = [token for event in events for token in event.token_ids]
    assert sum(entry.tokens for entry in decoded) == totals.generated_tokens == len(answer)
    assert names.count("preempted") == totals.preemptions
    if events[0].token_ids:
        assert totals.cached_tokens == events[0].cached_tokens
        assert totals.prefill_seconds is not None
        assert totals.queue_seconds == next(entry.at for entry in line.events if entry.event == "admitted")
    # From each admission to the first token after it, every known token was cached or computed.
    missing, generated, prefilled = 0, 0, 0
    for entry in line.events:
        if entry.event == "admitted":
            assert entry.tokens == totals.prompt_tokens + generated
            missing = entry.tokens - entry.cached
        elif entry.event == "cache_hit":
            missing -= entry.cached
        elif entry.event == "prefill":
            missing -= entry.tokens
            prefilled += entry.tokens
        elif entry.event == "decode":
            assert missing == 0
            generated += entry.tokens
        assert missing >= 0
    # What draws the first token of a run is computed by its last chunk.
    assert totals.computed_tokens == prefilled + sum(entry.steps - 1 for entry in decoded)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    block_size=st.integers(1, 5),
    num_blocks=st.integers(4, 30),
    budget=st.integers(1, 40),
    seqs=st.integers(1, 6),
    caching=st.booleans(),
)
def test_any_run(seed: int, block_size: int, num_blocks: int, budget: int, seqs: int, caching: bool) -> None:
    rng = random.Random(seed)
    backend = FakeBackend(block_size=block_size, num_blocks=num_blocks)
    engine = make_engine(
        backend, MAX_LEN, max_num_batched_tokens=budget, max_num_seqs=seqs, max_waiting=8,
        prefix_caching=caching,
    )  # fmt: skip
    ticks = itertools.count(1)
    engine.recorder.clock = lambda: float(next(ticks))
    events: dict[str, list[EngineEvent]] = {}
    unfinished: set[str] = set()
    added = 0
    while added < 40 or engine.has_work:
        while added < 40 and rng.random() < 0.4:
            item = random_request(rng, f"r{added}")
            added += 1
            try:
                engine.add(item)
            except (OverloadedError, InvalidRequestError):
                assert engine.recorder.timeline(item.request_id) is None
                continue
            unfinished.add(item.request_id)
        if unfinished and rng.random() < 0.1:
            engine.abort(rng.choice(sorted(unfinished)))
        for event in engine.step():
            events.setdefault(event.request_id, []).append(event)
            if event.finish_reason is not None:
                unfinished.discard(event.request_id)
        assert {line.request_id for line in engine.recorder.live()} == set(engine.scheduler.request_ids)
    lines = {request_id: timeline(engine, request_id) for request_id in events}
    for request_id, line in lines.items():
        check_timeline(line, events[request_id])
    assert sum(line.totals.computed_tokens for line in lines.values()) == backend.computed_tokens
    assert sum(line.totals.preemptions for line in lines.values()) == engine.stats().preemptions


def test_neighbour_computes_the_prefix() -> None:
    """Three requests with one prompt in one step: one computes it, the others wait and then find it."""
    engine = make_engine(FakeBackend(block_size=4))
    prompt = list(range(20))
    run(engine, *(request(name, prompt, max_tokens=4) for name in "abc"))
    assert [entry.event for entry in timeline(engine, "a").events] == [
        "queued", "admitted", "prefill", "decode", "finished"
    ]  # fmt: skip
    for name in "bc":
        line = timeline(engine, name)
        assert [entry.event for entry in line.events] == [
            "queued", "held", "admitted", "cache_hit", "prefill", "decode", "finished"
        ]  # fmt: skip
        held, admitted, copied, prefill = line.events[1:5]
        assert held.reason == "prefix_in_flight"
        assert (admitted.tokens, admitted.cached, admitted.reason) == (20, 16, "ram")
        assert (copied.cached, copied.reason) == (3, "ram")
        assert prefill.tokens == 1
        assert line.totals.cached_tokens == 19


def test_waits_and_preemption_say_why() -> None:
    engine = make_engine(FakeBackend(block_size=4, num_blocks=6), 64, max_num_seqs=2, prefix_caching=False)
    items = [request(name, [n] * 8, max_tokens=8) for n, name in enumerate("abc")]
    events = run(engine, *items)
    assert all(len(tokens(each)) == 8 for each in events.values())
    lines = {name: timeline(engine, name) for name in "abc"}
    preempted = [entry for line in lines.values() for entry in line.events if entry.event == "preempted"]
    assert [entry.reason for entry in preempted] == ["kv_blocks"]
    waits = {entry.reason for line in lines.values() for entry in line.events if entry.event == "waiting"}
    assert "max_num_seqs" in waits


def test_priority_displaces() -> None:
    engine = make_engine(max_num_seqs=1)
    engine.add(request("low", [1, 2, 3], priority=5, max_tokens=20))
    engine.step()
    run(engine, request("high", [4, 5, 6], priority=-1))
    reasons = [entry.reason for entry in timeline(engine, "low").events if entry.event == "preempted"]
    assert reasons == ["priority"]


def test_chunks_and_times() -> None:
    """A prompt of 10 tokens under a budget of 4, by a clock that is set by hand."""
    engine = make_engine(max_num_batched_tokens=4)
    now = 100.0
    engine.recorder.clock = lambda: now
    engine.add(request("a", list(range(10)), arrival=98.0, max_tokens=3))
    now = 101.0
    while engine.has_work:
        engine.step()
        now += 1
    line = timeline(engine, "a")
    assert [(e.event, e.at, e.until, e.steps, e.tokens) for e in line.events] == [
        ("queued", 2, None, 1, 10),
        ("admitted", 3, None, 1, 10),
        ("prefill", 3, 3, 1, 4),
        ("prefill", 4, 4, 1, 4),
        ("prefill", 5, 5, 1, 2),
        ("decode", 5, 7, 3, 3),
        ("finished", 7, None, 1, 0),
    ]
    totals = line.totals
    assert (totals.queue_seconds, totals.prefill_seconds, totals.decode_seconds) == (3, 2, 2)
    assert line.events[5].slowest == 1
    assert (totals.steps, totals.computed_tokens, engine.recorder.prefill_tokens) == (5, 12, 10)


def test_live() -> None:
    engine = make_engine()
    now = 10.0
    engine.recorder.clock = lambda: now
    engine.add(request("a", [1, 2, 3], arrival=9.5, max_tokens=50))
    (line,) = engine.recorder.live()
    assert (line.request_id, line.state, line.age, line.generated_tokens) == ("a", "waiting", 0.5, 0)
    for _ in range(5):
        engine.step()
        now += 0.5
    (line,) = engine.recorder.live()
    assert (line.state, line.prompt_tokens, line.generated_tokens) == ("decode", 3, 5)
    assert line.tokens_per_second == pytest.approx(4 / 2.5)
    unfinished = timeline(engine, "a")
    assert (unfinished.finish_reason, unfinished.totals.generated_tokens) == (None, 5)
    engine.step()
    assert unfinished.totals.generated_tokens == 5, "a timeline that was handed out goes on changing"


def test_an_arrival_of_another_clock_is_now() -> None:
    engine = make_engine()
    engine.add(request("a", [1], arrival=1e12))
    assert timeline(engine, "a").events[0].at < 1


def test_events_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "MAX_EVENTS", 8)
    engine = make_engine(max_num_batched_tokens=1)
    run(engine, request("a", list(range(30)), max_tokens=4))
    line = timeline(engine, "a")
    assert [entry.event for entry in line.events] == ["queued", "admitted", *["prefill"] * 5, "finished"]
    assert line.dropped == 2 + 30 + 1 + 1 - 8
    assert (line.totals.computed_tokens, line.totals.generated_tokens) == (33, 4)


def test_finished_ones_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "MAX_FINISHED", 5)
    engine = make_engine()
    run(engine, *(request(f"r{n}", [n], max_tokens=1) for n in range(9)))
    known = [n for n in range(9) if engine.recorder.timeline(f"r{n}") is not None]
    assert known == [4, 5, 6, 7, 8]
    monkeypatch.setattr(recorder_module, "MAX_FINISHED_BYTES", 1)
    run(engine, request("last", [1], max_tokens=1))
    assert engine.recorder.timeline("last") is None


def test_crosses_as_messagepack() -> None:
    engine = make_engine()
    run(engine, request("a", [1, 2, 3]))
    line = timeline(engine, "a")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(line), type=Timeline) == line


def test_an_id_used_again_has_the_newer_timeline() -> None:
    recorder = Recorder()
    for prompt in ([1], [1, 2]):
        recorder.open(request("a", prompt))
        recorder.finish("a", "stop")
    line = recorder.timeline("a")
    assert line is not None
    assert line.totals.prompt_tokens == 2
    recorder.finish("nobody", "stop")
