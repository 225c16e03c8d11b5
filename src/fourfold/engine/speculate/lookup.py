"""Guesses copied from text: what followed the last tokens where they stood before.

Prompt lookup (Saxena 2023; vLLM's "ngram"), over three texts: what the client expects the answer to be
(OpenAI's `prediction`), the sequence itself, and earlier answers under the same constraint of the same
tenant.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Mapping

from fourfold.engine.sequence import Sequence
from fourfold.engine.speculate.proposer import Guess

WINDOW = 32_768
"""Tokens of a text that are searched: its last ones."""
MAX_ANSWERS = 8
"""Earlier answers kept per constraint and tenant."""
MAX_ANSWER_TOKENS = 1_024
FORCED = 4
"""Tokens looked at for each guess under a constraint."""
MAX_CONSTRAINTS = 64
"""Whose answers are kept: those used last."""

_SIZE = array("i").itemsize


class Lookup:
    """Implements Proposer."""

    kind: str | None = None

    def __init__(self, shortest: int, longest: int, *, own: bool = True) -> None:
        """shortest, longest: how many of the last tokens must be found again, the longest first.
        own: search the sequence itself; otherwise only predictions and earlier answers."""
        self._shortest, self._longest, self._own = shortest, longest, own
        self._answers: OrderedDict[tuple[str, str], deque[array[int]]] = OrderedDict()

    def propose(self, wanted: Mapping[Sequence, int]) -> dict[Sequence, Guess]:
        found = {}
        for seq, most in wanted.items():
            # Earlier text has what the constraint forces, too.
            guess = self._guess(seq, most if seq.guide is None else FORCED * most)
            if guess is not None:
                found[seq] = guess
        return found

    def ended(self, seq: Sequence) -> None:
        constraint = seq.request.constraint
        if constraint is None:
            return
        key = (seq.request.cache_salt, constraint.grammar)
        kept = self._answers.setdefault(key, deque(maxlen=MAX_ANSWERS))
        self._answers.move_to_end(key)
        kept.append(seq.tokens[seq.prompt_len : seq.prompt_len + MAX_ANSWER_TOKENS])
        if len(self._answers) > MAX_CONSTRAINTS:
            self._answers.popitem(last=False)

    def _guess(self, seq: Sequence, most: int) -> Guess | None:
        prediction = seq.prediction
        if prediction is not None:
            if seq.output_len == 0:
                return Guess(prediction[:most], "prediction")
            # One token is enough: the client says that this text is what will come.
            found = _after(prediction, seq.tokens[seq.prompt_len :], 1, self._longest, most, exact=False)
            if found is not None:
                return Guess(found[0], "prediction")
        best: Guess | None = None
        longest = self._shortest - 1
        texts: list[tuple[str, array[int], bool]] = [("own", seq.tokens, True)] if self._own else []
        if seq.guide is not None and seq.request.constraint is not None:
            key = (seq.request.cache_salt, seq.request.constraint.grammar)
            texts += [("answers", answer, False) for answer in reversed(self._answers.get(key, ()))]
        for kind, text, exact in texts:
            # Only a longer match is better than one found before.
            found = _after(text, seq.tokens, longest + 1, self._longest, most, exact=exact)
            if found is not None:
                longest = found[1]
                best = Guess(found[0], f"{kind}-{longest}")
                if longest == self._longest:
                    break
        return best


def _after(
    text: array[int], tokens: array[int], shortest: int, longest: int, most: int, *, exact: bool
) -> tuple[array[int], int] | None:
    """What follows the last occurrence in `text` of the last tokens of `tokens`, and how many were the same.

    exact: `text` is `tokens` itself, whose end does not count.
    """
    end = len(text) - 1 if exact else len(text)
    start = max(0, end - WINDOW)
    data = text[start:end].tobytes()
    for n in range(min(longest, len(tokens)), shortest - 1, -1):
        at = _last(data, tokens[len(tokens) - n :].tobytes())
        if at >= 0:
            following = text[start + at + n : start + at + n + most]
            if following:
                return following, n
    return None


def _last(data: bytes, part: bytes) -> int:
    """Index, in tokens, of the last occurrence at a token's beginning; -1 if there is none."""
    at = data.rfind(part)
    while at >= 0 and at % _SIZE:
        at = data.rfind(part, 0, at + len(part) - 1)
    return at // _SIZE if at >= 0 else -1
