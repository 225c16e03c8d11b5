"""Cores and memory under faked cgroup files; tests of the real ones only check that they are plausible."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from fourfold import _native
from fourfold.build.machine import available_memory, memory_nodes, memory_spread_over, usable_cores

MEMINFO = "MemTotal:       16384000 kB\nMemFree:         1000000 kB\nMemAvailable:    8000000 kB\n"


@pytest.fixture
def four_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Eight CPUs, two to a core: cpu n and n + 4 are siblings. Returns the topology pattern."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    for cpu in range(8):
        (tmp_path / f"siblings{cpu}").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    return str(tmp_path / "siblings{}")


def write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.mark.parametrize(
    "files, cores",
    [
        ({}, 4),
        ({"cpu.max": "max 100000\n"}, 4),
        ({"cpu.max": "200000 100000\n"}, 2),
        ({"cpu.max": "150000 100000\n"}, 2),  # rounded up
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "1000 100000\n"}, 1),
        ({"cpu.max": "1600000 100000\n"}, 4),
        ({"cpu.max": "nonsense"}, 4),
        ({"cpu.max": "100000 0\n"}, 4),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4),
        ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
        ({"cpu/cpu.cfs_quota_us": "250000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
        ({"cpu/cpu.cfs_quota_us": "300000\n"}, 4),
    ],
)
def test_cores_are_physical_and_within_the_quota(
    four_cores: str, tmp_path: Path, files: dict[str, str], cores: int
) -> None:
    assert usable_cores(write(tmp_path / "cgroup", files), four_cores) == cores


def test_affinity_counts_only_the_cores_it_leaves(
    monkeypatch: pytest.MonkeyPatch, four_cores: str, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 5, 6})
    assert usable_cores(tmp_path, four_cores) == 2


def test_without_topology_every_cpu_is_a_core(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2}, raising=False)
    assert usable_cores(tmp_path, str(tmp_path / "none{}")) == 3


@pytest.mark.parametrize(
    "files, memory",
    [
        ({}, 8000000 * 1024),
        ({"memory.max": "max\n", "memory.current": "5\n"}, 8000000 * 1024),
        ({"memory.max": "3000000000\n", "memory.current": "1000000000\n"}, 2000000000),
        ({"memory.max": "1000\n", "memory.current": "2000\n"}, 0),
        ({"memory.max": "90000000000\n", "memory.current": "1000\n"}, 8000000 * 1024),
        ({"memory.max": "junk\n", "memory.current": "1000\n"}, 8000000 * 1024),
        ({"memory.max": "1000\n"}, 8000000 * 1024),
        (
            {
                "memory/memory.limit_in_bytes": "3000000000\n",
                "memory/memory.usage_in_bytes": "1000000000\n",
            },
            2000000000,
        ),
        (  # version 1 writes "no limit" as the largest number of pages
            {
                "memory/memory.limit_in_bytes": "9223372036854771712\n",
                "memory/memory.usage_in_bytes": "1000000000\n",
            },
            8000000 * 1024,
        ),
    ],
)
def test_memory_is_what_system_and_cgroup_leave(tmp_path: Path, files: dict[str, str], memory: int) -> None:
    (tmp_path / "meminfo").write_text(MEMINFO)
    assert available_memory(write(tmp_path / "cgroup", files), tmp_path / "meminfo") == memory


def test_memory_without_meminfo_is_the_installed_memory(tmp_path: Path) -> None:
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert available_memory(tmp_path, tmp_path / "none") == installed
    (tmp_path / "meminfo").write_text("MemTotal: 5 kB\n")
    assert available_memory(tmp_path, tmp_path / "meminfo") == installed


@pytest.mark.parametrize(
    "cpulists, status, nodes",
    [
        (["0-3", "4-7"], "", [0, 1]),
        (["0-3", "4-7"], "Mems_allowed_list:\t0-1\n", [0, 1]),
        (["0-3", "4-7"], "Mems_allowed_list:\t1\n", [1]),  # a cpuset leaves the memory of one
        (["0-1,4-5", "8-15", "2-3,6-7"], "", [0, 2]),  # no allowed CPU on node 1
        (["0-7", ""], "", [0]),  # a node of memory only, such as CXL
        (["0-7", "junk"], "Mems_allowed_list: junk\n", [0]),
        ([], "", []),
    ],
)
def test_memory_nodes_are_those_of_the_allowed_cpus(
    four_cores: str, tmp_path: Path, cpulists: list[str], status: str, nodes: list[int]
) -> None:
    root = write(tmp_path, {f"node{n}/cpulist": f"{cpus}\n" for n, cpus in enumerate(cpulists)})
    write(tmp_path, {"status": status})
    assert memory_nodes(root, tmp_path / "status") == nodes


def test_memory_nodes_of_this_machine() -> None:
    nodes = memory_nodes()
    assert nodes == sorted(set(nodes))
    assert len(nodes) <= (os.cpu_count() or 1)


def test_memory_is_left_alone_on_one_node() -> None:
    before = _native.memory_policy_is_set()
    with memory_spread_over([0]) as spread:
        assert not spread
        assert _native.memory_policy_is_set() == before


def test_memory_is_spread_while_inside_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes asked for; this machine may have one, so the system call is told of that one."""
    real = _native.spread_memory
    if _native.memory_policy_is_set() or real([0]) != 0:
        pytest.skip("a memory policy is set, or the system forbids setting one")
    real([])
    monkeypatch.setattr(_native, "spread_memory", lambda nodes: real(nodes[:1]))
    with memory_spread_over([0, 1]) as spread:
        assert spread
        assert _native.memory_policy_is_set()
        with memory_spread_over([0, 1]) as again:  # a policy that is there is respected
            assert not again
        assert _native.memory_policy_is_set()
    assert not _native.memory_policy_is_set()


def test_memory_that_cannot_be_spread_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_native, "memory_policy_is_set", lambda: False)
    monkeypatch.setattr(_native, "spread_memory", lambda nodes: errno.EPERM)
    with memory_spread_over([0, 1]) as spread:
        assert not spread
    assert "EPERM" in caplog.text


def test_nodes_that_do_not_exist_are_refused() -> None:
    assert _native.spread_memory([-1]) == errno.EINVAL
    assert _native.spread_memory([1024]) == errno.EINVAL
    assert not _native.memory_policy_is_set()


def test_this_machine() -> None:
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)
    assert 0 < available_memory() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
