"""Whether KV blocks in a lower tier are fetched or computed again: whichever measured costs say is faster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

Copy = Literal["save", "restore", "read"]
"""save: pool to host memory.  restore: host memory to pool.  read: disk to host memory."""

MEMORY = 1 / 16
"""Least share of a new measurement in a copy's mean."""

FORGET = 0.98
"""What a mean is multiplied by each time it spoke against a copy, which is not measured then: so a slow
moment is not held against a tier forever."""

Recompute = Callable[[int, int, int], float]
"""(context, tokens, rest) → seconds that the engine would need for `tokens` tokens behind `context` others,
beyond those for the `rest` behind them, which are computed in any case; 0 for rest: as part of a long prompt.
Infinite while nothing is known."""


def unknown(context: int, tokens: int, rest: int) -> float:
    """A Recompute of which nothing is known."""
    return float("inf")


class FetchChoice:
    """One thread asks; each kind of copy is measured by one thread. What was never measured costs nothing, so
    it is tried."""

    def __init__(self, block_size: int, recompute: Recompute = unknown) -> None:
        """block_size: tokens of a block."""
        self.recompute = recompute
        self.block_size = block_size
        self._seconds: dict[Copy, float] = {}

    def measured(self, copy: Copy, seconds: float) -> None:
        """One block was copied in so much time."""
        before = self._seconds.get(copy)
        self._seconds[copy] = seconds if before is None else before + MEMORY * (seconds - before)

    def seconds(self, copy: Copy) -> float:
        """Of one block; 0 while nothing is known."""
        return self._seconds.get(copy, 0.0)

    def fetches(self, blocks: int, from_disk: int, context: int, rest: int) -> bool:
        """Whether to fetch `blocks` blocks that begin behind `context` tokens, before `rest` tokens that are
        computed in any case.  from_disk: how many of them are not in host memory yet."""
        cost = blocks * self.seconds("restore") + from_disk * self.seconds("read")
        if cost <= self.recompute(context, blocks * self.block_size, rest):
            return True
        self._doubt("read" if from_disk else "restore")
        return False

    def saves(self, context: int) -> bool:
        """Whether a block that begins behind `context` tokens is worth a copy in host memory."""
        cost = self.seconds("save") + self.seconds("restore")
        if cost <= self.recompute(context, self.block_size, 0):
            return True
        self._doubt("save")
        return False

    def _doubt(self, copy: Copy) -> None:
        if copy in self._seconds:
            self._seconds[copy] *= FORGET
