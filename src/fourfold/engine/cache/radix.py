"""Prefix cache as a radix tree over blocks: shared by running requests, kept, evicted leaf first.

The idea of a radix tree over KV with LRU leaves is SGLang's RadixAttention (Zheng et al. 2024); here an edge
is one full block, so a block boundary is the only place where paths part, and a node never has to be split.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable, Iterable

from fourfold.engine.cache.events import BlockRemoved, BlockStored, KVEventSink, block_digest, root_digest
from fourfold.engine.cache.ledger import Ledger, LedgerError
from fourfold.engine.cache.node import Node
from fourfold.engine.cache.table import BlockName, BlockTable

Spill = Callable[[Node], None]
"""Called with a node about to be evicted while its block is still intact: the way to a lower tier."""


class RadixCache:
    """See PrefixCache. One tree per salt, so a tenant can neither hit nor time another's prefixes."""

    def __init__(
        self, num_blocks: int, block_size: int, sink: KVEventSink | None = None, spill: Spill | None = None
    ) -> None:
        self.ledger = Ledger(num_blocks)
        self.block_size = block_size
        self._sink = sink
        self._spill = spill
        self._roots: dict[str, Node] = {}
        self._nodes = 0
        self._tick = 0
        self._pushes = 0
        # Cached leaves by last use. Entries are never updated: one whose node moved on is skipped when it
        # surfaces, and the heap is rebuilt when most of it is stale.
        self._leaves: list[tuple[int, int, Node]] = []

    # Before: cached or live nodes of the tree. After: each of the path has this table as one more holder.
    def match(self, tokens: array[int], salt: str, limit: int) -> BlockTable:
        # A root is registered by the first insert: a salt that never fills a block leaves nothing behind.
        root = self._roots.get(salt) or Node(None, salt, b"", -1, root_digest(salt) if self._sink else b"")
        table = BlockTable(salt, root)
        self.extend(table, tokens, limit)
        return table

    def known(self, tokens: array[int], salt: str, limit: int) -> int:
        size, end = self.block_size, self.block_size
        node = self._roots.get(salt)
        limit = min(limit, len(tokens))
        while node is not None and end <= limit:
            node = node.children.get(tokens[end - size : end].tobytes())
            if node is not None:
                end += size
        return end - size

    # Before: table holds `shared` tree nodes and nothing else. After: it holds more of them.
    def extend(self, table: BlockTable, tokens: array[int], limit: int) -> int:
        if len(table.blocks) != table.shared:
            raise LedgerError(
                f"a table of {len(table.blocks)} blocks, {table.shared} shared, cannot be extended"
            )
        size = self.block_size
        start = table.shared * size
        limit = min(limit, len(tokens))
        node, end = self._current(table), start + size
        while end <= limit:
            child = node.children.get(tokens[end - size : end].tobytes())
            if child is None:
                break
            self.ledger.share(child.block)
            table.blocks.append(child.block)
            node, end = child, end + size
        table.node = node
        table.shared = len(table.blocks)
        return end - size - start

    def next_key(self, table: BlockTable | None, tokens: array[int], salt: str) -> BlockName | None:
        size = self.block_size
        node = self._roots.get(salt) if table is None else self._current(table)
        if node is None:
            return (salt, 0, tokens[:size].tobytes()) if len(tokens) >= size else None
        end = (node.depth + 1) * size
        while end <= len(tokens):
            key = tokens[end - size : end].tobytes()
            child = node.children.get(key)
            if child is None:
                # Roots come and go with their children, so a root is named by its salt alone.
                return (salt, id(node) if node.depth else 0, key)
            node, end = child, end + size
        return None

    # Before: free blocks, or cached ones that are evicted. After: live with this table as the only holder.
    def allocate(self, table: BlockTable, count: int) -> bool:
        ledger = self.ledger
        missing = count - ledger.free
        if missing > 0 and (missing > ledger.cached or self.evict(missing) < missing):
            return False
        for _ in range(count):
            table.blocks.append(ledger.take())
        return True

    # Before: full blocks behind `shared` belong to this table alone. After: they are tree nodes with this
    # table as a holder. Where another holder was first with the same content, the table's own block becomes
    # free and the table holds the tree's instead: their contents are equal to the bit (rule 1).
    def insert(self, table: BlockTable, tokens: array[int], filled: int) -> None:
        size = self.block_size
        end = (table.shared + 1) * size
        while end <= filled:
            node = table.node
            if node.parent is None:
                node = self._roots.setdefault(table.salt, node)
            key = tokens[end - size : end].tobytes()
            own = table.blocks[table.shared]
            child = node.children.get(key)
            if child is None:
                child = self._add(node, key, own)
            else:
                self.ledger.share(child.block)
                self.ledger.drop(own, keep=False)
                table.blocks[table.shared] = child.block
            table.node = child
            table.shared += 1
            end += size

    # Before: the table is one holder of each of its blocks. After: it holds none. Tree nodes without another
    # holder are cached (or, if discarded, free and gone); blocks outside the tree are free.
    def release(self, table: BlockTable, discard: bool = False) -> None:
        ledger = self.ledger
        for block in table.blocks[table.shared :]:
            ledger.drop(block, keep=False)
        self._tick += 1
        node = table.node
        while node.parent is not None:
            parent = node.parent
            node.tick = self._tick
            if ledger.drop(node.block, keep=True) and not node.children:
                if discard:
                    self._remove(node)
                else:
                    self._push(node)
            node = parent
        table.blocks = array("i")
        table.shared = 0
        table.node = node

    # Before: cached, without children. After: free and out of the tree.
    def evict(self, count: int) -> int:
        done = 0
        while done < count and self._leaves:
            tick, _, node = heapq.heappop(self._leaves)
            if node.tick != tick or not self._evictable(node):
                continue
            if self._spill is not None:
                self._spill(node)
            self._remove(node)
            done += 1
        return done

    def check(self, tables: Iterable[BlockTable]) -> None:
        tables = list(tables)
        self.ledger.check(block for table in tables for block in table.blocks)
        in_tree: set[int] = set()
        leaves = {id(node) for tick, _, node in self._leaves if node.tick == tick}
        for root in self._roots.values():
            stack = list(root.children.items())
            while stack:
                key, node = stack.pop()
                if node.key != key or node.block in in_tree or len(key) != 4 * self.block_size:
                    raise LedgerError(f"block {node.block} is in the tree twice or under a wrong key")
                in_tree.add(node.block)
                if self._evictable(node) and id(node) not in leaves:
                    raise LedgerError(f"block {node.block} is a cached leaf that eviction would never find")
                holders = self.ledger.holders(node.block)
                if any(self.ledger.holders(child.block) > holders for child in node.children.values()):
                    raise LedgerError(f"block {node.block} has fewer holders than its child")
                stack.extend(node.children.items())
        cached = {b for b in range(self.ledger.total) if self.ledger.is_cached(b)}
        if len(in_tree) != self._nodes or not cached <= in_tree:
            raise LedgerError(
                f"{len(in_tree)} nodes found, {self._nodes} counted; lost: {sorted(cached - in_tree)}"
            )
        for table in tables:
            path, node = [], table.node
            while node.parent is not None:
                path.append(node.block)
                node = node.parent
            if path[::-1] != list(table.blocks[: table.shared]):
                raise LedgerError(f"table {list(table.blocks)} does not follow its path {path[::-1]}")
            if any(block in in_tree for block in table.blocks[table.shared :]):
                raise LedgerError(f"table {list(table.blocks)} has a private block that is in the tree")

    def _current(self, table: BlockTable) -> Node:
        """The table's node; for an empty path the root registered now, which another may have made."""
        node = table.node
        return node if node.parent is not None else self._roots.get(table.salt, node)

    def _add(self, parent: Node, key: bytes, block: int) -> Node:
        digest = block_digest(parent.digest, key) if self._sink else b""
        node = Node(parent, parent.salt, key, block, digest)
        parent.children[key] = node
        self._nodes += 1
        if self._sink:
            ids = array("i")
            ids.frombytes(key)
            self._sink(BlockStored(digest, parent.digest, node.salt, tuple(ids)))
        return node

    def _remove(self, node: Node) -> None:
        parent = node.parent
        if parent is None:
            raise LedgerError("a root cannot be removed")
        del parent.children[node.key]
        self.ledger.evict(node.block)
        self._nodes -= 1
        if self._sink:
            self._sink(BlockRemoved(node.digest, node.salt))
        node.block = -1
        if parent.parent is None:
            if not parent.children and self._roots.get(node.salt) is parent:
                del self._roots[node.salt]
        elif self._evictable(parent):
            self._push(parent)

    def _evictable(self, node: Node) -> bool:
        return node.block >= 0 and not node.children and self.ledger.is_cached(node.block)

    def _push(self, node: Node) -> None:
        self._pushes += 1
        heapq.heappush(self._leaves, (node.tick, self._pushes, node))
        if len(self._leaves) > 2 * self._nodes + 64:
            fresh = {id(n): (t, p, n) for t, p, n in self._leaves if n.tick == t and self._evictable(n)}
            self._leaves = list(fresh.values())
            heapq.heapify(self._leaves)
