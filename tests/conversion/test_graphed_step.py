"""``GraphedStep``: replayed steps are the eager ones bit for bit, and what changes is captured anew and said."""

from __future__ import annotations

import copy
import logging
from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import acceler8
from acceler8 import recipes
from acceler8.conversion.graphed_step import CudaGraphs
from acceler8.errors import PlanError, RunError
from acceler8.nn import state_of
from tests.models import Mlp

RECIPES = ("rowwise", "tensorwise", "delayed", "blockwise")
gpu = pytest.mark.requires(sm=90)


class Replayed:
    """Stands for CUDA graphs on a CPU, under their rules: Python runs in ``record`` alone, work in ``replay`` alone."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer

    def warm_up(self, function: Callable[[], Any]) -> Any:
        return function()

    def record(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        before = [t.clone() for t in self._tensors()]
        found = [(p.grad, None if p.grad is None else p.grad.clone()) for p in self._model.parameters()]
        result = function()
        left = [p.grad for p in self._model.parameters()]
        with torch.no_grad():
            for t, was in zip(self._tensors(), before, strict=True):
                t.copy_(was)
            for grad, was in found:
                if grad is not None:
                    grad.copy_(was)

        def replay() -> None:
            at_hand = [p.grad for p in self._model.parameters()]
            for p, (grad, _) in zip(self._model.parameters(), found, strict=True):
                p.grad = None if grad is None else p.grad
            state = state_of(self._model)
            ticks, steps = state.clock._ticks, state.amax and state.amax.steps
            schedules = [(schedule, schedule.is_on) for schedule in state.own_schedules()]
            for schedule, was in recorded:
                schedule.is_on = was
            if state.amax is not None:
                state.amax.steps = steps_then
            made = function()
            for p, into, was in zip(self._model.parameters(), left, at_hand, strict=True):
                if into is not None and p.grad is not into:
                    into.copy_(p.grad)
                p.grad = was
            state.clock._ticks = ticks
            if state.amax is not None:
                state.amax.steps = steps
            for schedule, was in schedules:
                schedule.is_on = was
            result.data.copy_(made)

        state = state_of(self._model)
        recorded = [(schedule, schedule.window.holds(state.clock.ticks - 1)) for schedule in state.own_schedules()]
        steps_then = state.amax.steps - 1 if state.amax is not None else 0
        return replay, result

    def _tensors(self) -> list[Tensor]:
        state = state_of(self._model)
        held = [t for s in self._optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
        return [*self._model.parameters(), *held, *([] if state.amax is None else [state.amax.data])]


def training(
    recipe: Any, device: str, *, graphed: bool, capturable: bool | None = None, lr: float | Tensor = 1e-3, **plan: Any
) -> tuple[Any, nn.Module, torch.optim.Optimizer]:
    """``(step, model, optimizer)``; the step takes x and gives the loss."""
    model = nn.Sequential(Mlp(0, width=128, hidden=256), Mlp(1, width=128, hidden=256)).to(device)
    acceler8.convert(model, acceler8.plan(model, recipe, **plan))
    capturable = device == "cuda" if capturable is None else capturable
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, capturable=capturable)
    acceler8.attach(model, optimizer)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x.flip(-1))
        loss.backward()
        optimizer.step()
        return loss

    if graphed:
        capture = None if device == "cuda" else Replayed(model, optimizer)
        return acceler8.GraphedStep(step, model, optimizer, capture=capture), model, optimizer
    return step, model, optimizer


def batch(seed: int, device: str, rows: int = 48) -> Tensor:
    return torch.randn(rows, 128, generator=torch.Generator().manual_seed(seed)).to(device) * (1 + seed % 5)


def said_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line for record in caplog.records if "GraphedStep" in (line := record.getMessage())]


def assert_same_training(recipe: Any, device: str, steps: int = 12, **plan: Any) -> Any:
    """Losses, weights, optimizer state, amax state and counts of ``steps`` steps, against eager ones."""
    graphed, model, optimizer = training(recipe, device, graphed=True, **plan)
    eager, twin, of_twin = training(recipe, device, graphed=False, **plan)
    for seed in range(steps):
        x = batch(seed, device)
        assert torch.equal(graphed(x), eager(x).detach()), seed
        assert state_of(model).clock.ticks == state_of(twin).clock.ticks == seed + 1
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)
        for name, value in optimizer.state[p].items():
            assert torch.equal(value, of_twin.state[q][name]), name
    states = acceler8.fp8_state_dict(model), acceler8.fp8_state_dict(twin)
    assert states[0].keys() == states[1].keys()
    for name, value in states[1].items():
        assert torch.equal(states[0][name], value), name
    return graphed


@pytest.mark.parametrize("recipe", RECIPES)
def test_replayed_steps_are_the_eager_ones(recipe, device):
    graphed = assert_same_training(recipe, device)
    assert graphed.captures == 1
    assert graphed.replays == 9  # one step to learn what norms' readers are, two in which nothing is new


def test_an_interval_of_delayed_scaling_has_a_graph_for_either_boundary(device, caplog):
    with caplog.at_level(logging.INFO, logger="acceler8"):
        graphed = assert_same_training(recipes.get("delayed", interval=3), device, 14)
    assert graphed.captures == 2
    assert not [line for line in said_in(caplog) if "shapes changed" in line]


@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
def test_a_stage_of_a_schedule_is_captured_anew_and_said(recipe, device, caplog):
    with caplog.at_level(logging.INFO, logger="acceler8"):
        graphed = assert_same_training(recipe, device, 18, fp8_steps="5:12")
    assert graphed.captures == 3
    said = said_in(caplog)
    assert len(said) == 2
    assert all("the schedule's stage" in line and "captured again" in line for line in said)


@pytest.mark.parametrize(
    ("rows", "replays"),
    [((48, 16, 48, 16, 48, 16, 48, 16), 5), ((48, 48, 48, 48, 16, 16, 48, 16), 4)],  # a new shape is eager once
    ids=["from the start", "later"],
)
def test_other_shapes_have_graphs_of_their_own(rows, replays, device, caplog):
    graphed, _, _ = training("rowwise", device, graphed=True)
    eager, _, _ = training("rowwise", device, graphed=False)
    with caplog.at_level(logging.INFO, logger="acceler8"):
        for seed, count in enumerate(rows):
            x = batch(seed, device, rows=count)
            assert torch.equal(graphed(x), eager(x).detach())
    assert (graphed.captures, graphed.replays) == (2, replays)
    assert [("shapes changed" in line, "captured again" in line) for line in said_in(caplog)] == [(True, False)]


def test_behind_a_change_each_shape_is_eager_once(device):
    graphed, _, optimizer = training("rowwise", device, graphed=True)
    for seed, rows in enumerate((48, 48, 48, 48, 16, 16)):
        graphed(batch(seed, device, rows))
    assert (graphed.captures, graphed.replays) == (2, 2)
    optimizer.param_groups[0]["lr"] = 0.01
    for seed, rows in enumerate((48, 48, 48, 16)):
        graphed(batch(seed, device, rows))
    assert (graphed.captures, graphed.replays) == (3, 3)


def halved(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Its state dict with half the moments."""
    state = copy.deepcopy(optimizer.state_dict())
    for moments in state["state"].values():
        moments["exp_avg"] *= 0.5
    return state


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda model, _: model.eval(), "the mode of a layer"),
        (lambda model, _: model[0].up.weight.requires_grad_(False), "requires_grad"),
        (lambda model, _: setattr(model[0].up.weight, "data", model[0].up.weight.data.clone()), "memory"),
        (lambda _, optimizer: optimizer.param_groups[0].update(lr=0.01), "make lr a tensor"),
        (lambda _, optimizer: optimizer.param_groups[0].update(betas=(0.5, 0.999)), "a number of the optimizer"),
        (
            lambda _, optimizer: optimizer.load_state_dict(halved(optimizer)),
            "GraphedStep: the optimizer's state changed",
        ),
        (lambda model, _: model[0].norm.eval(), "the mode of a layer"),
        (lambda model, _: model[1].register_forward_hook(lambda _, __, out: out * 2), "a module's hooks"),
    ],
    ids=["eval", "frozen", "moved", "lr", "betas", "loaded", "norm's mode", "a block's hook"],
)
def test_what_else_changes_is_captured_anew_and_said(change, named, device, caplog):
    graphed, model, optimizer = training("rowwise", device, graphed=True)
    eager, twin, of_twin = training("rowwise", device, graphed=False)
    with caplog.at_level(logging.INFO, logger="acceler8"):
        for seed in range(12):
            if seed == 6:
                assert graphed.captures == 1
                change(model, optimizer)
                change(twin, of_twin)
            x = batch(seed, device)
            assert torch.equal(graphed(x), eager(x).detach()), seed
    assert graphed.captures == 2
    (said,) = [record.getMessage() for record in caplog.records if "captured again" in record.getMessage()]
    assert named in said


