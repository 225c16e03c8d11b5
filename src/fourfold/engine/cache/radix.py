"""Prefix cache as a radix tree: shared by running requests, kept, evicted leaf first; hits are to the token.

The idea of a radix tree over KV with LRU leaves is SGLang's RadixAttention (Zheng et al. 2024). Here an edge
is one block, full or (at the end of a path) filled in part. Full blocks are shared by reference. Where paths
part inside a block, the newcomer gets a copy of it and goes on in that; so a node never has to be split.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator

from fourfold.engine.cache.check import check_cache
from fourfold.engine.cache.events import KVEventSink, block_digest, root_digest
from fourfold.engine.cache.eviction import Leaves
from fourfold.engine.cache.ledger import Ledger, LedgerError
from fourfold.engine.cache.lower import LowerTier
from fourfold.engine.cache.moves import Moves
from fourfold.engine.cache.node import TOKEN_BYTES, Node
from fourfold.engine.cache.table import BlockTable, Unknown
from fourfold.engine.operations import BlockRemoved, BlockStored


class RadixCache:
    """See PrefixCache. One tree per salt, so a tenant can neither hit nor time another's prefixes."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        sink: KVEventSink | None = None,
        *,
        lower: LowerTier | None = None,
        policy: str = "lru",
    ) -> None:
        """sink: told of full blocks that become known or are forgotten.
        lower: where blocks go before they are evicted, and come back from.
        policy: of eviction; a key of eviction.POLICIES."""
        self.ledger = Ledger(num_blocks)
        self.moves = Moves()
        self.block_size = block_size
        self.copied_tokens = 0
        """Tokens that were not recomputed thanks to copies of partly shared blocks. Only grows."""
        self.evicted_blocks = 0
        self._sink = sink
        self._lower = lower
        self._roots: dict[str, Node] = {}
        self._nodes = 0
        self._tick = 0
        self._leaves = Leaves(policy, self._evictable)

    @property
    def roots(self) -> Iterable[Node]:
        """One root per salt that has anything known."""
        return self._roots.values()

    @property
    def num_nodes(self) -> int:
        return self._nodes

    # Before: cached or live nodes of the tree. After: each of the path has this table as one more holder.
    def match(self, tokens: array[int], salt: str, limit: int) -> BlockTable:
        # A root is registered by the first insert: a salt that never fills a block leaves nothing behind.
        table = BlockTable(salt, self._roots.get(salt) or Node(None, salt, b"", -1, root_digest(salt)))
        self._follow(table, tokens, limit)
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
        start, table.restored = table.shared, {}
        self._follow(table, tokens, limit)
        lower = self._lower
        while lower is not None and (run := self._restorable(lower, table, tokens, limit)):
            context, end = table.shared * self.block_size, (table.shared + len(run)) * self.block_size
            if not lower.worth(len(run), context, len(tokens) - end):
                table.declined = end
                break
            if not all(self._restore(lower, table, key, digest) for key, digest in run):
                break
            # What comes back may be followed by what is here still.
            self._follow(table, tokens, limit)
        return (table.shared - start) * self.block_size

    # Before: as for extend. After: one more block, live with this table alone, with a copy's content.
    def extend_in_block(self, table: BlockTable, tokens: array[int], limit: int) -> int:
        self._require_whole(table)
        start = table.shared * self.block_size
        source, shared = self._current(table).nearest(
            tokens[start : min(start + self.block_size, limit)].tobytes()
        )
        if source is None:
            return 0
        # The source may be cached, and the only one that could be evicted.
        self.ledger.share(source.block)
        if allocated := self.allocate(table, 1):
            self.moves.copy(source.block, table.blocks[-1])
            table.tokens, table.filled = tokens, start + shared
            self.copied_tokens += shared
        source.hits += 1
        self._tick += 1
        self._unhold(source, self._tick)
        return shared if allocated else 0

    def lower_digests(self, tokens: array[int], salt: str, limit: int) -> Iterator[bytes]:
        """Digests of the full blocks of a sequence that the tree does not have, in order."""
        size = self.block_size
        node = self._roots.get(salt)
        digest = root_digest(salt) if node is None else node.digest
        for end in range(size, min(limit, len(tokens)) + 1, size):
            key = tokens[end - size : end].tobytes()
            node = None if node is None else node.children.get(key)
            digest = block_digest(digest, key) if node is None else node.digest
            if node is None:
                yield digest

    def next_unknown(self, table: BlockTable | None, tokens: array[int], salt: str) -> Unknown | None:
        size = self.block_size
        node = self._roots.get(salt) if table is None else self._current(table)
        start = 0
        while node is not None:
            start = node.depth * size
            key = tokens[start : start + size].tobytes()
            child = node.children.get(key)
            if child is None or len(key) < size * TOKEN_BYTES:
                break
            node = child
        key = tokens[start : start + size].tobytes()
        if not key:
            return None
        # Roots come and go with their children, so a root is named by its salt alone.
        return Unknown((salt, id(node) if node is not None and node.depth else 0), start, key)

    # Before: free blocks, or cached ones that are evicted. After: live with this table as the only holder.
    def allocate(self, table: BlockTable, count: int) -> bool:
        if not self._make_room(count):
            return False
        for _ in range(count):
            table.blocks.append(self.ledger.take())
        return True

    # Before: full blocks behind `shared` belong to this table alone. After: they are tree nodes with this
    # table as a holder. Where another holder was first with the same content, the table's own block becomes
    # free and the table holds the tree's instead: their contents are equal to the bit (rule 1).
    # A prompt's last block, filled in part, becomes known too: the table's own, and it goes on in it.
    def insert(self, table: BlockTable, tokens: array[int], filled: int) -> None:
        size = self.block_size
        many = filled - table.filled > 1
        table.tokens, table.filled = tokens, filled
        while (table.shared + 1) * size <= filled:
            self._insert_full(table, tokens)
        # Not while an answer grows by single tokens: nobody else waits for these.
        if many and table.tail is None and table.shared * size < filled:
            self._insert_tail(table)

    # Before: the table is one holder of each of its blocks. After: it holds none. Tree nodes without another
    # holder are cached (or, if suspect and without children, free and gone); other blocks are free, but for a
    # part block whose beginning nobody knows better: it is cached too.
    def release(self, table: BlockTable, discard: bool = False) -> None:
        ledger = self.ledger
        self._tick += 1
        kept = None if discard else self._keep_tail(table)
        if table.tail is not None and table.tail.block >= 0 and table.tail is not kept:
            self._forget(table.tail)
        for block in table.blocks[table.shared + (kept is not None) :]:
            ledger.drop(block, keep=False)
        if kept is not None:
            self._unhold(kept, self._tick)
        node = table.node
        while node.parent is not None:
            parent = node.parent
            if discard:
                node.suspect = True
                if self._lower is not None:
                    self._lower.forget(node.digest)
            self._unhold(node, self._tick)
            node = parent
        table.blocks = array("i")
        table.shared, table.filled, table.tail = 0, 0, None
        table.node = node

    # Before: cached, without children. After: free and out of the tree.
    def evict(self, count: int) -> int:
        before = self.ledger.free
        while self.ledger.free - before < count and (node := self._leaves.pop()) is not None:
            if self._lower is not None and self._whole(node):
                self._lower.leaving(node, self.moves)
            self._remove(node)
        freed = self.ledger.free - before
        self.evicted_blocks += freed
        return freed

    def check(self, tables: Iterable[BlockTable]) -> None:
        check_cache(self, list(tables), {id(node) for node in self._leaves})

    def _follow(self, table: BlockTable, tokens: array[int], limit: int) -> None:
        """Holds the full blocks of the tree that come next."""
        self._require_whole(table)
        size = self.block_size
        end = (table.shared + 1) * size
        limit = min(limit, len(tokens))
        node = self._current(table)
        while end <= limit:
            child = node.children.get(tokens[end - size : end].tobytes())
            if child is None:
                break
            self.ledger.share(child.block)
            child.hits += 1
            table.blocks.append(child.block)
            node, end = child, end + size
        table.node = node
        table.shared = len(table.blocks)

    def _restorable(
        self, lower: LowerTier, table: BlockTable, tokens: array[int], limit: int
    ) -> list[tuple[bytes, bytes]]:
        """(key, digest) of the next blocks that the lower tier has, up to the first it lacks."""
        size = self.block_size
        digest = self._current(table).digest
        found: list[tuple[bytes, bytes]] = []
        for start in range(table.shared * size, min(limit, len(tokens)) - size + 1, size):
            key = tokens[start : start + size].tobytes()
            digest = block_digest(digest, key)
            if not lower.has(digest):
                break
            found.append((key, digest))
        return found

    # Before: a free block, or a cached one that is evicted. After: a node with this table as the only holder,
    # whose content comes with the moves.
    def _restore(self, lower: LowerTier, table: BlockTable, key: bytes, digest: bytes) -> bool:
        # Asked after making room: what is evicted for it goes where this comes from.
        if not self._make_room(1) or not lower.has(digest):
            return False
        block = self.ledger.take()
        tier = lower.restore(digest, block, self.moves)
        table.restored[tier] = table.restored.get(tier, 0) + self.block_size
        table.blocks.append(block)
        table.node = self._add(self._registered(table, self._current(table)), key, block)
        table.shared += 1
        return True

    def _insert_full(self, table: BlockTable, tokens: array[int]) -> None:
        size, start = self.block_size, table.shared * self.block_size
        key = tokens[start : start + size].tobytes()
        own = table.blocks[table.shared]
        if table.tail is not None:
            if table.tail.block >= 0:
                self._forget(table.tail)
            table.tail = None
        node = self._registered(table, table.node)
        child = node.children.get(key)
        if child is None:
            child = self._add(node, key, own)
            if self._lower is not None:
                self._lower.stored(child, self.moves)
        else:
            self.ledger.share(child.block)
            self.ledger.drop(own, keep=False)
            table.blocks[table.shared] = child.block
        table.node = child
        table.shared += 1

    def _insert_tail(self, table: BlockTable) -> None:
        key = table.tokens[table.shared * self.block_size : table.filled].tobytes()
        node = self._registered(table, table.node)
        if not node.covers(key):
            table.tail = self._add(node, key, table.blocks[table.shared])

    def _keep_tail(self, table: BlockTable) -> Node | None:
        """The node of the table's part block, with all that is in it; None if others have as much."""
        start = table.shared * self.block_size
        filled = min(table.filled, len(table.tokens))
        if filled <= start or len(table.blocks) <= table.shared:
            return None
        key = table.tokens[start:filled].tobytes()
        tail = table.tail
        if tail is not None and tail.block >= 0:
            if tail.key == key:
                return tail
            self._forget(tail)
        node = self._registered(table, table.node)
        if node.covers(key):
            return None
        return self._add(node, key, table.blocks[table.shared])

    def _registered(self, table: BlockTable, node: Node) -> Node:
        return self._roots.setdefault(table.salt, node) if node.parent is None else node

    def _current(self, table: BlockTable) -> Node:
        """The table's node; for an empty path the root registered now, which another may have made."""
        node = table.node
        return node if node.parent is not None else self._roots.get(table.salt, node)

    def _make_room(self, count: int) -> bool:
        missing = count - self.ledger.free
        return missing <= 0 or (missing <= self.ledger.cached and self.evict(missing) >= missing)

    def _unhold(self, node: Node, tick: int) -> None:
        """One holder less, at `tick`; without any it may be evicted (or, if suspect, goes at once)."""
        node.tick = tick
        if self.ledger.drop(node.block, keep=True) and not node.children:
            if node.suspect:
                self._remove(node)
            else:
                self._leaves.push(node, self._nodes)

    def _add(self, parent: Node, key: bytes, block: int) -> Node:
        node = Node(parent, parent.salt, key, block, block_digest(parent.digest, key))
        node.born = node.tick = self._tick
        covered = parent.beginning_of(key)
        parent.attach(node)
        self._nodes += 1
        if covered is not None:
            if self.ledger.is_cached(covered.block):
                self._remove(covered)
            else:
                self._forget(covered)
        if self._sink is not None and self._whole(node):
            ids = array("i")
            ids.frombytes(key)
            self._sink(BlockStored(node.digest, parent.digest, node.salt, tuple(ids)))
        return node

    # Before: cached. After: free and out of the tree; so are the suspect nodes before it that nothing follows
    # any more.
    def _remove(self, node: Node) -> None:
        doomed: Node | None = node
        while doomed is not None:
            block = doomed.block
            doomed = self._forget(doomed)
            self.ledger.evict(block)

    # The block's state does not change.
    def _forget(self, node: Node) -> Node | None:
        """Takes a leaf out of the tree. Returns its parent if that is suspect and nothing keeps it."""
        parent = node.parent
        if parent is None:
            raise LedgerError("a root cannot be removed")
        parent.detach(node)
        self._nodes -= 1
        if self._sink is not None and self._whole(node):
            self._sink(BlockRemoved(node.digest, node.salt))
        node.block = -1
        if parent.parent is None:
            if not parent.children and self._roots.get(node.salt) is parent:
                del self._roots[node.salt]
        elif self._evictable(parent):
            if parent.suspect:
                return parent
            self._leaves.push(parent, self._nodes)
        return None

    def _evictable(self, node: Node) -> bool:
        return node.block >= 0 and not node.children and self.ledger.is_cached(node.block)

    def _whole(self, node: Node) -> bool:
        return len(node.key) == self.block_size * TOKEN_BYTES

    @staticmethod
    def _require_whole(table: BlockTable) -> None:
        if len(table.blocks) != table.shared:
            raise LedgerError(
                f"a table of {len(table.blocks)} blocks, {table.shared} shared, cannot be extended"
            )
