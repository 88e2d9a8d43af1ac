"""The named recipes, written down a second time."""

from __future__ import annotations

import pytest

from acceler8 import recipes
from acceler8.errors import RecipeError
from acceler8.recipes import CurrentScaling, DelayedScaling, Recipe

# name: (fprop, dgrad, wgrad), each "format granularity" of both operands, by default
DEFAULTS = {
    "tensorwise": ("E4M3 tensorwise x E4M3 tensorwise", "E5M2 tensorwise x E4M3 tensorwise") * 2,
    "rowwise": ("E4M3 rowwise x E4M3 rowwise",) * 3,
    "blockwise": ("E4M3 1x128 x E4M3 128x128", "E4M3 1x128 x E4M3 128x128", "E4M3 1x128 x E4M3 1x128"),
    "mxfp8": ("E4M3 mx1x32 x E4M3 mx1x32",) * 3,
    "delayed": ("E4M3 tensorwise x E4M3 tensorwise", "E5M2 tensorwise x E4M3 tensorwise") * 2,
    "activations_only": (
        "high precision x high precision",
        "high precision x high precision",
        "high precision x E4M3 rowwise",
    ),
}
for name in ("tensorwise", "delayed"):
    forward, gradient = DEFAULTS[name][:2]
    DEFAULTS[name] = (forward, gradient, gradient)


def said(recipe: Recipe) -> tuple[str, ...]:
    return tuple(f"{gemm.a} x {gemm.b}" for gemm in (recipe.fprop, recipe.dgrad, recipe.wgrad))


def test_names():
    assert recipes.names() == tuple(DEFAULTS)
    assert recipes.get() == recipes.get("rowwise") == recipes.resolve(None)


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults(name):
    recipe = recipes.get(name)
    assert said(recipe) == DEFAULTS[name]
    assert recipe.name == name
    assert (recipe.pow2_scales, recipe.eval, recipe.skip, recipe.margin) == (False, "high_precision", (), 0)
    assert recipe.save_for_backward == "fp8"
    assert recipe.scaling == (DelayedScaling() if name == "delayed" else CurrentScaling())
    # Hopper's fast accumulation in fprop only, and never with block scales, which promote sums themselves
    assert recipe.fprop.fast_accum == (name in ("tensorwise", "rowwise", "delayed"))
    assert not recipe.dgrad.fast_accum
    assert not recipe.wgrad.fast_accum
    assert recipes.resolve(name) == recipes.resolve(recipe) == recipe


def test_format_policies():
    r = "rowwise"
    assert said(recipes.get(r, formats="HYBRID")) == (
        f"E4M3 {r} x E4M3 {r}", f"E5M2 {r} x E4M3 {r}", f"E5M2 {r} x E4M3 {r}",
    )  # fmt: skip
    assert said(recipes.get(r, formats="e5m2")) == (f"E5M2 {r} x E4M3 {r}",) * 3
    assert recipes.get(r, formats="E5M2").notes == ("wgrad re-quantises x in E4M3: no GPU multiplies E5M2 x E5M2",)
    assert recipes.get(r).notes == ()
    assert recipes.get(r, save_for_backward="bf16").notes == (
        "kept for backward: inputs as they are, cast again for wgrad",
    )


@pytest.mark.parametrize("policy", ["HYBRID", "E5M2"])
def test_block_scales_come_in_e4m3_only(policy):
    with pytest.raises(RecipeError, match="E5M2 with 1x128 scales; allowed: E4M3"):
        recipes.get("blockwise", formats=policy)


def test_fields():
    recipe = recipes.get("delayed", amax_history_len=16, amax_compute_algo="most_recent", margin=2, interval=3)
    assert recipe.scaling == DelayedScaling(amax_history_len=16, amax_compute_algo="most_recent", margin=2, interval=3)
    assert recipe.margin == 2
    assert recipe.is_delayed
    other = recipes.get("rowwise", eval="fp8", skip=("a", "b"), pow2_scales=True)
    assert (other.eval, other.skip, other.pow2_scales) == ("fp8", ("a", "b"), True)


WRONG = [
    (
        lambda: recipes.get("rowise"),
        r"unknown recipe 'rowise'; did you mean 'rowwise'\? valid: activations_only, blockwise",
    ),
    (lambda: recipes.get("x"), "unknown recipe 'x'; valid: activations_only, blockwise"),
    (lambda: recipes.get("rowwise", formats="HYBIRD"), "unknown formats 'HYBIRD'; did you mean 'HYBRID'"),
    (lambda: recipes.get("rowwise", evl="fp8"), "unknown field of recipe 'rowwise' 'evl'; did you mean 'eval'"),
    (lambda: recipes.get("rowwise", amax_history_len=4), "unknown field of recipe 'rowwise' 'amax_history_len'"),
    (lambda: recipes.get("delayed", amax_history_length=4), "did you mean 'amax_history_len'"),
    (lambda: recipes.resolve(3), r"recipe is a int; allowed: a name \(tensorwise, rowwise"),
]


@pytest.mark.parametrize(("call", "message"), WRONG)
def test_unknown_names(call, message):
    with pytest.raises(RecipeError, match=message):
        call()


def test_torchaos_name_is_rowwise_with_wgrad_in_high_precision():
    plain = recipes.get("rowwise", pow2_scales=True)
    assert recipes.get("rowwise_with_gw_hp", pow2_scales=True) == plain.with_gemms(wgrad=False)
    assert "rowwise_with_gw_hp" not in recipes.names()
