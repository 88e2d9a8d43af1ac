"""Recipes and TERecipeKwargs as TransformerEngine's classes and fields: what arrives, and what is refused by name."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
import torch

from acceler8 import backends, recipes
from acceler8.backends.transformer_engine import TransformerEngineOptions, recipe_of_kwargs
from acceler8.backends.transformer_engine.recipes import CAPABILITIES, CLASSES, describe, odd_dimensions, unsupported
from acceler8.errors import PlanError, RecipeError
from acceler8.utils import TERecipeKwargs

TE = backends.find("transformer_engine")


def test_the_vocabulary():
    assert {name: describe(recipes.get(name)).name for name in CLASSES} == {
        "delayed": "DelayedScaling",
        "tensorwise": "Float8CurrentScaling",
        "blockwise": "Float8BlockScaling",
        "mxfp8": "MXFP8BlockScaling",
    }
    assert {row.recipe for row in CAPABILITIES} == set(CLASSES)
    assert {name: describe(recipes.get(name)).multiple for name in CLASSES} == {
        "delayed": 16,
        "tensorwise": 16,
        "blockwise": 128,
        "mxfp8": 32,
    }


@pytest.mark.parametrize("name", ["rowwise", "activations_only"])
def test_a_recipe_that_it_does_not_have_is_refused_with_those_that_it_has(name):
    said = f"has no recipe {name}; allowed: delayed, tensorwise, blockwise, mxfp8"
    assert said in str(TE.lacks(recipes.get(name), torch.device("meta")))
    with pytest.raises(PlanError, match=said):
        describe(recipes.get(name))


def test_formats_arrive():
    for name, policy in (("delayed", "HYBRID"), ("tensorwise", "HYBRID"), ("mxfp8", "E4M3"), ("blockwise", "E4M3")):
        assert describe(recipes.get(name)).fields["fp8_format"] == policy
    assert describe(recipes.get("delayed", formats="E4M3")).fields["fp8_format"] == "E4M3"
    assert describe(recipes.get("mxfp8", formats="HYBRID")).fields["fp8_format"] == "HYBRID"
    assert "E5M2 in the forward pass" in str(unsupported(recipes.get("delayed", formats="E5M2")))
    assert "write HYBRID" in str(unsupported(recipes.get("tensorwise", formats="E5M2")))


def test_scales_and_accumulation_arrive():
    plain = describe(recipes.get("tensorwise"))
    assert (plain.pow2_scales, plain.fast_accum) == (False, True)
    assert describe(recipes.get("tensorwise", pow2_scales=True)).pow2_scales is True
    assert describe(recipes.get("blockwise", pow2_scales=True)).pow2_scales is True
    assert describe(recipes.get("mxfp8")).pow2_scales is None  # they are, always
    assert "pow2_scales=True with delayed scaling" in str(unsupported(recipes.get("delayed", pow2_scales=True)))


@pytest.mark.parametrize("name", sorted(CLASSES))
@pytest.mark.parametrize("gemm", ["fprop", "dgrad", "wgrad"])
def test_another_accumulation_arrives_or_is_refused(name, gemm):
    recipe = recipes.get(name)
    assert unsupported(recipe) is None
    had = getattr(recipe, gemm).fast_accum
    other = recipe.replace(**{gemm: dataclasses.replace(getattr(recipe, gemm), fast_accum=not had)})
    if (name, gemm) == ("tensorwise", "fprop"):
        assert (describe(recipe).fast_accum, describe(other).fast_accum) == (True, False)
        return
    said = f"fast_accum={not had} in {gemm}, which TransformerEngine computes with {had} under {name}; allowed: {had}"
    assert said in str(TE.lacks(other, torch.device("meta")))
    with pytest.raises(PlanError, match=said):
        describe(other)
    if gemm != "fprop":  # in high precision nothing accumulates in FP8
        assert unsupported(other.with_gemms(**{gemm: False})) is None


def test_what_stays_for_backward_is_its_own_affair():
    for policy in ("bf16", "fp8_compressed"):
        recipe = recipes.get("tensorwise", save_for_backward=policy)
        assert f"save_for_backward='{policy}' with backend 'transformer_engine'" in str(unsupported(recipe))


@pytest.mark.parametrize(
    ("shape", "name", "said"),
    [
        ((64, 32), "delayed", None),
        ((64, 32), "mxfp8", None),
        ((64, 48), "mxfp8", "48 not a multiple of 32"),
        ((64, 128), "blockwise", "64 not a multiple of 128"),
        ((96, 64), "blockwise", "64 and 96 not a multiple of 128"),
        ((256, 128), "blockwise", None),
        ((30, 32), "tensorwise", "30 not a multiple of 16"),
    ],
)
def test_dimensions_by_recipe(shape, name, said):
    reason = odd_dimensions(shape, recipes.get(name))
    assert reason is None if said is None else said in str(reason)
    layer = torch.nn.Linear(shape[1], shape[0], device="meta")
    assert (TE.refuses(layer, recipes.get(name)) is None) == (said is None)


def test_gpus_by_recipe(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "A GPU")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    runs = {}
    for capability in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0)):
        found = [name for name in CLASSES if TE.lacks(recipes.get(name), torch.device("cuda", 0)) is None]
        runs[capability] = found
    assert runs == {
        (8, 0): [],
        (8, 9): ["delayed", "tensorwise"],
        (9, 0): ["delayed", "tensorwise", "blockwise"],
        (10, 0): ["delayed", "tensorwise", "blockwise", "mxfp8"],
        (12, 0): ["delayed", "tensorwise", "blockwise"],
    }
    capability = (9, 0)
    assert "A GPU (sm_90)" in str(TE.lacks(recipes.get("mxfp8"), torch.device("cuda", 0)))
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert "needs CUDA 12.9 or newer" in str(TE.lacks(recipes.get("blockwise"), torch.device("cuda", 0)))
    assert "the CPU" in str(TE.lacks(recipes.get("delayed"), torch.device("cpu")))


def test_every_field_of_the_kwargs_arrives():
    recipe = recipe_of_kwargs(
        use_autocast_during_eval=True,
        margin=2,
        interval=5,
        fp8_format="e4m3",
        amax_history_len=16,
        amax_compute_algo="MAX",
        override_linear_precision=(False, True, True),
        skip=("head",),
    )
    described = describe(recipe)
    assert described.name == "DelayedScaling"
    assert described.fields == {
        "fp8_format": "E4M3",
        "margin": 2,
        "amax_history_len": 16,
        "amax_compute_algo": "max",
    }
    assert (described.interval, described.dgrad, described.wgrad) == (5, False, False)
    assert recipe.eval == "fp8"
    assert recipe.skip == ("head",)


def test_the_defaults_are_those_of_the_kwargs():
    handler = TERecipeKwargs()
    for name, parameter in inspect.signature(recipe_of_kwargs).parameters.items():
        if name not in ("recipe", "fp8_format"):  # None there: the recipe's own
            assert getattr(handler, name) == parameter.default, name
    assert describe(recipe_of_kwargs()).fields == {
        "fp8_format": "HYBRID",
        "margin": 0,
        "amax_history_len": 1024,
        "amax_compute_algo": "most_recent",
    }


def test_mxfp8_is_reached_with_both_formats():
    assert describe(recipe_of_kwargs(use_mxfp8_block_scaling=True)).name == "MXFP8BlockScaling"
    hybrid = describe(recipe_of_kwargs(use_mxfp8_block_scaling=True, fp8_format="HYBRID"))
    assert hybrid.fields == {"fp8_format": "HYBRID"}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"fp8_format": "E5M2"}, "E5M2 is not trained with by TransformerEngine: .*write HYBRID"),
        ({"fp8_format": "E4M2"}, "unknown fp8_format 'E4M2'; did you mean 'E4M3'"),
        ({"amax_compute_algo": "mean"}, "unknown amax_compute_algo 'mean'"),
        ({"override_linear_precision": (True, True, True)}, "leaves nothing in FP8"),
        ({"override_linear_precision": (True, False, False)}, "keeps fprop in high precision"),
        ({"override_linear_precision": (False, True)}, "allowed: three booleans"),
        ({"recipe": "tensorwise", "margin": 1}, "margin=1 belongs to delayed scaling"),
        ({"recipe": "delayed", "use_mxfp8_block_scaling": True}, "allowed: one of them"),
        ({"recipe": "blokwise"}, "unknown recipe 'blokwise'; did you mean 'blockwise'"),
        ({"interval": 0}, "interval=0"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(fields, said):
    with pytest.raises(RecipeError, match=said):
        recipe_of_kwargs(**fields)


def test_fprop_alone_in_high_precision_is_refused_in_a_recipe_too():
    recipe = recipes.get("tensorwise").with_gemms(fprop=False)
    assert "keeps fprop in high precision" in str(TE.lacks(recipe, torch.device("meta")))


def test_options():
    options = TransformerEngineOptions(convert_norms=False)
    assert TransformerEngineOptions.from_dict(options.to_dict()) == options
    with pytest.raises(RecipeError, match="convert_norms='no'; allowed: True, False"):
        TransformerEngineOptions(convert_norms="no")
    with pytest.raises(PlanError, match="got options"):
        backends.find("native").check_options(options)
    TE.check_options(options)


def test_notes():
    recipe = recipes.get("tensorwise").with_gemms(wgrad=False)
    notes = TE.notes(recipe, torch.device("meta"))
    assert any("wgrad in high precision" in note for note in notes)
    assert any("norms run as TransformerEngine's" in note and "cast their input to its dtype" in note for note in notes)
    assert (
        TE.notes(recipes.get("tensorwise"), torch.device("meta"), TransformerEngineOptions(convert_norms=False)) == []
    )


def test_a_start_and_what_stays_for_backward():
    state = {
        "scale_up.amax_history_fwd": torch.full((4, 3), 2.0),
        "scale_up.scale_fwd": torch.full((3,), 2.0),
        "scale_bwd": torch.full((2,), 2.0),
        "steps": torch.tensor(7),
    }
    start = {name: tensor.unique().tolist() for name, tensor in TE.initial_state(state).items()}
    expected = {"scale_up.amax_history_fwd": [0.0], "scale_up.scale_fwd": [1.0], "scale_bwd": [1.0], "steps": [0]}
    assert start == expected
    kept = {name: TE.kept_input_bytes(recipes.get(name), torch.bfloat16) for name in CLASSES}
    assert kept == {"delayed": 1.0, "tensorwise": 1.0, "blockwise": 1 + 4 / 128, "mxfp8": 1 + 1 / 32}
    assert TE.kept_input_bytes(recipes.get("delayed").with_gemms(wgrad=False), torch.float32) == 4.0


def test_the_default_recipe():
    assert TE.recipe_for(None, None).name == "delayed"
