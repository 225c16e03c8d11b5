"""Going through the beginning of an answer computes its first masks and changes none."""

from __future__ import annotations

import pytest
from llguidance import LLMatcher

from fourfold.grammar.rehearse import STEPS, rehearse
from fourfold.grammar.sources import Kind, make_constraint

from .vocabulary import EOS, SHARED, VOCABULARY


@pytest.mark.parametrize(
    ("kind", "source", "answer"),
    [
        ("json", {"type": "object", "properties": {"name": {"type": "string"}}}, '{"name": "red"}'),
        ("json", {"type": "array", "items": {"type": "number"}}, "[1.5, -20]"),
        ("regex", "(ab|ac)+[0-9]{2,4}", "abac123"),
        ("lark", "start: a /x/\na[max_tokens=3]: /[a-c]*/", "abx"),
        ("choice", ["yes", "no"], "no"),
    ],
)
def test_rehearsing_changes_no_mask(kind: Kind, source: object, answer: str) -> None:
    grammar = make_constraint(kind, source, "f").grammar
    tokenizer = SHARED._ready_tokenizer()
    rehearsed, fresh = (LLMatcher(tokenizer, grammar, log_level=0) for _ in range(2))
    rehearse(rehearsed.deep_copy(), (EOS,))
    for token in VOCABULARY.encode(answer):
        assert rehearsed.compute_bitmask() == fresh.compute_bitmask()
        assert rehearsed.consume_token(token)
        assert fresh.consume_token(token)
    assert rehearsed.compute_bitmask() == fresh.compute_bitmask()
    assert not rehearsed.is_error()


@pytest.mark.parametrize(
    ("kind", "source", "masks"),
    [("regex", "([a-c][0-9])+", STEPS), ("choice", ["yes", "no"], 1)],
)
def test_some_masks_are_computed_and_none_after_the_end(kind: Kind, source: object, masks: int) -> None:
    computed = 0

    class Counted:
        def __init__(self, matcher: LLMatcher) -> None:
            self.matcher = matcher

        def compute_bitmask(self) -> bytes:
            nonlocal computed
            computed += 1
            return self.matcher.compute_bitmask()

        def __getattr__(self, name: str) -> object:
            return getattr(self.matcher, name)

    grammar = make_constraint(kind, source, "f").grammar
    matcher = Counted(LLMatcher(SHARED._ready_tokenizer(), grammar, log_level=0))
    rehearse(matcher, (EOS,))  # type: ignore[arg-type]
    assert computed == masks