def test_a_learning_rate_in_another_tensor_is_captured_anew(device, caplog):
    graphed, _, optimizer = training("rowwise", device, graphed=True, lr=torch.tensor(1e-3, device=device))
    eager, _, of_twin = training("rowwise", device, graphed=False, lr=torch.tensor(1e-3, device=device))
    with caplog.at_level(logging.INFO, logger="acceler8"):
        for seed in range(10):
            for group in (optimizer.param_groups[0], of_twin.param_groups[0]):
                if seed == 5:
                    group["lr"] = torch.tensor(0.1, device=device)
                elif seed == 4:
                    group["lr"].fill_(0.01)  # where the graph reads it
            x = batch(seed, device)
            assert torch.equal(graphed(x), eager(x).detach()), seed
    assert graphed.captures == 2
    assert ["a number of the optimizer" in line for line in said_in(caplog)] == [True]


def accumulating(model: nn.Module, optimizer: torch.optim.Optimizer, *, zeroes: bool) -> Callable[[Tensor], Tensor]:
    """A step that adds to the gradients it finds; with ``zeroes`` it makes them 0 first."""

    def step(x: Tensor) -> Tensor:
        if zeroes:
            optimizer.zero_grad(set_to_none=False)
        loss = F.mse_loss(model(x), x.flip(-1))
        loss.backward()
        optimizer.step()
        return loss

    return step


