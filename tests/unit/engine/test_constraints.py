"""Constrained requests in the scheduler and the loop, over the fake backend."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest
from grammar.counting import all_of, counter, nested
from grammar.vocabulary import EOS, ROWS, VOCABULARY, Vocabulary

from fourfold.engine.compiling import LARGE
from fourfold.engine.loop import Engine
from fourfold.errors import InvalidRequestError, OverloadedError
from fourfold.grammar.compile import Compiler
from fourfold.grammar.guide import Guide
from fourfold.grammar.sources import make_constraint
from fourfold.types import Constraint, EngineEvent

from .fake_backend import FakeBackend
from .helpers import check, make_engine, request, run, tokens

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["red", "green"]},
        "n": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["name", "n"],
    "additionalProperties": False,
}
LETTERS = {
    "type": "array", "items": {"enum": list("abcdefg")}, "uniqueItems": True, "minItems": 3, "maxItems": 4,
}  # fmt: skip


def engine(backend: FakeBackend | None = None, **config: Any) -> Engine:
    return make_engine(backend or FakeBackend(vocab_size=ROWS), load_tokens=Vocabulary, **config)


def json_constraint(schema: Any) -> Constraint:
    return make_constraint("json", schema, "response_format")


def asked(name: str, prompt: list[int], schema: Any = SCHEMA, **more: Any) -> Any:
    defaults = {"max_tokens": 120, "temperature": 1.0, "seed": 5, "eos": (EOS,)}
    return request(name, prompt, constraint=json_constraint(schema), **{**defaults, **more})


def text(events: list[EngineEvent]) -> str:
    ids = tokens(events)
    return b"".join(VOCABULARY.token_bytes(id) for id in ids if id != EOS).decode()


def check_valid(events: list[EngineEvent]) -> None:
    assert events[-1].finish_reason == "stop", events[-1]
    value = json.loads(text(events))
    assert value["name"] in ("red", "green")
    assert 0 <= value["n"] <= 999


def test_answers_are_valid_and_their_neighbours_unchanged() -> None:
    alone = run(engine(), request("free", [1, 2, 3], max_tokens=30))
    both = run(
        engine(),
        request("free", [1, 2, 3], max_tokens=30),
        *(asked(f"r{i}", [1, 2, 3, i], seed=i) for i in range(12)),
    )
    for i in range(12):
        check_valid(both[f"r{i}"])
    assert tokens(both["free"]) == tokens(alone["free"])
    assert len({text(both[f"r{i}"]) for i in range(12)}) > 1


def test_forced_tokens_cost_no_step_and_change_nothing() -> None:
    """With logprobs every token has a step of its own, so that is the same answer without forced tokens."""
    jumping, stepping = engine(), engine()
    fast = run(jumping, asked("a", [1, 2, 3]))["a"]
    slow = run(stepping, asked("a", [1, 2, 3], logprobs=0))["a"]
    assert sum(event.forced_tokens for event in fast) == jumping.stats().forced_tokens > 5
    assert jumping.stats().step < stepping.stats().step
    check_valid(fast)
    check_valid(slow)
    assert sum(len(event.logprobs or ()) for event in slow) == len(tokens(slow))
    # The fake draws from the bytes of its context, so only the cut into tokens can make a difference.
    assert all(event.forced_tokens == 0 for event in slow)


def test_the_state_survives_preemption() -> None:
    """B48."""
    small = FakeBackend(block_size=4, num_blocks=24, vocab_size=ROWS)
    one = engine(small, max_num_seqs=8)
    together = run(one, *(asked(f"r{i}", [i, i + 1, 7], seed=i, max_tokens=80) for i in range(8)))
    assert one.stats().preemptions > 0
    for i in range(8):
        check_valid(together[f"r{i}"])
        alone = run(engine(), asked(f"r{i}", [i, i + 1, 7], seed=i, max_tokens=80))
        assert text(alone[f"r{i}"]) == text(together[f"r{i}"])


@pytest.mark.parametrize("logprobs", [None, 2])
def test_validation_takes_answers_back(logprobs: int | None) -> None:
    one = engine()
    events = run(one, *(asked(f"r{i}", [i], LETTERS, seed=i, logprobs=logprobs) for i in range(20)))
    ended = [events[f"r{i}"] for i in range(20)]
    assert one.stats().rejected_answers > 0
    stopped = [each for each in ended if each[-1].finish_reason == "stop"]
    assert len(stopped) > 10
    for each in stopped:
        assert len(each) == 1, "nothing may be shown before it was validated"
        value = json.loads(text(each))
        assert len(value) == len(set(value)) >= 3
        if logprobs is not None:
            assert [one.token_id for one in each[0].logprobs or ()] == tokens(each)
    for each in ended:
        if each[-1].finish_reason == "error":
            assert "no valid answer was found" in (each[-1].error or "")
            assert not tokens(each)
    assert one.cache.ledger.counts().live == 0


def test_an_answer_goes_on_past_the_one_that_is_excluded() -> None:
    """Handwritten/mod301 and mod303 in small: the first depth that all counters agree on is the one that
    `not` excludes, so whoever closes there must go on to the next."""
    schema = all_of("x0", "y0", **counter("x", 2, 1), **counter("y", 3, 2))
    schema["allOf"].append({"not": {"const": nested(5)}})
    one = engine(FakeBackend(num_blocks=1000, vocab_size=ROWS), max_model_len=2000)
    events = run(one, *(asked(f"r{i}", [i], schema, seed=i, max_tokens=1500) for i in range(12)))
    assert one.stats().rejected_answers > 0, "nobody closed at the depth that is excluded"
    for i in range(12):
        assert events[f"r{i}"][-1].finish_reason == "stop"
        depth = text(events[f"r{i}"]).count('"a"')
        assert depth % 6 == 5
        assert depth > 5


def test_no_valid_answer_is_an_error() -> None:
    never = {"enum": ["a", "b"], "allOf": [{"not": {"pattern": "^a"}}, {"not": {"pattern": "^b"}}]}
    one = engine()
    events = run(one, asked("r", [1], never))["r"]
    assert events[-1].finish_reason == "error"
    assert not tokens(events)
    assert one.cache.ledger.counts().live == 0


def test_max_tokens_cuts_forced_tokens_too() -> None:
    for most in range(1, 9):
        events = run(engine(), asked("r", [1], max_tokens=most))["r"]
        assert len(tokens(events)) == most
        assert events[-1].finish_reason == "length"


def test_min_tokens_that_the_constraint_cannot_reach() -> None:
    """The constraint ends the answer; it is not an error that it is short."""
    short = request("r", [1], constraint=make_constraint("choice", ["yes"], "f"), eos=(EOS,), min_tokens=8)
    events = run(engine(), short)["r"]
    assert text(events) == "yes"
    assert events[-1].finish_reason == "stop"


def test_ignore_eos_ends_with_the_constraint() -> None:
    events = run(engine(), asked("r", [1], ignore_eos=True))["r"]
    check_valid(events)


def test_no_token_left_is_an_error_of_that_request() -> None:
    bias = {ord("y"): 1.0}
    bad = request(
        "bad", [1], constraint=make_constraint("regex", "[xy]*", "f"), eos=(EOS,), allowed_vocab=ord("a"),
        logit_bias={},
    )  # fmt: skip
    events = run(engine(), bad, request("good", [1], logit_bias=bias))
    assert events["bad"][-1].finish_reason == "error"
    assert "no token is left" in (events["bad"][-1].error or "")
    assert events["bad"][-1].refused_param is None
    assert events["good"][-1].finish_reason == "length"


def test_a_grammar_that_does_not_compile_is_refused() -> None:
    broken = Constraint(grammar="start: missing", param="ebnf")
    events = run(engine(), request("r", [1], constraint=broken), request("good", [1]))
    assert events["r"][-1].refused_param == "ebnf"
    assert "missing" in (events["r"][-1].error or "")
    assert events["good"][-1].finish_reason == "length"


def test_a_constraint_without_any_answer_is_refused() -> None:
    for schema in ({"$ref": "#"}, {"$ref": "#/$defs/a", "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}}):
        events = run(engine(), asked("r", [1], schema), request("good", [1]))
        assert events["r"][-1].refused_param == "response_format"
        assert "no answer can satisfy" in (events["r"][-1].error or "")
        assert events["good"][-1].finish_reason == "length"


def test_without_a_tokenizer_it_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="without a tokenizer"):
        make_engine().add(asked("r", [1]))


class Slow(Vocabulary):
    """A tokenizer that is not loaded until told."""

    gate = threading.Event()

    def __init__(self) -> None:
        assert self.gate.wait(10)
        super().__init__()


def test_others_run_while_a_constraint_compiles() -> None:
    Slow.gate.clear()
    one = make_engine(FakeBackend(vocab_size=ROWS), load_tokens=Slow, max_waiting=2)
    one.add(asked("a", [1]))
    one.add(asked("b", [2]))
    assert one.stats().waiting == 2
    with pytest.raises(OverloadedError):
        one.add(asked("c", [3]))
    one.abort("b")
    one.add(request("free", [1], max_tokens=3))
    seen: list[EngineEvent] = []
    deadline = time.monotonic() + 20
    while not any(e.request_id == "free" and e.finish_reason for e in seen) and time.monotonic() < deadline:
        seen += one.step()
    assert [e.finish_reason for e in seen if e.request_id == "b"] == ["abort"]
    assert not [e for e in seen if e.request_id == "a"]
    assert one.has_work
    Slow.gate.set()
    while one.has_work and time.monotonic() < deadline:
        seen += one.step()
    check_valid([e for e in seen if e.request_id == "a"])
    check(one)
    one.close()


def test_small_constraints_do_not_wait_for_a_large_one(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, compile = threading.Event(), Compiler.compile

    def slow(compiler: Compiler, constraint: Constraint, tenant: str) -> Guide:
        if len(constraint.grammar) > LARGE:
            assert gate.wait(20)
        return compile(compiler, constraint, tenant)

    monkeypatch.setattr(Compiler, "compile", slow)
    one = engine()
    one.add(asked("large", [1], {"enum": [f"value number {n}" for n in range(5000)]}))
    one.add(asked("small", [2]))
    seen: list[EngineEvent] = []
    deadline = time.monotonic() + 20
    while not (seen and seen[-1].finish_reason) and time.monotonic() < deadline:
        seen += one.step()
    assert {event.request_id for event in seen} == {"small"}
    check_valid(seen)
    gate.set()
    while one.has_work and time.monotonic() < deadline:
        seen += one.step()
    assert text([event for event in seen if event.request_id == "large"]).startswith('"value number ')
    one.close()
