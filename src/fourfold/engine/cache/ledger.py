"""Who owns which KV block. Every block is in exactly one state; the four counts always add up to the pool."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

import msgspec


class BlockState(IntEnum):
    FREE = 0
    """Content is meaningless; may be handed out."""
    CACHED = 1
    """Holds a prefix nobody uses now; may be reused or evicted."""
    LIVE = 2
    """Used by `count` holders."""
    IN_TRANSFER = 3
    """Being filled or drained by a copy; nobody may read, write or evict it."""


class LedgerError(RuntimeError):
    """A move that the ledger's states do not allow: a bug of the caller, never of a user."""


class LedgerCounts(msgspec.Struct, frozen=True):
    """Blocks per state; `free + cached + live + in_transfer == total`."""

    free: int
    cached: int
    live: int
    in_transfer: int
    total: int


class Ledger:
    """The states of `total` blocks. All moves are O(1) and checked.

    The allowed moves::

        FREE --take--> LIVE(1) --share--> LIVE(n+1) --drop--> LIVE(n-1) ... --drop--> CACHED or FREE
        CACHED --share--> LIVE(1)      CACHED --evict--> FREE
        FREE --begin_transfer--> IN_TRANSFER --end_transfer--> CACHED or FREE
    """

    def __init__(self, total: int) -> None:
        if total < 1:
            raise LedgerError(f"a pool needs at least 1 block, got {total}")
        self.total = total
        self._state = bytearray(total)
        self._count = [0] * total
        # A stack, lowest id on top, so that a fresh pool is used from its start and runs repeat exactly.
        self._free = list(range(total - 1, -1, -1))
        self._cached = 0
        self._live = 0
        self._in_transfer = 0

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        return self._cached

    @property
    def live(self) -> int:
        return self._live

    @property
    def available(self) -> int:
        """Blocks that can be handed out, after evicting what is cached."""
        return len(self._free) + self._cached

    def counts(self) -> LedgerCounts:
        return LedgerCounts(len(self._free), self._cached, self._live, self._in_transfer, self.total)

    def state(self, block: int) -> BlockState:
        return BlockState(self._state[block])

    def holders(self, block: int) -> int:
        """Holders of a live block; 0 in every other state."""
        return self._count[block]

    def is_cached(self, block: int) -> bool:
        return self._state[block] == BlockState.CACHED

    def take(self) -> int:
        """FREE → LIVE(1). The caller owns the block and must `drop` it once."""
        if not self._free:
            raise LedgerError("no free block; evict first")
        block = self._free.pop()
        self._state[block] = BlockState.LIVE
        self._count[block] = 1
        self._live += 1
        return block

    def share(self, block: int) -> None:
        """CACHED → LIVE(1), or LIVE(n) → LIVE(n+1). The caller becomes one more holder."""
        state = self._state[block]
        if state == BlockState.CACHED:
            self._state[block] = BlockState.LIVE
            self._cached -= 1
            self._live += 1
        elif state != BlockState.LIVE:
            raise LedgerError(f"block {block} is {BlockState(state).name}, only CACHED or LIVE can be shared")
        self._count[block] += 1

    def drop(self, block: int, keep: bool) -> bool:
        """LIVE(n) → LIVE(n-1); the last holder leaves it CACHED (keep) or FREE. True if that was the last."""
        if self._state[block] != BlockState.LIVE:
            raise LedgerError(f"block {block} is {self.state(block).name}, only LIVE can be dropped")
        self._count[block] -= 1
        if self._count[block]:
            return False
        self._live -= 1
        if keep:
            self._state[block] = BlockState.CACHED
            self._cached += 1
        else:
            self._state[block] = BlockState.FREE
            self._free.append(block)
        return True

    def evict(self, block: int) -> None:
        """CACHED → FREE."""
        if self._state[block] != BlockState.CACHED:
            raise LedgerError(f"block {block} is {self.state(block).name}, only CACHED can be evicted")
        self._state[block] = BlockState.FREE
        self._cached -= 1
        self._free.append(block)

    def begin_transfer(self) -> int:
        """FREE → IN_TRANSFER: a place for content that comes from another tier or machine."""
        if not self._free:
            raise LedgerError("no free block; evict first")
        block = self._free.pop()
        self._state[block] = BlockState.IN_TRANSFER
        self._in_transfer += 1
        return block

    def end_transfer(self, block: int, keep: bool) -> None:
        """IN_TRANSFER → CACHED (keep: the content arrived) or FREE (it did not)."""
        if self._state[block] != BlockState.IN_TRANSFER:
            raise LedgerError(f"block {block} is {self.state(block).name}, not IN_TRANSFER")
        self._in_transfer -= 1
        if keep:
            self._state[block] = BlockState.CACHED
            self._cached += 1
        else:
            self._state[block] = BlockState.FREE
            self._free.append(block)

    def check(self, held: Iterable[int]) -> None:
        """Recounts everything. held: every block of every holder, once per holder. Raises LedgerError."""
        expected = [0] * self.total
        for block in held:
            expected[block] += 1
        if expected != self._count:
            wrong = [b for b in range(self.total) if expected[b] != self._count[b]]
            raise LedgerError(f"holders of blocks {wrong[:8]} differ from the ledger's counts")
        by_state = [self._state.count(state) for state in BlockState]
        counted = [len(self._free), self._cached, self._live, self._in_transfer]
        if by_state != counted or sum(counted) != self.total:
            raise LedgerError(f"states {by_state} differ from counters {counted} of {self.total} blocks")
        if len(set(self._free)) != len(self._free) or any(
            self._state[b] != BlockState.FREE for b in self._free
        ):
            raise LedgerError("the free list holds a block twice or one that is not free")
        for block, count in enumerate(self._count):
            if (count > 0) != (self._state[block] == BlockState.LIVE):
                raise LedgerError(f"block {block} is {self.state(block).name} with {count} holders")
