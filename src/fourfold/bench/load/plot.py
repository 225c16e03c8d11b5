"""Throughput against latency as an SVG file, without a plotting library."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 720, 440
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 50, 60
COLORS = ("#1b6ca8", "#d1495b", "#3a7d44", "#8e5ea2", "#e0a030", "#555555")


@dataclass(frozen=True, slots=True)
class Point:
    """label: written beside it."""

    x: float
    y: float
    label: str = ""


def line_plot(title: str, x_label: str, y_label: str, series: Mapping[str, Sequence[Point]]) -> str:
    """An SVG document. Axes begin at 0. Raises ValueError if there are no points."""
    points = [point for line in series.values() for point in line]
    if not points:
        raise ValueError("nothing to plot")
    x_ticks, y_ticks = ticks(max(p.x for p in points)), ticks(max(p.y for p in points))

    def x_at(value: float) -> float:
        return LEFT + value / x_ticks[-1] * (WIDTH - LEFT - RIGHT)

    def y_at(value: float) -> float:
        return HEIGHT - BOTTOM - value / y_ticks[-1] * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(LEFT, 22, title, size=15),
    ]
    for tick in x_ticks:
        parts.append(_line(x_at(tick), TOP, x_at(tick), HEIGHT - BOTTOM, "#dddddd"))
        parts.append(_text(x_at(tick), HEIGHT - BOTTOM + 18, f"{tick:g}", anchor="middle"))
    for tick in y_ticks:
        parts.append(_line(LEFT, y_at(tick), WIDTH - RIGHT, y_at(tick), "#dddddd"))
        parts.append(_text(LEFT - 8, y_at(tick) + 4, f"{tick:g}", anchor="end"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 16, x_label, anchor="middle"))
    parts.append(
        f'<g transform="rotate(-90 18 {HEIGHT / 2})">{_text(18, HEIGHT / 2, y_label, anchor="middle")}</g>'
    )
    for index, (name, line) in enumerate(series.items()):
        color = COLORS[index % len(COLORS)]
        path = " ".join(f"{x_at(p.x):.1f},{y_at(p.y):.1f}" for p in line)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        for p in line:
            parts.append(f'<circle cx="{x_at(p.x):.1f}" cy="{y_at(p.y):.1f}" r="3.5" fill="{color}"/>')
            if p.label:
                parts.append(_text(x_at(p.x) + 6, y_at(p.y) - 6, p.label, color=color, size=11))
        parts.append(_text(LEFT + 10 + 130 * index, 40, name, color=color))
    return "\n".join([*parts, "</svg>", ""])


def ticks(largest: float) -> list[float]:
    """From 0 to at least `largest`, in steps of 1, 2 or 5 times a power of ten; about five of them."""
    if not largest > 0:
        return [0.0, 1.0]
    rough = largest / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * times for times in (1, 2, 5, 10) if power * times >= rough * (1 - 1e-9))
    return [step * i for i in range(math.ceil(largest / step - 1e-9) + 1)]


def _line(x1: float, y1: float, x2: float, y2: float, color: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}"/>'


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", color: str = "#222222", size: int = 12
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}" font-size="{size}">'
        f"{escape(text)}</text>"
    )
