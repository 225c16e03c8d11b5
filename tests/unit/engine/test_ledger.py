"""The ledger: every block in exactly one state, and moves that are not allowed are refused."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fourfold.engine.cache import BlockState, Ledger, LedgerCounts, LedgerError


def test_a_block_goes_its_way() -> None:
    ledger = Ledger(2)
    assert ledger.counts() == LedgerCounts(2, 0, 0, 0, 2)
    block = ledger.take()
    ledger.share(block)
    assert (ledger.state(block), ledger.holders(block)) == (BlockState.LIVE, 2)
    assert not ledger.drop(block, keep=True)
    assert ledger.drop(block, keep=True)
    assert ledger.counts() == LedgerCounts(1, 1, 0, 0, 2)
    assert ledger.available == 2
    ledger.evict(block)
    assert ledger.counts() == LedgerCounts(2, 0, 0, 0, 2)
    block = ledger.begin_transfer()
    assert ledger.counts() == LedgerCounts(1, 0, 0, 1, 2)
    ledger.end_transfer(block, keep=True)
    assert ledger.is_cached(block)


def test_what_is_not_allowed_is_refused() -> None:
    ledger = Ledger(1)
    for move in (
        ledger.share,
        ledger.evict,
        lambda b: ledger.drop(b, True),
        lambda b: ledger.end_transfer(b, True),
    ):
        with pytest.raises(LedgerError, match="block 0 is FREE"):
            move(0)
    ledger.take()
    for take in (ledger.take, ledger.begin_transfer):
        with pytest.raises(LedgerError, match="no free block"):
            take()
    with pytest.raises(LedgerError, match="only CACHED"):
        ledger.evict(0)
    with pytest.raises(LedgerError, match="at least 1"):
        Ledger(0)


def test_the_check_finds_a_leak_and_a_double_free() -> None:
    ledger = Ledger(3)
    block = ledger.take()
    ledger.check([block])
    with pytest.raises(LedgerError, match="holders"):
        ledger.check([])
    with pytest.raises(LedgerError, match="holders"):
        ledger.check([block, block])


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(5)
        self.held: list[int] = []
        self.moving: list[int] = []

    @precondition(lambda self: self.ledger.free)
    @rule()
    def take(self) -> None:
        self.held.append(self.ledger.take())

    @precondition(lambda self: self.held)
    @rule(i=st.integers(0, 99))
    def share(self, i: int) -> None:
        block = self.held[i % len(self.held)]
        self.ledger.share(block)
        self.held.append(block)

    @precondition(lambda self: self.held)
    @rule(i=st.integers(0, 99), keep=st.booleans())
    def drop(self, i: int, keep: bool) -> None:
        block = self.held.pop(i % len(self.held))
        assert self.ledger.drop(block, keep) == (block not in self.held)

    @precondition(lambda self: self.ledger.cached)
    @rule(revive=st.booleans())
    def reuse_or_evict(self, revive: bool) -> None:
        block = next(b for b in range(5) if self.ledger.is_cached(b))
        if revive:
            self.ledger.share(block)
            self.held.append(block)
        else:
            self.ledger.evict(block)

    @precondition(lambda self: self.ledger.free)
    @rule()
    def begin(self) -> None:
        self.moving.append(self.ledger.begin_transfer())

    @precondition(lambda self: self.moving)
    @rule(keep=st.booleans())
    def end(self, keep: bool) -> None:
        self.ledger.end_transfer(self.moving.pop(), keep)

    @invariant()
    def balances(self) -> None:
        self.ledger.check(self.held)
        counts = self.ledger.counts()
        assert counts.free + counts.cached + counts.live + counts.in_transfer == counts.total
        assert counts.live == len(set(self.held))
        assert counts.in_transfer == len(self.moving)


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
