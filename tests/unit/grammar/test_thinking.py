"""A constraint that begins after the reasoning, and budgets of reasoning."""

from __future__ import annotations

from typing import Any

import pytest

from fourfold.errors import InvalidRequestError
from fourfold.grammar.guide import Guide
from fourfold.grammar.sources import Kind, make_constraint
from fourfold.grammar.thinking import Thinking, after_thinking
from fourfold.types import Constraint

from .test_guide import text
from .vocabulary import CONTROL, EOS, SHARED, VOCABULARY, mask

SCHEMA = {"type": "object", "properties": {"name": {"enum": ["red"]}}, "required": ["name"]}
ANSWER = '{"name": "red"}'
TEXTS = Thinking(("<think>",), ("</think>",), opened=False)
TOKEN = Thinking(("<think>",), (CONTROL,), opened=True, end_text="</think>")


def guide(constraint: Constraint | None) -> Guide:
    assert constraint is not None
    return SHARED.compile(constraint, "")


def made(kind: Kind, content: Any) -> Constraint:
    return make_constraint(kind, content, "response_format")


def takes(following: Guide, tokens: list[int]) -> bool:
    """Whether `tokens` are a finished answer."""
    for token in tokens:
        if not mask(following)[token]:
            return False
        following.accept(token)
    return following.error is None and bool(mask(following)[EOS])


def ids(*pieces: str | int) -> list[int]:
    return [
        id for piece in pieces for id in (VOCABULARY.encode(piece) if isinstance(piece, str) else [piece])
    ]


@pytest.mark.parametrize(
    ("pieces", "good"),
    [
        (["<think>{no JSON</think>", ANSWER], True),
        (["<think></think>\n\n", ANSWER], True),
        ([ANSWER], True),
        (["<think>", ANSWER], False),
        (["<think>x</think>and then ", ANSWER], False),
        (["x"], False),
        (["<think>x</think>", '{"name": "blue"}'], False),
    ],
)
def test_a_schema_after_texts(pieces: list[str], good: bool) -> None:
    assert takes(guide(after_thinking(made("json", SCHEMA), TEXTS)), ids(*pieces)) is good


@pytest.mark.parametrize(
    ("pieces", "good"),
    [
        (["thought", CONTROL, ANSWER], True),
        ([CONTROL, "\n", ANSWER], True),
        (["thought </think>", CONTROL, ANSWER], False),  # the parser would see its end there
        ([ANSWER], False),
        (["thought", CONTROL, CONTROL, ANSWER], False),
    ],
)
def test_a_schema_after_a_token(pieces: list[str | int], good: bool) -> None:
    assert takes(guide(after_thinking(made("json", SCHEMA), TOKEN)), ids(*pieces)) is good


@pytest.mark.parametrize("kind, content, answer", [("regex", "ab+", "abb"), ("choice", ["yes", "no"], "no"),
    ("lark", 'start: "x" "y"', "xy"), ("gbnf", 'root ::= "q"', "q")])  # fmt: skip
def test_every_kind_of_constraint(kind: Kind, content: Any, answer: str) -> None:
    whole = after_thinking(made(kind, content), TOKEN)
    assert takes(guide(whole), ids("so", CONTROL, answer))
    assert not takes(guide(whole), ids("so", CONTROL, "z"))


@pytest.mark.parametrize("constraint", [None, made("json", SCHEMA)])
@pytest.mark.parametrize("budget", [0, 1, 5])
def test_the_budget_counts_tokens(constraint: Constraint | None, budget: int) -> None:
    whole = after_thinking(
        constraint, Thinking(("<think>",), (CONTROL,), True, end_text="</think>", budget=budget)
    )
    following = guide(whole)
    for _ in range(budget):
        # Guessing ahead must not use up the budget.
        assert following.draft([ord("a")] * 3, 3, 9, every=False) == ([], [0])
        assert mask(following)[ord("a")]
        following.accept(ord("a"))
    assert mask(following).nonzero()[0].tolist() == [CONTROL]
    assert following.forced_tokens(9)[0] == CONTROL
    following.accept(CONTROL)
    assert takes(following, ids(ANSWER))


def test_no_budget_when_the_answer_does_not_begin_with_reasoning() -> None:
    whole = after_thinking(
        None, Thinking(("<think>",), (CONTROL,), False, begin_text="<think>", end_text="</think>", budget=2)
    )
    assert takes(guide(whole), ids("a long answer without any thought"))
    assert takes(guide(whole), ids("<think>ab", CONTROL, "and then <think> is a word"))
    assert not takes(guide(whole), ids("<think>abc", CONTROL))
    assert not takes(guide(whole), ids(" <think>abc"))


def test_control_tokens_of_a_free_answer() -> None:
    free = Thinking(("<think>",), ("</think>",), True, budget=None, tokens=(CONTROL,))
    assert after_thinking(None, free) is None
    budgeted = Thinking(("<think>",), (CONTROL,), True, budget=3, tokens=(CONTROL,))
    assert takes(guide(after_thinking(None, budgeted)), ids("a", CONTROL, "b", CONTROL, "c"))


def test_a_budget_needs_one_token() -> None:
    with pytest.raises(InvalidRequestError, match="no single token") as error:
        after_thinking(None, Thinking(("<think>",), ("</think>",), True, budget=5))
    assert error.value.param == "thinking_budget"


def test_validation_begins_after_the_reasoning() -> None:
    """uniqueItems is beyond the grammar; what looks like JSON in the reasoning is not looked at."""
    schema = {
        "type": "array",
        "items": {"enum": list("ab")},
        "uniqueItems": True,
        "minItems": 2,
        "maxItems": 2,
    }
    whole = after_thinking(made("json", schema), TOKEN)
    following = guide(whole)
    answer: list[int] = []
    for token in ids('["a", "a"] no', CONTROL, '\n["a", "a"'):
        following.accept(token)
        answer.append(token)
        if len(answer) < 12:
            assert following.check(answer, finished=False) is None
    following.accept(ord("]"))
    answer.append(ord("]"))
    violation = following.check(answer)
    assert violation is not None
    position = following.take_back(answer, violation)
    assert position is not None
    assert position > answer.index(CONTROL) + 1
    assert text(answer[answer.index(CONTROL) + 1 : position]).startswith('\n["a", "')
    short = guide(whole)
    direct = ids("x", CONTROL, '["a", "b"]')
    for token in direct:
        short.accept(token)
    assert short.check(direct) is None


def test_taking_back_counts_anew() -> None:
    """A refused value is begun again with the budget that the reasoning left."""
    schema = {
        "type": "array",
        "items": {"enum": list("ab")},
        "uniqueItems": True,
        "minItems": 2,
        "maxItems": 2,
    }
    whole = after_thinking(
        made("json", schema), Thinking(("<think>",), (CONTROL,), True, end_text="</think>", budget=3)
    )
    following = guide(whole)
    answer = ids("abc", CONTROL, '["a", "a"]')
    for token in answer:
        assert mask(following)[token]
        following.accept(token)
    violation = following.check(answer)
    assert violation is not None
    position = following.take_back(answer, violation)
    assert position is not None
    assert following.error is None
    assert position > 3
    assert mask(following).any()
