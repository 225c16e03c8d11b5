"""Who keeps its place among the running sequences when slots or KV blocks are short.

A tenant's sequences are numbered in their order (priority, then the first of each user, the second of each,
and so on), and number k of a tenant of weight w stands at k / w: everybody's first before anybody's second.
The last in that order gives way. The first of all, the oldest of the tenants' firsts, is never displaced by
another tenant's, so it always advances: no livelock. Who was displaced stands behind who displaced it, so the
two do not take turns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from fourfold.engine.sequence import Sequence

Standing = tuple[float, float, int]
"""(number in its tenant / weight, arrival, ordinal): the smaller keeps its place longer."""


def standings(running: Iterable[Sequence]) -> dict[Sequence, Standing]:
    """Of all running sequences, given in order of rank."""
    by_tenant: dict[str, list[tuple[int, int, Sequence]]] = {}
    per_user: Counter[tuple[str, str, int]] = Counter()
    for seq in running:
        key = (seq.tenant, seq.user, seq.request.priority)
        by_tenant.setdefault(seq.tenant, []).append((seq.request.priority, per_user[key], seq))
        per_user[key] += 1
    found = {}
    for members in by_tenant.values():
        members.sort(key=lambda each: each[:2])  # stable: equal ones stay in order of rank
        for number, (_, _, seq) in enumerate(members):
            found[seq] = (number / seq.request.weight, *seq.rank[1:])
    return found


def last(running: Iterable[Sequence]) -> Sequence:
    """The one that gives way first. Raises ValueError if nothing runs."""
    found = standings(running)
    return max(found, key=found.__getitem__)


def displaced_by(seq: Sequence, running: list[Sequence], service: Callable[[str], float]) -> Sequence | None:
    """Which running sequence gives its place to the waiting `seq`; None if none has to.

    Of another tenant the last of all, if that one has more places for its weight than `seq`'s tenant would
    have with this one, and has had as much service at least. Of its own tenant the last one, if its priority
    is worse, or equal and its user would still have as many places as `seq`'s. Arrival does not count.

    service: what a tenant had so far, for its weight.
    """
    if not running:
        return None
    found = standings(running)
    victim = max(found, key=found.__getitem__)
    own = [each for each in running if each.tenant == seq.tenant]
    more_places = len(own) / seq.request.weight < found[victim][0]
    if victim.tenant != seq.tenant and more_places and service(seq.tenant) <= service(victim.tenant):
        return victim
    if own:
        worst = max(own, key=found.__getitem__)
        if worst.request.priority > seq.request.priority:
            return worst
        if worst.request.priority == seq.request.priority:
            places = Counter(each.user for each in own if each.request.priority == seq.request.priority)
            if places[worst.user] > places[seq.user] + 1:
                return worst
    return None
