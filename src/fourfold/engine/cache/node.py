"""A node of the prefix tree, and how prefixes are compared."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

TOKEN_BYTES = 4


def common_tokens(a: bytes, b: bytes) -> int:
    """Leading tokens (int32 each) that two keys share."""
    n = min(len(a), len(b))
    differing = int.from_bytes(a[:n], "little") ^ int.from_bytes(b[:n], "little")
    if not differing:
        return n // TOKEN_BYTES
    return ((differing & -differing).bit_length() - 1) // (8 * TOKEN_BYTES)


class Node:
    """One block below its parent; the path from the root is a prefix. The root has block -1.

    A full block may have children. One that is filled in part (a tail) is always a leaf: nobody continues in
    it, its content is copied. No child's key is the beginning of another's.

    key: the block's token ids (int32, native order), the edge label.
    salt: whose tree.
    tick: when the node was last used, in uses of the cache.  born: when it was made.  hits: how often it was
        found since.
    pins: pinned prefixes it is a part of.
    suspect: a sequence that used it failed; it goes when the last holder does.
    """

    __slots__ = (
        "block", "born", "children", "depth", "digest", "hits", "key", "order", "parent", "pins", "salt",
        "suspect", "tick",
    )  # fmt: skip

    def __init__(self, parent: Node | None, salt: str, key: bytes, block: int, digest: bytes) -> None:
        self.parent = parent
        self.salt = salt
        self.key = key
        self.block = block
        self.digest = digest
        self.children: dict[bytes, Node] = {}
        # The children's keys, sorted: the one that shares most with a given key is a neighbour of it.
        self.order: list[bytes] = []
        self.tick = self.born = 0
        self.hits = 0
        self.pins = 0
        self.suspect = False
        self.depth: int = 0 if parent is None else parent.depth + 1

    def attach(self, child: Node) -> None:
        self.children[child.key] = child
        insort(self.order, child.key)

    def detach(self, child: Node) -> None:
        del self.children[child.key]
        del self.order[bisect_left(self.order, child.key)]

    def nearest(self, key: bytes) -> tuple[Node | None, int]:
        """The child that shares most tokens with `key`, and how many."""
        at = bisect_left(self.order, key)
        best, most = None, 0
        for neighbour in self.order[max(0, at - 1) : at + 1]:
            shared = common_tokens(neighbour, key)
            if shared > most:
                best, most = self.children[neighbour], shared
        return best, most

    def covers(self, key: bytes) -> bool:
        """Whether a child's key begins with `key` (or is it)."""
        at = bisect_left(self.order, key)
        return at < len(self.order) and self.order[at].startswith(key)

    def beginning_of(self, key: bytes) -> Node | None:
        """The child whose key is a true beginning of `key`. Keys are beginnings of no other child's, so it
        stands right before."""
        at = bisect_left(self.order, key)
        if at and key.startswith(self.order[at - 1]):
            return self.children[self.order[at - 1]]
        return None

    def walk(self) -> Iterator[Node]:
        """All nodes below this one, parents before children."""
        stack = list(self.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())
