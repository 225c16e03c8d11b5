"""Guesses change how many steps an answer takes, and nothing else."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from grammar.vocabulary import EOS, ROWS, Vocabulary
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.config import SpeculationConfig
from fourfold.engine.loop import Engine
from fourfold.engine.sequence import Sequence
from fourfold.engine.speculate.build import LoadedDraft
from fourfold.engine.speculate.draft import NO_DRAFT, Draft
from fourfold.engine.speculate.governor import LEARNING, PLAIN_EVERY, PROBE_EVERY, USUAL_BASE, Governor, Own
from fourfold.engine.speculate.lookup import Lookup
from fourfold.engine.speculate.proposer import Guess
from fourfold.engine.speculate.speculator import Speculator
from fourfold.errors import ConfigError
from fourfold.types import EngineEvent, EngineRequest

from .fake_backend import FakeBackend
from .helpers import check, make_engine, request, run, tokens
from .test_constraints import LETTERS, SCHEMA, json_constraint
from .test_random_mixes import MAX_LEN, Mix, alone, outcome


class Oracle:
    """Knows the answers, and is wrong on purpose now and then."""

    kind: str | None = None

    def __init__(
        self, answer: Callable[[EngineRequest], list[int]], rng: random.Random, wrong: float
    ) -> None:
        self.answer, self.rng, self.wrong = answer, rng, wrong

    def propose(self, wanted: Mapping[Sequence, int]) -> dict[Sequence, Guess]:
        guesses = {}
        for seq, most in wanted.items():
            right = self.answer(seq.request)[seq.output_len :][: 3 * most]
            guesses[seq] = Guess(
                [self.rng.randrange(90) if self.rng.random() < self.wrong else one for one in right], "oracle"
            )
        return guesses

    def ended(self, seq: Sequence) -> None:
        pass


class Free(Governor):
    """Guesses cost nothing: what the clock says of steps over the fake backend means nothing."""

    def price(self, sequences: int, work: float) -> float:
        return 0.0


class Linear(Governor):
    """Steps cost two seconds, and half a second per token: a guess costs a fifth of a token."""

    def took(self, sequences: int, work: float, seconds: float) -> None:
        super().took(sequences, work, 2 + 0.5 * work)


def guided_by(engine: Engine, proposer: Any, governor: Governor | None = None) -> Engine:
    speculator = Speculator([proposer], governor or Free(6))
    engine._speculator = engine.scheduler._speculator = speculator
    return engine


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    block_size=st.integers(1, 5),
    num_blocks=st.integers(4, 30),
    budget=st.integers(1, 40),
    seqs=st.integers(1, 6),
    wrong=st.sampled_from([0.0, 0.2, 0.7]),
)
def test_random_mixes_are_as_without(
    seed: int, block_size: int, num_blocks: int, budget: int, seqs: int, wrong: float
) -> None:
    """Aborts, preemption, penalties, bans, bias, logprobs, stops: every token as if alone and not guessed."""
    engine = make_engine(
        FakeBackend(block_size=block_size, num_blocks=num_blocks), MAX_LEN,
        max_num_batched_tokens=budget, max_num_seqs=seqs, max_waiting=8,
    )  # fmt: skip
    limit = engine.scheduler.limits.max_len
    oracle = Oracle(lambda item: alone(item, limit)[0][0], random.Random(seed), wrong)
    mix = Mix(random.Random(seed), guided_by(engine, oracle))
    for _ in range(40):
        mix.step(0.4)
    mix.end()


def test_right_guesses_save_steps_and_wrong_ones_cost_none() -> None:
    item = request("r", [1, 2, 3], max_tokens=60)
    plain = make_engine()
    answer = tokens(run(plain, item)["r"])
    for wrong, most_steps in ((0.0, 16), (1.0, 60)):
        engine = guided_by(make_engine(), Oracle(lambda item: answer, random.Random(1), wrong))
        events = run(engine, item)["r"]
        assert tokens(events) == answer
        stats = engine.stats()
        assert stats.step <= most_steps
        assert stats.draft_tokens > 0
        told = sum(e.accepted_draft_tokens for e in events), sum(e.rejected_draft_tokens for e in events)
        assert told == (stats.accepted_draft_tokens, stats.draft_tokens - stats.accepted_draft_tokens)
        assert (stats.accepted_draft_tokens == stats.draft_tokens) is (wrong == 0.0)


def asked(name: str, prompt: list[int], schema: Any, **more: Any) -> EngineRequest:
    defaults = {"max_tokens": 120, "temperature": 1.0, "eos": (EOS,)}
    return request(name, prompt, constraint=json_constraint(schema), **{**defaults, **more})


def constrained(**more: Any) -> Engine:
    # Without pacing, which goes by measured time, steps can be counted.
    return make_engine(FakeBackend(vocab_size=ROWS, **more), load_tokens=Vocabulary, max_itl_ratio=0)


@pytest.mark.parametrize("schema", [SCHEMA, LETTERS], ids=["grammar", "validation"])
@pytest.mark.parametrize("logprobs", [None, 1])
@pytest.mark.parametrize("wrong", [0.0, 0.3])
def test_constrained_answers_are_as_without(schema: Any, logprobs: int | None, wrong: float) -> None:
    items = [asked(f"r{i}", [i, 7], schema, seed=i, logprobs=logprobs) for i in range(12)]
    plain = constrained()
    before = run(plain, *items)
    answers = {name: tokens(events) for name, events in before.items()}
    engine = constrained()
    oracle = Oracle(lambda item: answers[item.request_id], random.Random(3), wrong)
    after = run(guided_by(engine, oracle), *items)
    for name, events in before.items():
        assert outcome(after[name]) == outcome(events)
        assert sum(e.forced_tokens for e in after[name]) == sum(e.forced_tokens for e in events)
    assert engine.stats().accepted_draft_tokens > 5
    assert engine.stats().step < plain.stats().step + (wrong > 0)
    assert engine.stats().rejected_answers == plain.stats().rejected_answers
    assert engine.cache.ledger.counts().live == 0


def test_earlier_answers_of_the_tenant_are_guesses() -> None:
    engine = constrained()
    first = run(engine, asked("a", [5], SCHEMA, seed=1))["a"]
    assert engine.stats().draft_tokens == 0
    again = run(engine, asked("b", [5], SCHEMA, seed=1))["b"]
    assert tokens(again) == tokens(first)
    assert engine.stats().accepted_draft_tokens > 0
    before = engine.stats().draft_tokens
    run(engine, asked("c", [5], SCHEMA, seed=1, salt="another tenant"))
    assert engine.stats().draft_tokens == before


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 4, "repetition_penalty": 1.3}])
def test_a_model_is_its_own_best_draft(sampling: dict[str, Any]) -> None:
    """Both draw with the same seed and counter, so every guess is right."""
    plain = make_engine()
    items = [request(f"r{i}", [i, 2, 3], max_tokens=40, **sampling) for i in range(3)]
    before = run(plain, *items)
    engine = make_engine(
        draft=LoadedDraft(FakeBackend(), 256), speculation=SpeculationConfig(method="draft_model", model="x")
    )
    after = run(engine, *items)
    assert {n: tokens(e) for n, e in after.items()} == {n: tokens(e) for n, e in before.items()}
    stats = engine.stats()
    assert stats.accepted_draft_tokens == stats.draft_tokens > 60
    assert stats.step < plain.stats().step / 2
    engine.close()


def test_a_draft_model_that_is_too_small_or_another_s() -> None:
    settings = SpeculationConfig(method="draft_model", model="x")
    plain = tokens(run(make_engine(), request("r", list(range(20)), max_tokens=30))["r"])
    for small in (LoadedDraft(FakeBackend(num_blocks=6), 256), LoadedDraft(FakeBackend(), 24)):
        engine = make_engine(draft=small, speculation=settings)
        assert tokens(run(engine, request("r", list(range(20)), max_tokens=30))["r"]) == plain
    with pytest.raises(ConfigError, match="50 tokens and the model 97"):
        make_engine(draft=LoadedDraft(FakeBackend(vocab_size=50), 256), speculation=settings)


def test_predictions() -> None:
    item = request("r", [1, 2, 3], max_tokens=50)
    answer = tokens(run(make_engine(), item)["r"])
    edited = [*answer[:20], 1, 1, *answer[24:]]
    for prediction, steps in ((answer, 15), (edited, 20), ([9] * 5, 51), ([96], 51)):
        engine = make_engine()
        item.prediction_ids = prediction
        assert tokens(run(engine, item)["r"]) == answer
        assert engine.stats().step <= steps


def test_nan_in_a_guess_s_row_fails_nobody() -> None:
    """The row of a wrong guess is nobody's; that of a right one fails the request when it comes to it."""
    answer = tokens(run(make_engine(), request("r", [1, 2, 3], max_tokens=30))["r"])
    strange = next(t for t in range(97) if t not in answer and t > 3)
    proposer = Oracle(lambda item: [strange] * 30, random.Random(1), 0.0)
    engine = guided_by(make_engine(FakeBackend(poison=strange)), proposer)
    assert tokens(run(engine, request("r", [1, 2, 3], max_tokens=30))["r"]) == answer
    engine = guided_by(
        make_engine(FakeBackend(poison=answer[10])), Oracle(lambda item: answer, random.Random(1), 0.0)
    )
    events: list[EngineEvent] = run(engine, request("r", [1, 2, 3], max_tokens=30))["r"]
    assert tokens(events) == answer[: answer.index(answer[10]) + 1]
    assert events[-1].finish_reason == "error"
    check(engine)


