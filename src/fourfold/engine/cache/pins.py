"""Prefixes that are kept on demand: they are held like a running request's, so nothing evicts them."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from fourfold.engine.cache.node import Node
from fourfold.engine.cache.radix import RadixCache
from fourfold.engine.cache.table import BlockTable
from fourfold.errors import InvalidRequestError
from fourfold.types import PinInfo

MAX_PINS = 1024
"""Pinned prefixes of all owners."""


def _path(table: BlockTable) -> Iterator[Node]:
    node = table.node
    while node.parent is not None:
        yield node
        node = node.parent


class Pins:
    """By owner and name. Full blocks are pinned; the rest of a prefix, less than a block, is computed anew if
    it was evicted."""

    def __init__(self, cache: RadixCache, share: float) -> None:
        """share: of the pool, for all owners together; one that has a name (a tenant) gets half of that."""
        self._cache = cache
        self._limit = int(cache.ledger.total * share)
        self._tables: dict[tuple[str, str], BlockTable] = {}
        self._blocks: dict[str, int] = {}

    @property
    def blocks(self) -> int:
        """Pinned blocks; one that several prefixes share counts once."""
        return sum(self._blocks.values())

    def tables(self) -> list[BlockTable]:
        return list(self._tables.values())

    def pin(self, owner: str, salt: str, name: str, tokens: array[int]) -> PinInfo:
        """Pins what is known of the prefix; a pin of that name is replaced.

        Raises InvalidRequestError if it would take more than the owner may have; the old pin stays then.
        """
        before = self._tables.get((owner, name))
        if before is None and len(self._tables) >= MAX_PINS:
            raise InvalidRequestError(
                f"{MAX_PINS} prefixes are pinned, which is the limit; unpin one", "name"
            )
        table = self._cache.match(tokens, salt, len(tokens))
        released = {id(node) for node in _path(before) if node.pins == 1} if before is not None else set()
        own = self._blocks.get(owner, 0) - len(released)
        more = sum(node.pins == 0 or id(node) in released for node in _path(table))
        limit = self._limit // 2 if owner else self._limit
        for used, most, whose in (
            (own, limit, "this owner"),
            (self.blocks - len(released), self._limit, "all owners"),
        ):
            if used + more > most:
                self._cache.release(table)
                size = self._cache.block_size
                raise InvalidRequestError(
                    f"{more} KV blocks ({more * size} tokens) more cannot be pinned: {used} of the {most} "
                    f"blocks that {whose} may pin are taken; unpin a prefix, or raise --kv-pinned-share",
                    "prompt",
                )
        self.unpin(owner, name)
        for node in _path(table):
            self._blocks[owner] = self._blocks.get(owner, 0) + (node.pins == 0)
            node.pins += 1
        self._tables[owner, name] = table
        return self._info(name, table)

    def unpin(self, owner: str, name: str) -> bool:
        """What was pinned stays cached. False if there is no such pin."""
        table = self._tables.pop((owner, name), None)
        if table is None:
            return False
        for node in _path(table):
            node.pins -= 1
            self._blocks[owner] -= node.pins == 0
        if not self._blocks.get(owner, 1):
            del self._blocks[owner]
        self._cache.release(table)
        return True

    def of(self, owner: str) -> list[PinInfo]:
        return [self._info(name, table) for (whose, name), table in self._tables.items() if whose == owner]

    def _info(self, name: str, table: BlockTable) -> PinInfo:
        blocks = len(table.blocks)
        return PinInfo(name=name, tokens=blocks * self._cache.block_size, blocks=blocks)
