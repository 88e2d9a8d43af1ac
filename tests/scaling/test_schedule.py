"""Windows of steps, and that a schedule follows its clock at boundaries and when it is set."""

from __future__ import annotations

import copy

import pytest

from acceler8.errors import RecipeError
from acceler8.scaling import Schedule, StepClock, StepWindow


@pytest.mark.parametrize(
    ("text", "steps", "said", "written"),
    [
        (":3", [0, 1, 2], "the first 3 steps", ":3"),
        ("3:", [3, 4, 5], "steps from 3 on", "3:"),
        (" 2 : 4 ", [2, 3], "steps 2 to 3", "2:4"),
        ("0:2", [0, 1], "the first 2 steps", ":2"),
        (":", [0, 1, 2, 3, 4, 5], "every step", ":"),
        ("0:", [0, 1, 2, 3, 4, 5], "every step", ":"),
    ],
)
def test_windows(text, steps, said, written):
    window = StepWindow.of(text)
    assert [step for step in range(6) if window.holds(step)] == steps
    assert (window.said, str(window), window.is_all) == (said, written, written == ":")
    assert StepWindow.of(str(window)) == window


@pytest.mark.parametrize(
    "text", ["", "10", "1:2:3", "-1:", ":-5", "a:b", "01:", "1_0:", "1.5:", 3, None, "9" * 30 + ":"]
)
def test_what_is_no_window(text):
    with pytest.raises(RecipeError, match="allowed: START:STOP, steps from 0, STOP not in it"):
        StepWindow.of(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [("5:5", "5:5, which holds no step"), ("7:5", "7:5, which"), (":0", "stop got 0; allowed: an int")],
)
def test_an_empty_window_is_an_error(text, said):
    with pytest.raises(RecipeError, match=said):
        StepWindow.of(text)


def test_a_schedule_follows_ticks_and_jumps_behind_the_subscribers():
    clock = StepClock()
    schedule = Schedule(StepWindow.of("2:4"), clock)
    clock.follow(schedule.follow)
    seen = []
    clock.subscribe(lambda: seen.append(schedule.is_on))
    for _ in range(5):
        clock.tick()
    assert seen == [False, False, True, True, False]  # of the step that ended
    clock.ticks = 3
    assert schedule.is_on
    clock.unfollow(schedule.follow)
    clock.tick()
    assert schedule.is_on


def test_a_copied_clock_has_its_own_followers():
    clock = StepClock()
    schedule = Schedule(StepWindow.of("1:"), clock)
    clock.follow(schedule.follow)
    other_schedule, other = copy.deepcopy((schedule, clock))
    other.tick()
    assert (schedule.is_on, other_schedule.is_on) == (False, True)


def test_a_led_clock_is_ticked_and_set_along():
    ours, own = StepClock(), StepClock()
    own.tick()
    ours.lead(own)
    ours.tick()
    ours.ticks = 9
    assert own.ticks == 10
    ours.ticks = 0
    assert own.ticks == 1
