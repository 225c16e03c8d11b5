"""The scheduler over the fake backend: who runs when, what is shared, and nobody depends on others."""

from __future__ import annotations

import random
from array import array
from typing import Any

import numpy as np
import pytest

from fourfold.engine.batch import Batch
from fourfold.engine.loop import Engine
from fourfold.errors import InvalidRequestError, OverloadedError
from fourfold.types import EngineEvent, EngineRequest

from .fake_backend import FakeBackend
from .helpers import check, make_engine, request, run, tokens


def alone(item: EngineRequest, **options: Any) -> list[int]:
    return tokens(run(make_engine(FakeBackend(num_blocks=256), **options), item)[item.request_id])


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(97) for _ in range(length)]


@pytest.mark.parametrize("budget", [1, 3, 16, 64, 512])
def test_output_does_not_depend_on_chunks(budget: int) -> None:
    item = request("a", prompt(1, 50))
    engine = make_engine(max_num_batched_tokens=budget, max_num_seqs=4)
    assert tokens(run(engine, item)["a"]) == alone(item)


def test_b31_greedy_alone_and_among_others_that_come_and_go() -> None:
    item = request("a", prompt(1, 20), max_tokens=30)
    engine = make_engine(max_num_batched_tokens=24)
    engine.add(item)
    got: list[int] = []
    for step in range(200):
        if step < 40 and step % 5 == 0:
            engine.add(request(f"n{step}", prompt(step, 3 + step), max_tokens=step // 3 + 1))
        for event in engine.step():
            if event.request_id == "a":
                got += event.token_ids
        check(engine)
    assert not engine.has_work
    assert got == alone(item)


def test_a_long_prompt_never_makes_a_running_answer_wait() -> None:
    engine = make_engine(max_num_batched_tokens=16, max_model_len=1000, backend=FakeBackend(num_blocks=300))
    engine.add(request("chat", [1, 2], max_tokens=60))
    engine.step()
    engine.add(request("long", prompt(2, 500), max_tokens=1))
    for _ in range(59):
        assert "chat" in {event.request_id for event in engine.step()}


def test_first_come_first_served_and_priority_before_that() -> None:
    engine = make_engine(max_num_seqs=1)
    items = [request("late", [1], arrival=2.0), request("early", [2], arrival=1.0)]
    items += [request("urgent", [3], arrival=3.0, priority=-1)]
    assert list(run(engine, *items)) == ["urgent", "early", "late"]


def test_an_urgent_request_takes_the_place_of_one_of_worse_priority() -> None:
    engine = make_engine(max_num_seqs=1)
    low = request("low", prompt(1, 9), priority=5, max_tokens=40)
    engine.add(low)
    for _ in range(3):
        first = engine.step()
    assert first
    events = run(engine, request("high", [1, 2], priority=0))
    assert list(events) == ["high", "low"]
    assert engine.stats().preemptions == 1


def test_preemption_changes_no_token_and_the_oldest_always_advances() -> None:
    backend = FakeBackend(num_blocks=9)
    engine = make_engine(backend, max_num_batched_tokens=64)
    items = [request(f"r{i}", prompt(i, 9), max_tokens=20, logprobs=1, prompt_logprobs=1) for i in range(3)]
    events: dict[str, list[EngineEvent]] = {}
    order: list[str] = []
    for item in items:
        engine.add(item)
    while engine.has_work:
        for event in engine.step():
            events.setdefault(event.request_id, []).append(event)
            order += [event.request_id] if event.finish_reason else []
        check(engine)
    assert engine.stats().preemptions > 0
    for item in items:
        assert tokens(events[item.request_id]) == alone(item)
        reported = events[item.request_id][0].prompt_logprobs
        assert reported is not None
        assert [p and p.token_id for p in reported] == [None, *item.prompt_ids[1:]]
    finished = {name: step for step, name in enumerate(order)}
    assert finished["r0"] < finished["r1"] < finished["r2"]


def test_b44_what_never_fits_is_refused_and_the_small_one_runs() -> None:
    engine = make_engine(FakeBackend(num_blocks=8))
    with pytest.raises(InvalidRequestError, match=r"80 tokens.*limit is 32.*KV cache"):
        engine.add(request("big", prompt(1, 80)))
    assert len(tokens(run(engine, request("small", [1, 2, 3]))["small"])) == 8
    assert engine.model.max_model_len == 32


@pytest.mark.parametrize("extra", [{}, {"max_tokens": None}, {"max_tokens": 16}])
def test_b45_the_limit_of_the_context(extra: dict[str, Any]) -> None:
    engine = make_engine(max_model_len=40)
    limit = engine.model.max_model_len
    events = run(engine, request("fits", prompt(1, limit - 1), **extra))["fits"]
    assert len(tokens(events)) == 1
    assert events[-1].finish_reason == "length"
    for length in (limit, limit + 1):
        with pytest.raises(InvalidRequestError, match=rf"{length} tokens.*limit is {limit}") as caught:
            engine.add(request("no", prompt(1, length), **extra))
        assert caught.value.code == "context_length_exceeded"
    filled = run(engine, request("all", prompt(1, 10), max_tokens=None))["all"]
    assert len(tokens(filled)) == limit - 10


def test_an_answer_ends_where_the_pool_does() -> None:
    engine = make_engine(FakeBackend(num_blocks=4), max_model_len=100)
    events = run(engine, request("a", [1, 2, 3], max_tokens=None))["a"]
    assert len(tokens(events)) == 13
    assert events[-1].finish_reason == "length"


@pytest.mark.parametrize("bad", [[], [-1], [97], [4294967295], [1, 2**70], [5, -3, 2]])
def test_b16_ids_outside_the_vocabulary(bad: list[int]) -> None:
    engine = make_engine()
    with pytest.raises(InvalidRequestError) as caught:
        engine.add(request("bad", bad))
    assert caught.value.param == "prompt"
    wrong = [token for token in bad if not 0 <= token < 97]
    assert not wrong or any(str(token) in str(caught.value) for token in wrong)
    assert run(engine, request("good", [1]))["good"][-1].finish_reason == "length"


@pytest.mark.parametrize("sampling", [{"max_tokens": 10**9}, {"n": 10**6}, {"logit_bias": {97: 1.0}}])
def test_b19_absurd_values_are_refused_at_once(sampling: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=str(next(iter(sampling)))):
        make_engine().add(request("a", [1], **sampling))


def test_b19_more_requests_than_slots_queue_and_complete() -> None:
    engine = make_engine(max_num_seqs=4)
    events = run(engine, *(request(f"r{i}", [1, 2, 3], temperature=1.0, seed=i) for i in range(100)))
    assert len(events) == 100
    assert all(e[-1].finish_reason == "length" for e in events.values())


def test_the_queue_is_bounded_and_says_when_to_come_back() -> None:
    engine = make_engine(max_num_seqs=1, max_waiting=3)
    for i in range(3):
        engine.add(request(f"r{i}", [1]))
    with pytest.raises(OverloadedError, match=r"3 requests are waiting, the limit is 3") as caught:
        engine.add(request("r3", [1]))
    assert 1 <= caught.value.retry_after <= 60
    engine.step()
    engine.add(request("r4", [1]))
    assert len(run(engine)) == 4


def test_an_id_in_use_is_refused_and_free_again_afterwards() -> None:
    engine = make_engine()
    engine.add(request("a", [1]))
    with pytest.raises(InvalidRequestError, match="already in use"):
        engine.add(request("a", [2]))
    run(engine)
    run(engine, request("a", [3]))


def test_b38_a_prompt_of_whole_blocks_twice() -> None:
    for length in (8, 9, 12, 13):
        engine = make_engine()
        first = run(engine, request("a", prompt(1, length), logprobs=2))["a"]
        second = run(engine, request("b", prompt(1, length), logprobs=2))["b"]
        assert tokens(first) == tokens(second)
        assert [e.logprobs for e in first] == [e.logprobs for e in second]
        assert first[0].cached_tokens == 0
        assert second[0].cached_tokens == length - 1


def test_b40_only_the_same_salt_hits() -> None:
    engine = make_engine()
    cached = []
    for i, salt in enumerate(["A", "A", "B", ""]):
        events = run(engine, request(f"r{i}", prompt(1, 20), salt=salt))[f"r{i}"]
        cached.append(events[0].cached_tokens)
    assert cached == [0, 19, 0, 0]


def test_b42_an_aborted_answer_is_reused_by_the_next_turn() -> None:
    backend = FakeBackend()
    engine = make_engine(backend)
    engine.add(request("a", prompt(1, 20), max_tokens=50))
    answer = [token for _ in range(12) for event in engine.step() for token in event.token_ids]
    engine.abort("a")
    check(engine)
    turn = [*prompt(1, 20), *answer, 5, 6]
    before = backend.computed_tokens
    item = request("b", turn, max_tokens=1)
    events = run(engine, item)
    assert events["b"][0].cached_tokens >= 28
    assert backend.computed_tokens - before <= len(turn) - 28
    assert tokens(events["b"]) == alone(item)


def test_b42_generated_tokens_stay_for_the_next_turn() -> None:
    engine = make_engine()
    answer = tokens(run(engine, request("a", prompt(1, 20), max_tokens=13))["a"])
    events = run(engine, request("b", [*prompt(1, 20), *answer, 7]))["b"]
    assert events[0].cached_tokens == 32


@pytest.mark.parametrize("when", ["queued", "prefill", "decode"])
def test_b43_abort_frees_everything_within_a_step(when: str) -> None:
    engine = make_engine(max_num_seqs=1, max_num_batched_tokens=8)
    engine.add(request("other" if when == "queued" else "a", prompt(1, 30), max_tokens=100))
    if when == "queued":
        engine.add(request("a", prompt(2, 10)))
    for _ in range(8 if when == "decode" else 1):
        engine.step()
    if when == "queued":
        engine.abort("other")
    engine.abort("a")
    events = {event.request_id: event.finish_reason for event in engine.step()}
    check(engine)
    assert events["a"] == "abort"
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.live_blocks) == (0, 0, 0)
    assert not engine.has_work
    engine.abort("a")
    assert engine.step() == []


def test_abort_while_the_batch_is_computed() -> None:
    engine: Engine
    backend = FakeBackend(hook=lambda batch: engine.abort("a"))
    engine = make_engine(backend)
    items = [request("a", prompt(1, 9)), request("b", prompt(2, 9))]
    for item in items:
        engine.add(item)
    engine.step()
    check(engine)
    backend.hook = None
    events = run(engine)
    assert [e.finish_reason for e in events["a"]] == ["abort"]


def test_b34_not_a_number_ends_one_request_only() -> None:
    items = [request(f"r{i}", [*prompt(i, 9), 50 + i], max_tokens=5) for i in range(4)]
    backend = FakeBackend(poison=52)
    clean = [alone(item) for item in items]
    assert all(52 not in answer for answer in clean)
    engine = make_engine(backend)
    events = run(engine, *items)
    assert [e[-1].finish_reason for e in events.values()] == ["length", "length", "error", "length"]
    assert "not finite" in (events["r2"][-1].error or "")
    assert [tokens(events[f"r{i}"]) for i in (0, 1, 3)] == [clean[i] for i in (0, 1, 3)]
    assert engine.stats().nan_requests == 1
    assert run(engine, request("again", items[2].prompt_ids))["again"][0].error
    backend.poison = None
    later = run(engine, request("later", items[2].prompt_ids, max_tokens=5))["later"]
    assert (later[0].cached_tokens, tokens(later)) == (0, clean[2])


def test_a_backend_that_raises_ends_the_requests_of_that_batch_only() -> None:
    def explode(batch: Batch) -> None:
        raise MemoryError("no more")

    backend = FakeBackend()
    engine = make_engine(backend, max_num_seqs=2)
    for i in range(3):
        engine.add(request(f"r{i}", prompt(i, 9)))
    backend.hook = explode
    failed = engine.step()
    assert {e.request_id: e.finish_reason for e in failed} == {"r0": "error", "r1": "error"}
    assert "MemoryError: no more" in (failed[0].error or "")
    check(engine)
    backend.hook = None
    events = run(engine)
    assert tokens(events["r2"]) == alone(request("r2", prompt(2, 9)))


def test_results_of_a_wrong_size_are_a_failure_of_the_backend() -> None:
    backend = FakeBackend()
    whole = backend.run

    def short(batch: Batch) -> Any:
        result = whole(batch)
        result.rank = result.rank[:-1]
        return result

    backend.run = short  # type: ignore[method-assign]
    events = run(make_engine(backend), request("a", [1]))["a"]
    assert "entries of rank" in (events[0].error or "")


def test_b35_penalties_count_the_same_cold_and_warm() -> None:
    text = [7, 8, 9, 10] * 6
    sampling = {"repetition_penalty": 1.1, "frequency_penalty": 0.5}
    engine = make_engine()
    cold = run(engine, request("cold", text, **sampling))["cold"]
    warm = run(engine, request("warm", text, **sampling))["warm"]
    assert warm[0].cached_tokens == 23
    assert tokens(cold) == tokens(warm) != alone(request("plain", text))
    longer = request("longer", [*text, 1, 2], **sampling)
    assert tokens(run(engine, longer)["longer"]) == alone(longer)


def test_b29_a_seed_means_the_same_whoever_is_there() -> None:
    a = request("a", prompt(1, 9), temperature=0.8, seed=42)
    expected = alone(a)
    for i in range(4):
        engine = make_engine(seed=i)
        others = [request(f"b{j}", prompt(j, 5), temperature=0.8) for j in range(i)]
        assert tokens(run(engine, *others, a)["a"]) == expected


def test_unseeded_draws_differ_from_each_other_and_repeat_with_the_engine_seed() -> None:
    def draws(seed: int, with_seeded: bool) -> list[list[int]]:
        engine = make_engine(seed=seed)
        items = [request(f"r{i}", [1, 2], temperature=1.0) for i in range(3)]
        if with_seeded:
            items.insert(1, request("s", [1, 2], temperature=1.0, seed=-5))
        events = run(engine, *items)
        return [tokens(events[f"r{i}"]) for i in range(3)]

    first = draws(7, False)
    assert len({tuple(answer) for answer in first}) == 3
    assert first == draws(7, True)
    assert first != draws(8, False)


def test_stop_ids_eos_and_the_flags_about_them() -> None:
    answer = alone(request("a", [1, 2, 3], max_tokens=8))
    third = answer[2]
    cut = answer[: answer.index(third) + 1]
    eos = run(make_engine(), request("a", [1, 2, 3], eos=(third,)))["a"]
    assert (tokens(eos), eos[-1].finish_reason, eos[-1].stop_token) == (cut, "stop", third)
    stop = run(make_engine(), request("a", [1, 2, 3], stop_token_ids=(third,), ignore_eos=True))["a"]
    assert (tokens(stop), stop[-1].finish_reason) == (cut, "stop")
    ignored = run(make_engine(), request("a", [1, 2, 3], eos=(third,), ignore_eos=True))["a"]
    assert (tokens(ignored), ignored[-1].finish_reason, ignored[-1].stop_token) == (answer, "length", None)


def test_min_tokens_bans_what_would_end_the_answer_until_then() -> None:
    answer = alone(request("a", [1, 2, 3], max_tokens=8))
    events = run(make_engine(), request("a", [1, 2, 3], eos=(answer[0],), min_tokens=5, max_tokens=8))["a"]
    assert len(tokens(events)) >= 5
    assert answer[0] not in tokens(events)[:5]


def test_logit_bias_and_allowed_vocab_reach_the_backend() -> None:
    seen: list[Batch] = []
    engine = make_engine(FakeBackend(hook=seen.append))
    run(
        engine,
        request("a", [1, 2], logit_bias={5: 1.5, 9: -100.0}, max_tokens=1),
        request("b", [3], allowed_vocab=90, top_k=-1, top_p=0.5, temperature=0.7, seed=-1, max_tokens=1),
        request("c", [4], logit_bias={7: 2.0}, max_tokens=1),
    )
    batch = seen[0]
    a, b, c = batch.samples
    assert batch.bias_ids[a["bias_start"] : a["bias_end"]].tolist() == [5, 9]
    assert batch.bias_values[a["bias_start"] : a["bias_end"]].tolist() == [1.5, -100.0]
    assert batch.bias_ids[c["bias_start"] : c["bias_end"]].tolist() == [7]
    assert (b["allowed_vocab"], b["top_k"], b["seed"]) == (90, 0, 2**64 - 1)
    assert (b["top_p"], b["temperature"]) == (np.float32(0.5), np.float32(0.7))
    assert (a["temperature"], a["allowed_vocab"], a["logprobs"], a["mask"]) == (0, 97, -1, -1)
    assert batch.samples["row"].tolist() == [1, 2, 3]


def test_prompt_logprobs_cover_every_position_though_the_prompt_is_cached() -> None:
    engine = make_engine(max_num_batched_tokens=7)
    item = request("a", prompt(1, 21), prompt_logprobs=2, max_tokens=2)
    first = run(engine, item)["a"]
    second = run(engine, item)["a"]
    for events in (first, second):
        reported = events[0].prompt_logprobs
        assert reported is not None
        assert reported[0] is None
        assert [p.token_id for p in reported[1:] if p] == item.prompt_ids[1:]
        assert all(len(p.top) == 2 for p in reported[1:] if p)
        assert all(e.prompt_logprobs is None for e in events[1:])
    assert first[0].prompt_logprobs == second[0].prompt_logprobs
    assert second[0].cached_tokens == 0


@pytest.mark.parametrize("length", [1, 2, 9, 64])
def test_scoring_without_sampling(length: int) -> None:
    engine = make_engine(max_model_len=64, max_num_batched_tokens=16)
    (event,) = run(engine, request("a", prompt(1, length), max_tokens=0, prompt_logprobs=0))["a"]
    assert event.finish_reason == "length"
    assert event.token_ids == []
    assert event.prompt_logprobs is not None
    assert len(event.prompt_logprobs) == length


def test_equal_prompts_that_arrive_together_are_computed_once() -> None:
    backend = FakeBackend(num_blocks=256)
    engine = make_engine(backend, max_num_batched_tokens=32, max_num_seqs=64)
    items = [request(f"r{i}", prompt(1, 100), temperature=1.0, seed=i, max_tokens=4) for i in range(8)]
    events = run(engine, *items)
    assert backend.computed_tokens == 100 + 7 + 8 * 3
    for item in items:
        assert tokens(events[item.request_id]) == alone(item)
    assert [events[f"r{i}"][0].cached_tokens for i in range(8)] == [0] + [99] * 7


def test_equal_prompts_shorter_than_a_block_are_computed_once_too() -> None:
    backend = FakeBackend(block_size=16, num_blocks=64)
    engine = make_engine(backend, max_num_seqs=64)
    items = [request(f"r{i}", prompt(1, 10), temperature=1.0, seed=i, max_tokens=4) for i in range(6)]
    events = run(engine, *items)
    assert backend.computed_tokens == 10 + 5 + 6 * 3
    assert [events[f"r{i}"][0].cached_tokens for i in range(6)] == [0] + [9] * 5


def test_those_who_wait_for_a_shared_prefix_take_no_slot() -> None:
    engine = make_engine(max_num_batched_tokens=64, max_num_seqs=2)
    for i in range(3):
        engine.add(request(f"same{i}", prompt(1, 20)))
    engine.add(request("different", prompt(2, 20)))
    assert {event.request_id for event in engine.step()} == {"same0", "different"}


def test_draws_are_counted_by_output_whatever_the_prompt_and_preemptions() -> None:
    counters: dict[int, list[int]] = {}

    def note(batch: Batch) -> None:
        for sample in batch.samples:
            counters.setdefault(int(sample["seed"]), []).append(int(sample["counter"]))

    engine = make_engine(FakeBackend(num_blocks=9, hook=note), max_num_batched_tokens=16)
    run(engine, *(request(f"r{i}", prompt(i, 9), temperature=1.0, seed=i, max_tokens=20) for i in range(3)))
    assert engine.stats().preemptions > 0
    assert counters == {i: list(range(20)) for i in range(3)}


def test_without_prefix_caching_everything_is_computed_and_nothing_kept() -> None:
    backend = FakeBackend()
    engine = make_engine(backend, prefix_caching=False)
    for name in ("a", "b"):
        assert run(engine, request(name, prompt(1, 20), max_tokens=1))[name][0].cached_tokens == 0
    assert backend.computed_tokens == 40
    assert engine.stats().free_blocks == 64


def test_blocks_pinned_from_outside_are_no_hang() -> None:
    engine = make_engine(FakeBackend(num_blocks=8))
    pin = engine.cache.match(array("i", [1]), "", 0)
    assert engine.cache.allocate(pin, 7)
    engine.add(request("a", prompt(1, 20)))
    events = [event for _ in range(3) for event in engine.step()]
    assert [e.finish_reason for e in events] == ["error"]
    assert "5 KV blocks are needed, but only 1 of 8" in (events[0].error or "")
    assert not engine.has_work


def test_statistics_add_up() -> None:
    engine = make_engine()
    run(engine, request("a", prompt(1, 20), max_tokens=5), request("b", prompt(1, 20), max_tokens=7))
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.cached_prompt_tokens, stats.generation_tokens) == (40, 19, 12)
    assert (stats.finished, stats.running, stats.waiting, stats.live_blocks) == (2, 0, 0, 0)
    assert stats.free_blocks + stats.cached_blocks == stats.total_blocks == 64
    assert 0 < stats.backend_seconds <= stats.step_seconds
    assert stats.rss_bytes > 1 << 20


def test_log_line_under_load(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("fourfold.engine.loop.LOG_INTERVAL", 0.0)
    with caplog.at_level("INFO", "fourfold.engine"):
        run(make_engine(), request("a", prompt(1, 20)))
    assert "generation" in caplog.text
    assert "KV use" in caplog.text
