"""acceler8's recipes as torchao's ``Float8LinearConfig``, and back.

``tensorwise`` and ``rowwise`` are torchao's recipes of the same names, field by field; ``rowwise`` with wgrad in high
precision is its ``rowwise_with_gw_hp``. torchao's rowwise recipes round scales down to powers of two, so they do here.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from acceler8.backends.capability import kind_of
from acceler8.backends.torchao import library
from acceler8.backends.torchao.options import TorchaoOptions
from acceler8.errors import PlanError, RecipeError
from acceler8.formats import E4M3, E5M2
from acceler8.recipes import CurrentScaling, Gemm, Operand, Recipe, get
from acceler8.recipes.registry import GW_HP
from acceler8.scaling import ROWWISE, TENSORWISE

NAMES = ("tensorwise", "rowwise", GW_HP)
"""torchao's names of recipes; the last is ours for ``rowwise`` with wgrad in high precision."""


def named(recipe: str) -> Recipe | None:
    """The recipe that only torchao has a name for; None for a name of acceler8's vocabulary, or another."""
    if recipe.lower() != GW_HP:
        return None
    return get("rowwise").with_gemms(wgrad=False).replace(name=GW_HP)


def problem(recipe: Recipe) -> str | None:
    """What of a recipe whose granularity torchao has it cannot do; None: nothing."""
    for name in ("fprop", "dgrad", "wgrad"):
        gemm: Gemm = getattr(recipe, name)
        if gemm.a.is_fp8 is not gemm.b.is_fp8:
            return f"{name} has one operand in FP8; allowed: both, or none"
    pairs = (
        ("x", recipe.fprop.a, recipe.wgrad.b),
        ("w", recipe.fprop.b, recipe.dgrad.b),
        ("dy", recipe.dgrad.a, recipe.wgrad.a),
    )
    for role, first, second in pairs:
        if first.is_fp8 and second.is_fp8 and first.format is not second.format:
            return f"{role} is in {first.format} and {second.format}; allowed: one format for both GEMMs; use HYBRID"
    if recipe.save_for_backward == "fp8_compressed":
        return "save_for_backward is fp8_compressed, and torchao keeps inputs in high precision; leave it out"
    return None


def linear_config(recipe: Recipe, options: TorchaoOptions, device: torch.device) -> Any:
    """The ``Float8LinearConfig`` that computes a recipe: the options' own, if they have one."""
    config = library.module("float8.config")
    if options.config is not None:
        return _without_all_gather(options.config)
    is_rowwise = kind_of(recipe) == "rowwise"
    w_of_dgrad = _cast(config, recipe.dgrad.b)
    if is_rowwise and not recipe.wgrad.is_fp8 and recipe.dgrad.is_fp8:  # as in torchao's rowwise_with_gw_hp
        w_of_dgrad = _cast(config, Operand(format=recipe.dgrad.b.format, granularity=TENSORWISE))
    return config.Float8LinearConfig(
        cast_config_input=_cast(config, recipe.fprop.a),
        cast_config_input_for_grad_weight=_cast(config, recipe.wgrad.b),
        cast_config_weight=_cast(config, recipe.fprop.b),
        cast_config_weight_for_grad_input=w_of_dgrad,
        cast_config_grad_output=_cast(config, recipe.dgrad.a, E4M3 if is_rowwise else E5M2),
        cast_config_grad_output_for_grad_weight=_cast(config, recipe.wgrad.a, E4M3 if is_rowwise else E5M2),
        gemm_config_output=config.Float8GemmConfig(use_fast_accum=recipe.fprop.fast_accum or not recipe.fprop.is_fp8),
        gemm_config_grad_input=config.Float8GemmConfig(use_fast_accum=recipe.dgrad.fast_accum),
        gemm_config_grad_weight=config.Float8GemmConfig(use_fast_accum=recipe.wgrad.fast_accum),
        pad_inner_dim=options.pad_inner_dim,
        emulate=_must_emulate(is_rowwise, device),
        round_scales_to_power_of_2=recipe.pow2_scales or is_rowwise,
    )


def recipe_of(config: Any, eval: str | None) -> Recipe:
    """A ``Float8LinearConfig`` in acceler8's words, for plans. Raises PlanError for one that no GEMM computes."""

    def operand(cast: Any) -> Operand:
        if cast.scaling_type.value == "disabled":
            return Operand()
        fmt = E5M2 if "e5m2" in str(cast.target_dtype) else E4M3
        return Operand(format=fmt, granularity=ROWWISE if cast.scaling_granularity.value == "axiswise" else TENSORWISE)

    c = config
    x, w, dy = (operand(cast) for cast in (c.cast_config_input, c.cast_config_weight, c.cast_config_grad_output))
    w_of_dgrad = operand(c.cast_config_weight_for_grad_input)
    if w.is_fp8 and w_of_dgrad.is_fp8:
        w_of_dgrad = w  # torchao may cast it with another granularity, which a Recipe cannot say and a note does
    kinds = {o.granularity.name for o in (x, w, dy) if o.is_fp8}
    try:
        return Recipe(
            name=f"torchao config ({', '.join(sorted(kinds)) or 'high precision'})",
            fprop=Gemm(a=x, b=w, fast_accum=c.gemm_config_output.use_fast_accum),
            dgrad=Gemm(a=dy, b=w_of_dgrad, fast_accum=c.gemm_config_grad_input.use_fast_accum),
            wgrad=Gemm(
                a=operand(c.cast_config_grad_output_for_grad_weight),
                b=operand(c.cast_config_input_for_grad_weight),
                fast_accum=c.gemm_config_grad_weight.use_fast_accum,
            ),
            scaling=CurrentScaling(),
            pow2_scales=c.round_scales_to_power_of_2,
            eval=eval or "high_precision",  # type: ignore[arg-type]
        )
    except RecipeError as error:
        raise PlanError(f"the Float8LinearConfig describes what acceler8 cannot plan: {error}") from None


def _cast(config: Any, operand: Operand, of_disabled: Any = E4M3) -> Any:
    """A ``CastConfig``; torchao wants a dtype for an operand that is not cast too."""
    if operand.format is None:
        return config.CastConfig(scaling_type=config.ScalingType.DISABLED, target_dtype=of_disabled.torch_dtype)
    granularity = "axiswise" if operand.granularity is ROWWISE else "tensorwise"
    return config.CastConfig(
        scaling_granularity=config.ScalingGranularity(granularity), target_dtype=operand.format.torch_dtype
    )


def _without_all_gather(config: Any) -> Any:
    """Drop what puts a tensor subclass in the weight's place for FSDP2's all-gather, which nothing calls."""
    if not config.enable_fsdp_float8_all_gather:
        return config
    return dataclasses.replace(config, enable_fsdp_float8_all_gather=False)


def _must_emulate(is_rowwise: bool, device: torch.device) -> bool:
    """PyTorch 2.11's and 2.12's CPU kernel multiplies with one scale a tensor only (INTERNAL ASSERT, Blas.cpp)."""
    return is_rowwise and device.type == "cpu" and torch.__version__ < (2, 13)  # type: ignore[operator]
