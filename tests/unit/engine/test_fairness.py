"""Tenants, users and priorities under load: the scheduler over the fake backend, on a clock of its own."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fourfold.engine.cache import RadixCache
from fourfold.engine.fairness import ANSWER_TOKEN, MAX_COUNTERS, VirtualCounters
from fourfold.engine.policy import Limits
from fourfold.engine.scheduler import Scheduler
from fourfold.types import EngineEvent, EngineRequest

from .fake_backend import FakeBackend
from .helpers import request


class Bench:
    """A scheduler whose steps take as long as they are said to."""

    def __init__(self, budget: int = 32, seqs: int = 4, blocks: int = 256, seconds: float = 0.01) -> None:
        self.backend = FakeBackend(num_blocks=blocks, check=False)
        limits = Limits(1024, seqs, budget, 1024, self.backend.block_size, blocks, self.backend.vocab_size)
        self.cache = RadixCache(blocks, self.backend.block_size)
        self.scheduler = Scheduler(limits, self.cache)
        self.seconds = seconds
        self.now = 100.0
        self.served: Counter[str] = Counter()
        """Tokens computed per tenant, those of answers by their price."""
        self.first: dict[str, int] = {}
        """In which step each request's first token came."""
        self.steps = 0
        self.ended: dict[str, EngineEvent] = {}

    def add(self, *items: EngineRequest) -> None:
        for item in items:
            self.scheduler.add(item, now=self.now)

    def step(self) -> None:
        scheduler = self.scheduler
        batch = scheduler.next_batch(now=self.now)
        events = scheduler.take_orphans()
        if batch is not None:
            for item in scheduler._plan.values():
                seq, end = item.sequence, item.sequence.computed + item.count
                prompt = max(0, min(end, seq.prompt_len) - seq.computed)
                self.served[seq.tenant] += prompt + int(ANSWER_TOKEN) * (item.count - prompt)
            scheduler.cache.moves.run(self.backend)
            result = self.backend.run(batch)
            self.now += self.seconds
            scheduler.measured(self.seconds)
            events += scheduler.commit(batch, result)
        self.steps += 1
        for event in events:
            if event.token_ids:
                self.first.setdefault(event.request_id, self.steps)
            if event.finish_reason is not None:
                self.ended[event.request_id] = event
        if self.steps % 16 == 0:
            self.cache.check(scheduler.tables())

    def run(self, steps: int = 20_000) -> None:
        for _ in range(steps):
            if not self.scheduler.has_work:
                return
            self.step()
        assert not self.scheduler.has_work, "no end in sight"


def prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(97) for _ in range(length)]


def burst(
    tenant: str, count: int, length: int, answer: int, seed: int = 0, **more: object
) -> list[EngineRequest]:
    rng = random.Random(tenant)
    return [
        request(f"{tenant}{i}", prompt(rng, length), tenant=tenant, salt=tenant, max_tokens=answer, **more)
        for i in range(count)
    ]


def test_a_burst_of_one_tenant_does_not_delay_another() -> None:
    bench = Bench()
    bench.add(*burst("flood", 30, 60, 8))
    for _ in range(10):
        bench.step()
    bench.add(*burst("other", 1, 20, 4))
    before = bench.steps
    bench.run()
    assert bench.first["other0"] - before <= 6
    assert len(bench.ended) == 31


def test_long_answers_of_one_tenant_give_a_place_to_another() -> None:
    bench = Bench(seqs=4)
    bench.add(*burst("flood", 6, 4, 60))
    for _ in range(10):
        bench.step()
    bench.add(*burst("other", 1, 4, 4))
    before = bench.steps
    for _ in range(10):
        bench.step()
    assert bench.first["other0"] - before <= 3
    assert bench.scheduler.counters.preemptions == 1
    bench.run()


def test_users_of_one_tenant_share_what_it_has() -> None:
    bench = Bench()
    rng = random.Random(1)
    bench.add(*(request(f"a{i}", prompt(rng, 60), user="a", max_tokens=30) for i in range(16)))
    for _ in range(10):
        bench.step()
    bench.add(request("b", prompt(rng, 20), user="b", max_tokens=4))
    before = bench.steps
    bench.run()
    assert bench.first["b"] - before <= 6


def test_service_follows_weights() -> None:
    bench = Bench()
    bench.add(*burst("heavy", 40, 40, 8, weight=3.0), *burst("light", 40, 40, 8))
    while bench.scheduler._planner.waiting.waits("heavy") and bench.scheduler._planner.waiting.waits("light"):
        bench.step()
    assert bench.served["heavy"] / bench.served["light"] == pytest.approx(3.0, rel=0.2)


