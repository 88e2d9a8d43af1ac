"""A model whose layers have recipes of their own: each computes as under its recipe alone, and the plan says which."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import Tensor, nn

import acceler8
from acceler8 import recipes
from acceler8.conversion import Plan
from acceler8.errors import PlanError
from acceler8.nn import Fp8Linear, fp8_layers, state_of
from tests.models import RECIPES, Mlp, assert_equal, batch, outcome, train

# every recipe, one layer that a pattern leaves, and one that none fits
MIXED = {f"blocks.{i}": recipe for i, recipe in enumerate((*RECIPES, None))}


class Blocks(nn.Module):
    """A block a recipe, one to be left, and one that no pattern fits."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mlp(seed) for seed in range(len(MIXED) + 1))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def rows(plan: Plan) -> dict[str, tuple[str, str]]:
    return {row.name: (row.recipe, row.reason) for row in plan.rows}


def test_the_plan_says_each_layers_recipe():
    plan = acceler8.plan(Blocks(), MIXED)
    said = rows(plan)
    for i, recipe in enumerate(RECIPES):
        assert said[f"blocks.{i}.up"][0] == recipe
    assert said["blocks.6.up"] == ("", "high precision by recipe (blocks.6)")
    assert said["blocks.7.down"] == ("", "no pattern of the recipe fits it")
    assert plan.totals.fp8_layers == 12
    lines = str(plan).splitlines()
    assert next(line for line in lines if "why" in line).split("┃")[5].strip() == "recipe"
    assert next(line for line in lines if "blocks.1.up" in line).split("│")[5].strip() == "rowwise"
    assert any(note.startswith("activations_only: x is kept for backward") for note in plan.notes)
    assert sum("emulated" in note for note in plan.notes) == len({n for n in plan.notes if "emulated" in n}) > 1
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


@pytest.mark.parametrize("training", [True, False])
def test_each_layer_computes_as_under_its_own_recipe_alone(training):
    mixed = acceler8.convert(Blocks(), Plan.from_dict(acceler8.plan(Blocks(), MIXED).to_dict())).train(training)
    for i, recipe in enumerate((*RECIPES, None, None)):
        alone = Mlp(i) if recipe is None else acceler8.convert(Mlp(i), recipe)
        alone.train(training)
        for seed in (1, 2, 3):  # delayed scaling with its histories
            got, want = (outcome(model, batch(seed=seed)) for model in (mixed.blocks[i], alone))
            assert_equal(got, want)
            acceler8.step(mixed)
            if recipe is not None:
                acceler8.step(alone)


def test_only_delayed_layers_have_amax_slots():
    model = acceler8.convert(Blocks(), MIXED)
    amax = state_of(model).amax
    assert amax is not None
    assert amax.names == [f"blocks.4.{layer}.{role}" for layer in ("up", "down") for role in ("x", "w", "dy", "-")]
    slots = {name: layer._acceler8_layer.slots for name, layer in fp8_layers(model)}
    found = {name: [slot.index for slot in own[:3]] for name, own in slots.items() if own is not None}
    assert found == {"blocks.4.up": [0, 1, 2], "blocks.4.down": [4, 5, 6]}
    assert state_of(acceler8.convert(Blocks(), {"blocks.0": "rowwise"})).amax is None


def test_it_trains_verifies_restores_and_keeps_its_state():
    model = acceler8.convert(Blocks(), MIXED)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    acceler8.attach(model, optimizer)

    def step() -> None:
        optimizer.zero_grad()
        model(batch()).square().mean().backward()
        optimizer.step()

    report = acceler8.verify(model, optimizer, step=step)
    assert report.checks["layers"] == "12 FP8 layers as planned"
    saved = acceler8.fp8_state_dict(model)
    assert sorted(saved) == ["blocks.4.down.amax", "blocks.4.up.amax", "steps"]
    other = acceler8.convert(Blocks(), MIXED)
    other.load_state_dict(model.state_dict())
    acceler8.load_fp8_state_dict(other, saved)
    assert_equal(outcome(other, batch()), outcome(model, batch()))
    with acceler8.window(model):
        assert_equal(outcome(model, batch()), outcome(other, batch()))
    plain = acceler8.restore(copy.deepcopy(model))
    assert not any(isinstance(module, Fp8Linear) for module in plain.modules())
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))


