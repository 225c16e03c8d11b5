"""Plots are well-formed, hold every point, and have round ticks."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.bench.load.plot import Point, line_plot, ticks

SVG = "{http://www.w3.org/2000/svg}"


@given(st.floats(1e-6, 1e9))
def test_ticks(largest: float) -> None:
    values = ticks(largest)
    assert values[0] == 0
    assert values[-1] >= largest * (1 - 1e-6)
    assert 3 <= len(values) <= 8
    assert values[-2] < largest


def test_no_span() -> None:
    assert ticks(0) == [0.0, 1.0]


@given(
    st.lists(st.tuples(st.floats(0, 1e4), st.floats(0, 1e4)), min_size=1, max_size=10),
    st.text("ab<&\"'", max_size=9),
)
def test_plot(points: list[tuple[float, float]], name: str) -> None:
    series = {name: [Point(x, y, "1") for x, y in points], "other": [Point(1, 2)]}
    root = ElementTree.fromstring(line_plot(f"a & b {name}", "x <", "y", series))
    circles = root.findall(f"{SVG}circle")
    assert len(circles) == len(points) + 1
    assert all(0 <= float(c.attrib["cx"]) <= 720 and 0 <= float(c.attrib["cy"]) <= 440 for c in circles)
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert f"a & b {name}" in texts
    with pytest.raises(ValueError, match="nothing to plot"):
        line_plot("t", "x", "y", {"empty": []})