def test_priorities_are_of_one_tenant_and_take_nothing_from_another() -> None:
    bench = Bench()
    bench.add(*burst("greedy", 16, 60, 8, priority=-1000))
    bench.step()
    bench.add(*burst("polite", 1, 20, 4))
    bench.run()
    assert bench.first["polite0"] <= 8


def test_a_short_request_overtakes_a_long_one_but_not_forever() -> None:
    bench = Bench(budget=16, seqs=8)
    rng = random.Random(1)
    bench.add(request("long", prompt(rng, 300), max_tokens=1))
    bench.step()
    count = 0
    while "long" not in bench.first:
        # A stream of short ones that alone would fill every step.
        for _ in range(2):
            bench.add(request(f"s{count}", prompt(rng, 12), max_tokens=1))
            count += 1
        bench.step()
        assert bench.steps < 300
    assert bench.first["s0"] <= 4
    # Its own 300 tokens, and as many of others, at 16 a step.
    assert bench.first["long"] <= 2 * 300 / 16 + 8


def test_a_longer_known_prefix_goes_first() -> None:
    bench = Bench(budget=16, seqs=8)
    rng = random.Random(2)
    known = prompt(rng, 80)
    bench.add(request("seed", known, max_tokens=1))
    bench.run()
    bench.add(request("cold", prompt(rng, 90), max_tokens=1), request("warm", [*known, 1, 2], max_tokens=1))
    bench.run()
    assert bench.first["warm"] < bench.first["cold"]


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    tenants=st.integers(2, 4),
    budget=st.integers(4, 40),
    seqs=st.integers(2, 6),
)
@example(seed=448, tenants=2, budget=13, seqs=2)  # one tenant's prompts are long, and each has one place
def test_the_bound_of_virtual_token_counters(seed: int, tenants: int, budget: int, seqs: int) -> None:
    """Among tenants that always have somebody waiting, service differs by a constant, however long it lasts:
    by what one step, and the answers of all running sequences, can add (Sheng et al., theorem 4.4)."""
    rng = random.Random(seed)
    bench = Bench(budget=budget, seqs=max(seqs, tenants), blocks=4096)
    names = [chr(97 + i) for i in range(tenants)]
    longest, answer = 40, 10
    for name in names:
        for i in range(30):
            bench.add(
                request(
                    f"{name}{i}", prompt(rng, rng.randint(1, longest)), tenant=name, salt=name,
                    max_tokens=rng.randint(1, answer),
                )
            )  # fmt: skip
    waiting = bench.scheduler._planner.waiting
    bound = longest + budget + ANSWER_TOKEN * answer * bench.scheduler.limits.max_seqs
    while all(waiting.waits(name) for name in names):
        bench.step()
        service = [bench.served[name] for name in names]
        assert max(service) - min(service) <= bound


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32), blocks=st.integers(8, 40), seqs=st.integers(1, 6), budget=st.integers(1, 40)
)
def test_everybody_ends_whatever_happens(seed: int, blocks: int, seqs: int, budget: int) -> None:
    """Tenants, users, weights, priorities and small pools: no livelock, no starvation, no block lost."""
    rng = random.Random(seed)
    bench = Bench(budget=budget, seqs=seqs, blocks=blocks)
    longest = min(30, blocks * 4 - 10)
    added = 0
    for _ in range(40):
        while rng.random() < 0.4 and bench.scheduler.num_waiting < 1000:
            tenant = rng.choice("abc")
            bench.add(
                request(
                    f"r{added}", prompt(rng, rng.randint(1, longest)), tenant=tenant, user=rng.choice("xy"),
                    salt=tenant, weight={"a": 1.0, "b": 2.0, "c": 0.5}[tenant],
                    priority=rng.choice([0, 0, 1, -1]), max_tokens=rng.randint(1, 10),
                    arrival=bench.now - rng.choice([0.0, 0.5]),
                )
            )  # fmt: skip
            added += 1
        bench.step()
    bench.run()
    assert len(bench.ended) == added
    assert all(event.finish_reason in ("length", "stop") for event in bench.ended.values())
    assert bench.cache.ledger.live == 0


def test_who_comes_back_has_saved_nothing_up() -> None:
    counters: VirtualCounters[str] = VirtualCounters()
    counters.charge("busy", 1000.0)
    counters.enter("idle", ["busy"])
    assert counters.of("idle") == 1000.0
    counters.leave("busy")
    counters.enter("new", [])
    assert counters.of("new") == 1000.0


def test_counters_are_bounded() -> None:
    counters: VirtualCounters[str] = VirtualCounters()
    for i in range(3 * MAX_COUNTERS):
        counters.enter(f"t{i}", ["t0"] if i else [])
        counters.charge(f"t{i}", float(i))
    assert len(counters) <= MAX_COUNTERS + 1
    assert counters.of("t0") == 0.0
