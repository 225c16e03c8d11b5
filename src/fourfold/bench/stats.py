"""Medians, percentiles and ratios of repeated measurements."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Runs:
    """One figure, measured several times; at least once, in the order of measuring."""

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError("a figure needs at least one run")

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def low(self) -> float:
        return min(self.values)

    @property
    def high(self) -> float:
        return max(self.values)

    def scaled(self, factor: float) -> Runs:
        return Runs(tuple(value * factor for value in self.values))

    def per(self, amount: float) -> Runs:
        """Seconds → amount per second."""
        return Runs(tuple(amount / value for value in self.values))

    def ratio(self, other: Runs) -> Runs:
        """Run by run: what was measured one after the other is compared with each other. ValueError if the
        numbers of runs differ."""
        return Runs(tuple(a / b for a, b in zip(self.values, other.values, strict=True)))

    def record(self) -> dict[str, object]:
        """For JSON."""
        return {"median": self.median, "min": self.low, "max": self.high, "runs": list(self.values)}


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear interpolation between the two nearest ranks, as numpy.percentile does by default.

    Raises ValueError if there are no values or percent is outside 0 to 100.
    """
    if not values:
        raise ValueError("no values to take a percentile of")
    if not 0 <= percent <= 100:
        raise ValueError(f"a percentile is between 0 and 100, got {percent}")
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


@dataclass(frozen=True, slots=True)
class Distribution:
    """A sample's size, mean, standard deviation, extremes and percentiles."""

    count: int
    mean: float
    std: float
    min: float
    max: float
    percentiles: dict[float, float]

    @staticmethod
    def of(values: Iterable[float], percents: Sequence[float] = (50, 90, 99)) -> Distribution | None:
        """None if there are no values."""
        sample = list(values)
        if not sample:
            return None
        return Distribution(
            len(sample),
            statistics.fmean(sample),
            statistics.pstdev(sample),
            min(sample),
            max(sample),
            {percent: percentile(sample, percent) for percent in percents},
        )

    def record(self) -> dict[str, object]:
        """For JSON."""
        return {
            "count": self.count,
            "mean": self.mean,
            "std": self.std,
            "min": self.min,
            "max": self.max,
            **{f"p{percent:g}": value for percent, value in self.percentiles.items()},
        }
