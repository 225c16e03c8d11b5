"""One sequence's way through its constraint: which tokens may come, which must, and what to take back."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fourfold.grammar.schema.spans import finished_part, growing, span_of
from fourfold.grammar.schema.validate import TooCostlyError, Validator, Violation
from fourfold.types import Constraint

if TYPE_CHECKING:
    from llguidance import LLMatcher

_DEAD_END = "NoExtensionBias"
"""llguidance's word for a place where no text can follow."""
MAX_REJECTIONS = 64
"""Times that validation may refuse an answer, or its beginning, in one request."""
_ATTEMPTS_AT_VALUE = 8
"""Of those, how many begin one refused value anew before what stands before it is changed."""
_ENDS = re.compile(rb"[,\]}]")
"""What the end of a value inside another has."""


class Guide:
    """Positions count the tokens of the answer from 0.

    error: why this constraint cannot go on; None while it can.
    """

    __slots__ = (
        "_after",
        "_choices",
        "_counted",
        "_dead",
        "_dead_ends",
        "_ended",
        "_excluded",
        "_fresh",
        "_furthest",
        "_length",
        "_matcher",
        "_open",
        "_stuck",
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
        """Positions where more than one token could have been drawn."""
        self._open = True
        """Whether the last mask left a choice."""
        self._excluded: dict[int, set[int]] = {}
        """Tokens that led to a refused answer, by position."""
        self._validator = None if constraint.schema is None else Validator(json.loads(constraint.schema))
        self._after = constraint.after
        self._counted = constraint.counted
        self._fresh = matcher.deep_copy() if constraint.schema else None
        """For going back: a reset takes back neither what was counted nor an error."""
        self._dead, self._dead_ends = False, 0
        """Whether the grammar let the answer come to where nothing can follow, and how often it did."""
        self._ended = False
        """Whether a value may have ended since the last look."""
        self._furthest, self._stuck = -1, 0
        """Where the furthest refused value began, and how many were refused since, no further on."""
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
        return self.error is None and not self._dead and bool(self._matcher.is_stopped())

    def fill_masks(self, rows: NDArray[np.uint32], draft: Sequence[int], places: Sequence[int]) -> None:
        """rows: [places, words], contiguous. Row i gets a set bit for each token that may come after the
        first places[i] tokens of `draft` (see `draft`); all zeros if none may, or if the constraint failed
        (see error). places ascend from 0."""
        # In a copy: a dead end that a guess leads to is an error of the matcher's for good, and llguidance
        # 1.9.1 may take the last mask before a rollback for that of another text after it.
        matcher = self._matcher.deep_copy() if places[-1] > 0 else self._matcher
        at, dead = 0, self._dead
        address, size = rows.ctypes.data, rows.strides[0]
        for i, place in enumerate(places):
            if self.error is None and not dead:
                for token in draft[at:place]:
                    matcher.consume_token(token)
                at = place
                matcher.unsafe_compute_mask_ptr(address + i * size, size)
                if matcher.is_error():
                    dead = self._notice(matcher.get_error()[:500] or "the grammar engine gave up", place)
            if self.error is not None or dead:
                rows[i] = 0
            for token in self._excluded.get(self._length + place, ()):
                rows[i, token >> 5] &= ~np.uint32(1 << (token & 31))

    def _notice(self, error: str, place: int) -> bool:
        """Whether it is a dead end, out of which another choice leads; the answer as it is stands in it if
        `place` is 0."""
        if not (self.validates and error.startswith(_DEAD_END)):
            self.error = error
            return False
        self._dead = self._dead or place == 0
        return True

    def look(self, row: NDArray[np.uint32]) -> None:
        """Notes whether the next token was a choice: `row` is the mask that it is drawn under. Only needed
        if it validates."""
        self._open = int.from_bytes(row.tobytes(), "little").bit_count() > 1

    def draft(
        self, guesses: Sequence[int], most: int, room: int, *, every: bool
    ) -> tuple[list[int], list[int]]:
        """(tokens, places): what of `guesses` may come next, at most `most`, with the tokens that are forced
        then put in, up to `room` in all; and how many of them come before each token that is drawn.

        every: each token is drawn; then forced ones that nobody guessed are guesses too.
        """
        tokens: list[int] = []
        places = [0]
        if self._counted or self._dead:
            return tokens, places  # llguidance does not take back what it counted
        queue = list(guesses)
        while self.error is None and len(tokens) < room and len(places) <= most:
            forced = self._forced(room - len(tokens), len(tokens)) if every and not queue else []
            if not queue and not forced:
                break
            token = queue.pop(0) if queue else forced[0]
            excluded = token in self._excluded.get(self._length + len(tokens), ())
            if excluded or self._matcher.validate_tokens([token]) != 1:
                break
            self._matcher.consume_token(token)
            tokens.append(token)
            if not every:
                forced = self._forced(room - len(tokens), len(tokens))
                if forced and not self._matcher.consume_tokens(forced):
                    break
                tokens += forced
                if queue[: len(forced)] != forced[: len(queue)]:
                    queue = []
                del queue[: len(forced)]
            if self._matcher.is_stopped():
                break
            places.append(len(tokens))
        self._back(len(tokens))
        return tokens, places

    def _back(self, count: int) -> None:
        if count and not self._matcher.rollback(count) and self.error is None:
            self.error = self._matcher.get_error()[:500] or f"{count} tokens could not be taken back"

    def accept(self, token: int, *, forced: bool = False) -> None:
        """The next token of the answer; never an EOS."""
        if self._open and not forced:
            self._choices.append(self._length)
        self._length += 1
        if self._validator is not None and _ENDS.search(self._tokens[token]):
            self._ended = True
        if self.error is None and not self._matcher.consume_token(token):
            self.error = f"token {token} does not fit the constraint: {self._matcher.get_error()[:500]}"

    def forced_tokens(self, most: int) -> list[int]:
        """Up to `most` tokens that must come next, as the model's own tokenizer would write them.

        They are not accepted yet. What may still join with text after it into another token is left out.
        """
        return self._forced(most, 0)

    def _forced(self, most: int, ahead: int) -> list[int]:
        if self.error is not None or self._dead or most <= 0 or self._excluded.get(self._length + ahead):
            return []
        return list(self._matcher.compute_ff_tokens()[:most])

    def check(self, answer: Sequence[int], *, finished: bool = True) -> Violation | None:
        """Validates `answer` (token ids, without an EOS), or its beginning: the values in it that have ended,
        as far as nothing that follows can mend them. None if there is nothing to object to."""
        if self._validator is None or not (finished or self._ended):
            return None
        self._ended = False
        before, text = self._text(answer)
        if self._after and not before and not finished:
            return None  # this may be reasoning still
        try:
            if finished:
                return self._validator.check(json.loads(text))
            part = finished_part(text)
            if part is None:
                return None
            value = json.loads("".join(part))
            paths = growing(value, len(part[1]))
            return None if paths is None else self._validator.check(value, paths)
        except (TooCostlyError, ValueError, RecursionError) as error:
            # A beginning that cannot be judged is judged at the end.
            return Violation((), f"cannot be validated: {error}") if finished else None

    def take_back(self, answer: Sequence[int], violation: Violation | None) -> int | None:
        """Goes back to a choice in what `violation` names, for another draw. Without one no token was left:
        to the last choice if all were refused before, ever further out of what the grammar calls a dead end.

        Returns the position: `answer` must be cut to that many tokens. None if there is no choice left to
        change or too much was refused already.
        """
        self.rejections += 1
        if self.rejections > MAX_REJECTIONS or not self._choices:
            return None
        if violation is None:
            position = self._choice_before_dead_end()
        else:
            position = self._choice_for(answer, violation)
        self._excluded = {at: ids for at, ids in self._excluded.items() if at <= position}
        self._excluded.setdefault(position, set()).add(answer[position])
        self._rewind(position, answer)
        return position

    def _choice_before_dead_end(self) -> int:
        if self._excluded.get(self._length):
            return self._choices[-1]
        back = self._dead_ends * (self._dead_ends + 1) // 2
        self._dead_ends += 1
        return self._choices[-1 - back % len(self._choices)]

    def _choice_for(self, answer: Sequence[int], violation: Violation) -> int:
        """The last choice in the refused value. If that brought nothing: of a text or number the first one,
        of what holds other values ever earlier ones; after some times one before the value."""
        choices, start, compound = self._choices_in(answer, violation)
        if start > self._furthest:
            self._furthest, self._stuck = start, 0
            return choices[-1]
        self._stuck += 1
        first = self._choices.index(choices[0])
        if self._stuck > _ATTEMPTS_AT_VALUE and first > 0:
            return self._choices[max(0, first - (1 << (self._stuck - _ATTEMPTS_AT_VALUE - 1)))]
        back = self._stuck * (self._stuck + 1) // 2
        return choices[-1 - back % len(choices)] if compound else choices[0]

    def _choices_in(self, answer: Sequence[int], violation: Violation) -> tuple[list[int], int, bool]:
        """The choices among the tokens of the refused value, where it begins, and whether it is an array or
        object. The token that ended a
        number is one of them: the number might have gone on."""
        before, text = self._text(answer)
        part = finished_part(text)
        start, end = span_of(text if part is None else "".join(part), violation.path)
        first, last = len((before + text[:start]).encode()), len((before + text[:end]).encode())
        number, compound = text[start : start + 1] in "-0123456789", text[start : start + 1] in "[{"
        at, inside, begin = 0, set(), len(answer)
        for position, token in enumerate(answer):
            size = len(self._tokens[token])
            if at + size > first and (at < last or (number and at == last)):
                inside.add(position)
                begin = min(begin, position)
            at += size
        return [each for each in self._choices if each in inside] or self._choices, begin, compound

    def _rewind(self, position: int, answer: Sequence[int]) -> None:
        self._choices = [at for at in self._choices if at < position]
        if self._fresh is None:
            raise ValueError("only an answer that is validated can be taken back")
        self._matcher = self._fresh.deep_copy()
        self.error, self._dead = None, False
        self._length = position
        if not self._matcher.consume_tokens(list(answer[:position])):
            self.error = f"the constraint cannot be taken back to token {position}"

    def _text(self, answer: Sequence[int]) -> tuple[str, str]:
        """Reasoning that comes before the value, and the value."""
        text = b"".join([self._tokens[token] for token in answer]).decode("utf-8", "replace")
        if self._after:
            _, tag, rest = text.partition(self._after)
            if tag:
                value = rest.lstrip("\n")
                return text[: len(text) - len(value)], value
        return "", text
