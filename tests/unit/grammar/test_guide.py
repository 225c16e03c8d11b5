"""Masks, forced tokens and going back, against what the grammar says of texts."""

from __future__ import annotations

import json

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fourfold.grammar.guide import MAX_REJECTIONS, Guide
from fourfold.grammar.schema.validate import Violation
from fourfold.grammar.sources import make_constraint

from .vocabulary import EOS, SHARED, VOCABULARY, guide, mask

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["red", "green"]}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}
LETTERS = {
    "type": "array", "items": {"enum": list("abcd")}, "uniqueItems": True, "minItems": 2, "maxItems": 4,
}  # fmt: skip


def follow(guide: Guide, draw: int, most: int = 60) -> list[int]:
    """An answer whose n-th token is the (draw >> n)-th of those allowed, forced tokens included."""
    answer: list[int] = []
    while not guide.finished and len(answer) < most:
        allowed = np.flatnonzero(mask(guide))
        token = int(allowed[(draw >> len(answer)) % len(allowed)])
        if token == EOS:
            break
        guide.accept(token)
        answer.append(token)
        for forced in guide.forced_tokens(most - len(answer)):
            guide.accept(forced, forced=True)
            answer.append(forced)
    return answer


def text(answer: list[int]) -> str:
    return b"".join(VOCABULARY.token_bytes(token) for token in answer).decode()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**60))
def test_whatever_is_drawn_the_answer_is_valid(draw: int) -> None:
    value = json.loads(text(follow(guide("json", SCHEMA), draw)))
    assert set(value) == {"name", "ok"}
    assert value["name"] in ("red", "green")
    assert value["ok"] in (True, False)


def test_forced_tokens_are_the_tokenizer_s() -> None:
    """Every one of them is the only text that may come, cut as the tokenizer cuts it."""
    following = guide("json", SCHEMA)
    forced = following.forced_tokens(100)
    assert text(forced) == '{"name": "'
    # The quote at the end may be a part of no longer token here, so nothing had to be left out.
    assert forced == VOCABULARY.encode('{"name": "')
    assert following.forced_tokens(2) == forced[:2]
    for token in forced:
        assert mask(following)[token]
        following.accept(token, forced=True)
    assert not following.forced_tokens(100)


def test_what_may_join_the_next_text_is_not_forced() -> None:
    """`"` may become `", "` here, depending on what is drawn, so it is left to the model."""
    following = guide("lark", 'start: "x" ("\\", \\"" | "\\"!")')
    forced = following.forced_tokens(10)
    assert text(forced) == "x"


def test_the_end_needs_no_token() -> None:
    following = guide("choice", ["yes", "no"])
    for token in b"ye":
        following.accept(token)
    assert following.forced_tokens(5) == [ord("s")]
    following.accept(ord("s"), forced=True)
    assert following.finished
    assert np.flatnonzero(mask(following)).tolist() == [EOS]


def test_a_token_that_does_not_fit_is_an_error_not_an_exception() -> None:
    following = guide("choice", ["yes"])
    following.accept(ord("n"))
    assert following.error is not None
    assert not following.finished
    assert not mask(following).any()
    assert following.forced_tokens(5) == []


def test_guides_of_one_constraint_are_independent() -> None:
    constraint = make_constraint("choice", ["yes", "no"], "f")
    first, second = SHARED.compile(constraint, ""), SHARED.compile(constraint, "")
    first.accept(ord("y"))
    assert mask(second)[[ord("y"), ord("n")]].all()
    cached = SHARED.cached(constraint, "")
    assert cached is not None
    assert mask(cached)[ord("n")]
    assert SHARED.cached(constraint, "another tenant") is None