def sequence_of(tokens: list[int], prompt: int = 1, prediction: list[int] | None = None) -> Sequence:
    engine = make_engine()
    item = request("r", [1] * prompt)
    item.prediction_ids = prediction or []
    engine.add(item)
    seq = engine.scheduler._sequences["r"]
    seq.tokens = array("i", tokens)
    return seq


@pytest.mark.parametrize(
    ("text", "guess"),
    [
        ([1, 2, 3, 4, 5, 1, 2], [3, 4, 5]),
        ([1, 2, 8, 1, 2, 9, 7, 1, 2], [9, 7, 1]),  # the last occurrence
        ([9, 1, 2, 5, 8, 1, 2, 6, 9, 1, 2], [5, 8, 1]),  # the longest match before the last
        ([1, 2, 3, 4], None),
        ([4, 5], None),
        ([7, 7, 7, 7], [7]),
        # Bytes of neighbours must not be taken for a token: this is 1, 2 in the middle of others.
        ([0x0100, 0x0200, 5, 5, 0x01, 0x02], None),
        ([0x01000000, 0x02000000, 0, 5, 5, 0x0100, 0x0200], None),
    ],
)
def test_lookup(text: list[int], guess: list[int] | None) -> None:
    seq = sequence_of(text)
    found = Lookup(2, 4).propose({seq: 3})
    assert (list(found[seq].tokens) if found else None) == guess


