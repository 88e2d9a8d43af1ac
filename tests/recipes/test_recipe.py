"""A recipe is frozen, checked once, and comes back from JSON."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle

import pytest

from acceler8 import recipes
from acceler8.errors import RecipeError
from acceler8.formats import E4M3, E5M2
from acceler8.recipes import CurrentScaling, DelayedScaling, Gemm, Operand, Recipe
from acceler8.scaling import ROWWISE, TENSORWISE, BLOCK_1x128, BLOCK_128x128, MX_1x32

ROW, BLOCK, SQUARE = (Operand(format=E4M3, granularity=g) for g in (ROWWISE, BLOCK_1x128, BLOCK_128x128))
PLAIN = Operand()
VARIANTS = [
    *(recipes.get(name) for name in recipes.names()),
    recipes.get("rowwise", formats="E5M2", skip=("lm_head",), eval="fp8", pow2_scales=True),
    recipes.get("blockwise", save_for_backward="bf16"),
    recipes.get("delayed", amax_history_len=3, margin=-1),
    recipes.get("blockwise").with_gemms(dgrad=False),
]


@pytest.mark.parametrize("recipe", VARIANTS, ids=lambda r: r.name)
def test_round_trips(recipe):
    data = json.loads(json.dumps(recipe.to_dict()))
    for again in (Recipe.from_dict(data), pickle.loads(pickle.dumps(recipe)), copy.deepcopy(recipe)):
        assert again == recipe
        assert hash(again) == hash(recipe)
        assert again.wgrad.b.format is recipe.wgrad.b.format
        assert again.wgrad.b.granularity is recipe.wgrad.b.granularity


def test_frozen():
    recipe = recipes.get("rowwise")
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.eval = "fp8"
    assert recipe.replace(eval="fp8").eval == "fp8"
    assert recipe.eval == "high_precision"


def test_with_gemms():
    recipe = recipes.get("rowwise")
    assert recipe.fp8_gemms == ("fprop", "dgrad", "wgrad")
    assert recipe.with_gemms() == recipe
    off = recipe.with_gemms(dgrad=False)
    assert off.fp8_gemms == ("fprop", "wgrad")
    assert (off.dgrad.a, off.dgrad.b) == (PLAIN, PLAIN)
    assert recipes.get("activations_only").fp8_gemms == ()


def test_a_gemm_is_fp8_if_both_operands_are():
    for a, b, fp8 in ((ROW, ROW, True), (ROW, PLAIN, False), (PLAIN, ROW, False), (PLAIN, PLAIN, False)):
        assert Gemm(a=a, b=b).is_fp8 is fp8


def built(**changes: object) -> Recipe:
    gemm = Gemm(a=ROW, b=ROW)
    return Recipe(**{"name": "mine", "fprop": gemm, "dgrad": gemm, "wgrad": gemm, **changes})


def test_a_recipe_of_ones_own():
    assert built().fp8_gemms == ("fprop", "dgrad", "wgrad")
    mixed = built(wgrad=Gemm(a=PLAIN, b=Operand(format=E5M2, granularity=ROWWISE)))
    assert mixed.notes == (
        "x is kept for backward in E5M2 rowwise; wgrad runs in high precision on its dequantised values",
    )


CONTRADICTIONS = [
    ({"eval": "bf16"}, "unknown eval policy 'bf16'; valid: fp8, high_precision"),
    ({"skip": "lm_head"}, r"skip='lm_head'; allowed: a tuple of layer names; write skip=\('lm_head',\)"),
    ({"skip": (1,)}, r"skip=\(1,\); allowed: a tuple of layer names"),
    ({"pow2_scales": "yes"}, "pow2_scales='yes'; allowed: True, False"),
    (
        {"save_for_backward": "fp16"},
        "unknown save_for_backward 'fp16'; did you mean .*valid: bf16, fp8, fp8_compressed",
    ),
    (
        {"save_for_backward": "bf16", "wgrad": Gemm(a=PLAIN, b=ROW)},
        "save_for_backward='bf16' with recipe 'mine', whose wgrad reads x from FP8 in high precision; allowed: fp8,",
    ),
    (
        {"wgrad": Gemm(a=Operand(format=E5M2, granularity=ROWWISE), b=Operand(format=E5M2, granularity=ROWWISE))},
        "wgrad got E5M2 x E5M2, which no GPU multiplies; give one operand E4M3",
    ),
    ({"fprop": Gemm(a=SQUARE, b=ROW)}, "fprop: x has granularity 128x128; allowed for x: tensorwise, rowwise, 1x128"),
    ({"fprop": Gemm(a=ROW, b=BLOCK)}, "fprop: w has granularity 1x128; allowed for w: tensorwise, rowwise, 128x128"),
    ({"fprop": Gemm(a=BLOCK, b=SQUARE)}, "x has granularities 1x128 and rowwise; allowed: one"),
    (
        {n: Gemm(a=ROW, b=Operand(format=E4M3, granularity=TENSORWISE)) for n in ("fprop", "dgrad")},
        "fprop pairs granularities rowwise and tensorwise",
    ),
    ({"scaling": DelayedScaling()}, "fprop: x has granularity rowwise with delayed scaling; allowed: tensorwise"),
]


@pytest.mark.parametrize(("changes", "message"), CONTRADICTIONS)
def test_contradictions(changes, message):
    with pytest.raises(RecipeError, match=message):
        built(**changes)


def test_operands_of_high_precision_gemms_may_differ():
    """Only casts that two GEMMs share must agree."""
    half = Operand(format=E4M3, granularity=MX_1x32)
    recipe = built(fprop=Gemm(a=PLAIN, b=half), dgrad=Gemm(a=PLAIN, b=PLAIN), wgrad=Gemm(a=ROW, b=ROW))
    assert recipe.fp8_gemms == ("wgrad",)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"amax_history_len": 0}, "amax_history_len=0; allowed: an integer of 1 or more"),
        ({"amax_history_len": 2.0}, "amax_history_len=2.0"),
        ({"interval": True}, "interval=True"),
        ({"margin": 17}, "margin=17; allowed: an integer from -16 to 16"),
        ({"margin": 0.5}, "margin=0.5"),
        ({"amax_compute_algo": "mean"}, "unknown amax_compute_algo 'mean'.* valid: max, most_recent"),
    ],
)
def test_delayed_scaling_is_checked(fields, message):
    with pytest.raises(RecipeError, match=message):
        DelayedScaling(**fields)


def test_replace_names_the_nearest_field():
    with pytest.raises(RecipeError, match="unknown recipe field 'wgrd'; did you mean 'wgrad'"):
        recipes.get("rowwise").replace(wgrd=None)


def broken(path: str, value: object) -> dict[str, object]:
    """A rowwise recipe's JSON with one entry changed, or removed if ``value`` is Ellipsis."""
    data = json.loads(json.dumps(recipes.get("rowwise").to_dict()))
    *parents, last = path.split(".")
    at = data
    for part in parents:
        at = at[part]
    if value is ...:
        del at[last]
    else:
        at[last] = value
    return data


