"""What this process may use of the machine: cores, memory. Affinity and cgroup limits are respected.

Threads are never bound to cores: beside another process, a bound thread waits for its core while another one
is free. Who wants to give a part of the machine does so with taskset, a cpuset or numactl: that is followed.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Iterator
from pathlib import Path

log = logging.getLogger(__name__)

_CGROUP = Path("/sys/fs/cgroup")
_MEMORY_FILES = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)
"""Of cgroup version 2 and version 1."""
_NODES = Path("/sys/devices/system/node")
_STATUS = Path("/proc/self/status")
_TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


def cores(topology: str = _TOPOLOGY) -> list[list[int]]:
    """The CPUs this process may run on, ascending, one list for each physical core."""
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    found: dict[str, list[int]] = {}
    for cpu in sorted(cpus):
        siblings = str(cpu)
        with contextlib.suppress(OSError):
            siblings = Path(topology.format(cpu)).read_text().strip()
        found.setdefault(siblings, []).append(cpu)
    return list(found.values())


def usable_cores(cgroup: Path = _CGROUP, topology: str = _TOPOLOGY) -> int:
    """Physical cores this process may run on, at most its cgroup's CPU quota (rounded up), at least 1."""
    found = len(cores(topology))
    quota = _cpu_quota(cgroup)
    return max(1, found if quota is None else min(found, -int(-quota // 1)))


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


def memory_nodes(nodes: Path = _NODES, status: Path = _STATUS) -> list[int]:
    """The memory nodes near the CPUs this process may run on and that it may allocate from, ascending."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    found = []
    for folder in nodes.glob("node[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            if allowed & _numbers((folder / "cpulist").read_text()):
                found.append(int(folder.name.removeprefix("node")))
    with contextlib.suppress(OSError, ValueError, StopIteration):
        line = next(x for x in status.read_text().splitlines() if x.startswith("Mems_allowed_list:"))
        found = [node for node in found if node in _numbers(line.partition(":")[2])]
    return sorted(found)


def _numbers(ranges: str) -> set[int]:
    """Of a list as the kernel writes it: "0-2,8" is 0, 1, 2, 8."""
    numbers: set[int] = set()
    for part in ranges.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            numbers.update(range(int(first), int(last or first) + 1))
    return numbers


@contextlib.contextmanager
def memory_spread_over(nodes: list[int]) -> Iterator[bool]:
    """Inside, memory that this thread and those it starts touch first comes from all `nodes` in turn.

    The threads started inside go on so. Yields whether it was done: not with fewer than two nodes, nor if a
    memory policy is already set (numactl), nor where the system forbids it (containers without CAP_SYS_NICE),
    which is logged.
    """
    from fourfold import _native

    if len(nodes) < 2 or _native.memory_policy_is_set():
        yield False
        return
    failed = _native.spread_memory(nodes)
    if failed:
        log.warning(
            "memory is not spread over the nodes %s: %s. Weights may lie far from half of the threads; "
            "numactl --interleave=all does the same from outside",
            nodes,
            errno.errorcode.get(failed, failed),
        )
        yield False
        return
    try:
        yield True
    finally:
        _native.spread_memory([])
