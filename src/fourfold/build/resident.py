"""A file held in memory, on huge pages where the system gives them."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_HUGE_PAGE = 1 << 21
_READ = 1 << 24
"""Bytes of one read: a whole number of huge pages."""


class Resident:
    """A whole file in memory, on huge pages where the system gives them.

    Not mapped: decoding streams through all of it for every token, and a file's 4 KiB pages cost a third of
    the memory bandwidth in address translation (measured: 17 against 26 GB/s on one thread).
    """

    def __init__(self, path: Path, expected: int) -> None:
        """Raises ValueError if the file has not the expected size (bytes)."""
        with path.open("rb", buffering=0) as file:
            self._size = os.fstat(file.fileno()).st_size
            if self._size != expected:
                raise ValueError(f"{path.name} has {self._size} bytes instead of {expected}")
            size = max(1, -(-expected // _HUGE_PAGE)) * _HUGE_PAGE
            # Private: the system gives huge pages to shared memory only if told so.
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                with contextlib.suppress(OSError):  # a kernel without them: slower, not wrong
                    memory.madvise(mmap.MADV_HUGEPAGE)
            _read(file.fileno(), memoryview(memory)[:expected], path.name)
            self._bytes = np.frombuffer(memory, np.uint8)
            self._bytes.flags.writeable = False

    def run(self, start: int, nbytes: int) -> NDArray[np.uint8]:
        if not 0 <= start <= start + nbytes <= self._size:
            raise ValueError(f"bytes {start} to {start + nbytes} are outside a file of {self._size}")
        return self._bytes[start : start + nbytes]


def _read(descriptor: int, into: memoryview, name: str) -> None:
    """Fills `into` from the beginning of a file. Two threads, if there is enough to do: one does not get all
    of the memory's bandwidth. Raises OSError, or ValueError if the file ends before."""
    starts = iter(range(0, len(into), _READ))
    failures: list[Exception] = []

    def work() -> None:
        try:
            for start in starts:  # `next` on it is one step under the interpreter's lock
                at, end = start, min(start + _READ, len(into))
                while at < end:
                    count = os.preadv(descriptor, [into[at:end]], at)
                    if not count:
                        raise ValueError(f"{name} ended after {at} of {len(into)} bytes")
                    at += count
        except (OSError, ValueError) as error:
            failures.append(error)

    helper = threading.Thread(target=work, name="read-weights")
    if len(into) > _READ:
        helper.start()
    work()
    if helper.ident is not None:
        helper.join()
    if failures:
        raise failures[0]