JSON = [
    ("wgrd", None, "unknown key in recipe 'wgrd'; did you mean 'wgrad'"),
    ("name", ..., "recipe lacks name; write it with"),
    ("scaling", ..., "recipe lacks scaling"),
    ("fprop", "E4M3", "fprop of the recipe is a str; allowed: a mapping with a, b, fast_accum"),
    ("fprop.b", ..., "fprop of the recipe lacks b"),
    ("fprop.c", None, "unknown key in fprop of the recipe 'c'"),
    ("fprop.a.format", "E4M4", "unknown format 'E4M4'; did you mean 'E4M3'"),
    ("fprop.a.granularity", "rows", "unknown granularity 'rows'; did you mean 'rowwise'"),
    ("fprop.a.granularity", ..., "fprop.a of the recipe lacks granularity"),
    ("scaling.time", "later", "unknown time of scaling 'later'.* valid: current, delayed"),
    ("scaling.margin", 1, "current scaling got margin; allowed with delayed scaling only"),
    (
        "scaling.amax_historylen",
        1,
        "unknown key in scaling of the recipe 'amax_historylen'; did you mean 'amax_history_len'",
    ),
    ("eval", "slow", "unknown eval policy 'slow'"),
]


@pytest.mark.parametrize(("path", "value", "message"), JSON)
def test_json_that_is_no_recipe(path, value, message):
    with pytest.raises(RecipeError, match=message):
        Recipe.from_dict(broken(path, value))


def test_optional_keys_have_their_defaults():
    data = recipes.get("rowwise").to_dict()
    for key in ("eval", "skip", "pow2_scales", "save_for_backward"):
        del data[key]
    del data["dgrad"]["fast_accum"]
    assert Recipe.from_dict(data) == recipes.get("rowwise")
    assert Recipe.from_dict(data).scaling == CurrentScaling()
