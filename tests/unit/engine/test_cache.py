"""The prefix cache: matches what was inserted, never across salts, evicts ends of prefixes first."""

from __future__ import annotations

from array import array

import pytest

from fourfold.config import EngineConfig
from fourfold.engine.cache import (
    BlockTable,
    LedgerCounts,
    LedgerError,
    Moves,
    PlainCache,
    RadixCache,
)
from fourfold.engine.cache.node import Node
from fourfold.engine.operations import BlockRemoved, BlockStored, KVEvent
from fourfold.errors import ConfigError

SIZE = 2


def ids(*values: int) -> array[int]:
    return array("i", values)


def fill(cache: RadixCache, tokens: array[int], salt: str = "") -> BlockTable:
    """What a request does: match, allocate the rest, compute, insert."""
    table = cache.match(tokens, salt, len(tokens))
    cache.extend_in_block(table, tokens, len(tokens))
    assert cache.allocate(table, -(-len(tokens) // SIZE) - len(table.blocks))
    cache.insert(table, tokens, len(tokens))
    return table


def found(cache: RadixCache, tokens: array[int], salt: str = "", limit: int | None = None) -> int:
    """Tokens that a newcomer need not compute."""
    limit = len(tokens) if limit is None else limit
    table = cache.match(tokens, salt, limit)
    gained = len(table.blocks) * SIZE + cache.extend_in_block(table, tokens, limit)
    cache.check([table])
    cache.release(table)
    cache.check([])
    return gained


def test_a_released_prefix_is_found_again_to_the_token() -> None:
    cache = RadixCache(8, SIZE)
    cache.release(fill(cache, ids(1, 2, 3, 4, 5)))
    assert cache.ledger.counts().cached == 3
    for tokens, expected in (
        (ids(1, 2, 3, 4, 5, 6), 5),
        (ids(1, 2, 3, 4, 6), 4),
        (ids(1, 2, 3, 9), 3),
        (ids(1, 9), 1),
        (ids(1), 1),
        (ids(9), 0),
    ):
        assert found(cache, tokens) == expected
    assert found(cache, ids(1, 2, 3, 4), limit=3) == 3
    assert cache.ledger.counts().cached == 3


def test_a_partly_shared_block_is_copied_and_the_source_may_be_given_away_at_once() -> None:
    cache = RadixCache(3, SIZE)
    cache.release(fill(cache, ids(1, 2, 3, 4)))
    source = cache.match(ids(1, 2, 3, 4), "", 4)
    third = source.blocks[1]
    cache.release(source)
    table = cache.match(ids(1, 2, 3, 9), "", 3)
    assert cache.extend_in_block(table, ids(1, 2, 3, 9), 3) == 1
    other = cache.match(ids(7), "", 0)
    assert cache.allocate(other, 1)
    assert other.blocks[0] == third
    cache.check([table, other])
    moved: list[tuple[int, int]] = []

    class Store:
        copy_blocks = staticmethod(moved.extend)

    cache.moves.run(Store())  # type: ignore[arg-type]
    assert moved == [(third, table.blocks[1])]
    assert len(cache.moves) == 0


def test_a_part_block_without_room_for_its_copy_is_left() -> None:
    cache = RadixCache(2, SIZE)
    live = fill(cache, ids(1, 2, 3))
    table = cache.match(ids(1, 2, 3, 4), "", 3)
    assert cache.extend_in_block(table, ids(1, 2, 3, 4), 3) == 0
    cache.check([live, table])


def test_the_longest_of_many_beginnings_in_a_block_is_copied() -> None:
    cache = RadixCache(64, 8)
    for i in range(20):
        cache.release(fill(cache, array("i", [1, 2, i % 4, i // 4, 5, 6])))
    assert cache.ledger.cached == 20
    table = cache.match(ids(1, 2, 3, 4, 5, 7), "", 6)
    assert cache.extend_in_block(table, ids(1, 2, 3, 4, 5, 7), 6) == 5
    cache.release(table)
    assert found(cache, ids(1, 2, 3, 9)) == 3
    assert found(cache, ids(1, 2, 9)) == 2


def test_a_tail_gives_way_to_a_longer_one_and_is_not_kept_beside_it() -> None:
    cache = RadixCache(8, 4)
    for tokens in (ids(1, 2), ids(1, 2, 3), ids(1, 2), ids(1, 2, 3, 4, 5)):
        cache.release(fill(cache, tokens))
        cache.check([])
    assert cache.ledger.counts().cached == 2


def test_a_running_prompt_is_copied_from_before_its_block_is_full() -> None:
    cache = RadixCache(8, 4)
    first = fill(cache, ids(1, 2, 3, 4, 5, 6))
    second = cache.match(ids(1, 2, 3, 4, 5, 6), "", 5)
    assert cache.extend_in_block(second, ids(1, 2, 3, 4, 5, 6), 5) == 1
    tokens = ids(1, 2, 3, 4, 5, 6, 7, 8, 9)
    assert cache.allocate(first, 1)
    cache.insert(first, tokens, 9)
    cache.check([first, second])
    cache.release(first)
    cache.insert(second, ids(1, 2, 3, 4, 5, 6, 9), 7)
    cache.check([second])
    cache.release(second)
    cache.check([])
    assert cache.ledger.counts().cached == 4


def test_running_holders_share_and_the_second_to_fill_a_block_gives_its_own_back() -> None:
    cache = RadixCache(8, SIZE)
    first, second = cache.match(ids(1, 2, 3), "", 2), cache.match(ids(1, 2, 4), "", 2)
    for table in (first, second):
        assert cache.allocate(table, 2)
    cache.insert(first, ids(1, 2, 3), 3)
    assert cache.ledger.live == 4
    cache.check([first, second])
    cache.insert(second, ids(1, 2, 4), 3)
    assert cache.ledger.live == 3
    assert first.blocks[0] == second.blocks[0]
    cache.check([first, second])
    cache.release(first)
    cache.check([second])
    assert cache.ledger.counts().live == 2
    cache.release(second)
    assert cache.ledger.counts() == LedgerCounts(5, 3, 0, 0, 8)


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
    # Whoever runs with it keeps it; when the last of them is done, it goes as well.
    late = cache.match(ids(1, 2, 3, 4), "", 4)
    assert len(late.blocks) == 1
    for table, open_ in ((other, [late]), (late, [])):
        cache.release(table)
        cache.check(open_)
    assert cache.ledger.counts().free == 8
    assert cache.num_nodes == 0


def test_a_suspect_beginning_goes_with_the_last_of_what_follows_it() -> None:
    cache = RadixCache(8, SIZE)
    cache.release(fill(cache, ids(1, 2, 5, 6)))
    cache.release(fill(cache, ids(1, 2, 3, 4)), discard=True)
    cache.check([])
    assert cache.evict(1) == 2
    cache.check([])
    assert (cache.ledger.counts().free, cache.num_nodes) == (8, 0)


def test_a_long_suspect_beginning_goes_whole() -> None:
    blocks = 3000  # of a prompt of 96,000 tokens, if a block has 32
    cache = RadixCache(blocks + 1, SIZE)
    prompt = ids(*range(SIZE * blocks))
    cache.release(fill(cache, prompt + ids(-1, -2)))
    cache.release(fill(cache, prompt), discard=True)
    assert cache.evict(1) == blocks + 1
    cache.check([])
    assert cache.num_nodes == 0


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
    stored: list[bytes] = []
    spilled: list[bytes] = []

    class Lower:
        def stored(self, node: Node, moves: Moves) -> None:
            stored.append(node.key)

        def leaving(self, node: Node, moves: Moves) -> None:
            assert cache.ledger.is_cached(node.block)
            spilled.append(node.key)

        def has(self, digest: bytes) -> bool:
            return False

        def restore(self, digest: bytes, block: int, moves: Moves) -> None:
            raise AssertionError

    cache = RadixCache(3, SIZE, lower=Lower())
    cache.release(fill(cache, ids(1, 2, 3, 4, 5)))
    assert stored == [ids(1, 2).tobytes(), ids(3, 4).tobytes()]
    assert cache.evict(3) == 3
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
    assert len(list(cache.roots)) <= 2
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


@pytest.mark.parametrize("policy, gone", [("lru", 2), ("lfu", 3), ("fifo", 1)])
def test_eviction_policies(policy: str, gone: int) -> None:
    """1 is the oldest and used last, 2 is used most, but not lately; 3 is never used."""
    cache = RadixCache(3, SIZE, policy=policy)
    for value in (1, 2):
        cache.release(fill(cache, ids(value, value)))
    for value in (2, 2, 2):
        cache.release(cache.match(ids(value, value), "", 2))
    cache.release(fill(cache, ids(3, 3)))
    cache.release(cache.match(ids(1, 1), "", 2))
    assert cache.evict(1) == 1
    assert [v for v in (1, 2, 3) if not cache.match(ids(v, v), "", 2).blocks] == [gone]


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"lru, lfu, fifo.*'random'"):
        EngineConfig(radix_eviction_policy="random")  # type: ignore[arg-type]
