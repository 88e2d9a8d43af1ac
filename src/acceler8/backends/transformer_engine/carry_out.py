"""Carrying a conversion out, and undoing it.

Importing this file does not import TransformerEngine; its functions do.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from acceler8.backends.protocol import Conversion
from acceler8.backends.transformer_engine.donors import linear_donor, norm_donor
from acceler8.backends.transformer_engine.histories import AmaxHistories, keep_out
from acceler8.backends.transformer_engine.in_place import give_back, take_over
from acceler8.backends.transformer_engine.norms import Norm, find_norms
from acceler8.backends.transformer_engine.recipes import TeRecipe, build, describe
from acceler8.backends.transformer_engine.region import Region
from acceler8.nn.class_change import plain_type
from acceler8.recipes import Recipe

_LAYER, _NORM = "_acceler8_layer", "_acceler8_te_norm"


def convert(conversion: Conversion, *, with_norms: bool) -> None:
    """Change the class of the conversion's layers, and of the norms that it names. All donors are made first."""
    from acceler8.backends.transformer_engine._modules import TeLayerState, TeLinear

    donors = [linear_donor(module) for _, module, _ in conversion.layers]  # type: ignore[arg-type]
    norms = _norms_of(conversion) if with_norms else []
    norm_donors = [norm_donor(norm) for norm in norms]
    made: dict[Recipe, tuple[TeRecipe, Region]] = {}
    interval = next((describe(r).interval for _, _, r in conversion.layers if r.is_delayed), 1)
    histories = AmaxHistories(interval)
    for (name, module, recipe), donor in zip(conversion.layers, donors, strict=True):
        if recipe not in made:
            described = describe(recipe)
            made[recipe] = described, Region(build(described))
        described, region = made[recipe]
        state = conversion.state
        layer = TeLayerState(
            name,
            recipe,
            state.clock,
            schedule=state.schedules.get(name),
            te_recipe=region.recipe,
            region=region,
            multiple=described.multiple,
            dgrad=described.dgrad,
            wgrad=described.wgrad,
            histories=histories if recipe.is_delayed else None,
        )
        take_over(module, donor, nn.Linear, TeLinear)
        module.__dict__[_LAYER] = layer
        state.codes.append(layer.cache)
        if recipe.is_delayed:
            keep_out(module.fp8_meta)  # type: ignore[arg-type]
    for norm, donor in zip(norms, norm_donors, strict=True):
        convert_norm(norm, donor, conversion.state.own_schedules())


def _norms_of(conversion: Conversion) -> list[Norm]:
    """Those that the conversion names, with what they compute. One whose attributes clash stays as it is."""
    wanted = {id(module) for _, module in conversion.also}
    return [norm for norm in find_norms(conversion.model) if id(norm.module) in wanted and norm.refusal is None]


def convert_norm(norm: Norm, donor: nn.Module, schedules: list[Any], *, always: bool = False) -> None:
    """Change the class of one norm. Its eps, under the author's name for it, stays what it is."""
    from acceler8.backends.transformer_engine._modules import TeNormState, layer_norms, rms_norms

    author = plain_type(norm.module)
    assert norm.kind is not None
    classes = rms_norms if norm.kind.kind == "rms" else layer_norms
    take_over(norm.module, donor, author, classes.of(author))
    norm.module.__dict__[_NORM] = TeNormState(norm.name, norm.kind, author, schedules, always)


def restore(model: nn.Module, *, linears: bool = True, norms: bool = True) -> None:
    """Undo ``convert`` for everything inside ``model``, or for its linear layers or norms alone."""
    from acceler8.backends.transformer_engine._modules import (
        TeLayerNorm,
        TeLinear,
        TeRMSNorm,
        layer_norms,
        rms_norms,
    )

    for module in model.modules():
        if linears and isinstance(module, TeLinear):
            module.__dict__.pop(_LAYER, None)
            module.__dict__.pop("_acceler8_pending", None)
            give_back(module, TeLinear, nn.Linear)
        elif norms and isinstance(module, (TeLayerNorm, TeRMSNorm)):
            state = module.__dict__.pop(_NORM)
            classes = rms_norms if isinstance(module, TeRMSNorm) else layer_norms
            give_back(module, classes.of(state.author), state.author)
