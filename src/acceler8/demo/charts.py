"""Loss curves as inline SVG with HTML labels, so that a report needs no script and no other file.

The SVG holds lines only and stretches to the space it gets (``preserveAspectRatio="none"``, strokes that do
not scale); the numbers beside it are HTML, placed in percent. Text inside a stretched or shrunk SVG would be
unreadable on a phone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

MAX_POINTS = 500
"""Longest line drawn; longer ones are averaged down, which is all that a screen can show."""

Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line of a chart: steps and values, a label for the legend and a CSS class that colours it."""

    label: str
    css: str
    points: Sequence[Point]


@dataclass(frozen=True, kw_only=True)
class Tick:
    """A labelled position on an axis, ``percent`` from the left or from the top."""

    label: str
    percent: float


@dataclass(frozen=True, kw_only=True)
class Line:
    """A series ready to draw: ``points`` is the attribute of an SVG polyline in a box of 100 by 100."""

    label: str
    css: str
    points: str


@dataclass(frozen=True, kw_only=True)
class Chart:
    """What the report's template draws."""

    title: str
    lines: list[Line]
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    zero_percent: float | None
    """Where the value 0 lies, percent from the top; None when it is outside."""


def nice_ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Return round numbers (1, 2 or 5 times a power of ten apart) from ``low`` to ``high``, about ``wanted``
    of them.
    """
    span = high - low
    if span <= 0:
        return [low]
    raw = span / wanted
    power = 10.0 ** math.floor(math.log10(raw))
    step = next((m * power for m in (1, 2, 5) if m * power >= raw), 10 * power)
    first = math.ceil(low / step - 1e-9)
    count = math.floor(high / step + 1e-9) - first + 1
    return [round((first + i) * step, 12) for i in range(count)]


def smooth(points: Sequence[Point], width: int) -> list[Point]:
    """Running mean over the last ``width`` values; the first ones are means of what there is."""
    smoothed: list[Point] = []
    total = 0.0
    for i, (x, y) in enumerate(points):
        total += y - (points[i - width][1] if i >= width else 0.0)
        smoothed.append((x, total / min(i + 1, width)))
    return smoothed


def thin_out(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """Average neighbours until at most ``limit`` points are left."""
    size = math.ceil(len(points) / limit) or 1
    groups = [points[i : i + size] for i in range(0, len(points), size)]
    return [(sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups]


def draw(title: str, series: Sequence[Series]) -> Chart:
    """Lay out the lines over common axes. Needs at least one point; a single value gets an axis around it."""
    xs = [x for one in series for x, _ in one.points]
    ys = [y for one in series for _, y in one.points]
    left, right = min(xs), max(xs)
    low, high = min(ys), max(ys)
    margin = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    low, high = low - margin, high + margin

    def across(x: float) -> float:
        return 50.0 if right == left else 100 * (x - left) / (right - left)

    def down(y: float) -> float:
        return 100 * (high - y) / (high - low)

    def line(one: Series) -> Line:
        drawn = " ".join(f"{across(x):.2f},{down(y):.2f}" for x, y in thin_out(one.points))
        return Line(label=one.label, css=one.css, points=drawn)

    return Chart(
        title=title,
        lines=[line(one) for one in series],
        x_ticks=[Tick(label=f"{x:g}", percent=across(x)) for x in nice_ticks(left, right) if x == int(x)],
        y_ticks=[Tick(label=f"{y:.4g}", percent=down(y)) for y in nice_ticks(low, high)],
        zero_percent=down(0.0) if low < 0 < high else None,
    )
