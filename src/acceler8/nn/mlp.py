"""``FusedMLP``: an MLP of the model's author whose class was changed, so that it can run as one operation.

Its parts stay what they are, FP8 layers with their own Parameters. Whether they can run as one is asked anew at
each call: a part that carries a hook, an adapter, a parametrisation or another forward must be called, so then the
author's own forward runs, with its FP8 layers. ``torch.compile`` asks once and guards what was asked.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from acceler8.functional.gated_mlp import gated_mlp
from acceler8.functional.mlp import mlp as ungated_mlp
from acceler8.functional.weight_codes import WeightCodes
from acceler8.nn.class_change import OF_EVERY_MODULE, AuthorsClass, is_to_be_called, swap_class, what_changed
from acceler8.nn.linear import Fp8Linear

_STATE = "_acceler8_fusion"
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass
class MLPState:
    """What a converted MLP knows: its parts by their names as children. Plain data."""

    name: str
    layers: tuple[str, ...]
    """Gate, up and down; or gate and up as one layer, and down; without a gate the first and the second."""
    activation: str
    author: type[nn.Module]
    """The class that the module had."""
    is_gated: bool = True
    argument: str = ""
    """What the author's forward calls its input."""
    others: dict[str, Any] = field(default_factory=dict)
    """The other children and the attributes at conversion, among them the activation: with others it is another MLP."""
    inside: list[tuple[str, nn.Module, dict[str, Any]]] = field(default_factory=list)
    """The modules in those children, by name, with their attributes at conversion, such as a dropout's probability."""
    codes: WeightCodes = field(default_factory=WeightCodes)
    """Of gate and up together, where they are two layers."""
    why_not: str | None = None
    """Why the last forward in training mode did not run as one; None if it did, or there was none."""


class FusedMLP(nn.Module):
    """Mixin in front of the author's class. Made by conversion, not constructed."""

    _acceler8_fusion: MLPState

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """What the author's forward computes."""
        state = self._acceler8_fusion
        inputs = args or tuple(value for name, value in kwargs.items() if name == state.argument)
        layers = None
        if len(inputs) == 1 == len(args) + len(kwargs):
            layers, why_not = self._parts(inputs[0])
        else:
            why_not = "its arguments are not those of an MLP"
        is_eager = self.training and not torch.compiler.is_compiling()
        if is_eager:
            state.why_not = why_not
        if layers is None:
            return cast(Tensor, super().forward(*args, **kwargs))
        if is_eager:
            for layer in layers:
                layer._acceler8_layer.count_unmarked_call()
        codes = None
        if self.training:
            codes = (
                (state.codes if len(layers) > 2 else layers[0]._acceler8_layer.codes),
                layers[-1]._acceler8_layer.codes,
            )
        return run_as_one(self, inputs[0], records=self.training, codes=codes)

    def _parts(self, x: Any) -> tuple[tuple[Fp8Linear, ...] | None, str | None]:
        """The FP8 layers if they can run as one operation on ``x`` now, else why not."""
        state, children = self._acceler8_fusion, self._modules
        layers = tuple(children.get(name) for name in state.layers)
        for name, layer in zip(state.layers, layers, strict=True):
            if type(layer) is not Fp8Linear:
                return None, f"{name} is a {type(layer).__name__}"
            if layer.training is not self.training:
                return None, f"{name} is not in the module's mode"
        if changed := what_changed(self, state.others):
            return None, f"{changed} is not what it was at conversion"
        for name, part, was in state.inside:
            if changed := what_changed(part, was):
                return None, f"{name}.{changed} is not what it was at conversion"
        for name, child in children.items():
            if child is not None and (why := is_to_be_called(child, gathers=True)):
                return None, f"{name} {why}"
        parts = cast("tuple[Fp8Linear, ...]", layers)
        states = [layer._acceler8_layer for layer in parts]
        if not all(layer.is_fp8(self.training) for layer in states):
            return None, "high precision"
        if any(layer.observer is not None for layer in states):
            return None, "its layers are observed"
        biases = [layer.bias for layer in parts if layer.bias is not None]
        if biases and state.is_gated:
            return None, "a bias"
        if any(type(layer.codes) is not WeightCodes for layer in states):
            return None, "its weights are gathered in FP8"
        weights = [layer.weight for layer in parts]
        if any(type(p) is not nn.Parameter for p in (*weights, *biases)):
            return None, "a weight or bias is no plain Parameter"
        if len({weight.requires_grad for weight in weights[:-1]}) > 1:
            return None, f"one of {' and '.join(state.layers[:-1])} is frozen"
        if type(x) is not Tensor and type(x) is not nn.Parameter:
            return None, f"its input is a {type(x).__name__}"
        if any(p.dtype is not weights[0].dtype or p.device != x.device for p in (*weights, *biases)):
            return None, "dtypes or devices differ"
        if x.dtype is not weights[0].dtype and not (torch.is_autocast_enabled(x.device.type) and x.dtype in _DTYPES):
            return None, "dtypes or devices differ"
        if x.ndim == 0 or x.shape[-1] != weights[0].shape[1]:
            return None, "its input has another width"  # the layers say so
        return parts, None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self._acceler8_fusion.codes.drop()
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _classes.rebuild, (self._acceler8_fusion.author,), self.__getstate__()  # type: ignore[no-untyped-call]


