"""Fetching KV from a lower tier or computing it again: by measured costs, with the same answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from fourfold.engine.cache import RadixCache
from fourfold.engine.policy import Limits
from fourfold.engine.scheduler import Scheduler
from fourfold.engine.step_cost import span_work
from fourfold.engine.tiers.choice import FetchChoice

from .fake_backend import FakeBackend
from .helpers import check, make_engine, request, run, tokens
from .test_step_cost import machine
from .test_tiers import LONG, OTHER, ask, restarted, tiered


def test_what_was_never_measured_is_tried() -> None:
    choice = FetchChoice(4, lambda context, tokens, rest: 0.0)
    assert choice.fetches(10, 10, 0, 5)
    assert choice.saves(0)
    assert FetchChoice(4).fetches(10, 0, 0, 5), "and so is what nothing is known to compare with"


def test_the_faster_way_is_taken() -> None:
    choice = FetchChoice(4, lambda context, tokens, rest: 1e-3 * tokens * (1 + context / 100))
    choice.measured("restore", 3e-3)
    assert choice.fetches(10, 0, 0, 5), "30 ms of copies, 40 ms of computing"
    choice.measured("read", 2e-3)
    assert not choice.fetches(10, 10, 0, 5), "50 ms of copies and reads"
    assert choice.fetches(10, 4, 0, 5), "most of it is in memory already"
    assert choice.fetches(10, 10, 100, 5), "behind a long context computing takes longer"
    choice.measured("save", 5e-3)
    assert not choice.saves(0), "8 ms there and back, 4 ms of computing"
    assert choice.saves(200)


def test_a_slow_moment_is_not_held_against_a_tier_forever() -> None:
    choice = FetchChoice(4, lambda context, tokens, rest: 1e-3)
    choice.measured("read", 1.0)
    tries = next(i for i in range(1000) if choice.fetches(1, 1, 0, 1))
    assert 100 < tries < 1000
    choice.measured("read", 1e-4)
    for _ in range(99):
        choice.measured("read", 1e-4)
    assert choice.seconds("read") == pytest.approx(1e-4, rel=0.1)


def test_computing_costs_what_steps_of_that_size_cost() -> None:
    limits = Limits(4096, 8, 512, 99, 32, 64, 97)
    scheduler = Scheduler(limits, RadixCache(64, 32))
    assert scheduler.recompute_seconds(0, 100, 1) == float("inf")
    for _ in range(30):
        for count in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512):
            for context in (0, 2000):
                work = span_work(context, count)
                scheduler.costs.observe(count, work, machine(count, work))
    both = machine(256, span_work(1000, 256)) - machine(128, span_work(1128, 128))
    assert scheduler.recompute_seconds(1000, 128, 128) == pytest.approx(both, rel=0.1)
    # Two whole steps and a part, less that part.
    whole = machine(512, span_work(0, 512)) + machine(512, span_work(512, 512))
    part = machine(100, span_work(1024, 100))
    assert scheduler.recompute_seconds(0, 1024, 100) == pytest.approx(whole + part - part, rel=0.1)
    share = machine(512, span_work(0, 512)) * 32 / 512
    assert scheduler.recompute_seconds(0, 32, 0) == pytest.approx(share, rel=0.1)


@pytest.mark.parametrize("fetch", [True, False])
def test_a_hit_in_host_memory_is_fetched_or_computed(fetch: bool) -> None:
    engine = tiered(kv_host_cache_gib=0.001)
    cold, _ = ask(engine, "a", LONG)
    ask(engine, "b", OTHER)
    tiers = engine.kv.tiers
    assert tiers is not None
    # One block's copy took a second; computing all of them takes one, or a hundred.
    tiers.choice.measured("restore", 1.0)
    tiers.choice.recompute = lambda context, tokens, rest: 100.0 if fetch else 1.0
    before = engine.stats()
    warm, cached = ask(engine, "c", LONG)
    after = engine.stats()
    assert warm == cold
    assert (cached >= 56) is fetch
    assert (after.tiers.restored_blocks > before.tiers.restored_blocks) is fetch
    assert (after.recomputed_tokens_by_tier.get("host", 0) > 0) is not fetch
    events = engine.recorder.timeline("c").events  # type: ignore[union-attr]
    assert [e.reason for e in events if e.event == "recomputed"] == ([] if fetch else ["host"])
    check(engine)
    engine.close()


@pytest.mark.parametrize("fetch", [True, False])
def test_a_hit_on_disk_is_waited_for_or_computed(tmp_path: Path, fetch: bool) -> None:
    cold, second = restarted(tmp_path)
    assert second.kv.tiers is not None
    second.kv.tiers.choice.measured("read", 1.0)
    second.kv.tiers.choice.recompute = lambda context, tokens, rest: 100.0 if fetch else 1.0
    assert ask(second, "b", LONG) == (cold, 56 if fetch else 0)
    stats = second.stats()
    assert stats.recomputed_tokens_by_tier == ({} if fetch else {"disk": 56})
    assert stats.tiers.disk_read_blocks == (14 if fetch else 0)
    second.close()


@pytest.mark.parametrize("swap", [True, False])
def test_a_preempted_sequence_is_swapped_or_recomputed(swap: bool) -> None:
    """Two answers that do not fit the pool together: one makes room, and comes back by the faster way."""
    engine = make_engine(FakeBackend(num_blocks=24), 90, kv_host_cache_gib=0.001, max_itl_ratio=0)
    tiers = engine.kv.tiers
    assert tiers is not None
    tiers.choice.measured("save", 1.0)
    tiers.choice.recompute = lambda context, tokens, rest: 1e6 if swap else 0.5
    items = [request(name, LONG[i : 40 + i], max_tokens=40) for i, name in enumerate("ab")]
    alone = {item.request_id: tokens(run(make_engine(), item)[item.request_id]) for item in items}
    together = run(engine, *items)
    assert {name: tokens(events) for name, events in together.items()} == alone
    stats = engine.stats()
    assert stats.preemptions > 0
    assert (stats.tiers.saved_blocks > 0) is swap
    assert (stats.tiers.restored_blocks > 0) is swap
    assert (stats.tiers.forgone_blocks > 0) is not swap
    engine.close()
