"""Who guesses: the interface, and what a proposer is told."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Protocol

from fourfold.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Guess:
    """tokens: what comes next, most likely.  kind: guesses of one kind are right about equally often."""

    tokens: Items[int]
    kind: str


class Proposer(Protocol):
    """Not told what came of its guesses: `Speculator` keeps the rates."""

    kind: str | None
    """The kind of all its guesses, if making them costs so much that their worth is asked for before."""

    def propose(self, wanted: Mapping[Sequence, int]) -> dict[Sequence, Guess]:
        """wanted: sequences that are about to draw, and how many guesses to make at most; tokens that the
        sequence's constraint forces do not count. Leaves out sequences that it knows nothing for."""
        ...

    def ended(self, seq: Sequence) -> None:
        """The sequence will draw no more."""
        ...
