"""The prefix cache's interface without reuse: every block belongs to one holder and is free afterwards."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from fourfold.engine.cache.ledger import Ledger
from fourfold.engine.cache.moves import Moves
from fourfold.engine.cache.node import Node
from fourfold.engine.cache.table import BlockTable, Unknown


class PlainCache:
    """See PrefixCache; nothing is ever known, so nothing is cached, evicted, copied or reported."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.ledger = Ledger(num_blocks)
        self.moves = Moves()
        self.block_size = block_size
        self._root = Node(None, "", b"", -1, b"")

    def match(self, tokens: array[int], salt: str, limit: int) -> BlockTable:
        return BlockTable(salt, self._root)

    def known(self, tokens: array[int], salt: str, limit: int) -> int:
        return 0

    def extend(self, table: BlockTable, tokens: array[int], limit: int) -> int:
        return 0

    def extend_in_block(self, table: BlockTable, tokens: array[int], limit: int) -> int:
        return 0

    def next_unknown(self, table: BlockTable | None, tokens: array[int], salt: str) -> Unknown | None:
        return None

    # Before: free. After: live with this table as the only holder.
    def allocate(self, table: BlockTable, count: int) -> bool:
        if count > self.ledger.free:
            return False
        for _ in range(count):
            table.blocks.append(self.ledger.take())
        return True

    def insert(self, table: BlockTable, tokens: array[int], filled: int) -> None:
        return None

    # Before: live, held by this table alone. After: free.
    def release(self, table: BlockTable, discard: bool = False) -> None:
        for block in table.blocks:
            self.ledger.drop(block, keep=False)
        table.blocks = array("i")

    def evict(self, count: int) -> int:
        return 0

    def check(self, tables: Iterable[BlockTable]) -> None:
        self.ledger.check(block for table in tables for block in table.blocks)
