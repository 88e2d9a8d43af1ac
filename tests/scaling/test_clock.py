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


@pytest.mark.parametrize(
    ("steps", "ticks"),
    [
        ([0, 0, 0], [1, 2, 3]),  # one optimizer
        ([0, 1, 0, 1], [1, 1, 2, 2]),  # in turn, or two of one model
        ([1, 0, 1, 0], [1, 1, 2, 2]),
        ([1, 1, 1, 0, 1, 1, 1, 0], [1, 2, 3, 3, 4, 5, 6, 6]),  # three steps of one beside one of the other
        ([0, 1, 0, 2, 0, 1], [1, 1, 2, 2, 3, 3]),
    ],
)
def test_optimizers_that_step_before_one_steps_again_make_one_step(steps, ticks):
    clock, weights = StepClock(), []
    led = StepClock()
    clock.lead(led)
    for one in (clock, led):
        one.subscribe(lambda: weights.append("step"))
        one.watch_weights(lambda: weights.append("part"))
    seen = []
    for i, number in enumerate(steps, 1):
        clock.optimizer_stepped(number)
        seen.append(clock.ticks)
        assert len(weights) == 2 * i  # whoever keeps what depends on weights hears of each
    assert seen == ticks
    assert led.ticks == clock.ticks
