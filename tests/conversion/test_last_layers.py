"""FP8 by depth: at each step the blocks that should be, and only those, compute as if they had been converted then."""

from __future__ import annotations

import copy
import json
import logging

import pytest
import torch
from torch import Tensor, nn

import acceler8
from acceler8 import recipes
from acceler8.conversion import Plan
from acceler8.errors import PlanError, RecipeError, VerifyError
from acceler8.nn import fp8_layers, state_of
from acceler8.parallel.fp8_all_gather import gather_in_fp8
from acceler8.scaling import LINE, LastLayers, StepClock
from tests.models import Mlp, assert_equal, batch, differs, outcome

DEPTH = 4


class Deep(nn.Module):
    """A layer, four blocks, a layer: the two outside are no heads."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.first = nn.Linear(32, 32)
        self.blocks = nn.ModuleList(Mlp(seed) for seed in range(DEPTH))
        self.last = nn.Linear(32, 32)
        with torch.no_grad():
            for layer in (self.first, self.last):
                layer.weight.copy_(torch.randn(32, 32, generator=generator) * 0.2)
                layer.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def deep(last_layers: object, recipe: object = "rowwise", steps: str | None = None, **rest: object) -> nn.Module:
    return acceler8.convert(Deep(), recipe, fp8_last_layers=last_layers, fp8_steps=steps, **rest)


STAGES = "0:1,2:3,4:all"
# parts of the model that turn to FP8 at a step, by hand
TURNS = {0: ["blocks.3"], 2: ["blocks.1", "blocks.2"], 4: ["blocks.0", "first", "last"]}


class ByHand:
    """A model whose parts are converted one by one, each when it is due."""

    def __init__(self, recipe: object) -> None:
        self.model, self.recipe, self.parts = Deep(), recipe, []

    def turn(self, names: list[str]) -> None:
        for name in names:
            part = self.model.get_submodule(name)
            own = self.recipe.get(name, self.recipe.get("*")) if isinstance(self.recipe, dict) else self.recipe
            if own is not None:
                self.parts.append(acceler8.convert(part, own))

    def step(self) -> None:
        for part in self.parts:
            acceler8.step(part)


MIXED = {"blocks.1": "delayed", "blocks.3": "delayed", "blocks.2": None, "*": "tensorwise"}


@pytest.mark.parametrize("recipe", ["rowwise", "delayed", MIXED])
def test_the_last_blocks_turn_first(recipe):
    model, hand = deep(STAGES, recipe), ByHand(recipe)
    for step in range(6):
        x = batch(seed=step)
        before = outcome(hand.model, x) if step in TURNS else None
        if step in TURNS:
            hand.turn(TURNS[step])
        want = outcome(hand.model, x)
        assert before is None or differs(want, before)
        assert_equal(outcome(model, x), want)
        acceler8.step(model)
        hand.step()


@pytest.mark.parametrize(("steps", "begins", "ends"), [("1:5", 1, 5), ("3:", 3, 99), ("4:5", 4, 5)])
def test_both_settings_must_allow_a_step(steps, begins, ends):
    model, hand = deep(STAGES, "delayed", steps), ByHand("delayed")
    for step in range(7):
        x = batch(seed=step)
        if begins <= step < ends:
            hand.turn([n for due, names in TURNS.items() if max(due, begins) == step for n in names])
        if step == ends:
            for part in hand.parts:
                acceler8.restore(part)
            hand.parts.clear()
        assert_equal(outcome(model, x), outcome(hand.model, x))
        acceler8.step(model)
        hand.step()


def test_a_training_with_micro_batches_is_that_of_parts_converted_in_time():
    def train_step(model: nn.Module, parts: list[nn.Module], optimizer: torch.optim.Optimizer, step: int) -> float:
        total = 0.0
        windows = [acceler8.window(part) for part in parts]
        for one in windows:
            one.__enter__()
        for micro in range(2):
            loss = (model(batch(seed=2 * step + micro)) - batch(seed=99)).square().mean()
            loss.backward()
            total += loss.item()
        for one in windows:
            one.__exit__(None, None, None)
        optimizer.step()
        optimizer.zero_grad()
        for part in parts:
            acceler8.step(part)
        return total

    model, hand = deep(STAGES, "delayed"), ByHand("delayed")
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, hand.model))
    got, want = [], []
    for step in range(6):
        hand.turn(TURNS.get(step, []))
        got.append(train_step(model, [model], ours, step))
        want.append(train_step(hand.model, hand.parts, theirs, step))
    assert got == want


def test_codes_are_kept_in_a_window_by_the_layers_that_are_on():
    model = deep(STAGES)
    for step in range(6):
        with acceler8.window(model):
            outcome(model, batch(seed=step))
            kept = {name for name, layer in fp8_layers(model) if layer._acceler8_layer.codes.live()}
        due = [name for begin, names in TURNS.items() if begin <= step for name in names]
        assert kept == {name for name, _ in fp8_layers(model) if any(f"{name}.".startswith(f"{p}.") for p in due)}
        acceler8.step(model)


def test_histories_of_layers_that_are_not_on_yet_stay_empty():
    model = deep("1:1,3:all", recipes.get("delayed", interval=5))
    amax = state_of(model).amax
    columns = {name.rpartition(".")[0]: i // LINE for i, name in enumerate(amax.names)}
    for step in range(5):
        outcome(model, batch(seed=step))
        acceler8.step(model)
        fed = {name for name, i in columns.items() if bool((amax.data[1, LINE * i : LINE * i + 3] > 0).all())}
        if step < 1:
            assert not amax.data.any()
        elif step < 3:
            assert fed == {"blocks.3.up", "blocks.3.down"}
        else:
            assert fed == set(columns)  # at once, though the interval is not over
    assert amax.steps == 4


def test_steps_without_a_delayed_layer_on_are_no_steps_of_the_histories():
    model = deep("0:1,2:all", {"blocks.3": "rowwise", "*": "delayed"})
    for step in range(4):
        outcome(model, batch(seed=step))
        acceler8.step(model)
    assert state_of(model).amax.steps == 2


def test_evaluation_follows_the_depth_unless_asked_for():
    model, x = deep("0:1,1:all", recipes.get("rowwise", eval="fp8")).eval(), batch()
    hand = Deep()
    acceler8.convert(hand.blocks[3], recipes.get("rowwise", eval="fp8"))
    plain, hand = Deep().eval(), hand.eval()
    last_only = model(x)
    assert torch.equal(last_only, hand(x))
    assert not torch.equal(last_only, plain(x))
    with acceler8.evaluate_in_fp8(model):
        all_of_it = model(x)
    assert not torch.equal(all_of_it, last_only)
    assert torch.equal(model(x), last_only)
    acceler8.step(model)
    assert torch.equal(model(x), all_of_it)
    high = deep("0:1,1:all").eval()
    assert torch.equal(high(x), plain(x))


def test_a_clock_that_runs_already_and_one_that_is_set():
    clock = StepClock()
    clock.ticks = 4
    model = deep(STAGES, clock=clock)
    everything = acceler8.convert(Deep(), "rowwise")
    assert_equal(outcome(model, batch()), outcome(everything, batch()))
    clock.ticks = 1
    hand = ByHand("rowwise")
    hand.turn(["blocks.3"])
    assert_equal(outcome(model, batch()), outcome(hand.model, batch()))


def test_copies_and_restoring_leave_the_clock():
    model = deep("1:2,2:all", "delayed")
    other = copy.deepcopy(model)
    for _ in range(2):
        acceler8.step(other)
    assert_equal(outcome(model, batch()), outcome(Deep(), batch()))
    assert_equal(outcome(other, batch()), outcome(acceler8.convert(Deep(), "delayed"), batch()))
    clock = state_of(model).clock
    assert len(clock._followers) == 2
    acceler8.restore(model)
    assert not clock._followers
    assert not clock._subscribers
    assert_equal(outcome(model, batch()), outcome(Deep(), batch()))


# Dynamo itself does this with every autograd.Function that it traces (torch 2.13)
@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be inst:DeprecationWarning")
def test_a_compiled_model_turns_with_its_stages():
    torch.compiler.reset()
    model, hand = (nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)) for _ in range(2))
    hand.load_state_dict(model.state_dict())
    acceler8.convert(model, "rowwise", fp8_last_layers="1:1,2:all")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for step in range(6):  # a graph a stage: the number of the step is no part of them
        if step in (1, 2):
            acceler8.convert(hand[2 - step], "rowwise")
        with torch.compiler.set_stance("fail_on_recompile" if step > 2 else "default"):
            assert_equal(outcome(model, batch(), compiled), outcome(hand, batch()))
        acceler8.step(model)
    torch.compiler.reset()


def test_the_plan_says_which_blocks_turn_when():
    plan = acceler8.plan(Deep(), fp8_last_layers={4: "all", 0: 1, 2: 3}, fp8_steps="1:9", skip=["blocks.3.up"])
    assert plan.blocks == tuple(f"blocks.{i}" for i in range(DEPTH))
    said = str(plan)
    for line in (
        "FP8 by depth: 4 blocks, blocks.0 to blocks.3",
        "  from step 1: blocks.3 (1 in all)",
        "  from step 2: blocks.1 to blocks.2 (4 in all)",
        "  from step 4: blocks.0 and 2 layers outside of the blocks (4 in all)",
        "only in steps 1 to 8, counted from 0",
    ):
        assert line in said.splitlines()[-6:] or any(line in one for one in said.splitlines())
    first_steps = {line.split("│")[1].strip(): line.split("│")[5].strip() for line in said.splitlines() if "│" in line}
    assert first_steps == {
        **{"first": "4", "blocks.0.up": "4", "blocks.0.down": "4", "last": "4"},
        **{f"blocks.{i}.{name}": "2" for i in (1, 2) for name in ("up", "down")},
        **{"blocks.3.up": "", "blocks.3.down": "1"},
    }
    assert [len(plan.in_fp8(step)) for step in range(10)] == [0, 1, 5, 5, 9, 9, 9, 9, 9, 0]
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


def test_without_all_the_rest_is_never_in_fp8():
    plan = acceler8.plan(Deep(), fp8_last_layers="5:2")
    assert "  never in FP8: blocks.0 to blocks.1 and 2 layers outside of the blocks (6 in all)" in str(plan)
    assert not plan.in_fp8(4)
    assert plan.in_fp8(5) == plan.in_fp8(10**9) == tuple(f"blocks.{i}.{n}" for i in (2, 3) for n in ("up", "down"))


def test_every_layer_from_the_start_is_no_schedule():
    plan = acceler8.plan(Deep(), fp8_last_layers="0:all")
    assert plan == acceler8.plan(Deep())
    assert plan.blocks == ()
    assert not state_of(acceler8.convert(Deep(), plan)).schedules
    older = {k: v for k, v in plan.to_dict().items() if k not in ("fp8_last_layers", "blocks")}
    assert Plan.from_dict(older) == plan


def test_more_layers_than_there_are_is_said():
    plan = acceler8.plan(Deep(), fp8_last_layers="0:4")
    assert not plan.warnings
    plan = acceler8.plan(Deep(), fp8_last_layers="0:2,3:5")
    assert plan.warnings == (
        "fp8_last_layers 0:2,3:5 asks for the last 5 of 4 blocks: all of them; write all, which is also for layers"
        " outside of the blocks",
    )
    assert "first" not in plan.in_fp8(3)


def test_errors():
    with pytest.raises(PlanError, match="fp8_last_layers 0:1 counts blocks, and Mlp has none"):
        acceler8.plan(Mlp(), fp8_last_layers="0:1")
    with pytest.raises(PlanError, match=r"never puts a layer of this Deep in FP8: of blocks.0 to blocks.3 it reaches"):
        acceler8.plan(Deep(), fp8_last_layers="0:1", skip=["blocks.3"])
    with pytest.raises(RecipeError, match=r"fp8_steps :5 ends before fp8_last_layers 5:1 begins, at step 5"):
        acceler8.plan(Deep(), fp8_last_layers="5:1", fp8_steps=":5")
    with pytest.raises(RecipeError, match="fp8_last_layers got '4'; allowed: STEP:K with commas"):
        acceler8.convert(Deep(), "rowwise", fp8_last_layers="4")
    model = Deep()
    with pytest.raises(PlanError, match=r"convert got fp8_last_layers beside a Plan.*give it to acceler8.plan"):
        acceler8.convert(model, acceler8.plan(model), fp8_last_layers="0:1")
    with pytest.raises(PlanError, match="convert got fp8_steps beside a Plan"):
        acceler8.convert(model, acceler8.plan(model), fp8_steps="1:")
    assert next(fp8_layers(model), None) is None
    nothing = acceler8.plan(Deep(), fp8_last_layers="0:1", skip=["first", "last", "blocks.*"])
    assert nothing.fp8_names == ()  # a plan without FP8 is warned of, and says so


def test_stages_may_be_given_as_an_object():
    stages = LastLayers(((0, 1), (2, None)))
    assert acceler8.plan(Deep(), fp8_last_layers=stages) == acceler8.plan(Deep(), fp8_last_layers="0:1,2:all")


def test_verify_says_what_is_not_on_and_that_nothing_marks_steps():
    model = deep("1:1,9:all")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(batch()).square().mean().backward()
        optimizer.step()

    with pytest.raises(VerifyError, match=r"marked no step boundary, so fp8_last_layers 1:1,9:all stands still"):
        acceler8.verify(model, optimizer, step=step)
    acceler8.attach(model, optimizer)
    report = acceler8.verify(model, optimizer, step=step)
    said = "(8 of 10 FP8 layers were in high precision in step 1, by fp8_last_layers 1:1,9:all)"
    assert said in report.checks["moved and fresh"]


def test_a_loop_without_boundaries_is_told(caplog):
    layer = next(fp8_layers(deep("4:all", steps="2:")))[1]
    with caplog.at_level(logging.WARNING, "acceler8"):
        for _ in range(300):
            layer(batch())
    (record,) = caplog.records
    assert "256 training forwards with fp8_steps 2: and fp8_last_layers 4:all and no step boundary was marked" in (
        record.getMessage()
    )


def test_weights_gathered_as_codes_have_no_schedule():
    with pytest.raises(PlanError, match="gather_in_fp8 got a model with fp8_last_layers 1:all; allowed: FP8 in every"):
        gather_in_fp8(deep("1:all"))