def test_one_recipe_for_all_by_pattern_is_that_recipe():
    assert train(acceler8.convert(Mlp(), {"*": "delayed"}), 4) == train(acceler8.convert(Mlp(), "delayed"), 4)


def test_each_recipe_leaves_out_what_it_skips_of_its_own_layers():
    recipe = {"up": recipes.get("rowwise", skip=("down",)), "*": "tensorwise"}
    assert rows(acceler8.plan(Mlp(), recipe))["down"][0] == "tensorwise"
    assert rows(acceler8.plan(Mlp(), recipe, skip=["down"]))["down"] == ("", "skipped by name (down)")
    with pytest.raises(PlanError, match="skip names 'dwn', which fits no layer; did you mean 'down'"):
        acceler8.plan(Mlp(), {"up": recipes.get("rowwise", skip=("dwn",))})


@pytest.mark.parametrize(
    ("pattern", "near"), [("donw", "did you mean 'down'"), ("norm", "there are: down, up"), ("*.upp", "there are")]
)
def test_a_pattern_that_fits_no_layer_is_an_error(pattern, near):
    model = nn.Sequential(Mlp())[0]
    with pytest.raises(PlanError, match=rf"recipe has the pattern '{pattern.replace('*', '.')}'.*{near}"):
        acceler8.plan(model, {pattern: "rowwise", "*": "tensorwise"})


def test_a_pattern_that_does_nothing_is_warned_of():
    plan = acceler8.plan(Mlp(), {"up": "rowwise", "u*": "tensorwise", "down": "blockwise", "*": None}, skip=["down"])
    assert plan.warnings == (
        "pattern 'u*' decides no layer: patterns before it fit all that it fits; move it up",
        "pattern 'down' (recipe blockwise) makes no layer FP8: skipped by name (down)",
    )
    assert not acceler8.plan(Mlp(), {"up": "rowwise", "down": "tensorwise", "*": "delayed"}).warnings


def test_a_plan_whose_recipes_leave_a_planned_layer_is_refused():
    data = acceler8.plan(Mlp(), {"up": "rowwise", "down": "tensorwise"}).to_dict()
    data["recipe"]["layers"].pop()
    with pytest.raises(PlanError, match="'down' is planned FP8 and the plan's recipes leave it; plan it again"):
        acceler8.convert(Mlp(), Plan.from_dict(data))


def test_a_single_layer_has_no_name_and_every_glob_fits_it():
    layer = acceler8.convert(nn.Linear(32, 32), {"*": "tensorwise"})
    assert isinstance(layer, Fp8Linear)
    assert layer._acceler8_layer.recipe.name == "tensorwise"


def test_a_mistyped_part_of_a_glob_is_mended():
    with pytest.raises(PlanError, match=r"pattern '\*\.donw', which fits no layer; did you mean '\*\.down'\?"):
        acceler8.plan(Blocks(), {"*.donw": "rowwise", "*": "tensorwise"})


def test_a_block_is_named_by_its_whole_path():
    model = nn.ModuleDict({"model": Blocks()})
    with pytest.raises(
        PlanError, match=r"the pattern 'blocks\.0', which fits no layer; did you mean 'model\.blocks\.0'\?"
    ):
        acceler8.plan(model, {"blocks.0": None, "*": "rowwise"})
    said = rows(acceler8.plan(model, {"model.blocks.0": None, "*": "rowwise"}))
    assert (said["model.blocks.0.up"][0], said["model.blocks.1.up"][0]) == ("", "rowwise")