def test_gradients_in_other_memory_are_captured_anew(device, caplog):
    graphed, model, optimizer = training("rowwise", device, graphed=True)
    eager, twin, of_twin = training("rowwise", device, graphed=False)
    graphed._train_step = accumulating(model, optimizer, zeroes=True)
    eager = accumulating(twin, of_twin, zeroes=True)
    with caplog.at_level(logging.INFO, logger="acceler8"):
        for seed in range(10):
            if seed == 5:
                assert graphed.captures == 1
                for p in (*model.parameters(), *twin.parameters()):
                    p.grad = p.grad.clone()
            x = batch(seed, device)
            assert torch.equal(graphed(x), eager(x).detach()), seed
    assert graphed.captures == 2
    assert ["a gradient's memory changed" in line for line in said_in(caplog)] == [True]


def test_a_step_without_gradients_to_add_to_has_a_graph_of_its_own(device):
    """Zeroed outside, at every other step: what is added to must be there, and what is made is what a reader finds."""
    graphed, model, optimizer = training("rowwise", device, graphed=True)
    eager, twin, of_twin = training("rowwise", device, graphed=False)
    graphed._train_step = accumulating(model, optimizer, zeroes=False)
    eager = accumulating(twin, of_twin, zeroes=False)
    for seed in range(12):
        if seed % 2 == 0:
            optimizer.zero_grad()
            of_twin.zero_grad()
        x = batch(seed, device)
        assert torch.equal(graphed(x), eager(x).detach()), seed
        assert all(p.grad is not None for p in model.parameters())
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    captures = graphed.captures
    assert captures == 3  # the first that adds does so where eager steps did
    assert graphed.replays > 4
    for seed in range(12, 16):
        if seed % 2 == 0:
            optimizer.zero_grad()
        graphed(batch(seed, device))
    assert graphed.captures == captures


def test_what_changes_at_each_step_is_said_once(device, caplog):
    graphed, _, optimizer = training("rowwise", device, graphed=True)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    with caplog.at_level(logging.INFO, logger="acceler8"):
        for seed in range(20):
            assert len(said_in(caplog)) == (seed >= 8)
            graphed(batch(seed, device))
            scheduler.step()
    assert graphed.captures == 0
    (said,) = [r for r in caplog.records if "GraphedStep" in r.getMessage()]
    assert said.levelno == logging.WARNING
    assert "8 times" in said.getMessage()
    assert "the last time a number of the optimizer (make lr a tensor" in said.getMessage()


def test_a_change_now_and_then_is_no_warning(device, caplog):
    graphed, _, optimizer = training("rowwise", device, graphed=True)
    for seed in range(40):
        if seed % 4 == 0:
            optimizer.param_groups[0]["lr"] *= 0.9
        graphed(batch(seed, device))
    assert graphed.captures > 8
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


