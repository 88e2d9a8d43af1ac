"""Charts: ticks, smoothing, thinning and where points land."""

from __future__ import annotations

import pytest

from acceler8.demo.charts import MAX_POINTS, Series, draw, nice_ticks, smooth, thin_out


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 400, [0, 100, 200, 300, 400]),
        (1.9, 5.6, [2, 3, 4, 5]),
        (-0.0007, 0.0025, [0, 0.001, 0.002]),
        (3, 3, [3]),
        (-1, 1, [-1, -0.5, 0, 0.5, 1]),
    ],
)
def test_ticks_are_round_numbers_inside(low: float, high: float, expected: list[float]):
    assert nice_ticks(low, high) == pytest.approx(expected)


def test_running_mean():
    points = [(1, 2.0), (2, 4.0), (3, 6.0), (4, 0.0)]
    assert smooth(points, 1) == points
    assert smooth(points, 2) == [(1, 2.0), (2, 3.0), (3, 5.0), (4, 3.0)]


def test_long_lines_are_averaged_down():
    points = [(float(i), float(i % 2)) for i in range(10 * MAX_POINTS)]
    thin = thin_out(points)
    assert len(thin) == MAX_POINTS
    assert thin[0] == (4.5, 0.5)
    assert thin_out(points[:7]) == points[:7]


def test_points_land_where_the_axes_say():
    chart = draw("t", [Series(label="a", css="bf16", points=[(1, 0.0), (3, 10.0)])])
    (left, low), (right, high) = (map(float, p.split(",")) for p in chart.lines[0].points.split())
    assert (left, right) == (0.0, 100.0)
    assert high < low  # down the screen is down the value
    assert chart.zero_percent == pytest.approx(low, abs=0.01)
    five = next(t for t in chart.y_ticks if t.label == "5")
    assert five.percent == pytest.approx(low + (high - low) * 0.5, abs=0.01)
    assert [t.label for t in chart.x_ticks] == ["1", "2", "3"]


@pytest.mark.parametrize("points", [[(1, 5.0)], [(1, 0.0)], [(1, 2.0), (2, 2.0)]])
def test_flat_and_single_points_are_drawn_inside(points: list[tuple[float, float]]):
    chart = draw("t", [Series(label="a", css="bf16", points=points)])
    for pair in chart.lines[0].points.split():
        assert all(0 <= float(number) <= 100 for number in pair.split(","))


def test_zero_line_only_where_zero_is():
    assert draw("t", [Series(label="a", css="c", points=[(1, 2.0), (2, 3.0)])]).zero_percent is None
    assert draw("t", [Series(label="a", css="c", points=[(1, -2.0), (2, 2.0)])]).zero_percent == pytest.approx(50)
