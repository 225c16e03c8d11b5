"""How much of a prompt a step takes beside the answers that run, on made-up machines with a clock of their
own."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise

import pytest

from fourfold.bench.kv.backend import NoBackend
from fourfold.engine.cache import RadixCache
from fourfold.engine.pacing import LEAST_CHUNK, Answers, Pace
from fourfold.engine.policy import Limits
from fourfold.engine.scheduler import Scheduler
from fourfold.engine.step_cost import StepCosts, span_work

from .helpers import request
from .test_step_cost import learned, machine


@dataclass(frozen=True)
class Machine:
    """points: (tokens, milliseconds) of steps without context, linear between.  per_work: milliseconds per
    token of context that is read."""

    points: tuple[tuple[int, float], ...]
    per_work: float

    def seconds(self, tokens: int, work: float) -> float:
        for (low, fast), (high, slow) in pairwise(self.points):
            if tokens <= high:
                return 1e-3 * (fast + (slow - fast) * (tokens - low) / (high - low) + self.per_work * work)
        raise AssertionError(tokens)


MACHINES = {
    # An AVX2 core: every token costs from the first on, and attention costs much.
    "compute": Machine(((1, 17), (4, 34), (12, 98), (36, 300), (68, 312), (512, 1200)), 8e-4),
    # AMX: bound by memory up to 16 tokens, with a jump behind, and fast then.
    "jump": Machine(((1, 8), (16, 10), (17, 14), (32, 16), (64, 22), (128, 44), (512, 190)), 2e-5),
    # Wide: hundreds of tokens are free.
    "wide": Machine(((1, 5), (64, 5.5), (256, 8), (512, 14)), 1e-6),
}


def engine(pace: Pace) -> tuple[Scheduler, NoBackend]:
    limits = Limits(
        max_model_len=4096, max_num_seqs=64, max_num_batched_tokens=512, max_waiting=99, block_size=32,
        num_blocks=1024, vocab_size=50_000,
    )  # fmt: skip
    return Scheduler(limits, RadixCache(1024, 32), pace=pace), NoBackend(32, 1024, 512)


def gaps_beside_a_prompt(
    machine: Machine, streams: int, pace: Pace, seed: int
) -> tuple[list[float], list[float]]:
    """Seconds of steps with answers alone, and of those in which a prompt of 2,000 tokens is computed, which
    came to an engine that had computed nothing but short prompts and answers."""
    rng = random.Random(seed)
    scheduler, backend = engine(pace)
    for i in range(streams):
        prompt = [rng.randrange(50_000) for _ in range(16)]
        scheduler.add(request(str(i), prompt, max_tokens=3000))
    quiet: list[float] = []
    beside: list[float] = []
    for number in range(3000):
        if number == 60:
            scheduler.add(request("long", [rng.randrange(50_000) for _ in range(2000)], max_tokens=1))
        batch = scheduler.next_batch()
        assert batch is not None
        work = sum(map(span_work, batch.seq_context.tolist(), batch.seq_tokens.tolist()))
        took = machine.seconds(len(batch.tokens), work) * rng.lognormvariate(0, 0.03)
        events = scheduler.commit(batch, backend.run(batch))
        scheduler.measured(took)
        if number >= 10:
            (quiet if number < 60 else beside).append(took)
        if any(event.request_id == "long" for event in events):
            return quiet, beside
    raise AssertionError("the prompt was never computed")


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))]


@pytest.mark.parametrize("streams", [1, 4, 16])
@pytest.mark.parametrize("name", MACHINES)
def test_answers_keep_their_pace_beside_a_long_prompt(name: str, streams: int) -> None:
    """Within twice as long at every percentile, first steps included; and the prompt gets what there is."""
    quiet, beside = gaps_beside_a_prompt(MACHINES[name], streams, Pace(), seed=streams)
    ratios = {share: percentile(beside, share) / percentile(quiet, share) for share in (0.5, 0.9, 0.99)}
    assert max(ratios.values()) < 2, ratios
    assert max(beside) < 2.2 * max(quiet)
    # A step's tokens are whole: with few answers, one more may be too many.
    assert ratios[0.9] > (1.3 if streams == 1 else 1.5), ratios


def seconds_for_a_crowd(machine: Machine, pace: Pace, requests: int, seed: int) -> float:
    """Of requests with prompts and answers of 128 tokens that come at once."""
    rng = random.Random(seed)
    scheduler, backend = engine(pace)
    for i in range(requests):
        scheduler.add(request(str(i), [rng.randrange(50_000) for _ in range(128)], max_tokens=128))
    total = 0.0
    while (batch := scheduler.next_batch()) is not None:
        work = sum(map(span_work, batch.seq_context.tolist(), batch.seq_tokens.tolist()))
        took = machine.seconds(len(batch.tokens), work)
        scheduler.commit(batch, backend.run(batch))
        scheduler.measured(took)
        total += took
    return total


@pytest.mark.parametrize("name", MACHINES)
def test_a_crowd_costs_no_throughput(name: str) -> None:
    """Prompts that trickle in beside few answers would leave the weights read for few tokens at a time."""
    paced, free = (seconds_for_a_crowd(MACHINES[name], pace, 32, seed=1) for pace in (Pace(), Pace(0)))
    assert paced < 1.1 * free


@pytest.mark.parametrize("name", ["compute", "jump"])
def test_a_target_in_seconds_is_kept(name: str) -> None:
    target = 3 * MACHINES[name].seconds(4, 4 * 50)
    _, beside = gaps_beside_a_prompt(MACHINES[name], 4, Pace(itl_target=target), seed=1)
    assert 0.7 * target < percentile(beside, 0.5) < 1.05 * target
    assert percentile(beside, 0.99) < 1.2 * target


def test_chunks_keep_the_pace_of_answers_and_grow_when_there_are_none() -> None:
    costs, pace = learned(), Pace(2.0)
    chunk = pace.chunk(costs, Answers(4, 4, 4, 400), 0, 508)
    quiet = machine(4, 400)
    assert machine(4 + chunk, 400 + span_work(0, chunk)) == pytest.approx(2 * quiet, rel=0.25)
    assert pace.chunk(costs, Answers(0, 0, 0, 0), 0, 512) == 512
    assert Pace(0).chunk(costs, Answers(4, 4, 4, 400), 0, 508) == 508
    # Far in a long prompt every token costs more, so there are fewer of them.
    assert pace.chunk(costs, Answers(4, 4, 4, 400), 4000, 508) < chunk
    # Many answers take longer, so there is more room beside them.
    assert pace.chunk(costs, Answers(64, 64, 64, 64_000), 0, 448) > chunk


def test_chunks_at_the_limits() -> None:
    costs = learned()
    assert Pace(1.0).chunk(costs, Answers(4, 4, 4, 400), 0, 508) >= LEAST_CHUNK
    assert Pace(1.5).chunk(costs, Answers(4, 4, 4, 400), 0, 2) == 2
    assert Pace(2.0).chunk(costs, Answers(4, 4, 4, 400), 0, 0) == 0
    assert Pace(2.0).next_chunk(StepCosts(), Answers(0, 0, 0, 0), 0, 508) == 508


def test_the_next_step_is_no_larger_than_what_is_known() -> None:
    costs = StepCosts()
    assert Pace(9).next_chunk(costs, Answers(4, 4, 4, 400), 0, 508) == 508
    costs.observe(4, 400, 0.003)
    costs.observe(512, span_work(0, 512), 0.2)
    assert Pace(9).chunk(costs, Answers(4, 4, 4, 400), 0, 508) > 50
    assert Pace(9).next_chunk(costs, Answers(4, 4, 4, 400), 0, 508) == 4
    costs.observe(8, 800, 0.003)
    assert Pace(9).next_chunk(costs, Answers(4, 4, 4, 400), 0, 508) == 12
    assert Pace(0).next_chunk(costs, Answers(4, 4, 4, 400), 0, 508) == 508


def test_a_target_bounds_chunks_and_answers() -> None:
    costs, pace = learned(), Pace(itl_target=0.02)
    chunk = pace.chunk(costs, Answers(4, 4, 4, 400), 0, 508)
    assert machine(4 + chunk, span_work(0, chunk)) == pytest.approx(0.02, rel=0.25)
    assert pace.allows(costs, 8, 8 * 100)
    assert not pace.allows(costs, 300, 300 * 100)
    assert Pace(itl_target=1e-6).allows(costs, 1, 10), "one answer always runs"