class Changing:
    """A mutable argument."""


@pytest.mark.parametrize(
    ("argument", "named"),
    [
        (UserDict(x=torch.ones(2)), "collections.UserDict; allowed: tensors"),
        (torch.ones(2).numpy(), "numpy.ndarray; allowed: tensors"),
        ([{"a": Changing()}], "test_graphed_step.Changing; allowed: tensors"),
        ({1, 2}, "builtins.set; allowed: tensors"),
    ],
    ids=["UserDict", "array", "object", "set"],
)
def test_arguments_whose_change_would_go_unseen_are_refused(argument, named, device):
    graphed, _, _ = training("rowwise", device, graphed=True)
    with pytest.raises(PlanError, match=rf"{named}.*pass dict\(batch\)"):
        graphed(batch(0, device), argument)


def test_equal_values_of_different_types_have_graphs_of_their_own(device):
    graphed, _, _ = training("rowwise", device, graphed=True)
    eager, _, _ = training("rowwise", device, graphed=False)
    train_step = graphed._train_step
    others = (None, b"1", "1", torch.float32, torch.device("cpu"))
    graphed._train_step = lambda x, flag, *rest: train_step(x) * (3.0 if flag is True else 2.0)
    for seed in range(12):
        flag = (1, True, 1.0)[seed % 3]
        x = batch(seed, device)
        assert torch.equal(graphed(x, flag, others), eager(x).detach() * (3.0 if flag is True else 2.0))
    assert graphed.captures == 3


@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
@pytest.mark.parametrize("error", [RuntimeError, ValueError])
def test_behind_a_failed_capture_eager_steps_go_on(recipe, error, device):
    """It fails behind the optimizer's step, when Python has counted a boundary and made gradients."""
    graphed, model, _ = training(recipe, device, graphed=True)
    eager, twin, _ = training(recipe, device, graphed=False)
    train_step, capture = graphed._train_step, graphed._capture

    def failing(x: Tensor) -> Tensor:
        train_step(x)
        raise error("no such thing in a graph")

    for seed in range(3):
        graphed(batch(seed, device))
        eager(batch(seed, device))
    for p in model.parameters():
        p.grad = None
    held = capture._tensors() if device == "cpu" else []
    before = [t.clone() for t in held]
    graphed._train_step = failing
    with pytest.raises(RunError if error is RuntimeError else ValueError, match="no such thing"):
        graphed(batch(3, device))
    with torch.no_grad():
        for t, was in zip(held, before, strict=True):  # on a GPU nothing ran
            t.copy_(was)
    assert graphed.captures == 0
    assert all(p.grad is None for p in model.parameters())
    for seed in range(3, 6):
        x = batch(seed, device)
        assert torch.equal(train_step(x), eager(x)), seed
    states = state_of(model), state_of(twin)
    assert states[0].clock.ticks == states[1].clock.ticks == 6
    if recipe == "delayed":
        assert states[0].amax.steps == states[1].amax.steps == 6
        assert torch.equal(states[0].amax.data, states[1].amax.data)


def test_the_amax_state_in_other_memory_is_captured_anew(device, caplog):
    graphed, model, _ = training("delayed", device, graphed=True)
    eager, _, _ = training("delayed", device, graphed=False)
    with caplog.at_level(logging.INFO, logger="acceler8"):
        for seed in range(9):
            if seed == 5:
                assert graphed.captures == 1
                amax = state_of(model).amax
                amax.data = amax.data.clone()  # as a move to another device does
                amax._find_lines()
            x = batch(seed, device)
            assert torch.equal(graphed(x), eager(x).detach()), seed
    assert graphed.captures == 2
    assert ["the amax state's memory changed" in line for line in said_in(caplog)] == [True]


def test_autocast_that_is_switched_on_is_captured_anew(device, caplog):
    graphed, _, _ = training("rowwise", device, graphed=True)
    was = torch.is_autocast_enabled("cuda")
    with caplog.at_level(logging.INFO, logger="acceler8"):
        try:
            for seed in range(8):
                torch.set_autocast_enabled("cuda", seed >= 4)
                graphed(batch(seed, device))
        finally:
            torch.set_autocast_enabled("cuda", was)
    assert graphed.captures == 2
    assert any("autocast" in line and "captured again" in line for line in said_in(caplog))