def test_a_wrong_guess_leaves_no_mask_behind() -> None:
    """Both branches come to a string after as many lexemes, but another text may follow it: the mask of the
    guessed branch must not be taken for that of the drawn one."""
    two = {"prefixItems": [{"const": "a"}, {"type": "string"}], "items": False, "minItems": 2}
    three = {"prefixItems": [{"const": "b"}, {"type": "string"}, {}], "items": False, "minItems": 3}
    schema = {"anyOf": [{"type": "array", **two}, {"type": "array", **three}]}
    guessed, drawn = VOCABULARY.encode('["a", "x'), VOCABULARY.encode('["b", "x')
    following, fresh = guide("json", schema), guide("json", schema)
    rows = np.zeros((2, following.words), np.uint32)
    following.fill_masks(rows, guessed, (0, len(guessed)))
    for token in drawn:
        following.accept(token)
        fresh.accept(token)
    assert (mask(following) == mask(fresh)).all()
    assert mask(following)[VOCABULARY.encode('", "')].all()


def test_a_refused_answer_goes_on_elsewhere() -> None:
    """The first token drawn anew lies in the refused item, and the one that was there is excluded."""
    following = guide("json", LETTERS)
    answer = VOCABULARY.encode('["a", "b", "a"]')
    for token in answer:
        assert mask(following)[token]
        following.accept(token)
    violation = following.check(answer)
    assert violation is not None
    assert violation.path == (2,)
    position = following.take_back(answer, violation)
    assert position is not None
    kept = text(answer[:position])
    assert '["a", "b"' in kept
    assert not mask(following)[answer[position]]
    assert mask(following).any()


DEAD_END = {
    "type": "object", "patternProperties": {"^[ab]{1}$": {"type": "integer"}}, "additionalProperties": False,
    "properties": {"a": False, "b": False, "d": {"type": "integer"}}, "required": ["d"], "minProperties": 2,
}  # fmt: skip
"""No name is left after "d", and the grammar does not know before it is there."""


def test_a_dead_end_is_taken_back() -> None:
    """Until nothing is left to try; neither an error of the grammar's nor the end of an answer. A draft that
    leads there does not lead the guide there."""
    following = guide("json", DEAD_END)
    answer = VOCABULARY.encode('{"d": 1')
    rows = np.zeros((2, following.words), np.uint32)
    draft = VOCABULARY.encode('{"d": 1, ')
    following.fill_masks(rows, draft, (0, len(draft)))
    assert rows[0].any()
    assert not rows[1].any()
    for token in answer:
        assert mask(following)[token]
        following.accept(token)
    positions = []
    for _ in range(MAX_REJECTIONS + 1):
        while (allowed := np.flatnonzero(mask(following))).size:
            following.accept(int(allowed[0]))
            answer.append(int(allowed[0]))
        assert following.error is None
        assert not following.finished
        position = following.take_back(answer, None)
        if position is None:
            break
        positions.append(position)
        del answer[position:]
    assert position is None
    assert following.rejections == len(positions) + 1 <= MAX_REJECTIONS + 1


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**60))
def test_retries_end(draw: int) -> None:
    """Either with a valid answer or, after a bounded number of them, without one."""
    following = guide("json", LETTERS)
    answer = follow(following, draw)
    if not following.finished:
        return
    for attempt in range(MAX_REJECTIONS + 2):
        violation = following.check(answer)
        if violation is None:
            assert len(set(json.loads(text(answer)))) == len(json.loads(text(answer)))
            return
        position = following.take_back(answer, violation)
        if position is None:
            return
        assert attempt < MAX_REJECTIONS
        answer = answer[:position]
        while not following.finished and len(answer) < 60:
            allowed = np.flatnonzero(mask(following))
            if not len(allowed):
                break
            token = int(allowed[(draw >> len(answer)) % len(allowed)])
            if token == EOS:
                break
            following.accept(token)
            answer.append(token)
        if not following.finished:
            return
    else:
        raise AssertionError("it never ended")


def test_with_no_choice_left_it_says_so() -> None:
    following = guide("json", {"const": [1, 1], "uniqueItems": True})
    answer = []
    for token in following.forced_tokens(100):
        following.accept(token, forced=True)
        answer.append(token)
    assert following.take_back(answer, Violation((), "x")) is None
