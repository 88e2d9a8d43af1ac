"""Delayed scaling: what enters the history, what comes out of it, and when."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from acceler8.formats import E4M3
from acceler8.kernels import quantize
from acceler8.scaling import TENSORWISE, AmaxSlot, AmaxState, Schedule, StepClock, StepWindow

CPU = torch.device("cpu")


def make(history_len: int = 3, algo: str = "max", interval: int = 1, slots: int = 2) -> AmaxState:
    return AmaxState([f"layer.{i}" for i in range(slots)], history_len, algo, interval, CPU)


def step(state: AmaxState, *amaxes: float | None) -> list[float]:
    """One training step in which slot i saw ``amaxes[i]`` (None: did not run); the amaxes in use after it."""
    for i, amax in enumerate(amaxes):
        if amax is not None:
            staging = AmaxSlot(state, i).staging
            torch.maximum(staging, torch.tensor(amax), out=staging)
    state.update()
    return [AmaxSlot(state, i).in_use.item() for i in range(len(amaxes))]


def history(state: AmaxState, slot: int) -> list[float]:
    return state.data[2:, slot].tolist()


def test_a_new_state_has_no_past():
    state = make(5)
    assert state.data.shape == (2 + 5, 2)
    assert state.data.dtype == torch.float32
    assert not state.data.any()


def test_max_follows_the_window():
    state = make(3, "max")
    used = [step(state, amax, 1.0)[0] for amax in (5.0, 2.0, 1.0, 3.0, 0.5, 0.25, 0.125)]
    assert used == [5.0, 5.0, 5.0, 3.0, 3.0, 3.0, 0.5]  # 5 leaves after three steps, 3 after three more
    assert history(state, 0) == [0.5, 0.25, 0.125]  # oldest first


def test_most_recent_is_the_last_step():
    state = make(3, "most_recent")
    assert [step(state, amax, 1.0)[0] for amax in (5.0, 2.0, 7.0, 1.0)] == [5.0, 2.0, 7.0, 1.0]


@pytest.mark.parametrize("algo", ["max", "most_recent"])
def test_a_history_of_one(algo):
    state = make(1, algo)
    assert [step(state, amax, 1.0)[0] for amax in (5.0, 2.0, 7.0)] == [5.0, 2.0, 7.0]


def test_a_slot_that_starts_late_takes_its_first_amax_at_once():
    state = make(4, "max", interval=4)
    assert step(state, 1.0, None) == [1.0, 0.0]
    assert step(state, 8.0, 2.0) == [1.0, 2.0]  # its own first; the other waits for the fourth step
    assert step(state, 2.0, 4.0) == [1.0, 2.0]
    assert step(state, 2.0, 4.0) == [8.0, 4.0]


def test_a_step_in_which_no_layer_is_on_changes_nothing():
    state, clock = make(2), StepClock()
    state.schedules = [Schedule(StepWindow.of(text), clock) for text in ("1:2", ":1")]
    for schedule in state.schedules:
        clock.follow(schedule.follow)
    clock.subscribe(state.update)
    for _ in range(4):
        state.data[0] += 1
        clock.tick()
    assert state.steps == 2


def test_slots_are_independent():
    state = make(2, slots=3)
    assert step(state, 1.0, 2.0, 3.0) == [1.0, 2.0, 3.0]
    assert step(state, 4.0, 0.5, 0.25) == [4.0, 2.0, 3.0]
    assert step(state, 0.1, 0.1, 0.1) == [4.0, 0.5, 0.25]


@pytest.mark.parametrize("algo", ["max", "most_recent"])
def test_the_amax_in_use_is_constant_between_boundaries(algo):
    """Calls and recomputes within a step neither see each other nor count twice."""
    state = make(3, algo, slots=1)
    slot = AmaxSlot(state, 0)
    x = torch.linspace(-8, 8, 256).reshape(16, 16)
    step(state, 2.0)
    first = quantize(x, E4M3, None, TENSORWISE, amax=slot.in_use, staging=slot.staging)[0]
    before = state.data.clone()
    again = quantize(x, E4M3, None, TENSORWISE, amax=slot.in_use, staging=slot.staging)[0]
    assert first is not None
    assert again is not None
    assert torch.equal(first.codes.view(torch.uint8), again.codes.view(torch.uint8))
    assert torch.equal(state.data, before)
    quantize(x / 2, E4M3, None, TENSORWISE, amax=slot.in_use, staging=slot.staging)
    assert torch.equal(state.data, before)  # a smaller tensor in the same step: the step's amax stays
    assert (slot.in_use.item(), slot.staging.item()) == (2.0, 8.0)
    assert first.scale_inv.item() == (torch.ones(1) / (torch.tensor(448.0) / 2.0)).item()
    state.update()
    assert (slot.in_use.item(), slot.staging.item()) == (8.0, 0.0)


@pytest.mark.parametrize("algo", ["max", "most_recent"])
def test_a_slot_that_did_not_run_keeps_its_past(algo):
    state = make(2, algo)
    step(state, 3.0, 4.0)
    for _ in range(5):
        assert step(state, 3.0, None) == [3.0, 4.0]
    assert history(state, 1) == [0.0, 4.0]


def test_an_all_zero_tensor_counts_as_one_that_did_not_run():
    state = make(2, "most_recent")
    step(state, 3.0, 3.0)
    assert step(state, 0.0, 3.0) == [3.0, 3.0]


@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_amax_never_freezes_a_scale(algo, bad):
    """TransformerEngine lets infinity into the history and then keeps the old scale until it has left the window:
    with this bad value, 1024 steps. Here it is dropped, and the next good step counts at once.
    """
    state = make(1024, algo)
    step(state, 1.0, 1.0)
    assert step(state, bad, 2.0) == [1.0, 2.0]
    assert state.data.isfinite().all()
    assert step(state, 6.0, 2.0) == [6.0, 2.0]


def test_the_planted_rule_of_transformer_engine_would_fail():
    """The test above is worth something: the rule that it warns of, written out, freezes."""
    past, in_use = [1.0], 1.0
    for staged in (math.inf, 6.0, 6.0):
        past.append(staged)
        largest = max(past)
        in_use = largest if math.isfinite(largest) and largest > 0 else in_use
    assert in_use == 1.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_tensor_reaches_staging_and_is_dropped_at_the_boundary(bad):
    state = make(4, slots=1)
    slot = AmaxSlot(state, 0)
    step(state, 2.0)
    x = torch.ones(4, 16)
    x[1, 1] = bad
    codes = quantize(x, E4M3, None, TENSORWISE, amax=slot.in_use, staging=slot.staging)[0]
    quantize(torch.ones(4, 16), E4M3, None, TENSORWISE, amax=slot.in_use, staging=slot.staging)  # NaN is not forgotten
    assert codes is not None
    assert codes.dequantize().isnan().sum() == 1
    assert not slot.staging.isfinite()
    state.update()
    assert (slot.in_use.item(), slot.staging.item()) == (2.0, 0.0)


def test_interval():
    state = make(8, "max", interval=3)
    used = [step(state, amax, 1.0)[0] for amax in (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)]
    assert used == [1.0, 1.0, 3.0, 3.0, 3.0, 6.0]  # the first step counts at once, then every third
    assert state.steps == 6
    assert history(state, 0)[-6:] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]  # every step enters the history


def test_before_any_history_a_tensor_scales_itself():
    state = make(slots=1)
    slot = AmaxSlot(state, 0)
    x = torch.full((16, 16), 3.0)
    delayed = quantize(x, E4M3, None, TENSORWISE, amax=slot.in_use, staging=slot.staging)[0]
    current = quantize(x, E4M3, None, TENSORWISE)[0]
    assert delayed is not None
    assert current is not None
    assert torch.equal(delayed.scale_inv, current.scale_inv)
    assert torch.equal(delayed.codes.view(torch.uint8), current.codes.view(torch.uint8))


def test_margin_is_headroom_for_growth():
    state = make(slots=1)
    slot = AmaxSlot(state, 0)
    step(state, 1.0)
    x = torch.full((16, 16), 4.0)  # four times the amax in use
    for margin, saturated in ((0, 256), (1, 256), (2, 0)):
        _, _, packed = quantize(
            x, E4M3, None, TENSORWISE, margin=margin, amax=slot.in_use, staging=slot.staging, statistics=True
        )
        assert packed is not None
        assert packed[1].item() == saturated


def test_a_deep_copy_is_apart():
    state = make(slots=1)
    slots = {"x": AmaxSlot(state, 0), "again": AmaxSlot(state, 0)}
    copied = copy.deepcopy(slots)
    step(state, 5.0)
    assert slots["x"].in_use.item() == 5.0
    assert copied["x"].in_use.item() == 0.0
    assert copied["x"].state is copied["again"].state  # one state still serves both


def test_moves():
    state = make()
    step(state, 1.0, 2.0)
    before = state.data
    state.to(torch.device("meta"))
    assert state.data is before
    state.to(CPU)
    assert state.data is before


@pytest.mark.requires(sm=89)
def test_moves_to_a_gpu_and_keeps_counting():
    state = make()
    step(state, 1.0, 2.0)
    state.to(torch.device("cuda"))
    AmaxSlot(state, 0).staging.fill_(7.0)
    state.update()
    assert state.data[1].tolist() == [7.0, 2.0]


def test_update_leaves_no_graph_and_keeps_its_storage():
    state = make()
    where = state.data.data_ptr()
    step(state, 1.0, 2.0)
    assert state.data.data_ptr() == where  # views that a captured graph holds stay valid
    assert not state.data.requires_grad
