"""The integrity check of the prefix tree: everything recounted from the tables there are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Protocol

from fourfold.engine.cache.ledger import Ledger, LedgerError
from fourfold.engine.cache.node import TOKEN_BYTES, Node
from fourfold.engine.cache.table import BlockTable


class Tree(Protocol):
    ledger: Ledger
    block_size: int

    @property
    def roots(self) -> Iterable[Node]: ...

    @property
    def num_nodes(self) -> int: ...


def check_cache(tree: Tree, tables: Sequence[BlockTable], leaves: set[int]) -> None:
    """Raises LedgerError for the first thing that does not add up.

    tables: every holder.  leaves: id() of the nodes that eviction would find.
    """
    ledger = tree.ledger
    ledger.check(block for table in tables for block in table.blocks)
    in_tree: dict[int, Node] = {}
    for root in tree.roots:
        _check_children(root)
        for node in root.walk():
            _check_children(node)
            _check_node(tree, node, in_tree, leaves)
            in_tree[node.block] = node
    cached = {block for block in range(ledger.total) if ledger.is_cached(block)}
    if len(in_tree) != tree.num_nodes or not cached <= in_tree.keys():
        lost = sorted(cached - in_tree.keys())
        raise LedgerError(f"{len(in_tree)} nodes found, {tree.num_nodes} counted; lost: {lost}")
    for table in tables:
        _check_table(table, in_tree)


def _check_children(node: Node) -> None:
    keys = node.order
    if sorted(node.children) != keys or any(child.key != key for key, child in node.children.items()):
        raise LedgerError(f"block {node.block} has a child under a wrong key")
    if any(after.startswith(before) for before, after in pairwise(keys)):
        raise LedgerError(f"block {node.block} has a child that is the beginning of another")


def _check_node(tree: Tree, node: Node, in_tree: dict[int, Node], leaves: set[int]) -> None:
    tokens, rest = divmod(len(node.key), TOKEN_BYTES)
    if node.block in in_tree or rest or not 1 <= tokens <= tree.block_size:
        raise LedgerError(f"block {node.block} is in the tree twice or has a key of {len(node.key)} bytes")
    if node.children and tokens < tree.block_size:
        raise LedgerError(f"block {node.block} is filled in part and has children")
    if not node.children and tree.ledger.is_cached(node.block) and id(node) not in leaves:
        raise LedgerError(f"block {node.block} is a cached leaf that eviction would never find")
    holders = tree.ledger.holders(node.block)
    if any(tree.ledger.holders(child.block) > holders for child in node.children.values()):
        raise LedgerError(f"block {node.block} has fewer holders than its child")


def _check_table(table: BlockTable, in_tree: dict[int, Node]) -> None:
    path, node = [], table.node
    while node.parent is not None:
        path.append(node.block)
        node = node.parent
    if path[::-1] != list(table.blocks[: table.shared]):
        raise LedgerError(f"table {list(table.blocks)} does not follow its path {path[::-1]}")
    own = None if table.tail is None or table.tail.block < 0 else table.tail
    for block in table.blocks[table.shared :]:
        if block in in_tree and in_tree[block] is not own:
            raise LedgerError(f"table {list(table.blocks)} has a private block that is in the tree")
    if own is not None and own.block != table.blocks[table.shared]:
        raise LedgerError(f"table {list(table.blocks)} has block {own.block} as its part block")
