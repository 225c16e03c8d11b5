"""The log of what changed in the prefix cache, for routers and other tiers that want to know what is where.

Numbered from 1 without gaps. The log keeps the last ones; who reads further back is told how many are lost.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable
from itertools import islice

from fourfold.engine.operations import MAX_PAGE, BlockMoved, EventPage, KVEvent

DIGEST_BYTES = 16
LOG_EVENTS = 8192

KVEventSink = Callable[[KVEvent], None]


class EventLog:
    """One thread appends and reads."""

    def __init__(self, size: int = LOG_EVENTS) -> None:
        self.epoch = os.urandom(8).hex()
        self.last = 0
        self._kept: deque[KVEvent] = deque(maxlen=size)

    def append(self, event: KVEvent) -> None:
        self.last += 1
        self._kept.append(event)

    def read(self, after: int, limit: int = MAX_PAGE, salt: str | None = None) -> EventPage:
        """Events with numbers above `after`, at most `limit`. salt: only those of that one; None: all."""
        before_kept = self.last - len(self._kept)
        lost = max(0, before_kept - max(0, after))
        start = max(0, after - before_kept)
        found: list[tuple[int, KVEvent]] = []
        for number, event in enumerate(islice(self._kept, start, None), before_kept + start + 1):
            if salt is not None and (isinstance(event, BlockMoved) or event.salt != salt):
                continue
            if len(found) == limit:
                return EventPage(epoch=self.epoch, last=self.last, lost=lost, numbered=found, more=True)
            found.append((number, event))
        return EventPage(epoch=self.epoch, last=self.last, lost=lost, numbered=found, more=False)


def root_digest(salt: str) -> bytes:
    """Digest of the empty prefix of one salt. BLAKE2b: the same in every process and machine."""
    return hashlib.blake2b(
        salt.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES, person=b"fourfold-root"
    ).digest()


def block_digest(parent: bytes, key: bytes) -> bytes:
    """Digest of a prefix: BLAKE2b of the parent's digest and the block's token ids (int32, native order)."""
    return hashlib.blake2b(parent + key, digest_size=DIGEST_BYTES, person=b"fourfold-block").digest()
