"""Windows of steps, and that a schedule follows its clock at boundaries and when it is set."""

from __future__ import annotations

import copy

import pytest

from acceler8.errors import RecipeError
from acceler8.scaling import LastLayers, Schedule, StepClock, StepWindow, check_schedule


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


@pytest.mark.parametrize(
    ("text", "step", "left"),
    [(":", 0, ":"), (":", 5, "5:"), ("3:9", 2, "3:9"), ("3:9", 8, "8:9"), ("3:9", 9, None), (":1", 0, ":1")],
)
def test_the_rest_of_a_window(text, step, left):
    got = StepWindow.of(text).since(step)
    assert (got and str(got)) == left


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ("0:4,1000:8,2000:all", "0:4,1000:8,2000:all"),
        (" 5 : 2 , 0:1,7: ALL", "0:1,5:2,7:all"),
        ({1000: 8, 0: 4, 2000: "all"}, "0:4,1000:8,2000:all"),
        ({"0": "4", "3": "All"}, "0:4,3:all"),
        ("0:all", "0:all"),
        ("3:1", "3:1"),
    ],
)
def test_stages(given, written):
    stages = LastLayers.of(given)
    assert str(stages) == written
    assert LastLayers.of(written) == stages == LastLayers.of(stages)
    assert stages.is_all == (written == "0:all")


@pytest.mark.parametrize(
    "given",
    [
        *("", "4", "0:0", "-1:4", "0:4,", "0:4;1:8", "01:4", "0:04", "0:1.5", "0:half", "9" * 30 + ":1", "0:4,0:8 ,"),
        *(4, None, ["0:4"], {}, {0: None}, {0: True}, {True: 4}, {1.5: 4}, {0: 4.0}, {0: -1}, {"0": ""}),
    ],
)
def test_what_is_no_stage(given):
    with pytest.raises(RecipeError, match=r"fp8_last_layers got .*; allowed: STEP:K with commas between them"):
        LastLayers.of(given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("0:4,0:8", "got step 0 twice; leave one out"),
        ({0: 4, "0": 8}, "got step 0 twice"),
        ("0:4,5:4", "got 0:4,5:4, where step 5 does not widen what step 0 has"),
        ("0:4,5:3,6:8", "where step 5 does not widen what step 0 has"),
        ("0:4,5:all,6:8", "where step 6 does not widen what step 5 has; allowed: .*; fp8_steps ends FP8"),
    ],
)
def test_stages_only_widen(given, said):
    with pytest.raises(RecipeError, match=said):
        LastLayers.of(given)


@pytest.mark.parametrize("stages", [(), ((0, 0),), ((-1, 2),), ((0, True),), ((5, 1), (0, 2)), ((0, "all"),)])
def test_stages_in_code_are_checked_too(stages):
    with pytest.raises(RecipeError, match="fp8_last_layers got"):
        LastLayers(stages)


def test_the_first_step_of_a_block_is_counted_from_the_last():
    stages = LastLayers.of("5:1,10:3,20:all")
    assert [stages.first_step(behind) for behind in range(5)] == [5, 10, 10, 20, 20]
    assert stages.first_step(None) == 20
    assert [LastLayers.of("5:2").first_step(behind) for behind in (0, 1, 2, None)] == [5, 5, None, None]


def test_two_settings_that_never_agree():
    check_schedule(StepWindow.of(":6"), LastLayers.of("5:1"))
    check_schedule(None, LastLayers.of("5:1"))
    check_schedule(StepWindow.of(":5"), None)
    with pytest.raises(RecipeError, match="allowed: a STOP above 5, or a first stage before step 5"):
        check_schedule(StepWindow.of(":5"), LastLayers.of("5:1"))


def test_no_window_is_never_on():
    clock = StepClock()
    schedule = Schedule(None, clock)
    clock.follow(schedule.follow)
    clock.ticks = 10**6
    assert not schedule.is_on


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
