"""The comparison: every workload by every peer, in turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from fourfold.bench.compare.peer import Peer, ServerNeeds
from fourfold.bench.compare.serving import RunningServer, ServerLoad, free_port
from fourfold.bench.engine import Workload
from fourfold.bench.stats import Runs
from fourfold.errors import FourfoldError
from fourfold.progress import Progress, silent

Better = Literal["more", "less"]


@dataclass(frozen=True, slots=True)
class Figure:
    """One thing measured of all peers. unit: of the runs.  runs: by peer, in the same order for all."""

    name: str
    unit: str
    better: Better
    runs: dict[str, Runs]

    def times_better(self, ours: str, theirs: str) -> Runs | None:
        """How many times better `ours` is, run by run; None if either has no figure."""
        if ours not in self.runs or theirs not in self.runs:
            return None
        a, b = self.runs[ours], self.runs[theirs]
        return a.ratio(b) if self.better == "more" else b.ratio(a)

    def best_other(self, ours: str) -> str | None:
        others = {name: runs.median for name, runs in self.runs.items() if name != ours}
        if not others:
            return None
        return (
            max(others, key=others.__getitem__)
            if self.better == "more"
            else min(others, key=others.__getitem__)
        )


@dataclass(slots=True)
class Comparison:
    """failures: peer → why it has no more figures."""

    figures: list[Figure] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)


class _Collector:
    """Runs by figure and peer, while they are measured."""

    def __init__(self) -> None:
        self.about: dict[str, tuple[str, Better]] = {}
        self.values: dict[str, dict[str, list[float]]] = {}

    def add(self, name: str, unit: str, better: Better, peer: str, value: float) -> None:
        self.about[name] = (unit, better)
        self.values.setdefault(name, {}).setdefault(peer, []).append(value)

    def figures(self, repeats: int) -> list[Figure]:
        """Of peers that finished every repeat."""
        found = []
        for name, by_peer in self.values.items():
            runs = {peer: Runs(tuple(v)) for peer, v in by_peer.items() if len(v) == repeats}
            if runs:
                found.append(Figure(name, *self.about[name], runs))
        return found


def compare(
    peers: Sequence[Peer],
    workloads: Sequence[Workload],
    loads: Sequence[ServerLoad],
    repeats: int,
    *,
    threads: int,
    with_servers: bool,
    progress: Progress = silent,
) -> Comparison:
    """Each repeat runs each workload once by each peer, one after the other, and then each server in turn.

    with_servers: start the peers' servers, for `loads`, start to first token and peak memory. They all get a
    KV cache for the largest load. A peer that fails is left out from then on.
    """
    collected = _Collector()
    result = Comparison()

    def attempt(peer: Peer, what: str) -> bool:
        progress(f"{peer.name}: {what}", 0, None, "runs")
        return peer.name not in result.failures

    for repeat in range(repeats):
        for workload in workloads:
            for peer in peers:
                if attempt(peer, f"{workload.name}, {repeat + 1} of {repeats}"):
                    try:
                        speed = peer.run(workload)
                    except FourfoldError as error:
                        result.failures[peer.name] = f"{workload.name}: {error}"
                        continue
                    if speed is not None:
                        collected.add(workload.name, "tok/s", "more", peer.name, speed)
        if with_servers:
            for peer in peers:
                if attempt(peer, f"server, {repeat + 1} of {repeats}"):
                    try:
                        _serve(peer, loads, repeat, threads, collected)
                    except FourfoldError as error:
                        result.failures[peer.name] = f"server: {error}"
    result.figures = collected.figures(repeats)
    return result


def _serve(peer: Peer, loads: Sequence[ServerLoad], seed: int, threads: int, collected: _Collector) -> None:
    sequences = max((load.concurrency for load in loads), default=1)
    longest = max((load.prompt + load.output for load in loads), default=512)
    needs = ServerNeeds(free_port(), threads, sequences, sequences * (-(-longest // 32) * 32 + 32))
    command = peer.server(needs)
    if command is None:
        return
    with RunningServer(command, needs.port) as server:
        collected.add("start", "s", "less", peer.name, server.start_seconds)
        server.warm_up(seed)
        for load in loads:
            measured = server.measure(load, seed)
            collected.add(load.name, "tok/s", "more", peer.name, measured.output_rate)
            for metric in ("ttft", "tpot"):
                distribution = measured.distributions[metric]
                if distribution is not None:
                    value = distribution.percentiles[50] * 1e3
                    collected.add(f"{load.name} {metric} p50", "ms", "less", peer.name, value)
        collected.add("peak memory", "MB", "less", peer.name, server.peak_memory / 1e6)
