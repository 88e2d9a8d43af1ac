"""The named recipes. Errors, tables and command-line choices all read this one registry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from acceler8.errors import RecipeError, unknown_name
from acceler8.formats import E4M3, E5M2, Format
from acceler8.recipes.recipe import CurrentScaling, DelayedScaling, Gemm, Operand, Recipe
from acceler8.scaling import (
    ROWWISE,
    TENSORWISE,
    BLOCK_1x128,
    BLOCK_128x128,
    Granularity,
    MX_1x32,
)

# What each format policy gives x, w and dy. E5M2: x and dy carry the wide range, w keeps the finer mantissa.
FORMAT_POLICIES: dict[str, tuple[Format, Format, Format]] = {
    "E4M3": (E4M3, E4M3, E4M3),
    "HYBRID": (E4M3, E4M3, E5M2),
    "E5M2": (E5M2, E4M3, E5M2),
}


def _build(
    name: str,
    granularity: Granularity,
    policy: str,
    *,
    w_granularity: Granularity | None = None,
    scaling: CurrentScaling | DelayedScaling | None = None,
    fast_fprop: bool = True,
    **rest: Any,
) -> Recipe:
    x_fmt, w_fmt, dy_fmt = FORMAT_POLICIES[policy]
    x, dy = Operand(format=x_fmt, granularity=granularity), Operand(format=dy_fmt, granularity=granularity)
    w = Operand(format=w_fmt, granularity=w_granularity or granularity)
    # two E5M2 operands cannot be multiplied: wgrad then reads x in E4M3
    x_of_wgrad = Operand(format=E4M3 if dy_fmt is E5M2 else x_fmt, granularity=granularity)
    return Recipe(
        name=name,
        fprop=Gemm(a=x, b=w, fast_accum=fast_fprop),
        dgrad=Gemm(a=dy, b=w),
        wgrad=Gemm(a=dy, b=x_of_wgrad),
        scaling=scaling or CurrentScaling(),
        **rest,
    )


def _tensorwise(policy: str, **rest: Any) -> Recipe:
    return _build("tensorwise", TENSORWISE, policy, **rest)


def _rowwise(policy: str, **rest: Any) -> Recipe:
    return _build("rowwise", ROWWISE, policy, **rest)


def _blockwise(policy: str, **rest: Any) -> Recipe:
    return _build("blockwise", BLOCK_1x128, policy, w_granularity=BLOCK_128x128, fast_fprop=False, **rest)


def _mxfp8(policy: str, **rest: Any) -> Recipe:
    return _build("mxfp8", MX_1x32, policy, fast_fprop=False, **rest)


def _delayed(policy: str, **rest: Any) -> Recipe:
    keys = DelayedScaling.__dataclass_fields__
    scaling = DelayedScaling(**{key: rest.pop(key) for key in list(rest) if key in keys})
    return _build("delayed", TENSORWISE, policy, scaling=scaling, **rest)


def _activations_only(policy: str, **rest: Any) -> Recipe:
    plain = Operand()
    saved = Operand(format=FORMAT_POLICIES[policy][0], granularity=ROWWISE)
    wgrad = Gemm(a=plain, b=saved)
    return Recipe(
        name="activations_only",
        fprop=Gemm(a=plain, b=plain),
        dgrad=Gemm(a=plain, b=plain),
        wgrad=wgrad,
        **rest,
    )


# name -> (builder, default format policy)
_RECIPES: dict[str, tuple[Callable[..., Recipe], str]] = {
    "tensorwise": (_tensorwise, "HYBRID"),
    "rowwise": (_rowwise, "E4M3"),
    "blockwise": (_blockwise, "E4M3"),
    "mxfp8": (_mxfp8, "E4M3"),
    "delayed": (_delayed, "HYBRID"),
    "activations_only": (_activations_only, "E4M3"),
}
DEFAULT = "rowwise"
GW_HP = "rowwise_with_gw_hp"
"""torchao's name for ``rowwise`` with wgrad in high precision, which ``get`` takes too."""


def names() -> tuple[str, ...]:
    """Names that ``get`` takes."""
    return tuple(_RECIPES)


def get(name: str = DEFAULT, *, formats: str | None = None, **fields: Any) -> Recipe:
    """The named recipe.

    ``formats`` is ``E4M3``, ``HYBRID`` (E4M3 forward, E5M2 gradients) or ``E5M2`` (x and dy in E5M2, w in
    E4M3); default HYBRID for tensorwise and delayed, E4M3 for the rest. ``fields`` are fields of Recipe
    (``eval``, ``skip``, ``pow2_scales``, ``save_for_backward``) and, for ``delayed``, of DelayedScaling.
    ``rowwise_with_gw_hp``, torchao's name, is ``rowwise`` with wgrad in high precision.
    Raises: RecipeError for an unknown name, format policy or field; the message names the nearest valid one.
    """
    if name == GW_HP:
        return get("rowwise", formats=formats, **fields).with_gemms(wgrad=False)
    if name not in _RECIPES:
        raise RecipeError(unknown_name("recipe", name, _RECIPES))
    build, policy = _RECIPES[name]
    policy = policy if formats is None else str(formats).upper()
    if policy not in FORMAT_POLICIES:
        raise RecipeError(unknown_name("formats", formats, FORMAT_POLICIES))
    allowed = ["eval", "skip", "pow2_scales", "save_for_backward"]
    allowed += list(DelayedScaling.__dataclass_fields__) if name == "delayed" else []
    for key in fields:
        if key not in allowed:
            raise RecipeError(unknown_name(f"field of recipe {name!r}", key, allowed))
    return build(policy, **fields)


def resolve(recipe: str | Recipe | None) -> Recipe:
    """A recipe from its name, from itself, or the default from None."""
    if isinstance(recipe, Recipe):
        return recipe
    if recipe is None or isinstance(recipe, str):
        return get(recipe or DEFAULT)
    raise RecipeError(f"recipe is a {type(recipe).__name__}; allowed: a name ({', '.join(names())}) or a Recipe")
