"""Processes that are measured: how long they take to answer, how much memory they held."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from fourfold.errors import FourfoldError


def first_output_seconds(command: Sequence[str], clock: Callable[[], float] = time.perf_counter) -> float:
    """From starting the command to the first byte it writes to standard output, which ends it.

    Raises FourfoldError with the end of its standard error if it fails before.
    """
    started = clock()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        first = process.stdout.read(1)
        seconds = clock() - started
        if not first:
            said = process.stderr.read().decode(errors="replace").strip()
            raise FourfoldError(f"{command[0]} wrote nothing; it said: {said[-500:]}")
        process.kill()
    return seconds


def start_to_first_token(model: str, flags: Sequence[str]) -> float:
    """Seconds from starting `fourfold run` to the first character of its answer. Raises FourfoldError."""
    command = [sys.executable, "-m", "fourfold", "run", model, "-p", "The", "--raw", "-n", "4", "--temp", "0"]
    return first_output_seconds([*command, "--ignore-eos", *flags])


def process_tree(pid: int) -> list[int]:
    """The process and all that descend from it (Linux)."""
    found = [pid]
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += process_tree(int(child))
    return found


def peak_memory(pid: int) -> int:
    """Sum of the peak resident sizes (bytes) of a process and its descendants; shared pages count in each."""
    total = 0
    for each in process_tree(pid):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{each}/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    total += int(line.split()[1]) * 1024
    return total


def proportional_memory(pid: int) -> int:
    """Resident bytes of a process and its descendants now; a page that n processes share counts 1/n in each
    (PSS), so what two of them share counts once."""
    total = 0
    for each in process_tree(pid):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{each}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
    return total
