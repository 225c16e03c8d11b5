"""Which cached leaf goes first. A policy is a function of the node alone; the smallest rank goes first."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping

from fourfold.engine.cache.node import Node

Rank = tuple[int, int]
Policy = Callable[[Node], Rank]

POLICIES: Mapping[str, Policy] = {
    "lru": lambda node: (node.tick, 0),
    "lfu": lambda node: (node.hits, node.tick),
    "fifo": lambda node: (node.born, 0),
}
"""By the names of SGLang's --radix-eviction-policy."""


class Leaves:
    """Cached leaves in order of the policy.

    Entries are never updated: one whose node was used since, or is no evictable leaf any more, is skipped
    when it surfaces, and the heap is rebuilt when most of it is stale.
    """

    def __init__(self, policy: str, evictable: Callable[[Node], bool]) -> None:
        """Raises KeyError for a policy that POLICIES does not have."""
        self._rank = POLICIES[policy]
        self._evictable = evictable
        self._heap: list[tuple[Rank, int, int, Node]] = []
        self._pushes = 0

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, node: Node, nodes: int) -> None:
        """nodes: how many the tree has, which bounds the heap."""
        self._pushes += 1
        heapq.heappush(self._heap, (self._rank(node), self._pushes, node.tick, node))
        if len(self._heap) > 2 * nodes + 64:
            fresh = {id(entry[3]): entry for entry in self._heap if self._fresh(entry)}
            self._heap = list(fresh.values())
            heapq.heapify(self._heap)

    def pop(self) -> Node | None:
        while self._heap:
            entry = heapq.heappop(self._heap)
            if self._fresh(entry):
                return entry[3]
        return None

    def __iter__(self) -> Iterator[Node]:
        return (entry[3] for entry in self._heap if self._fresh(entry))

    def _fresh(self, entry: tuple[Rank, int, int, Node]) -> bool:
        return entry[3].tick == entry[2] and self._evictable(entry[3])