def test_no_more_graphs_are_kept_than_eight(device):
    graphed, _, _ = training("rowwise", device, graphed=True)
    for rows in (16, 16, 16, *range(17, 25)):
        for _ in range(2):
            graphed(batch(0, device, rows))
        assert len(graphed._graphs) <= 8
    captures = graphed.captures
    graphed(batch(0, device, 24))
    assert graphed.captures == captures
    graphed(batch(0, device, 16))  # the oldest one went
    assert graphed.captures == captures + 1


def test_observed_steps_are_eager(device):
    graphed, model, _ = training("rowwise", device, graphed=True)
    for seed in range(5):
        graphed(batch(seed, device))
    replays = graphed.replays
    with acceler8.record_statistics(model) as statistics:
        graphed(batch(5, device))
    assert len(statistics.rows()) > 0
    assert graphed.replays == replays
    graphed(batch(6, device))
    assert graphed.replays == replays + 1


def test_norms_that_forgot_their_readers_are_captured_anew_and_said(device, caplog):
    """Observed layers cast for themselves, so a norm stops making codes, which the graph makes."""
    graphed, model, _ = training("rowwise", device, graphed=True)
    for seed in range(5):
        graphed(batch(seed, device))
    with acceler8.record_statistics(model), caplog.at_level(logging.INFO, logger="acceler8"):
        for seed in range(6):
            graphed(batch(seed, device))
    assert graphed.captures == 1
    with caplog.at_level(logging.INFO, logger="acceler8"):
        for seed in range(5):
            graphed(batch(seed, device))
    assert graphed.captures == 2
    assert any("what norms know of their readers changed" in line for line in said_in(caplog))


def test_results_are_copies_and_arguments_may_be_nested(device):
    model = Mlp(0).to(device)
    acceler8.convert(model, "rowwise")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def step(batch: dict[str, Tensor], *, scale: float) -> dict[str, Tensor]:
        optimizer.zero_grad()
        loss = model(batch["x"]).square().mean() * scale
        loss.backward()
        optimizer.step()
        acceler8.step(model)
        return {"loss": loss}

    class Results(Replayed):
        def record(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
            kept: dict[str, Any] = {}

            def flat() -> Tensor:
                kept["made"] = function()
                return kept["made"]["loss"]

            replay, loss = super().record(flat)
            return replay, {"loss": loss}

    capture = None if device == "cuda" else Results(model, optimizer)
    graphed = acceler8.GraphedStep(step, model, optimizer, warmup=1, capture=capture)
    losses = []
    for seed in range(8):
        x, scale = torch.randn(8, 32, generator=torch.Generator().manual_seed(seed)).to(device), 2.0 + seed % 2
        losses.append((graphed({"x": x}, scale=scale)["loss"], (scale * model(x).square().mean()).detach()))
    assert graphed.captures == 2  # a number is in the graph
    assert graphed.replays > 2
    for got, want in losses:
        assert not got.requires_grad
        assert torch.allclose(got, want.detach())
    assert len({loss.item() for loss, _ in losses}) == len(losses)


def test_on_a_cpu_it_runs_eagerly_and_says_so(caplog):
    _, model, optimizer = training("rowwise", "cpu", graphed=False)
    with caplog.at_level(logging.INFO, logger="acceler8"):
        graphed = acceler8.GraphedStep(lambda x: model(x).sum(), model, optimizer)
        x = batch(0, "cpu")
        assert torch.equal(graphed(x), model(x).sum().detach())
        graphed(x)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said == "GraphedStep: the model is on cpu, which has no CUDA graphs; each step runs eagerly"
    assert graphed.captures == graphed.replays == 0


def test_refusals():
    step, model, optimizer = training("rowwise", "cpu", graphed=False)
    with pytest.raises(PlanError, match="not converted; call acceler8"):
        acceler8.GraphedStep(step, Mlp(), optimizer)
    with pytest.raises(PlanError, match="warmup=0; allowed: an integer from 1"):
        acceler8.GraphedStep(step, model, optimizer, warmup=0)
    graphed = acceler8.GraphedStep(step, model, optimizer)
    with acceler8.window(model), pytest.raises(PlanError, match="open the window in train_step"):
        graphed(batch(0, "cpu"))
    acceler8.restore(model)
    with pytest.raises(PlanError, match="restored since"):
        graphed(batch(0, "cpu"))


def test_codes_of_the_warm_up_are_not_in_a_graph(device):
    """A window inside the step: what it kept in an eager step is gone when the next one is captured."""
    graphed, model, optimizer = training("rowwise", device, graphed=True)
    eager, twin, of_twin = training("rowwise", device, graphed=False)

    def windowed(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor], Tensor]:
        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            with acceler8.window(model):
                losses = [model(part).square().mean() for part in x.chunk(2)]
                torch.stack(losses).sum().backward()
            optimizer.step()
            return losses[0]

        return step

    graphed._train_step = windowed(model, optimizer)
    eager = windowed(twin, of_twin)
    for seed in range(8):
        x = batch(seed, device)
        assert torch.equal(graphed(x), eager(x).detach()), seed
    assert graphed.captures == 1
    assert not any(codes.live() or codes._kept for codes in state_of(model).codes)


