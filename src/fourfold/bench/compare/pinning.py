"""Every engine, the load client too, on the same cores."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from fourfold.build.machine import cores
from fourfold.errors import ConfigError


@contextlib.contextmanager
def pinned_to(threads: int) -> Iterator[list[int]]:
    """Inside, this process and those it starts may run on the first CPUs of `threads` physical cores only.

    Yields one CPU of each, ascending. Raises ConfigError if there are fewer.
    """
    found = cores()
    if threads > len(found):
        raise ConfigError(f"{threads} threads for each engine, but this process may use {len(found)} cores")
    chosen = sorted(core[0] for core in found)[:threads]
    if not hasattr(os, "sched_setaffinity"):
        yield chosen
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, chosen)
    try:
        yield chosen
    finally:
        os.sched_setaffinity(0, before)
