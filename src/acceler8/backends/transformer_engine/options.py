"""What the TransformerEngine backend can be told beside a recipe, and the recipe that TERecipeKwargs describe."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from acceler8 import recipes
from acceler8.backends.options import BackendOptions
from acceler8.errors import RecipeError, unknown_name
from acceler8.recipes import Recipe

FORMATS = ("HYBRID", "E4M3")


@dataclass(frozen=True, kw_only=True)
class TransformerEngineOptions(BackendOptions):
    """Settings of the backend. Raises RecipeError for a value that is none."""

    convert_norms: bool = True
    """LayerNorm and RMSNorm run as TransformerEngine's too, in training."""

    def __post_init__(self) -> None:
        if not isinstance(self.convert_norms, bool):
            raise RecipeError(f"convert_norms={self.convert_norms!r}; allowed: True, False")


def recipe_of_kwargs(
    *,
    recipe: str | None = None,
    use_autocast_during_eval: bool = False,
    margin: int = 0,
    interval: int = 1,
    fp8_format: str | None = None,
    amax_history_len: int = 1024,
    amax_compute_algo: str = "most_recent",
    override_linear_precision: Iterable[bool] = (False, False, False),
    use_mxfp8_block_scaling: bool = False,
    skip: Iterable[str] = (),
) -> Recipe:
    """The recipe that these fields of ``TERecipeKwargs`` describe: every one of them takes effect, or is refused.

    ``recipe`` is a word of the vocabulary; None: ``mxfp8`` with ``use_mxfp8_block_scaling``, else ``delayed``.
    ``override_linear_precision`` keeps fprop, dgrad, wgrad in high precision. ``margin``, ``interval`` and ``amax_*``
    belong to delayed scaling. Format and algorithm are read in any case.
    Raises: RecipeError for E5M2, for all three GEMMs in high precision, for fprop alone of them, and for fields of
        delayed scaling beside another recipe.
    """
    if recipe is None:
        recipe = "mxfp8" if use_mxfp8_block_scaling else "delayed"
    elif use_mxfp8_block_scaling and recipe != "mxfp8":
        raise RecipeError(f"use_mxfp8_block_scaling beside recipe {recipe!r}; allowed: one of them; leave one out")
    check_format(fp8_format)
    delayed = {
        "margin": (margin, 0),
        "interval": (interval, 1),
        "amax_history_len": (amax_history_len, 1024),
        "amax_compute_algo": (str(amax_compute_algo).lower(), "most_recent"),
    }
    if recipe != "delayed":
        if given := [f"{name}={value!r}" for name, (value, default) in delayed.items() if value != default]:
            raise RecipeError(f"{given[0]} belongs to delayed scaling, and the recipe is {recipe!r}; leave it out")
        fields = {}
    else:
        fields = {name: value for name, (value, _) in delayed.items()}
    made = recipes.get(
        recipe,
        formats=fp8_format,
        eval="fp8" if use_autocast_during_eval else "high_precision",
        skip=tuple(skip),
        **fields,
    )
    override = tuple(override_linear_precision)
    if len(override) != 3 or not all(isinstance(one, bool) for one in override):
        raise RecipeError(
            f"override_linear_precision={override!r}; allowed: three booleans, for fprop, dgrad and wgrad"
        )
    check_override(override)
    fprop, dgrad, wgrad = override
    return made.with_gemms(fprop=not fprop, dgrad=not dgrad, wgrad=not wgrad) if any(override) else made


def check_format(fp8_format: str | None) -> None:
    """Raise RecipeError for a format that TransformerEngine does not train with."""
    if fp8_format is None:
        return
    said = str(fp8_format).upper()
    if said == "E5M2":
        raise RecipeError(
            "fp8_format E5M2 is not trained with by TransformerEngine: its two mantissa bits lose the weights; allowed:"
            " HYBRID (E4M3 forward, E5M2 for gradients), E4M3; write HYBRID"
        )
    if said not in FORMATS:
        raise RecipeError(unknown_name("fp8_format", fp8_format, FORMATS))


def check_override(override: tuple[bool, ...]) -> None:
    """Raise RecipeError for combinations of (fprop, dgrad, wgrad) in high precision that cannot be honoured."""
    if all(override):
        raise RecipeError(
            "override_linear_precision (True, True, True) leaves nothing in FP8; allowed: at least fprop in FP8; use"
            " mixed_precision='bf16', or skip the layers"
        )
    if override[0]:
        raise RecipeError(
            f"override_linear_precision {override} keeps fprop in high precision, which TransformerEngine cannot with"
            " FP8 gradients; allowed: False for fprop, such as (False, False, True); use backend 'native' for this"
        )