def test_a_draft_is_cut_at_a_place() -> None:
    draft = Draft([1, 2, 3, 4, 5], [0, 1, 4, 5], "k")
    assert [len(draft.cut(n).tokens) for n in range(7)] == [0, 1, 1, 1, 4, 5, 5]
    assert draft.cut(3).places == [0, 1]
    assert draft.cut(0) is NO_DRAFT
    assert [draft.guesses(n) for n in range(7)] == [0, 1, 2, 2, 2, 3, 3]
    assert Draft([1, 2], [0]).guesses(2) == 1  # the last guess ends the answer


def steps(governor: Governor, sequences: int, cost: Callable[[int], float], count: int) -> None:
    for i in range(count):
        tokens = sequences * (1 + i % 4)
        governor.took(sequences, tokens, cost(tokens))


def test_guesses_are_made_while_they_pay() -> None:
    """cost = 10 + tokens/10 at one sequence: a guess costs 1/101 of a token. At 64 sequences with a cost of
    tokens alone it costs a whole one."""
    governor = Governor(5)
    assert governor.price(1, 1) == 1 / (1 + USUAL_BASE)
    steps(governor, 1, lambda n: 10 + n / 10, 40)
    assert governor.price(1, 1) == pytest.approx(1 / 101, rel=1e-3)
    assert governor.length("k", Own(), governor.price(1, 1)) == 5
    steps(governor, 64, lambda n: float(n), 40)
    assert governor.price(64, 64) == pytest.approx(1.0, rel=1e-3)
    assert governor.length("k", Own(), governor.price(64, 64)) == 0
    # A draft model's own cost counts: 2 s for one guess in a step of 10.
    governor.drafted(1, 1, 2.0)
    assert governor.price(1, 1) == pytest.approx((0.1 + 2) / 10.1, rel=1e-3)


def test_rates_are_of_the_kind_and_of_the_sequence() -> None:
    governor = Governor(4)
    bad, good = Own(), Own()
    for _ in range(50):
        governor.came_true("k", bad, 0, 3)
        governor.came_true("k", good, 3, 3)
    assert governor.rate("k", bad) < 0.3 < 0.8 < governor.rate("k", good)
    assert 0.4 < governor.rate("another", Own()) < 0.6
    assert governor.length("k", bad, 0.5) == 0
    assert governor.length("k", good, 0.5) == 4


def test_what_does_not_pay_is_tried_again_seldom() -> None:
    governor = Governor(4)
    assert sum(governor.turn() for _ in range(PLAIN_EVERY * 10)) == (PLAIN_EVERY - 1) * 10
    governor.pays = False
    assert sum(governor.turn() for _ in range(PROBE_EVERY * 10)) == 10


@pytest.mark.parametrize("wrong", [1.0, 0.0])
def test_it_switches_itself_off(wrong: float) -> None:
    """Where a guess costs a fifth of a token, wrong ones end soon and right ones go on."""
    item = request("r", [1, 2, 3], max_tokens=220, ignore_eos=True)
    answer = tokens(run(make_engine(), item)["r"])
    governor = Linear(6)
    for i in range(LEARNING * 3):
        governor.took(1, 1 + i % 5, 0)
    oracle = Oracle(lambda item: answer, random.Random(1), wrong)
    engine = guided_by(make_engine(), oracle, governor)
    assert tokens(run(engine, item)["r"]) == answer
    stats = engine.stats()
    if wrong:
        assert stats.draft_tokens < stats.step / 2
    else:
        assert stats.step < 60


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"method": "eagle"}, "method must be one of"),
        ({"method": "draft_model"}, "needs a model"),
        ({"model": "x"}, "only with that"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens"),
        ({"num_speculative_tokens": True}, "num_speculative_tokens"),
        ({"prompt_lookup_min": 5, "prompt_lookup_max": 2}, "more than prompt_lookup_max"),
        ({"disable_by_batch_size": "8"}, "disable_by_batch_size"),
    ],
)
def test_bad_settings(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        SpeculationConfig(**settings)
