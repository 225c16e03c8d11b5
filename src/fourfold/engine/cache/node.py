"""A node of the prefix tree."""

from __future__ import annotations


class Node:
    """One full block below its parent; the path from the root is a prefix. The root has block -1.

    key: the block's token ids (int32, native order), the edge label.
    salt: whose tree.
    tick: when the node was last used, in releases of the cache.
    """

    __slots__ = ("block", "children", "depth", "digest", "key", "parent", "salt", "tick")

    def __init__(self, parent: Node | None, salt: str, key: bytes, block: int, digest: bytes) -> None:
        self.parent = parent
        self.salt = salt
        self.key = key
        self.block = block
        self.digest = digest
        self.children: dict[bytes, Node] = {}
        self.tick = 0
        self.depth: int = 0 if parent is None else parent.depth + 1
