"""Fair sharing: which tenant is served next, which of its users, and which of their requests.

Tenants share the engine by virtual token counters (VTC; Sheng et al., "Fairness in Serving Large Language
Models", OSDI 2024): each counts the service it got, divided by its weight, and the smallest count among those
who wait is served next. A tenant that comes back is lifted to the others' level, so nobody saves up. Users of
one tenant share what it gets in the same way; what a body claims can never take from other tenants.

Priorities order the requests of one tenant. Among equal ones the first goes first, but if it fills the step a
request with less left to compute (short, or with a long known prefix) may go before: each may be overtaken by
as many tokens as its own prompt has, and then no more, so it waits at most about twice as long as in plain
order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable
from typing import Generic, TypeVar

from fourfold.engine.sequence import Sequence, SequenceState
from fourfold.engine.waiting import WaitingQueue

PROMPT_TOKEN, ANSWER_TOKEN = 1.0, 2.0
"""Service per computed token, as in the paper: an answer's token occupies a step, a prompt's shares one."""

MAX_COUNTERS = 4096
"""Counters remembered; beyond that the smallest of those who wait for nothing are forgotten."""

Key = TypeVar("Key", bound=Hashable)


class VirtualCounters(Generic[Key]):
    """Service received per key, weighted."""

    def __init__(self) -> None:
        self._counts: dict[Key, float] = {}
        self._last: float = 0.0
        """Count of the last key that stopped waiting."""

    def __len__(self) -> int:
        return len(self._counts)

    def of(self, key: Key) -> float:
        return self._counts.get(key, 0.0)

    def charge(self, key: Key, service: float) -> None:
        """service: tokens by their price, divided by the key's weight; negative to give back."""
        self._counts[key] = self._counts.get(key, 0.0) + service

    def enter(self, key: Key, waiting: Collection[Key]) -> None:
        """`key` begins to wait beside those in `waiting`: it is lifted to the least of them."""
        level = min(map(self.of, waiting)) if waiting else self._last
        self._counts[key] = max(self.of(key), level)
        if len(self._counts) > MAX_COUNTERS:
            self._forget({key, *waiting})

    def leave(self, key: Key) -> None:
        """`key` waits for nothing any more."""
        self._last = self.of(key)

    def _forget(self, kept: set[Key]) -> None:
        idle = sorted((key for key in self._counts if key not in kept), key=self.of)
        for key in idle[: max(1, len(self._counts) - MAX_COUNTERS // 2)]:
            del self._counts[key]


class FairOrder:
    """Chooses who computes next, and counts what everyone got."""

    def __init__(self) -> None:
        self.tenants: VirtualCounters[str] = VirtualCounters()
        self.users: VirtualCounters[tuple[str, str]] = VirtualCounters()

    def entered(self, seq: Sequence, queue: WaitingQueue) -> None:
        """To be called before `seq` joins the queue."""
        tenant, user = seq.tenant, seq.user
        if not queue.waits(tenant):
            self.tenants.enter(tenant, queue.tenants())
        if not queue.waits(tenant, user):
            self.users.enter((tenant, user), [(tenant, each) for each in queue.users(tenant)])

    def left(self, seq: Sequence, queue: WaitingQueue) -> None:
        """To be called after `seq` left the queue."""
        if not queue.waits(seq.tenant):
            self.tenants.leave(seq.tenant)
        if not queue.waits(seq.tenant, seq.user):
            self.users.leave((seq.tenant, seq.user))

    def charge(self, seq: Sequence, count: int) -> None:
        """`count` tokens of `seq` are computed in this step. What a preemption made it compute again, and
        what came from the cache, costs nothing."""
        start, end = seq.charged, seq.computed + count
        service = 0.0
        if end > start:
            prompt = max(0, min(end, seq.prompt_len) - start)
            service = (prompt * PROMPT_TOKEN + (end - start - prompt) * ANSWER_TOKEN) / seq.request.weight
            self._count(seq, service)
            seq.charged = end
        seq.last_charge = (service, start)

    def found(self, seq: Sequence) -> None:
        """What is computed of `seq` came from the cache."""
        seq.charged = max(seq.charged, seq.computed)

    def refund(self, seq: Sequence) -> None:
        """The tokens charged last are not computed after all."""
        service, seq.charged = seq.last_charge
        self._count(seq, -service)
        seq.last_charge = (0.0, seq.charged)

    def choose(
        self,
        prefills: Iterable[Sequence],
        queue: WaitingQueue | None,
        skipped: Collection[Sequence],
        closed: Collection[str],
        need: Callable[[Sequence], int],
        room: int,
    ) -> Sequence | None:
        """Who computes next: a running sequence of `prefills`, or a waiting one.

        queue: None if nobody is admitted.  skipped: not these.  closed: nobody waiting of these tenants.
        need: tokens that a waiting sequence would have to compute.  room: tokens left in this step.
        """
        pools: dict[str, list[Sequence]] = {}
        for seq in prefills:
            if seq.state == SequenceState.RUNNING and seq not in skipped:
                pools.setdefault(seq.tenant, []).append(seq)
        if queue is not None:
            for tenant in queue.tenants():
                if tenant not in closed:
                    heads = [seq for seq in queue.heads(tenant) if seq not in skipped]
                    if heads:
                        pools.setdefault(tenant, []).extend(heads)
        if not pools:
            return None
        pool = (
            next(iter(pools.values()))
            if len(pools) == 1
            else min(pools.values(), key=lambda each: (self.tenants.of(each[0].tenant), _oldest(each)))
        )
        return self._within_tenant(pool, need, room)

    def overtake(self, seq: Sequence, others: Iterable[Sequence], count: int) -> None:
        """`seq` computes `count` tokens now, before those of `others` that were there first."""
        for other in others:
            if other.rank < seq.rank and other.user == seq.user and other.tenant == seq.tenant:
                other.patience -= count

    def _within_tenant(self, pool: list[Sequence], need: Callable[[Sequence], int], room: int) -> Sequence:
        if len(pool) == 1:
            return pool[0]
        priority = min(seq.request.priority for seq in pool)
        pool = [seq for seq in pool if seq.request.priority == priority]
        user = min(pool, key=lambda seq: (self.users.of((seq.tenant, seq.user)), seq.rank)).user
        line = sorted((seq for seq in pool if seq.user == user), key=lambda seq: seq.rank)
        for index, seq in enumerate(line):
            if seq.patience <= 0:  # it was overtaken enough
                line = line[: index + 1]
                break
        left = {
            seq: len(seq.tokens) - seq.computed if seq.state == SequenceState.RUNNING else need(seq)
            for seq in line
        }
        if left[line[0]] <= room:
            return line[0]  # it is done in this step anyway
        return min(line, key=lambda seq: (left[seq], seq.rank))

    def _count(self, seq: Sequence, service: float) -> None:
        self.tenants.charge(seq.tenant, service)
        self.users.charge((seq.tenant, seq.user), service)


def _oldest(pool: list[Sequence]) -> tuple[float, int]:
    return min(seq.rank[1:] for seq in pool)
