"""The prefix cache: matches what was inserted, never across salts, evicts ends of prefixes first."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fourfold.engine.cache import (
    BlockRemoved,
    BlockStored,
    BlockTable,
    KVEvent,
    LedgerError,
    PlainCache,
    RadixCache,
)
from fourfold.engine.cache.node import Node

SIZE = 2


def ids(*values: int) -> array[int]:
    return array("i", values)


def fill(cache: RadixCache, tokens: array[int], salt: str = "") -> BlockTable:
    """What a request does: match, allocate the rest, compute, insert."""
    table = cache.match(tokens, salt, len(tokens))
    assert cache.allocate(table, -(-len(tokens) // SIZE) - len(table.blocks))
    cache.insert(table, tokens, len(tokens))
    return table


def test_a_released_prefix_is_found_again_up_to_its_full_blocks() -> None:
    cache = RadixCache(8, SIZE)
    cache.release(fill(cache, ids(1, 2, 3, 4, 5)))
    assert cache.ledger.counts().cached == 2
    for tokens, expected in ((ids(1, 2, 3, 4, 5, 6), 2), (ids(1, 2, 3, 9), 1), (ids(1, 9), 0), (ids(1), 0)):
        table = cache.match(tokens, "", len(tokens))
        assert len(table.blocks) == table.shared == expected
        cache.check([table])
        cache.release(table)
    limited = cache.match(ids(1, 2, 3, 4), "", 3)
    assert len(limited.blocks) == 1


def test_running_holders_share_and_the_second_to_fill_a_block_gives_its_own_back() -> None:
    cache = RadixCache(8, SIZE)
    first, second = cache.match(ids(1, 2, 3), "", 2), cache.match(ids(1, 2, 4), "", 2)
    for table in (first, second):
        assert cache.allocate(table, 2)
    cache.insert(first, ids(1, 2, 3), 3)
    assert cache.ledger.live == 4
    cache.insert(second, ids(1, 2, 4), 3)
    assert cache.ledger.live == 3
    assert first.blocks[0] == second.blocks[0]
    cache.check([first, second])
    cache.release(first)
    cache.check([second])
    assert cache.ledger.counts().live == 2
    cache.release(second)
    assert cache.ledger.counts() == cache.ledger.counts().__class__(7, 1, 0, 0, 8)


def test_salts_do_not_meet() -> None:
    cache = RadixCache(8, SIZE)
    cache.release(fill(cache, ids(1, 2), "a"))
    assert len(cache.match(ids(1, 2), "b", 2).blocks) == 0
    assert len(cache.match(ids(1, 2), "", 2).blocks) == 0
    assert len(cache.match(ids(1, 2), "a", 2).blocks) == 1


def test_eviction_takes_the_longest_unused_leaf_and_never_a_live_block() -> None:
    cache = RadixCache(6, SIZE)
    kept = fill(cache, ids(1, 2, 3, 4))
    cache.release(fill(cache, ids(1, 2, 5, 6)))
    cache.release(fill(cache, ids(7, 8)))
    cache.release(cache.match(ids(1, 2, 5, 6), "", 4))  # used again: now younger than 7, 8
    assert cache.evict(1) == 1
    assert len(cache.match(ids(7, 8), "", 2).blocks) == 0
    assert cache.evict(9) == 1
    cache.check([kept])
    assert cache.ledger.live == 2


def test_a_table_that_is_kept_pins_its_prefix() -> None:
    cache = RadixCache(4, SIZE)
    cache.release(fill(cache, ids(1, 2)))
    pin = cache.match(ids(1, 2), "", 2)
    other = cache.match(ids(5, 6), "", 2)
    assert not cache.allocate(other, 4)
    assert cache.allocate(other, 3)
    cache.check([pin, other])


def test_allocation_that_cannot_be_met_changes_nothing() -> None:
    cache = RadixCache(4, SIZE)
    cache.release(fill(cache, ids(1, 2)))
    live = cache.match(ids(9), "", 0)
    assert cache.allocate(live, 2)
    before = cache.ledger.counts()
    assert not cache.allocate(live, 3)
    assert cache.ledger.counts() == before
    assert len(live.blocks) == 2


def test_discarded_prefixes_are_forgotten_but_not_from_under_others() -> None:
    cache = RadixCache(8, SIZE)
    other = fill(cache, ids(1, 2))
    suspect = fill(cache, ids(1, 2, 3, 4))
    cache.release(suspect, discard=True)
    cache.check([other])
    assert cache.ledger.counts().cached == 0
    assert len(cache.match(ids(1, 2, 3, 4), "", 4).blocks) == 1


def test_events_tell_chain_salt_and_tokens() -> None:
    events: list[KVEvent] = []
    cache = RadixCache(2, SIZE, events.append)
    cache.release(fill(cache, ids(1, 2, 3, 4), "tenant"))
    first, second = events
    assert isinstance(first, BlockStored)
    assert isinstance(second, BlockStored)
    assert (first.tokens, second.tokens) == ((1, 2), (3, 4))
    assert second.parent == first.digest
    assert {e.salt for e in events} == {"tenant"}
    cache.release(fill(cache, ids(5, 6, 7), "other"))
    removed = [e for e in events if isinstance(e, BlockRemoved)]
    assert [e.digest for e in removed] == [second.digest, first.digest]
    again: list[KVEvent] = []
    twin = RadixCache(2, SIZE, again.append)
    twin.release(fill(twin, ids(1, 2), "other"))
    assert isinstance(again[0], BlockStored)
    assert again[0].digest not in {first.digest, second.digest}


def test_a_lower_tier_sees_blocks_before_they_go() -> None:
    spilled: list[bytes] = []

    def spill(node: Node) -> None:
        assert cache.ledger.is_cached(node.block)
        spilled.append(node.key)

    cache = RadixCache(2, SIZE, spill=spill)
    cache.release(fill(cache, ids(1, 2, 3, 4)))
    cache.evict(2)
    assert spilled == [ids(3, 4).tobytes(), ids(1, 2).tobytes()]


def test_extending_a_table_that_ends_in_a_part_block_is_a_bug_of_the_caller() -> None:
    cache = RadixCache(4, SIZE)
    table = cache.match(ids(1), "", 0)
    cache.allocate(table, 1)
    with pytest.raises(LedgerError, match="cannot be extended"):
        cache.extend(table, ids(1, 2), 2)


def test_many_salts_leave_nothing_behind() -> None:
    cache = RadixCache(2, SIZE)
    for i in range(100):
        cache.release(fill(cache, ids(1, 2), f"salt{i}"))
    assert len(cache._roots) <= 2
    assert len(cache._leaves) <= 2 * 2 + 64


def test_plain_cache_is_the_same_without_reuse() -> None:
    cache = PlainCache(4, SIZE)
    table = cache.match(ids(1, 2, 3, 4), "", 4)
    assert cache.allocate(table, 2)
    cache.insert(table, ids(1, 2, 3, 4), 4)
    cache.check([table])
    assert not cache.allocate(table, 3)
    cache.release(table)
    cache.check([])
    assert cache.ledger.counts().free == 4
    assert len(cache.match(ids(1, 2, 3, 4), "", 4).blocks) == 0


class CacheMachine(RuleBasedStateMachine):
    """Random holders over a tiny alphabet, so that prefixes meet often. Oracle: what went into a block."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = RadixCache(7, SIZE)
        self.open: list[tuple[BlockTable, array[int]]] = []
        self.content: dict[int, tuple[str, tuple[int, ...]]] = {}

    @rule(values=st.lists(st.integers(0, 1), min_size=1, max_size=9), salt=st.sampled_from(["", "s"]))
    def start(self, values: list[int], salt: str) -> None:
        tokens = array("i", values)
        table = self.cache.match(tokens, salt, len(tokens) - 1)
        for i, block in enumerate(table.blocks):
            assert self.content[block] == (salt, tuple(tokens[: (i + 1) * SIZE]))
        if not self.cache.allocate(table, -(-len(tokens) // SIZE) - len(table.blocks)):
            self.cache.release(table)
            return
        for i in range(table.shared, len(table.blocks)):
            self.content[table.blocks[i]] = (salt, tuple(tokens[: (i + 1) * SIZE]))
        self.open.append((table, tokens))

    @rule(i=st.integers(0, 99), part=st.integers(0, 9))
    def compute(self, i: int, part: int) -> None:
        if self.open:
            table, tokens = self.open[i % len(self.open)]
            self.cache.insert(table, tokens, min(part, len(tokens)))

    @rule(i=st.integers(0, 99), discard=st.booleans())
    def stop(self, i: int, discard: bool) -> None:
        if self.open:
            self.cache.release(self.open.pop(i % len(self.open))[0], discard)

    @rule(count=st.integers(1, 3))
    def evict(self, count: int) -> None:
        cached = self.cache.ledger.cached
        assert self.cache.evict(count) == min(count, cached)

    @invariant()
    def integrity(self) -> None:
        self.cache.check([table for table, _ in self.open])
        for table, tokens in self.open:
            for i in range(table.shared):
                assert self.content[table.blocks[i]] == (table.salt, tuple(tokens[: (i + 1) * SIZE]))

    def teardown(self) -> None:
        for table, _ in self.open:
            self.cache.release(table)
        self.cache.check([])
        self.cache.evict(99)
        assert self.cache.ledger.counts().free == 7


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
