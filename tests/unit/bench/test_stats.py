"""Percentiles against numpy's, medians and ratios."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.bench.stats import Distribution, Runs, percentile

numbers = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50)


@given(numbers, st.floats(0, 100))
def test_percentile_is_numpys(values: list[float], percent: float) -> None:
    assert percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)), abs=1e-6)


@pytest.mark.parametrize("percent", [-1, 101, float("nan")])
def test_no_such_percentile(percent: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 100"):
        percentile([1.0], percent)


def test_nothing_has_no_percentile() -> None:
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)
    assert Distribution.of([]) is None


@given(numbers)
def test_distribution_is_numpys(values: list[float]) -> None:
    d = Distribution.of(values, (25, 99))
    assert d is not None
    assert (d.count, d.min, d.max) == (len(values), min(values), max(values))
    assert d.mean == pytest.approx(np.mean(values), abs=1e-6)
    assert d.std == pytest.approx(np.std(values), abs=1e-5, rel=1e-6)
    assert d.record()["p99"] == pytest.approx(np.percentile(values, 99), abs=1e-6)


def test_runs() -> None:
    runs = Runs((4.0, 1.0, 2.0))
    assert (runs.median, runs.low, runs.high) == (2.0, 1.0, 4.0)
    assert runs.scaled(10).values == (40.0, 10.0, 20.0)
    assert runs.per(8).values == (2.0, 8.0, 4.0)
    assert runs.ratio(Runs((2.0, 2.0, 2.0))).values == (2.0, 0.5, 1.0)
    with pytest.raises(ValueError):
        runs.ratio(Runs((1.0,)))
    with pytest.raises(ValueError, match="at least one run"):
        Runs(())
