"""``FusedGatedMLP``: a gated MLP of the model's author whose class was changed, so that it can run as one operation.

Its parts stay what they are, three FP8 layers with their own Parameters. Whether they can run as one is asked anew at
each call: a part that carries a hook, an adapter, a parametrisation or another forward must be called, so then the
author's own forward runs, with its FP8 layers. The same forward runs under ``torch.compile``, which fuses by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from acceler8.functional.gated_mlp import gated_mlp
from acceler8.functional.weight_codes import WeightCodes
from acceler8.nn.class_change import is_to_be_called, swap_class
from acceler8.nn.linear import Fp8Linear

_STATE = "_acceler8_fusion"


@dataclass
class GatedMLPState:
    """What a converted gated MLP knows: its parts by their names as children. Plain data."""

    name: str
    gate: str
    up: str
    down: str
    activation: str
    author: type[nn.Module]
    """The class that the module had."""
    codes: WeightCodes = field(default_factory=WeightCodes)
    """Of gate and up together."""
    why_not: str | None = None
    """Why the last forward in training mode did not run as one; None if it did, or there was none."""


class FusedGatedMLP(nn.Module):
    """Mixin in front of the author's class. Made by conversion, not constructed."""

    _acceler8_fusion: GatedMLPState

    def forward(self, x: Tensor) -> Tensor:
        """What the author's forward computes."""
        if torch.compiler.is_compiling():
            return cast(Tensor, super().forward(x))
        state = self._acceler8_fusion
        layers, why_not = self._parts(x)
        if self.training:
            state.why_not = why_not
        if layers is None:
            return cast(Tensor, super().forward(x))
        gate, up, down = layers
        first, last = gate._acceler8_layer, down._acceler8_layer
        if self.training:
            for layer in layers:
                layer._acceler8_layer.count_unmarked_call()
        slots, records = None, self.training
        if first.slots is not None and last.slots is not None:
            slots = first.slots._replace(records=records), last.slots._replace(records=records)
        codes = (state.codes, last.codes) if self.training else None
        return gated_mlp(
            x,
            gate.weight,
            up.weight,
            down.weight,
            activation=state.activation,
            recipe=first.recipe,
            slots=slots,
            codes=codes,
        )

    def _parts(self, x: Tensor) -> tuple[tuple[Fp8Linear, Fp8Linear, Fp8Linear] | None, str | None]:
        """``(gate, up, down)`` if they can run as one operation on ``x`` now, else why not."""
        state, children = self._acceler8_fusion, self._modules
        layers = children.get(state.gate), children.get(state.up), children.get(state.down)
        for name, layer in zip((state.gate, state.up, state.down), layers, strict=True):
            if type(layer) is not Fp8Linear:
                return None, f"{name} is a {type(layer).__name__}"
            if layer.training is not self.training:
                return None, f"{name} is not in the module's mode"
        for name, child in children.items():
            if child is not None and (why := is_to_be_called(child)):
                return None, f"{name} {why}"
        gate, up, down = parts = cast("tuple[Fp8Linear, Fp8Linear, Fp8Linear]", layers)
        states = [layer._acceler8_layer for layer in parts]
        if not all(layer.is_fp8(self.training) for layer in states):
            return None, "high precision"
        if any(layer.observer is not None for layer in states):
            return None, "its layers are observed"
        if any(layer.bias is not None for layer in parts):
            return None, "a bias"
        if any(type(layer.codes) is not WeightCodes for layer in states):
            return None, "its weights are gathered in FP8"
        if any(type(layer.weight) is not nn.Parameter for layer in parts):
            return None, "a weight is no plain Parameter"
        weights = gate.weight, up.weight, down.weight
        if gate.weight.requires_grad is not up.weight.requires_grad:
            return None, f"one of {state.gate} and {state.up} is frozen"
        if any(w.dtype is not gate.weight.dtype or w.device != x.device for w in weights):
            return None, "dtypes or devices differ"
        if x.dtype is not gate.weight.dtype and not torch.is_autocast_enabled(x.device.type):
            return None, "dtypes or devices differ"
        if type(x) is not Tensor and type(x) is not nn.Parameter:
            return None, f"its input is a {type(x).__name__}"
        return parts, None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self._acceler8_fusion.codes.drop()
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _rebuild, (self._acceler8_fusion.author,), self.__getstate__()  # type: ignore[no-untyped-call]


_classes: dict[type[nn.Module], type[FusedGatedMLP]] = {}


def fused_class(author: type[nn.Module]) -> type[FusedGatedMLP]:
    """The class of fused modules of the author's class, the same one each time."""
    made = _classes.get(author)
    if made is None:
        made = type(f"Fp8{author.__name__}", (FusedGatedMLP, author), {"__module__": author.__module__})
        _classes[author] = made
    return made


def _rebuild(author: type[nn.Module]) -> FusedGatedMLP:
    cls = fused_class(author)
    return cls.__new__(cls)


def fuse(module: nn.Module, state: GatedMLPState) -> None:
    """Change the class of a module whose parts are FP8 layers."""
    module.__dict__[_STATE] = state
    swap_class(module, state.author, fused_class(state.author))


def unfuse(module: nn.Module) -> None:
    """Give a module its author's class back."""
    state: GatedMLPState = module.__dict__.pop(_STATE)
    swap_class(module, fused_class(state.author), state.author)
