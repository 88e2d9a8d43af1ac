"""The step clock."""

from __future__ import annotations

import copy

import pytest

from acceler8.scaling import StepClock


class Counter:
    def __init__(self, clock: StepClock) -> None:
        self.clock, self.seen = clock, []
        clock.subscribe(self.on_tick)

    def on_tick(self) -> None:
        self.seen.append(self.clock.ticks)


def test_subscribers_hear_every_tick_in_their_order():
    clock, order = StepClock(), []
    clock.subscribe(lambda: order.append("first"))
    clock.subscribe(lambda: order.append("second"))
    clock.tick()
    clock.tick()
    assert order == ["first", "second"] * 2
    assert clock.ticks == 2


def test_a_late_subscriber_hears_from_then_on():
    clock = StepClock()
    clock.tick()
    counter = Counter(clock)
    clock.tick()
    assert counter.seen == [2]


def test_unsubscribe():
    clock = StepClock()
    counter = Counter(clock)
    clock.unsubscribe(counter.on_tick)
    clock.tick()
    assert counter.seen == []
    with pytest.raises(ValueError, match="not in list"):
        clock.unsubscribe(counter.on_tick)


def test_a_copied_clock_calls_the_copied_subscriber():
    counter = Counter(StepClock())
    copied = copy.deepcopy(counter)
    copied.clock.tick()
    assert (counter.seen, copied.seen) == ([], [1])
    counter.clock.tick()
    assert (counter.seen, copied.seen) == ([1], [1])
