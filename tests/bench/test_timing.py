"""Percentiles by hand-computed values, and times of work that takes a known time."""

from __future__ import annotations

import time

import pytest
import torch

from acceler8.bench.timing import Spread, call_ms, percentile, queued_ms, turn_ms
from acceler8.errors import RunError

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([5.0], 0.2, 5.0),
        ([1.0, 2.0], 0.5, 1.5),
        ([3.0, 1.0, 2.0], 0.5, 2.0),
        ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 0.2, 2.0),
        ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 0.8, 5.0),
        ([10.0, 0.0], 0.0, 0.0),
        ([10.0, 0.0], 1.0, 10.0),
        ([0.0, 10.0, 20.0], 0.2, 4.0),
    ],
)
def test_percentile(values: list[float], share: float, expected: float):
    assert percentile(values, share) == pytest.approx(expected)


@pytest.mark.parametrize(("values", "share"), [([], 0.5), ([1.0], -0.1), ([1.0], 1.1)])
def test_percentile_of_nothing_is_refused(values: list[float], share: float):
    with pytest.raises(RunError, match="allowed: at least one value, 0 to 1"):
        percentile(values, share)


def test_spread_does_not_depend_on_order():
    assert Spread.of([4.0, 1.0, 3.0, 2.0]) == Spread.of([1.0, 2.0, 3.0, 4.0])
    assert Spread.of([1.0, 2.0, 30.0]).median == 2.0


def test_times_are_those_of_the_work():
    times = turn_ms(lambda: time.sleep(0.003), 3, CPU)
    assert len(times) == 3
    assert min(times) >= 3.0
    spread = call_ms(lambda: time.sleep(0.002), CPU, repeats=2, warmup=0, flush=False, sample_ms=6.0)
    assert 2.0 <= spread.median < 20.0


def test_queued_calls_take_turns_of_as_many_as_fill_a_sample():
    calls: list[str] = []
    works = {name: lambda name=name: (calls.append(name), time.sleep(0.001)) for name in "ab"}
    spreads = queued_ms(works, {"a": 1.0, "b": 10.0}, CPU, rounds=2, sample_ms=3.0)
    assert "".join(calls) == "b" + "aaab" + "baaa"
    assert all(1.0 <= spread.median < 10.0 and spread.count == 2 for spread in spreads.values())


def test_a_part_of_a_spread():
    assert Spread.of([2.0, 4.0, 6.0]).divided(2) == Spread.of([1.0, 2.0, 3.0])
