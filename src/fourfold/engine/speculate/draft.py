"""What a proposer guesses, as the batch computes it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Draft:
    """tokens: what may follow the known tokens of a sequence.
    places: after how many of them a token is drawn; ascending, from 0. Between two places are tokens that a
        constraint forces once the one before them was drawn.
    kind: see Guess.
    """

    tokens: Sequence[int] = ()
    places: Sequence[int] = (0,)
    kind: str = ""

    def guesses(self, most: int) -> int:
        """How many of its first `most` tokens were guessed: those that come at a place."""
        return bisect_left(self.places, min(most, len(self.tokens)))

    def agrees(self, tokens: Sequence[int]) -> int:
        """How many of its first tokens are those of `tokens`."""
        for i, (guess, token) in enumerate(zip(self.tokens, tokens, strict=False)):
            if guess != token:
                return i
        return min(len(self.tokens), len(tokens))

    def cut(self, most: int) -> Draft:
        """Its first tokens, at most `most`, up to a place: what is computed is drawn from."""
        if len(self.tokens) <= most:
            return self
        places = self.places[: bisect_right(self.places, most)]
        return Draft(self.tokens[: places[-1]], places, self.kind) if len(places) > 1 else NO_DRAFT


NO_DRAFT = Draft()
