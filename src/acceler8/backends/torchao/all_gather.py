"""torchao's FP8 all-gather under FSDP2: its tensor subclass around weights, and its scales of all weights at once.

The subclass goes around a weight right before the model is sharded, in a new Parameter; whoever shards remaps
optimizers anyway. Each shard is cast with the amax of the whole weight, by one collective for all weights in front of
each forward of the root module. torchao's own examples make it behind each optimizer step; scales then are those of
older weights after any other change (a checkpoint that is loaded, an average that is swapped in), and codes clip.

Source: torchao.float8.fsdp_utils (torchao 0.18).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor, nn

from acceler8.backends.torchao import library
from acceler8.errors import PlanError
from acceler8.recipes import Recipe
from acceler8.scaling import TENSORWISE


def _subclass() -> Any:
    return library.module("float8.fsdp_utils").WeightWithDynamicFloat8CastTensor


def wrap_weights(model: nn.Module, shards: int, ignored: Collection[nn.Parameter] = ()) -> int:
    """Put torchao's subclass around the weights of FP8 layers; returns how many. A second call changes nothing.

    A weight that several modules share stays wrapped in one Parameter. One whose rows do not divide among ``shards``
    travels in high precision: torchao sends unpadded shards (pytorch/ao#1938). ``ignored`` ones are not sharded.
    Raises: PlanError for a layer whose weight is not cast alike in fprop and dgrad, with one scale a tensor.
    """
    from acceler8.backends.torchao._layer import TorchaoLinear

    subclass = _subclass()
    made: dict[int, nn.Parameter] = {}
    for name, module in model.named_modules():
        if isinstance(module, TorchaoLinear) and type(module.weight.data) is Tensor:
            weight = module.weight
            if weight.shape[0] % shards or any(weight is p for p in ignored):
                continue
            _check(name, module._acceler8_layer.recipe)
            if id(weight) not in made:
                wrapped = subclass(
                    weight.detach(), module.linear_mm_config, module.config.cast_config_weight.target_dtype
                )
                made[id(weight)] = nn.Parameter(wrapped, requires_grad=weight.requires_grad)
    for module in model.modules():
        for key, p in module._parameters.items():
            if p is not None and id(p) in made:
                module._parameters[key] = made[id(p)]
    return len(made)


def _check(name: str, recipe: Recipe) -> None:
    fprop, dgrad = recipe.fprop.b, recipe.dgrad.b
    if not fprop.is_fp8 or fprop != dgrad or fprop.granularity is not TENSORWISE:
        raise PlanError(
            f"enable_fsdp_float8_all_gather: {name!r} casts its weight as {fprop} in fprop and {dgrad} in dgrad;"
            " allowed: tensorwise FP8 in both; choose recipe tensorwise, or leave the all-gather out"
        )


def make_scales(module: nn.Module, args: tuple[Any, ...]) -> None:
    """Hook in front of the root module's forward: scales of all weights as they now are. Every process comes here."""
    library.module("float8.fsdp_utils").precompute_float8_dynamic_scale_for_fsdp(module)


def wrapped_as(values: Tensor, like: Tensor) -> Tensor:
    """``values`` with torchao's subclass around them if ``like`` has it."""
    if not isinstance(like, _subclass()):
        return values
    made: Tensor = _subclass()(values, like._linear_mm_config, like._dtype)
    return made


__all__ = ["make_scales", "wrap_weights", "wrapped_as"]
