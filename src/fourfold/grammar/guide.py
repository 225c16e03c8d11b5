"""One sequence's way through its constraint: which tokens may come, which must, and what to take back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fourfold.grammar.schema.spans import span_of
from fourfold.grammar.schema.validate import TooCostlyError, Validator, Violation
from fourfold.types import Constraint

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_REJECTIONS = 12
"""Answers of one request that validation may refuse. Each goes back twice as far as the one before."""


class Guide:
    """Positions count the tokens of the answer from 0.

    error: why this constraint cannot go on; None while it can.
    """

    __slots__ = (
        "_choices",
        "_excluded",
        "_length",
        "_matcher",
        "_tokens",
        "_validator",
        "error",
        "rejections",
        "words",
    )

    def __init__(
        self, matcher: LLMatcher, tokens: Sequence[bytes], vocab_size: int, constraint: Constraint
    ) -> None:
        """tokens: bytes of each id.  vocab_size: rows of the logits."""
        self._matcher = matcher
        self._tokens = tokens
        self._length = 0
        self._choices: list[int] = []
        """Positions whose tokens were drawn, not forced."""
        self._excluded: dict[int, set[int]] = {}
        """Tokens that led to a refused answer, by position."""
        self._validator = None if constraint.schema is None else Validator(json.loads(constraint.schema))
        self.words = -(-vocab_size // 32)
        self.error: str | None = None
        self.rejections = 0

    @property
    def validates(self) -> bool:
        """Whether a finished answer can still be refused, so that nothing may be shown before."""
        return self._validator is not None

    @property
    def finished(self) -> bool:
        """Nothing can follow but the end."""
        return self.error is None and bool(self._matcher.is_stopped())

    def fill_mask(self, row: NDArray[np.uint32]) -> None:
        """row: [words], contiguous; gets a set bit for each token that may come. All zeros if none may, or
        if the constraint failed (see error)."""
        if self.error is None:
            self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            if self._matcher.is_error():
                self.error = self._matcher.get_error()[:500] or "the grammar engine gave up"
        if self.error is not None:
            row[:] = 0
        for token in self._excluded.get(self._length, ()):
            row[token >> 5] &= ~np.uint32(1 << (token & 31))

    def accept(self, token: int, *, forced: bool = False) -> None:
        """The next token of the answer; never an EOS."""
        if not forced:
            self._choices.append(self._length)
        self._length += 1
        if self.error is None and not self._matcher.consume_token(token):
            self.error = f"token {token} does not fit the constraint: {self._matcher.get_error()[:500]}"

    def forced_tokens(self, most: int) -> list[int]:
        """Up to `most` tokens that must come next, as the model's own tokenizer would write them.

        They are not accepted yet. What may still join with text after it into another token is left out.
        """
        if self.error is not None or most <= 0 or self._excluded.get(self._length):
            return []
        return list(self._matcher.compute_ff_tokens()[:most])

    def check(self, answer: Sequence[int]) -> Violation | None:
        """Validates the finished `answer` (token ids, without an EOS). None if it is valid."""
        if self._validator is None:
            return None
        text = self._text(answer)
        try:
            return self._validator.check(json.loads(text))
        except (TooCostlyError, ValueError, RecursionError) as error:
            return Violation((), f"cannot be validated: {error}")

    def take_back(self, answer: Sequence[int], violation: Violation | None) -> int | None:
        """Goes back to a choice that lies in what `violation` names (or anywhere, without one), so that
        another token is drawn there.

        Returns the position: `answer` must be cut to that many tokens. None if there is no choice left to
        change or too many answers were refused already.
        """
        self.rejections += 1
        if self.rejections > MAX_REJECTIONS or not self._choices:
            return None
        choices = self._choices if violation is None else self._choices_in(answer, violation)
        back = 1 << (self.rejections - 1)
        position = choices[-back] if back <= len(choices) else self._earlier(choices[0], back - len(choices))
        self._excluded = {at: ids for at, ids in self._excluded.items() if at <= position}
        self._excluded.setdefault(position, set()).add(answer[position])
        self._rewind(position, answer)
        return position

    def _choices_in(self, answer: Sequence[int], violation: Violation) -> list[int]:
        """The choices among the tokens of the refused value and of the one after it, which ends it."""
        text = self._text(answer)
        start, end = span_of(text, violation.path)
        first, last = len(text[:start].encode()), len(text[:end].encode())
        at, inside = 0, []
        for position, token in enumerate(answer):
            size = len(self._tokens[token])
            if at + size > first and at <= last:
                inside.append(position)
            at += size
        among = set(inside)
        return [at for at in self._choices if at in among] or self._choices

    def _earlier(self, position: int, by: int) -> int:
        index = self._choices.index(position)
        return self._choices[max(0, index - by)]

    def _rewind(self, position: int, answer: Sequence[int]) -> None:
        self._choices = [at for at in self._choices if at < position]
        self._matcher.reset()
        self.error = None
        self._length = position
        if not self._matcher.consume_tokens(list(answer[:position])):
            self.error = f"the constraint cannot be taken back to token {position}"

    def _text(self, answer: Sequence[int]) -> str:
        return b"".join([self._tokens[token] for token in answer]).decode("utf-8", "replace")
