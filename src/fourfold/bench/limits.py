"""What this machine can do at most: memory read bandwidth, and multiply-add rates of each kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fourfold import _native
from fourfold.bench.stats import Runs
from fourfold.progress import Progress, silent

Kind = Literal["read", "int8", "bf16", "fp32"]
PEAKS: tuple[Kind, ...] = ("int8", "bf16", "fp32")

BUFFER_BYTES = 512 << 20
"""Read per run: many times what caches hold."""
PEAK_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Limit:
    """runs: bytes/s for "read", else operations/s, a multiply-add being two.  how: the instructions."""

    kind: Kind
    threads: int
    how: str
    runs: Runs


@dataclass(frozen=True, slots=True)
class Limits:
    """All that was measured in one run."""

    isa: str
    measured: tuple[Limit, ...]

    def median(self, kind: Kind, threads: int) -> float | None:
        """Of exactly that many threads; None if this instruction set has no such operation."""
        found = [m for m in self.measured if m.kind == kind and m.threads == threads]
        return found[0].runs.median if found else None


def thread_counts(most: int) -> list[int]:
    """1, 2, 4, ... and `most` itself."""
    counts = [1]
    while counts[-1] * 2 < most:
        counts.append(counts[-1] * 2)
    return counts if most == 1 else [*counts, most]


def measure_limits(
    threads: Sequence[int],
    repeats: int,
    *,
    isa: str = "auto",
    buffer_bytes: int = BUFFER_BYTES,
    peak_seconds: float = PEAK_SECONDS,
    progress: Progress = silent,
) -> Limits:
    """Every kind for every number of threads; the repeats are interleaved, after one round to warm up.

    buffer_bytes: read per run, held once per entry of `threads`.  Raises ValueError for an unknown isa.
    """
    name = _native.isas()[-1] if isa == "auto" else isa
    benches = {count: _native.LimitBench(name, count, buffer_bytes) for count in dict.fromkeys(threads)}
    runs: dict[tuple[Kind, int], list[float]] = {}
    for repeat in range(repeats + 1):
        progress("measuring the machine", repeat, repeats + 1, "rounds")
        for count, bench in benches.items():
            figures: dict[Kind, float] = {"read": bench.bytes / bench.read()}
            for kind in PEAKS:
                if bench.instructions(kind) is not None:
                    figures[kind] = bench.peak(kind, peak_seconds)
            if repeat:
                for kind, figure in figures.items():
                    runs.setdefault((kind, count), []).append(figure)
    measured = tuple(
        Limit(kind, count, _how(benches[count], kind, name), Runs(tuple(values)))
        for (kind, count), values in sorted(
            runs.items(), key=lambda item: (("read", *PEAKS).index(item[0][0]), item[0][1])
        )
    )
    return Limits(name, measured)


def _how(bench: _native.LimitBench, kind: Kind, isa: str) -> str:
    if kind == "read":
        return f"{isa} loads, {bench.bytes >> 20} MiB"
    return bench.instructions(kind) or ""
