"""A window of FP8 steps: BF16 outside, bit for bit; FP8 inside, bit for bit; nothing of one in the other."""

from __future__ import annotations

import copy
import json
import logging

import pytest
import torch
from torch import nn

import acceler8
from acceler8.conversion import Plan
from acceler8.errors import PlanError, RecipeError, VerifyError
from acceler8.nn import fp8_layers, state_of
from acceler8.parallel.fp8_all_gather import gather_in_fp8
from acceler8.scaling import StepClock
from tests.models import RECIPES, Mlp, assert_equal, batch, converted, differs, outcome


def scheduled(steps: str, recipe: object = "rowwise", model: nn.Module | None = None, **rest: object) -> nn.Module:
    model = model or Mlp()
    return acceler8.convert(model, acceler8.plan(model, recipe, fp8_steps=steps), **rest)


@pytest.mark.parametrize("recipe", [*RECIPES, {"up": "delayed", "*": "tensorwise"}])
def test_high_precision_outside_and_the_recipe_inside(recipe):
    model, alone = scheduled("2:4", recipe), converted(recipe)
    for step in range(6):
        x = batch(seed=step)
        got = outcome(model, x)
        if step in (2, 3):
            assert_equal(got, outcome(alone, x))  # delayed scaling as if it began here
            acceler8.step(alone)
        else:
            assert_equal(got, outcome(Mlp(), x))
            assert differs(got, outcome(converted(recipe), x))
        acceler8.step(model)


def test_under_autocast_too():
    with torch.autocast("cpu", torch.bfloat16):
        assert_equal(outcome(scheduled("1:"), batch()), outcome(Mlp(), batch()))


def test_a_step_ends_as_it_began():
    """The boundary comes between a forward and its backward (two optimizers, say): the graph is the forward's."""
    for steps in ("1:", ":1"):
        model = scheduled(steps, "delayed")
        want = outcome(copy.deepcopy(model), batch())

        def then_the_boundary(x, model=model):
            y = model(x)
            acceler8.step(model)
            return y

        assert_equal(outcome(model, batch(), then_the_boundary), want)


@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
def test_a_training_is_that_of_a_model_converted_at_the_step(recipe):
    def train(model: nn.Module, steps: range) -> list[float]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for step in steps:
            optimizer.zero_grad()
            loss = (model(batch(seed=step)) - batch(seed=9)).square().mean()
            loss.backward()
            optimizer.step()
            if hasattr(model, "_acceler8_model"):
                acceler8.step(model)
            losses.append(loss.item())
        return losses

    whole, parts = scheduled("3:6", recipe), Mlp()
    expected = train(parts, range(3))
    acceler8.convert(parts, recipe)
    expected += train(parts, range(3, 6))
    acceler8.restore(parts)
    expected += train(parts, range(6, 9))
    assert train(whole, range(9)) == expected


def test_histories_are_fed_inside_only():
    model = scheduled("1:2", "delayed")
    amax = state_of(model).amax
    for step in range(4):
        outcome(model, batch(seed=step))
        acceler8.step(model)
        assert amax.steps == (step >= 1)
        assert bool(amax.data.any()) == (step >= 1)


def test_evaluation_in_fp8_is_for_the_window_unless_asked_for():
    model = scheduled("1:", acceler8.recipes.get("rowwise", eval="fp8")).eval()
    plain, x = Mlp().eval(), batch()
    assert torch.equal(model(x), plain(x))
    with acceler8.evaluate_in_fp8(model):
        in_fp8 = model(x)
    assert not torch.equal(in_fp8, plain(x))
    acceler8.step(model)
    assert torch.equal(model(x), in_fp8)


def test_the_plan_says_it_and_keeps_it():
    plan = acceler8.plan(Mlp(), fp8_steps="100:200")
    assert "only in steps 100 to 199, counted from 0; high precision outside" in str(plan)
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    assert acceler8.plan(Mlp(), fp8_steps="0:").fp8_steps is None
    older = {key: value for key, value in acceler8.plan(Mlp()).to_dict().items() if key != "fp8_steps"}
    assert Plan.from_dict(older) == acceler8.plan(Mlp())
    with pytest.raises(RecipeError, match="fp8_steps got '5'; allowed: START:STOP"):
        acceler8.plan(Mlp(), fp8_steps="5")


def test_a_clock_that_runs_already_and_one_that_is_set():
    clock = StepClock()
    clock.ticks = 5
    model = scheduled("5:", clock=clock)
    assert_equal(outcome(model, batch()), outcome(converted(), batch()))
    clock.ticks = 2
    assert_equal(outcome(model, batch()), outcome(Mlp(), batch()))


def test_copies_and_restoring_leave_the_clock():
    model = scheduled("1:")
    other = copy.deepcopy(model)
    acceler8.step(other)
    assert_equal(outcome(model, batch()), outcome(Mlp(), batch()))
    assert_equal(outcome(other, batch()), outcome(converted(), batch()))
    clock = state_of(model).clock
    acceler8.restore(model)
    assert not clock._followers
    assert not clock._subscribers


@pytest.mark.parametrize("steps", ["1:", "9:", ":1"])
def test_verify(steps):
    model = scheduled(steps)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(batch()).square().mean().backward()
        optimizer.step()

    with pytest.raises(VerifyError, match=r"step\(\) marked no step boundary, so fp8_steps \S+ stands still"):
        acceler8.verify(model, optimizer, step=step)
    acceler8.attach(model, optimizer)
    report = acceler8.verify(model, optimizer, step=step)
    said = (
        f"2 of 2 FP8 layers were in high precision in step 1, by fp8_steps {steps}" in report.checks["moved and fresh"]
    )
    assert said == (steps != "1:")


def test_a_loop_without_boundaries_is_told(caplog):
    layer = next(fp8_layers(scheduled("4:")))[1]
    with caplog.at_level(logging.WARNING, "acceler8"):
        for _ in range(300):
            layer(batch())
    (record,) = caplog.records
    assert "256 training forwards with fp8_steps 4: and no step boundary was marked, so all are in step 0" in (
        record.getMessage()
    )


# Dynamo itself does this with every autograd.Function that it traces (torch 2.13)
@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be inst:DeprecationWarning")
def test_a_compiled_model_changes_with_its_schedule():
    torch.compiler.reset()
    model = scheduled("1:2")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for step in range(8):  # two graphs: the number of the step is no part of them
        want = outcome(converted(fuse=False) if step == 1 else Mlp(), batch())
        with torch.compiler.set_stance("fail_on_recompile" if step > 2 else "default"):
            assert_equal(outcome(model, batch(), compiled), want)
        acceler8.step(model)
    torch.compiler.reset()


def test_weights_gathered_as_codes_have_no_schedule():
    with pytest.raises(PlanError, match="gather_in_fp8 got a model with fp8_steps 1:; allowed: FP8 in every step"):
        gather_in_fp8(scheduled("1:"))
