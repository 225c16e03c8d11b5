"""Requests that allow so much time: refused at once if it cannot be enough, ended when it is over."""

from __future__ import annotations

import random

import pytest

from fourfold.errors import DeadlineError, InvalidRequestError

from .helpers import make_engine, request, run
from .test_fairness import Bench, burst, prompt


def warm(bench: Bench) -> Bench:
    """Speeds are known."""
    bench.add(*burst("warm", 4, 40, 20))
    bench.run()
    return bench


def test_what_cannot_be_in_time_is_refused_at_once_with_both_numbers() -> None:
    bench = warm(Bench(seconds=0.1))
    bench.add(*burst("a", 20, 40, 20))
    with pytest.raises(
        DeadlineError, match=r"ttft_timeout is 0\.5 s, but the first token would take about"
    ) as e:
        bench.add(request("late", [1, 2, 3], tenant="a", ttft_timeout=0.5, arrival=bench.now))
    assert 1 <= e.value.retry_after <= 60
    assert not e.value.passed
    assert bench.scheduler.counters.refused == 1
    bench.add(request("patient", [1, 2, 3], tenant="a", ttft_timeout=500.0, arrival=bench.now))
    bench.run()
    assert bench.ended["patient"].finish_reason == "length"


def test_the_whole_answer_counts_for_timeout() -> None:
    bench = warm(Bench(seconds=0.1))
    with pytest.raises(DeadlineError, match=r"timeout is 2 s, but the whole answer would take about"):
        bench.add(request("long", [1, 2], max_tokens=100, timeout=2.0, arrival=bench.now))
    bench.add(request("short", [1, 2], max_tokens=5, timeout=2.0, arrival=bench.now))
    bench.run()
    assert bench.ended["short"].finish_reason == "length"


def test_nothing_is_refused_while_no_speed_is_known() -> None:
    bench = Bench()
    bench.add(request("first", [1, 2], ttft_timeout=0.001, arrival=bench.now))


def test_another_tenants_queue_does_not_count_where_it_does_not_delay() -> None:
    bench = warm(Bench(seconds=0.01, seqs=16))
    bench.add(*burst("flood", 60, 60, 4))
    with pytest.raises(DeadlineError):
        bench.add(request("x", [1] * 20, tenant="flood", ttft_timeout=0.5, arrival=bench.now))
    bench.add(request("y", [1] * 20, tenant="other", ttft_timeout=0.5, arrival=bench.now))
    bench.run()
    assert bench.ended["y"].finish_reason == "length"


def test_a_deadline_that_passes_while_waiting_ends_it_at_once() -> None:
    bench = Bench(seqs=1, seconds=0.1)
    bench.add(request("runs", [1], max_tokens=100))
    # No speed is known yet, so it is taken.
    bench.add(request("waits", [2], ttft_timeout=1.0, arrival=bench.now))
    start = bench.now
    while "waits" not in bench.ended:
        bench.step()
    assert bench.now - start <= 1.3
    event = bench.ended["waits"]
    assert (event.finish_reason, event.timed_out) == ("error", True)
    assert "no token within 1 s (ttft_timeout)" in (event.error or "")
    bench.run()
    assert bench.cache.ledger.live == 0


def test_a_deadline_that_passes_while_running_ends_it_and_nobody_else() -> None:
    bench = Bench(seconds=0.1)
    bench.add(
        request("late", [1], max_tokens=100, timeout=1.0, arrival=bench.now),
        request("other", [2], max_tokens=30),
    )
    bench.run()
    assert bench.ended["late"].timed_out
    assert "timeout" in (bench.ended["late"].error or "")
    assert bench.ended["other"].finish_reason == "length"
    assert bench.scheduler.counters.timed_out == 1


def test_a_first_token_in_time_ends_that_deadline() -> None:
    bench = Bench(seconds=0.1)
    bench.add(request("a", [1], max_tokens=50, ttft_timeout=1.0, arrival=bench.now))
    bench.run()
    assert bench.ended["a"].finish_reason == "length"


def test_time_that_passed_before_the_engine_saw_it_counts() -> None:
    bench = Bench()
    with pytest.raises(DeadlineError, match=r"timeout is 1 s, and 5\.0 s had passed"):
        bench.add(request("old", [1], timeout=1.0, arrival=bench.now - 5))


@pytest.mark.parametrize("value", [0.0, -1.0, 1e9, float("nan"), float("inf")])
def test_absurd_times_are_refused(value: float) -> None:
    for name in ("timeout", "ttft_timeout"):
        with pytest.raises(InvalidRequestError, match=name):
            make_engine().add(request("a", [1], **{name: value}))


def test_an_engine_ends_what_is_late_and_goes_on() -> None:
    engine = make_engine()
    events = run(engine, request("late", [1], max_tokens=100, timeout=1e-9), request("good", [2]))
    assert events["late"][-1].timed_out
    assert events["good"][-1].finish_reason == "length"
    assert engine.stats().timed_out == 1


def test_at_overload_those_accepted_are_in_time() -> None:
    """Arrivals at about twice what can be served: some are refused, and nearly nobody else is late."""
    rng = random.Random(3)
    bench = warm(Bench(budget=32, seqs=4, seconds=0.02))
    refused = accepted = 0
    due = bench.now
    for i in range(150):
        due += rng.expovariate(2.5 / 0.16)
        while bench.now < due:
            if bench.scheduler.has_work:
                bench.step()
            else:
                bench.now = due
        try:
            bench.add(request(f"r{i}", prompt(rng, 40), max_tokens=20, ttft_timeout=1.0, arrival=due))
            accepted += 1
        except DeadlineError:
            refused += 1
    bench.run()
    late = sum(event.timed_out for event in bench.ended.values())
    assert refused > 30
    assert accepted > 40
    assert late <= 0.05 * accepted
