"""The prefix cache against a slow model in plain Python: what every slot holds, and what may be found."""

from __future__ import annotations

from array import array
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from fourfold.engine.cache import BlockTable, RadixCache
from fourfold.engine.cache.node import Node

SIZE, BLOCKS = 3, 9
Content = list[tuple[str, tuple[int, ...]] | None]


class Pool:
    """Each slot holds the whole prefix it was computed from, so a wrong copy or a reused block shows."""

    def __init__(self) -> None:
        self.slots: list[Content] = [[None] * SIZE for _ in range(BLOCKS)]

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        for source, destination in pairs:
            self.slots[destination] = list(self.slots[source])

    def read_block(self, block: int, out: np.ndarray) -> None:
        raise AssertionError

    write_block = read_block


class Holder:
    def __init__(self, table: BlockTable, tokens: array[int], computed: int) -> None:
        self.table, self.tokens, self.computed = table, tokens, computed

    def compute(self, pool: Pool, position: int) -> None:
        for before in range(position):
            self.check(pool, before)
        self.slot(pool, position)[position % SIZE] = self.expected(position)

    def check(self, pool: Pool, position: int) -> None:
        assert self.slot(pool, position)[position % SIZE] == self.expected(position)

    def slot(self, pool: Pool, position: int) -> Content:
        return pool.slots[self.table.blocks[position // SIZE]]

    def expected(self, position: int) -> tuple[str, tuple[int, ...]]:
        return self.table.salt, tuple(self.tokens[: position + 1])


class CacheMachine(RuleBasedStateMachine):
    """Random holders over a tiny alphabet, so that prefixes meet often."""

    steps: ClassVar[int] = 0
    """Of all runs."""

    @initialize(policy=st.sampled_from(["lru", "lfu", "fifo"]))
    def begin(self, policy: str) -> None:
        self.cache = RadixCache(BLOCKS, SIZE, policy=policy)
        self.pool = Pool()
        self.open: list[Holder] = []
        # All prefixes that were ever computed and not thrown away; eviction may have removed any of them.
        self.ever: set[tuple[str, tuple[int, ...]]] = set()

    def room(self) -> int:
        return self.cache.ledger.available

    def run(self, holder: Holder, upto: int) -> None:
        """Computes and inserts, as a step does: the moves first."""
        self.cache.moves.run(self.pool)
        for i in range(holder.computed, upto):
            holder.compute(self.pool, i)
        holder.computed = upto
        self.ever.update((holder.table.salt, tuple(holder.tokens[:n])) for n in range(1, upto + 1))
        self.cache.insert(holder.table, holder.tokens, upto)

    @rule(
        values=st.lists(st.integers(0, 1), min_size=1, max_size=11),
        salt=st.sampled_from(["", "s"]),
        chunk=st.integers(1, 11),
    )
    def start(self, values: list[int], salt: str, chunk: int) -> None:
        tokens = array("i", values)
        limit = len(tokens) - 1
        known = max((n for n in range(limit + 1) if n == 0 or self.known(salt, values[:n])), default=0)
        before = self.room()
        table = self.cache.match(tokens, salt, limit)
        got = len(table.blocks) * SIZE
        assert got == known // SIZE * SIZE
        part = self.cache.extend_in_block(table, tokens, limit)
        # The last block that could be had may be the source itself.
        assert part == known - got or (part == 0 and self.room() <= 1)
        got += part
        assert got == 0 or (salt, tuple(values[:got])) in self.ever
        need = -(-len(tokens) // SIZE) - len(table.blocks)
        if not self.cache.allocate(table, need):
            assert need > self.room()
            self.cache.release(table)
            assert self.room() == before
            return
        holder = Holder(table, tokens, got)
        self.open.append(holder)
        self.run(holder, min(len(tokens), got + chunk))

    def known(self, salt: str, values: list[int]) -> bool:
        """By a search through the whole tree that knows nothing of sorted keys."""
        wanted = array("i", values)
        for root in self.cache.roots:
            if root.salt != salt:
                continue
            node, rest = root, wanted
            while len(rest) >= SIZE and rest[:SIZE].tobytes() in node.children:
                node, rest = node.children[rest[:SIZE].tobytes()], rest[SIZE:]
            return not rest or any(key.startswith(rest.tobytes()) for key in node.children)
        return False

    @rule(i=st.integers(0, 99), more=st.integers(1, 7))
    def compute(self, i: int, more: int) -> None:
        if self.open:
            holder = self.open[i % len(self.open)]
            self.run(holder, min(len(holder.tokens), holder.computed + more))

    @rule(i=st.integers(0, 99), values=st.lists(st.integers(0, 1), min_size=1, max_size=3))
    def answer(self, i: int, values: list[int]) -> None:
        """One token at a time, as an answer grows."""
        if not self.open:
            return
        holder = self.open[i % len(self.open)]
        self.run(holder, len(holder.tokens))
        for value in values:
            full = len(holder.table.blocks) * SIZE == len(holder.tokens)
            if full and not self.cache.allocate(holder.table, 1):
                return
            holder.tokens.append(value)
            self.run(holder, len(holder.tokens))

    @rule(i=st.integers(0, 99), discard=st.booleans(), cut=st.integers(0, 2))
    def stop(self, i: int, discard: bool, cut: int) -> None:
        if not self.open:
            return
        holder = self.open.pop(i % len(self.open))
        del holder.tokens[len(holder.tokens) - min(cut, len(holder.tokens) - 1) :]
        values, computed = list(holder.tokens), min(holder.computed, len(holder.tokens))
        suspect, node = discard, holder.table.node
        while node.parent is not None:
            suspect, node = suspect or node.suspect, node.parent
        self.cache.release(holder.table, discard)
        if not suspect and computed:
            assert self.known(holder.table.salt, values[:computed])

    @rule(count=st.integers(1, 3))
    def evict(self, count: int) -> None:
        cached = self.cache.ledger.cached
        assert min(count, cached) <= self.cache.evict(count) <= cached

    @invariant()
    def integrity(self) -> None:
        CacheMachine.steps += 1
        if not hasattr(self, "cache"):
            return
        self.cache.check([holder.table for holder in self.open])
        self.cache.moves.run(self.pool)
        for holder in self.open:
            for i in range(holder.computed):
                holder.check(self.pool, i)
        for root in self.cache.roots:
            for node in root.walk():
                self.check_node(node.salt, node)

    def check_node(self, salt: str, node: Node) -> None:
        path: list[int] = []
        keys = []
        at: Node = node
        while at.parent is not None:
            keys.append(at.key)
            at = at.parent
        for key in reversed(keys):
            path += np.frombuffer(key, np.int32).tolist()
        own = len(keys[0]) // 4
        for i in range(own):
            end = len(path) - own + i + 1
            assert self.pool.slots[node.block][i] == (salt, tuple(path[:end]))

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for holder in self.open:
            self.cache.release(holder.table)
        self.cache.check([])
        self.cache.evict(99)
        assert self.cache.ledger.counts().free == BLOCKS
        assert not list(self.cache.roots)


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@pytest.mark.slow
def test_a_hundred_thousand_steps() -> None:
    """Long runs reach states that short ones do not: a tree that was full and empty many times."""
    before = CacheMachine.steps
    many = settings(
        max_examples=600,
        stateful_step_count=200,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
        phases=[Phase.generate],
    )
    run_state_machine_as_test(CacheMachine, settings=many)
    assert CacheMachine.steps - before > 100_000