_classes = AuthorsClass(FusedMLP)


def fused_class(author: type[nn.Module]) -> type[nn.Module]:
    """The class of fused modules of the author's class, the same one each time."""
    return _classes.of(author)


def run_as_one(
    mlp: FusedMLP, x: Tensor, *, records: bool, codes: tuple[WeightCodes, WeightCodes] | None = None
) -> Tensor:
    """The fused operation on ``x``, which must be possible. ``records`` False leaves no trace in amax histories."""
    first, *more = (mlp._modules[name] for name in mlp._acceler8_fusion.layers)
    gate, second, down = cast("tuple[Fp8Linear, Fp8Linear, Fp8Linear]", (first, more[0], more[-1]))
    wide, narrow, slots = gate._acceler8_layer, down._acceler8_layer, None
    if wide.slots is not None and narrow.slots is not None:
        slots = wide.slots._replace(records=records), narrow.slots._replace(records=records)
    activation, recipe = mlp._acceler8_fusion.activation, wide.recipe
    if not mlp._acceler8_fusion.is_gated:
        return ungated_mlp(
            x,
            gate.weight,
            gate.bias,
            down.weight,
            down.bias,
            activation=activation,
            recipe=recipe,
            slots=slots,
            codes=codes,
        )
    return gated_mlp(
        x,
        gate.weight,
        None if second is down else second.weight,
        down.weight,
        activation=activation,
        recipe=recipe,
        slots=slots,
        codes=codes,
    )


def run_one_by_one(mlp: FusedMLP, x: Tensor) -> Tensor:
    """The author's forward of a module that can run as one, through its FP8 layers, without gradient or trace."""
    layers = [cast(Fp8Linear, mlp._modules[name]) for name in mlp._acceler8_fusion.layers]
    before = [(layer.training, layer._acceler8_layer.evaluates_in_fp8) for layer in layers]
    try:
        for layer in layers:  # an evaluation neither records an amax nor keeps codes
            layer.training, layer._acceler8_layer.evaluates_in_fp8 = False, True
        with torch.no_grad():
            return cast(Tensor, mlp._acceler8_fusion.author.forward(mlp, x.detach()))
    finally:
        for layer, was in zip(layers, before, strict=True):
            layer.training, layer._acceler8_layer.evaluates_in_fp8 = was


def fused_mlps(model: nn.Module) -> Iterator[tuple[str, FusedMLP]]:
    """``(name, module)`` of every MLP that can run as one, names as in ``model.named_modules()``."""
    for name, module in model.named_modules():
        if isinstance(module, FusedMLP):
            yield name, module


def fuse(module: nn.Module, state: MLPState) -> None:
    """Change the class of a module whose parts are FP8 layers."""
    state.argument = next(iter(inspect.signature(module.forward).parameters), "")
    children = {name: child for name, child in module._modules.items() if name not in state.layers}
    attributes = _attributes_of(module)
    state.others = {**attributes, **children}
    state.inside = [
        (f"{name}.{below}".rstrip("."), part, _attributes_of(part))
        for name, child in children.items()
        if child is not None
        for below, part in child.named_modules()
    ]
    module.__dict__[_STATE] = state
    swap_class(module, state.author, fused_class(state.author))


def _attributes_of(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in module.__dict__.items() if name not in OF_EVERY_MODULE}


def unfuse(module: nn.Module) -> None:
    """Give a module its author's class back."""
    state: MLPState = module.__dict__.pop(_STATE)
    swap_class(module, fused_class(state.author), state.author)
