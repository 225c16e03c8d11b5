"""What a comparison found: figures by peer, gaps and failures."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from fourfold.bench.stats import Runs

Better = Literal["more", "less"]


@dataclass(frozen=True, slots=True)
class Figure:
    """One thing measured of several peers. unit: of the runs.  runs: by peer."""

    name: str
    unit: str
    better: Better
    runs: dict[str, Runs]

    def times_better(self, ours: str, theirs: str) -> Runs | None:
        """How many times better `ours` is, run by run, for those measured one after the other are compared
        with each other; against the median of `theirs` if it ran another number of times. None if either has
        no figure."""
        if ours not in self.runs or theirs not in self.runs:
            return None
        a, b = self.runs[ours], self.runs[theirs]
        if len(a.values) != len(b.values):
            b = Runs((b.median,) * len(a.values))
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


@dataclass(frozen=True, slots=True)
class Note:
    """Why a peer has no figure, or fewer runs, of something."""

    peer: str
    what: str
    reason: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """gaps: what a peer has no way to do, or was not repeated for its length.  failures: what went wrong."""

    figures: list[Figure]
    gaps: list[Note]
    failures: list[Note]


@dataclass(slots=True)
class Collector:
    """Runs by figure and peer, while they are measured."""

    about: dict[str, tuple[str, Better]] = field(default_factory=dict)
    values: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def add(self, name: str, unit: str, better: Better, peer: str, value: float) -> None:
        self.about[name] = (unit, better)
        self.values.setdefault(name, {}).setdefault(peer, []).append(value)

    def figures(self) -> list[Figure]:
        return [
            Figure(name, *self.about[name], {peer: Runs(tuple(v)) for peer, v in by_peer.items()})
            for name, by_peer in self.values.items()
        ]
