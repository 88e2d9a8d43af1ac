"""The torchao backend: layers change their class in place to a subclass of torchao's ``Float8Linear``.

torchao's own ``convert_to_float8_training`` makes new modules, which lose hooks, attributes and the training flag, and
with ``enable_fsdp_float8_all_gather`` new Parameters, which no optimizer holds. Here modules and Parameters stay.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from acceler8.backends.capability import Capability, device_said, kind_of
from acceler8.backends.options import BackendOptions
from acceler8.backends.protocol import Backend, Conversion
from acceler8.backends.torchao import library
from acceler8.backends.torchao import recipes as own_recipes
from acceler8.backends.torchao.options import TorchaoOptions
from acceler8.errors import PlanError
from acceler8.recipes import LayerRecipes, Recipe

SLOW_IN_EAGER = (
    "torchao's casts are many small kernels unless torch.compile fuses them: without it a training step of the bench"
    " presets A and B ran at 0.64x and 0.50x of BF16's speed (NVIDIA H200, docs/benchmarks.md); compile the model"
    " (dynamo_backend inductor, with dynamo_use_regional_compilation for repeated blocks), or name backend native,"
    " which is fast without it"
)


class TorchaoBackend(Backend):
    """FP8 by torchao."""

    name = "torchao"
    filter_decides = True
    options_type = TorchaoOptions
    default_recipe = "tensorwise"
    slow_in_eager = SLOW_IN_EAGER

    def unavailable(self) -> str | None:
        """A torchao that is missing, too old or broken."""
        return library.unavailable()

    def capabilities(self) -> tuple[Capability, ...]:
        """Tensorwise and rowwise, from Ada on, and on the CPU."""
        ways = ("single", "ddp", "fsdp2", "deepspeed")
        return tuple(
            Capability(recipe=recipe, compute=(8, 9), on_cpu=True, strategies=ways)
            for recipe in ("tensorwise", "rowwise")
        )

    def lacks(self, recipe: Recipe, device: torch.device, strategy: str = "single") -> str | None:
        """Also formats that differ between an operand's two GEMMs, and compressed inputs."""
        if (why := super().lacks(recipe, device, strategy)) is not None:
            return why
        problem = own_recipes.problem(recipe)
        return None if problem is None else f"backend 'torchao' cannot run recipe {recipe.name!r}: {problem}"

    def recipe_for(self, recipe: Any, options: BackendOptions | None) -> Recipe | LayerRecipes:
        """Also ``rowwise_with_gw_hp``; a ``config`` in the options says it all."""
        config = options.config if isinstance(options, TorchaoOptions) else None
        if config is not None:
            assert isinstance(options, TorchaoOptions)
            made = own_recipes.recipe_of(config, options.eval)
            if recipe is not None and recipe != made:
                raise PlanError(
                    "got a recipe and options with a Float8LinearConfig, which says everything; allowed: one of them"
                )
            return made
        if isinstance(recipe, str) and (made_by_name := own_recipes.named(recipe)) is not None:
            return made_by_name
        return super().recipe_for(recipe, options)

    def notes(self, recipe: Recipe, device: torch.device, options: BackendOptions | None = None) -> list[str]:
        """Emulation, speed without torch.compile, and what torchao does otherwise than the recipe says."""
        own = _options(options)
        notes = []
        if device.type == "cpu":
            notes.append(f"emulated: {device_said(device)} has no FP8 GEMM; torchao's numerics, not faster")
        elif device.type == "cuda":
            notes.append(SLOW_IN_EAGER)
        notes.append("torchao keeps inputs for backward in high precision: no activation memory is saved")
        if kind_of(recipe) == "rowwise" and own.config is None and not recipe.pow2_scales:
            notes.append("scales are rounded down to powers of two, as in torchao's recipe rowwise")
        if kind_of(recipe) == "rowwise" and recipe.dgrad.is_fp8 and not recipe.wgrad.is_fp8:
            notes.append("dgrad reads the weight with one scale, as in torchao's recipe rowwise_with_gw_hp")
        return notes

    def strategy_notes(self, options: BackendOptions | None, strategy: str) -> list[str]:
        """That an all-gather was asked for where nothing is gathered."""
        if strategy == "fsdp2" or not gathers_in_fp8(options):
            return []
        return ["enable_fsdp_float8_all_gather does nothing here: the model is not sharded by FSDP2"]

    def kept_input_bytes(self, recipe: Recipe, dtype: torch.dtype) -> float:
        """Those of the input: torchao casts it again in backward."""
        return float(dtype.itemsize)

    def refuses(self, module: nn.Module, recipe: Recipe) -> str | None:
        """Also weights that FSDP2 has sharded, and attributes that torchao has too."""
        weight = module._parameters.get("weight")
        if type(weight).__name__ == "DTensor":
            return "its weight is sharded by FSDP2 already; convert the model first, as Accelerator does"
        if (reason := super().refuses(module, recipe)) is not None or library.unavailable() is not None:
            return reason  # a plan of a machine that has torchao; there the layer is asked again
        from acceler8.backends.torchao import _layer

        return _layer.attribute_clash(module)

    def left_by_default(self, model: nn.Module, options: BackendOptions | None = None) -> dict[int, str]:
        """The first and the last linear layer, in the order of registration."""
        linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
        if not linears or not _options(options).skip_first_and_last:
            return {}
        why = "linear layer of the model, which torchao's default leaves"
        return {id(linears[-1]): f"last {why}", id(linears[0]): f"first {why}"}

    def convert_layers(self, conversion: Conversion) -> None:
        """Change the class of each layer."""
        from acceler8.backends.torchao import _layer

        options, made = _options(conversion.options), []
        attributes: dict[tuple[Recipe, str], dict[str, Any]] = {}
        for name, module, recipe in conversion.layers:
            weight = module._parameters["weight"]
            assert weight is not None
            key = recipe, weight.device.type
            if key not in attributes:
                attributes[key] = _layer.attributes_of(own_recipes.linear_config(recipe, options, weight.device))
            made.append((module, conversion.layer_state(name, recipe), attributes[key]))
        for module, state, own in made:
            _layer.make_fp8(module, state, own)

    def restore_layers(self, model: nn.Module) -> None:
        """Set each class back."""
        from acceler8.backends.torchao import _layer

        for module in model.modules():
            if isinstance(module, _layer.TorchaoLinear):
                _layer.make_plain(module)

    def layers(self, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """Those of its class."""
        from acceler8.backends.torchao import _layer

        for name, module in model.named_modules():
            if isinstance(module, _layer.TorchaoLinear):
                yield name, module

    def expected_output(self, layer: nn.Module, x: Tensor) -> Tensor | None:
        """The forward again: it casts the weight at each call."""
        out: Tensor = layer.in_fp8(x) if x.numel() else layer(x)  # type: ignore[operator]
        return out


def gathers_in_fp8(options: BackendOptions | None) -> bool:
    """True if FSDP2 is to gather weights in FP8."""
    own = _options(options)
    return own.all_gather if own.config is None else bool(own.config.enable_fsdp_float8_all_gather)


def _options(options: BackendOptions | None) -> TorchaoOptions:
    return options if isinstance(options, TorchaoOptions) else TorchaoOptions()


__all__ = ["SLOW_IN_EAGER", "TorchaoBackend", "gathers_in_fp8"]
