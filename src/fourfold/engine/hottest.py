"""What the prefix cache holds, for people: its size, and the prefixes that were found most often."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Sequence
from itertools import islice

from fourfold.engine.cache import RadixCache
from fourfold.engine.cache.node import TOKEN_BYTES, Node
from fourfold.timeline import HotPrefix, TreeView

HOTTEST = 10
"""Prefixes that are named."""

SHOWN_TOKENS = 32
"""Token ids shown of the beginning of a prefix, and of its end."""

MAX_WALK = 50_000
"""Nodes looked at: a look takes the engine's thread about half a microsecond per node."""


def view_tree(cache: RadixCache, salts: Sequence[str] | None) -> TreeView:
    """salts: whose prefixes may be named; None: everyone's."""
    view = TreeView(nodes=cache.num_nodes, tokens=0, domains=0, pinned_tokens=0, hottest=[])
    ends: list[tuple[int, int, int, Node]] = []
    left = MAX_WALK
    for root in cache.roots:
        view.domains += 1
        shown = salts is None or root.salt in salts
        for node in islice(root.walk(), left):
            left -= 1
            tokens = len(node.key) // TOKEN_BYTES
            view.tokens += tokens
            view.pinned_tokens += tokens if node.pins else 0
            # Where all who came this far went on, a longer prefix says it.
            if shown and node.hits > max((child.hits for child in node.children.values()), default=0):
                ends.append((node.hits, node.depth, -len(ends), node))
    view.complete = left > 0
    view.hottest = [_prefix(cache, node) for *_, node in heapq.nlargest(HOTTEST, ends)]
    return view


def _prefix(cache: RadixCache, node: Node) -> HotPrefix:
    ids: array[int] = array("i")
    ids.frombytes(b"".join(reversed([each.key for each in _upwards(node)])))
    head = ids[:SHOWN_TOKENS]
    return HotPrefix(
        salt=node.salt,
        tokens=len(ids),
        hits=node.hits,
        head=list(head),
        tail=list(ids[max(len(head), len(ids) - SHOWN_TOKENS) :]),
        pinned=node.pins > 0,
        in_use=cache.ledger.holders(node.block) > 0,
    )


def _upwards(node: Node) -> list[Node]:
    """From `node` to the first below the root."""
    path = []
    while node.parent is not None:
        path.append(node)
        node = node.parent
    return path
