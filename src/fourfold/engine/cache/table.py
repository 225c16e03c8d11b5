"""What one holder has of the KV pool, and the interface every prefix cache has."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Protocol

from fourfold.engine.cache.ledger import Ledger
from fourfold.engine.cache.node import Node

BlockName = tuple[str, int, bytes]
"""Salt, parent and content of a block that is not known yet."""


class BlockTable:
    """The blocks of one holder, in order of positions.

    blocks: block ids; the holder is one of the holders of each.
    shared: how many leading blocks are in the prefix tree (they are full, and read-only from then on);
        the blocks behind them belong to this holder alone.
    node: tree node of block `shared - 1`, or the root of the salt.
    salt: whose tree.
    """

    __slots__ = ("blocks", "node", "salt", "shared")

    def __init__(self, salt: str, node: Node) -> None:
        self.blocks: array[int] = array("i")
        self.shared = 0
        self.node = node
        self.salt = salt


class PrefixCache(Protocol):
    """Hands out blocks and remembers what is in the full ones.

    Tokens are `array("i")`. A limit is the largest number of tokens that may be taken from the cache.
    """

    ledger: Ledger
    block_size: int

    def match(self, tokens: array[int], salt: str, limit: int) -> BlockTable:
        """Locks the longest known prefix: `len(table.blocks) * block_size` tokens. Must be released.

        Keeping a table without running anything pins its prefix.
        """
        ...

    def known(self, tokens: array[int], salt: str, limit: int) -> int:
        """How many tokens `match` would find now. Changes nothing, not even what is evicted next."""
        ...

    def extend(self, table: BlockTable, tokens: array[int], limit: int) -> int:
        """Takes further blocks that became known since; the table must end at a full block. Tokens gained."""
        ...

    def next_key(self, table: BlockTable | None, tokens: array[int], salt: str) -> BlockName | None:
        """Names the first block of `tokens` not known, if they fill it: equal names, equal content."""
        ...

    def allocate(self, table: BlockTable, count: int) -> bool:
        """Appends `count` fresh blocks, evicting if it must; False and no change if there are too few."""
        ...

    def insert(self, table: BlockTable, tokens: array[int], filled: int) -> None:
        """The first `filled` tokens are in the table's blocks now: makes the full ones known."""
        ...

    def release(self, table: BlockTable, discard: bool = False) -> None:
        """Gives everything back; what is known stays cached. discard: forget it where no one else uses it."""
        ...

    def evict(self, count: int) -> int:
        """Frees up to `count` cached blocks: the longest unused first, ends of prefixes before starts."""
        ...

    def check(self, tables: Iterable[BlockTable]) -> None:
        """Recounts everything from all tables there are; raises LedgerError."""
        ...
