"""Copies of block contents that the cache decided on, in order; run before the backend's next step.

The cache decides without touching contents (it does no I/O). What it decides holds as if it were done at
once, because everything is done in that order before anyone reads: a source may be given away right after.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


class BlockStore(Protocol):
    """Contents of the pool's blocks; a part of engine.batch.Backend."""

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None: ...

    def read_block(self, block: int, out: Bytes) -> None: ...

    def write_block(self, block: int, data: Bytes) -> None: ...


Move = Callable[[BlockStore], None]


class Moves:
    """Not thread-safe."""

    def __init__(self) -> None:
        self._pending: list[tuple[int, int] | Move] = []

    def __len__(self) -> int:
        return len(self._pending)

    def copy(self, source: int, destination: int) -> None:
        self._pending.append((source, destination))

    def call(self, move: Move) -> None:
        self._pending.append(move)

    def run(self, store: BlockStore) -> None:
        """In order; consecutive copies in one call."""
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        pairs: list[tuple[int, int]] = []
        for move in pending:
            if isinstance(move, tuple):
                pairs.append(move)
                continue
            if pairs:
                store.copy_blocks(pairs)
                pairs = []
            move(store)
        if pairs:
            store.copy_blocks(pairs)
