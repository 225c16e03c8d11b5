"""Sequences that wait for a place, by tenant and user, each line in order of rank."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterator
from itertools import chain
from operator import attrgetter

from fourfold.engine.sequence import Sequence

WINDOW = 8
"""How far down a user's line is looked for a request that may overtake."""

_rank = attrgetter("rank")


class WaitingQueue:
    """Holds each sequence once. Adding and removing are O(log n) and a move within one line."""

    def __init__(self) -> None:
        self._lines: dict[str, dict[str, list[Sequence]]] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Sequence]:
        return chain.from_iterable(line for users in self._lines.values() for line in users.values())

    def tenants(self) -> Collection[str]:
        """Those with somebody waiting."""
        return self._lines.keys()

    def users(self, tenant: str) -> Collection[str]:
        """Users of a tenant with somebody waiting."""
        return self._lines[tenant].keys() if tenant in self._lines else ()

    def waits(self, tenant: str, user: str | None = None) -> bool:
        """Whether anybody of the tenant (and user) does."""
        return tenant in self._lines and (user is None or user in self._lines[tenant])

    def line(self, tenant: str) -> Iterator[Sequence]:
        """Everybody of a tenant."""
        return chain.from_iterable(self._lines.get(tenant, {}).values())

    def heads(self, tenant: str) -> Iterator[Sequence]:
        """The first few of each user's line."""
        return chain.from_iterable(line[:WINDOW] for line in self._lines[tenant].values())

    def add(self, seq: Sequence) -> None:
        insort(self._lines.setdefault(seq.tenant, {}).setdefault(seq.user, []), seq, key=_rank)
        self._size += 1

    def remove(self, seq: Sequence) -> None:
        """Raises ValueError if it does not wait."""
        users = self._lines.get(seq.tenant, {})
        line = users.get(seq.user, [])
        at = bisect_left(line, seq.rank, key=_rank)
        if at == len(line) or line[at] is not seq:
            raise ValueError(f"request {seq.request.request_id!r} is not waiting")
        del line[at]
        self._size -= 1
        if not line:
            del users[seq.user]
            if not users:
                del self._lines[seq.tenant]