def test_codes_of_a_paused_window_do_not_enter_a_graph_or_leave_it(device):
    """Micro-batches of one accumulation: their window is paused between two calls, and its codes stay."""
    model = Mlp(0).to(device)
    acceler8.convert(model, "rowwise")
    seen: list[bool] = []

    def note() -> None:
        seen.append(any(codes._kept for codes in state_of(model).codes))

    def micro_batch(x: Tensor) -> Tensor:
        note()
        for codes in state_of(model).codes:
            codes.open()
        loss = model(x).sum()
        loss.backward()
        for codes in state_of(model).codes:
            codes.pause()
        return loss

    class Noting(Replayed):
        def record(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
            return note, function()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graphed = acceler8.GraphedStep(micro_batch, model, optimizer, warmup=1, capture=Noting(model, optimizer))
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(0)).to(device)
    while not graphed.captures:
        graphed(x)
    assert seen[-3:] == [True, False, False]  # the last eager step, the captured one, the first replay


@gpu
def test_a_step_that_waits_for_the_gpu_cannot_be_captured():
    _, model, optimizer = training("rowwise", "cuda", graphed=False)

    def step(x: Tensor) -> Tensor:
        loss = model(x).sum()
        loss.backward()
        loss.item()
        return loss

    graphed = acceler8.GraphedStep(step, model, optimizer, warmup=1)
    x = batch(0, "cuda")
    for _ in range(2):  # learns the norms' readers, then finds nothing new
        graphed(x)
    with pytest.raises(RunError, match=r"could not be captured: .*; allowed: work on the GPU only"):
        graphed(x)


@gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_checkpoint_of_a_graphed_training_goes_on_as_an_eager_one(recipe):
    graphed, model, _ = training(recipe, "cuda", graphed=True)
    for seed in range(6):
        graphed(batch(seed, "cuda"))
    twin = copy.deepcopy(model)
    x = batch(7, "cuda")
    assert torch.equal(twin(x), model(x))


@gpu
def test_graphs_are_captured_again_while_a_tensor_of_those_that_are_gone_is_alive():
    device = torch.device("cuda", torch.cuda.current_device())
    graphs = CudaGraphs(device)
    x = torch.ones(2**20, device=device)
    graphs.warm_up(lambda: x + 1)
    replay, left = graphs.record(lambda: x + 1)
    del replay
    replay, result = graphs.record(lambda: x + 2)
    replay()
    torch.cuda.synchronize(device)
    assert float(result[0]) == 3.0
    assert left.shape == x.shape


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (lambda step, model, optimizer: ((step, model), {}), "no optimizer"),
        (lambda step, model, optimizer: ((None, model, optimizer), {}), "train_step=NoneType"),
        (lambda step, model, optimizer: ((step, None, optimizer), {}), "model=NoneType"),
        (
            lambda step, model, optimizer: ((step, model, torch.optim.lr_scheduler.StepLR(optimizer, 1)), {}),
            "optimizer=StepLR",
        ),
        (lambda step, model, optimizer: ((step, model, optimizer), {"warmup": True}), "warmup=True"),
        (lambda step, model, optimizer: ((step, model, optimizer), {"warmup": 1.5}), "warmup=1.5"),
    ],
)
def test_what_it_takes_is_checked(wrong, named):
    _, model, optimizer = training("rowwise", "cpu", graphed=False)
    args, kwargs = wrong(lambda x: model(x).sum(), model, optimizer)
    with pytest.raises(PlanError, match=f"got {named}; allowed"):
        acceler8.GraphedStep(*args, **kwargs)
