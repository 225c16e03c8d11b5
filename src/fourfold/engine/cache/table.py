"""What one holder has of the KV pool, and the interface every prefix cache has."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from fourfold.engine.cache.ledger import Ledger
from fourfold.engine.cache.moves import Moves
from fourfold.engine.cache.node import Node


@dataclass(frozen=True, slots=True)
class Unknown:
    """The first block of a sequence whose content no one has.

    place: salt and parent; equal places and equal keys mean equal content.
    start: position of its first token.
    key: its token ids (int32, native order); fewer than a block's where the sequence ends in it.
    """

    place: tuple[str, int]
    start: int
    key: bytes


class BlockTable:
    """The blocks of one holder, in order of positions.

    blocks: block ids; the holder is one of the holders of each.
    shared: how many leading blocks are full ones of the prefix tree (read-only from then on); the blocks
        behind them belong to this holder alone.
    node: tree node of block `shared - 1`, or the root of the salt.
    salt: whose tree.
    tokens, filled: the holder's sequence, and how many of its tokens are in the blocks (as of `insert`).
    tail: node of block `shared`, which is filled in part, if the tree knows it: others may copy from it while
        the holder appends.
    restored: tokens that the last `extend` took from lower tiers, by tier.
    declined: end of the tokens that a lower tier has, but that are faster to compute.
    """

    __slots__ = ("blocks", "declined", "filled", "node", "restored", "salt", "shared", "tail", "tokens")

    def __init__(self, salt: str, node: Node) -> None:
        self.blocks: array[int] = array("i")
        self.shared = 0
        self.node = node
        self.salt = salt
        self.tokens: array[int] = array("i")
        self.filled = 0
        self.tail: Node | None = None
        self.restored: dict[str, int] = {}
        self.declined = 0


class PrefixCache(Protocol):
    """Hands out blocks and remembers what is in them.

    Tokens are `array("i")`. A limit is the largest number of tokens that may be taken from the cache.
    Contents are copied by `moves`, which must run before the next step of the backend.
    """

    ledger: Ledger
    moves: Moves
    block_size: int

    def match(self, tokens: array[int], salt: str, limit: int) -> BlockTable:
        """Locks the known full blocks: `len(table.blocks) * block_size` tokens. Must be released.

        Keeping a table without running anything pins its prefix.
        """
        ...

    def known(self, tokens: array[int], salt: str, limit: int) -> int:
        """How many tokens `match` would find now. Changes nothing, not even what is evicted next."""
        ...

    def extend(self, table: BlockTable, tokens: array[int], limit: int) -> int:
        """Takes further full blocks that became known since, or that a lower tier has; the table must end at
        a full block. Tokens gained."""
        ...

    def extend_in_block(self, table: BlockTable, tokens: array[int], limit: int) -> int:
        """Takes what is known of the next block, by a copy of its own; the table must end at a full block.
        Tokens gained, fewer than a block's. The sequence continues inside the block."""
        ...

    def next_unknown(self, table: BlockTable | None, tokens: array[int], salt: str) -> Unknown | None:
        """The first block of `tokens` not known, whole or its beginning; None if nothing is left."""
        ...

    def allocate(self, table: BlockTable, count: int) -> bool:
        """Appends `count` fresh blocks, evicting if it must; False and no change if there are too few."""
        ...

    def insert(self, table: BlockTable, tokens: array[int], filled: int) -> None:
        """The first `filled` tokens are in the table's blocks now: makes them known. The table keeps
        `tokens` to know what its last block holds when it is released."""
        ...

    def release(self, table: BlockTable, discard: bool = False) -> None:
        """Gives everything back; what is known stays cached, to the token. discard: its content may be wrong;
        forget it, at once or when the last of the others that use it is done."""
        ...

    def evict(self, count: int) -> int:
        """Frees `count` cached blocks, in the policy's order, ends of prefixes before starts: more if a
        suspect beginning (see `release`) goes with its end, fewer if there are no more. How many it were."""
        ...

    def check(self, tables: Iterable[BlockTable]) -> None:
        """Recounts everything from all tables there are; raises LedgerError."""
        ...
