"""What this process may use of the machine: cores, memory. Affinity and cgroup limits are respected."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_MEMORY_FILES = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)
"""Of cgroup version 2 and version 1."""
_TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


def usable_cores(cgroup: Path = _CGROUP, topology: str = _TOPOLOGY) -> int:
    """Physical cores this process may run on, at most its cgroup's CPU quota (rounded up), at least 1."""
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = set()
    for cpu in cpus:
        siblings = str(cpu)
        with contextlib.suppress(OSError):
            siblings = Path(topology.format(cpu)).read_text().strip()
        cores.add(siblings)
    quota = _cpu_quota(cgroup)
    return max(1, len(cores) if quota is None else min(len(cores), -int(-quota // 1)))


def _cpu_quota(cgroup: Path) -> float | None:
    """CPUs per period of cgroup v2's cpu.max or v1's cfs quota; None for no limit."""
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        limit, period = (cgroup / "cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    with contextlib.suppress(OSError, ValueError):
        limit_us = int((cgroup / "cpu/cpu.cfs_quota_us").read_text())
        period_us = int((cgroup / "cpu/cpu.cfs_period_us").read_text())
        return None if limit_us <= 0 else limit_us / period_us
    return None


def available_memory(cgroup: Path = _CGROUP, meminfo: Path = Path("/proc/meminfo")) -> int:
    """Bytes that can be allocated without swapping: MemAvailable, at most what the cgroup leaves."""
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError, StopIteration):
        line = next(x for x in meminfo.read_text().splitlines() if x.startswith("MemAvailable:"))
        free = int(line.split()[1]) * 1024
    for limit_name, used_name in _MEMORY_FILES:
        with contextlib.suppress(OSError, ValueError):  # ValueError for "max"
            limit = int((cgroup / limit_name).read_text())
            free = min(free, max(0, limit - int((cgroup / used_name).read_text())))
    return free
