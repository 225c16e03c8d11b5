"""Encoded KV blocks in this process's memory: the tier between pool and disk."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


@dataclass(slots=True)
class _Entry:
    slot: int
    busy: int
    """Who reads or writes it now; a busy entry is not thrown out."""
    ready: bool = False
    doomed: bool = False
    """Goes as soon as nobody is busy with it."""
    source: str = "host"


class HostPool:
    """Slots of one allocation by digest; the longest unused goes first. Thread-safe."""

    def __init__(self, slots: int, slot_bytes: int, removed: Callable[[bytes], None]) -> None:
        """slots: at least 1. Their memory is taken from the system when first used.
        removed: called with the digest of what was thrown out, in the thread that needed the slot."""
        self._data = np.empty((slots, slot_bytes), np.uint8)
        self._free = list(range(slots - 1, -1, -1))
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self._removed = removed
        self._lock = threading.Lock()
        self.slots = slots

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, digest: bytes) -> bool:
        """Whether it can be had; not while it is being written."""
        with self._lock:
            entry = self._entries.get(digest)
            return entry is not None and entry.ready

    def reserve(self, digest: bytes, source: str = "host") -> Bytes | None:
        """A slot to write to, then `commit` or `cancel`. None if it is here or coming, or all are busy."""
        with self._lock:
            if digest in self._entries:
                return None
            gone = None
            if not self._free:
                gone = next((d for d, entry in self._entries.items() if not entry.busy), None)
                if gone is None:
                    return None
                self._free.append(self._entries.pop(gone).slot)
            slot = self._free.pop()
            self._entries[digest] = _Entry(slot, busy=1, source=source)
        if gone is not None:
            self._removed(gone)
        return self._slot(slot)

    def commit(self, digest: bytes) -> None:
        with self._lock:
            entry = self._entries[digest]
            entry.ready = not entry.doomed
            self._release(digest, entry)

    def cancel(self, digest: bytes) -> None:
        with self._lock:
            self._free.append(self._entries.pop(digest).slot)

    def hold(self, digest: bytes) -> tuple[Bytes, str] | None:
        """Content, to be read only, and where it came from; then `let_go`. None if it is not here."""
        with self._lock:
            entry = self._entries.get(digest)
            if entry is None or not entry.ready:
                return None
            entry.busy += 1
            self._entries.move_to_end(digest)
            return self._slot(entry.slot), entry.source

    def let_go(self, digest: bytes) -> None:
        with self._lock:
            self._release(digest, self._entries[digest])

    def discard(self, digest: bytes) -> None:
        """Its content may be wrong: it can be had no more. Nothing happens if it is not here."""
        with self._lock:
            entry = self._entries.get(digest)
            if entry is None or entry.doomed:
                return
            was_here, entry.ready, entry.doomed = entry.ready, False, True
            entry.busy += 1
            self._release(digest, entry)
        if was_here:
            self._removed(digest)

    def _release(self, digest: bytes, entry: _Entry) -> None:
        entry.busy -= 1
        if entry.doomed and not entry.busy:
            self._free.append(self._entries.pop(digest).slot)

    def _slot(self, slot: int) -> Bytes:
        content: Bytes = self._data[slot]
        return content
