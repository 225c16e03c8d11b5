"""Random requests, aborts, pools and budgets: every token as if alone, and no block lost."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.engine.loop import Engine
from fourfold.errors import InvalidRequestError, OverloadedError
from fourfold.types import EngineEvent, EngineRequest, TokenLogprob

from .fake_backend import FakeBackend
from .helpers import check, make_engine, request, run

ROOTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14], [1, 2, 3, 4, 5, 60, 61], [20] * 12]
MAX_LEN = 48

Outcome = tuple[list[int], list[TokenLogprob], str | None]


def outcome(events: list[EngineEvent]) -> Outcome:
    return (
        [token for e in events for token in e.token_ids],
        [entry for e in events for entry in e.logprobs or []],
        events[-1].finish_reason,
    )


def random_request(rng: random.Random, request_id: str) -> EngineRequest:
    root = rng.choice(ROOTS)
    prompt = root[: rng.randint(1, len(root))] + [
        rng.randrange(30) for _ in range(rng.choice([0, 0, 1, 5, 15]))
    ]
    max_tokens = rng.choice([0, 1, 3, 8, 20, None])
    return request(
        request_id,
        prompt,
        salt=rng.choice(["", "", "t"]),
        priority=rng.choice([0, 0, 0, 1, -1]),
        arrival=rng.choice([0.0, 1.0]),
        eos=rng.choice([(), (3, 50)]),
        max_tokens=max_tokens,
        min_tokens=rng.choice([0, 0, 2]) if max_tokens is None or max_tokens > 1 else 0,
        temperature=rng.choice([0.0, 1.0]),
        seed=rng.randrange(5),
        repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
        logprobs=rng.choice([None, None, 0, 2]),
        prompt_logprobs=rng.choice([None, None, None, 1]),
        logit_bias=rng.choice([{}, {}, {4: 2.0}]),
        stop_token_ids=rng.choice([(), (7,)]),
    )


_alone: dict[tuple[str, int], tuple[Outcome, list[TokenLogprob | None] | None]] = {}
"""What a request gives by itself does not change, so it is computed once for all tests."""


def alone(item: EngineRequest, max_len: int) -> tuple[Outcome, list[TokenLogprob | None] | None]:
    key = (repr((item.prompt_ids, item.sampling, item.eos_ids)), max_len)
    if key not in _alone:
        engine = make_engine(FakeBackend(num_blocks=64, check=False), max_len, prefix_caching=False)
        events = run(engine, item, checked=False)[item.request_id]
        _alone[key] = (outcome(events), events[0].prompt_logprobs)
    return _alone[key]


class Mix:
    """An engine under random load, and what came out of it."""

    def __init__(self, rng: random.Random, engine: Engine) -> None:
        self.rng, self.engine = rng, engine
        self.items: dict[str, EngineRequest] = {}
        self.events: dict[str, list[EngineEvent]] = {}
        self.open: set[str] = set()
        self.finished = 0

    def step(self, load: float) -> None:
        rng, engine = self.rng, self.engine
        while rng.random() < load:
            item = random_request(rng, f"r{len(self.items)}")
            try:
                engine.add(item)
            except (OverloadedError, InvalidRequestError):
                break
            self.items[item.request_id] = item
            self.open.add(item.request_id)
        if self.open and rng.random() < 0.1:
            engine.abort(rng.choice(sorted(self.open)))
        for event in engine.step():
            self.events.setdefault(event.request_id, []).append(event)
            if event.finish_reason is not None:
                self.finish(event.request_id)
        check(engine)

    def finish(self, request_id: str) -> None:
        self.open.remove(request_id)
        events, item = self.events.pop(request_id), self.items[request_id]
        (tokens, logprobs, reason), prompt_logprobs = alone(item, self.engine.scheduler.limits.max_len)
        got_tokens, got_logprobs, got_reason = outcome(events)
        if got_reason == "abort":
            assert got_tokens == tokens[: len(got_tokens)]
            assert got_logprobs == logprobs[: len(got_logprobs)]
        else:
            assert (got_tokens, got_logprobs, got_reason) == (tokens, logprobs, reason)
            assert events[0].prompt_logprobs == prompt_logprobs
        assert events[0].cached_tokens < len(item.prompt_ids)
        self.finished += 1

    def end(self) -> None:
        for _ in range(20_000):
            if not self.engine.has_work:
                break
            self.step(0.0)
        assert not self.open
        assert not self.engine.has_work
        assert self.engine.stats().live_blocks == 0


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    block_size=st.integers(1, 5),
    num_blocks=st.integers(4, 30),
    budget=st.integers(1, 40),
    seqs=st.integers(1, 6),
    caching=st.booleans(),
)
def test_any_engine(
    seed: int, block_size: int, num_blocks: int, budget: int, seqs: int, caching: bool
) -> None:
    backend = FakeBackend(block_size=block_size, num_blocks=num_blocks)
    engine = make_engine(
        backend,
        MAX_LEN,
        max_num_batched_tokens=budget,
        max_num_seqs=seqs,
        max_waiting=8,
        prefix_caching=caching,
    )
    mix = Mix(random.Random(seed), engine)
    for _ in range(40):
        mix.step(0.4)
    mix.end()


@pytest.mark.parametrize("num_blocks, seqs, load", [(14, 4, 0.25), (40, 8, 0.45)])
def test_ten_thousand_steps(num_blocks: int, seqs: int, load: float) -> None:
    engine = make_engine(
        FakeBackend(num_blocks=num_blocks),
        MAX_LEN,
        max_num_batched_tokens=24,
        max_num_seqs=seqs,
        max_waiting=16,
    )
    mix = Mix(random.Random(num_blocks), engine)
    for _ in range(5_000):
        mix.step(load)
    mix.end()
    stats = engine.stats()
    assert mix.finished > 500
    assert min(stats.preemptions, stats.aborted, stats.cached_prompt_tokens) > 50
