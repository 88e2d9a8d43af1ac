"""The smallest backend that another package can give acceler8: weights rounded to E4M3, products in high precision.

The gradient passes the rounding as if it were not there (straight through).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from acceler8.backends import AlsoConverted, Backend, Capability, Conversion
from acceler8.nn import state_of


class Rounding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight: Tensor) -> Tensor:
        scale = 448 / weight.abs().amax().clamp(min=1e-12)
        return (weight * scale).to(torch.float8_e4m3fn).to(weight.dtype) / scale

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient


class ToyLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        is_fp8 = self._acceler8_layer.is_fp8(self.training)
        return F.linear(x, Rounding.apply(self.weight) if is_fp8 else self.weight, self.bias)


class ToyWindow:
    """Counts what owners of windows do."""

    def __init__(self) -> None:
        self.is_open, self.calls = False, []

    def open(self) -> None:
        self.is_open = True
        self.calls.append("open")

    def pause(self) -> None:
        self.is_open = False
        self.calls.append("pause")

    def close(self) -> None:
        self.is_open = False
        self.calls.append("close")

    def drop(self) -> None:
        self.calls.append("drop")


class ToyBackend(Backend):
    name = "toy"

    def capabilities(self) -> tuple[Capability, ...]:
        return Capability(recipe="tensorwise"), Capability(recipe="rowwise", compute=(99, 0))

    def also_converts(self, model, recipe, options=None) -> list[AlsoConverted]:
        found = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.LayerNorm)]
        return [AlsoConverted(name=n, module=m, refusal=None if m.bias is None else "has a bias") for n, m in found]

    def convert_layers(self, conversion: Conversion) -> None:
        for name, module, recipe in conversion.layers:
            module.__dict__["_acceler8_layer"] = conversion.layer_state(name, recipe)
            module.__class__ = ToyLinear
        for _, module in conversion.also:
            module.__dict__["toy"] = True
        conversion.state.codes.append(ToyWindow())
        conversion.model.__dict__["toy_steps"] = 0

    def restore_layers(self, model: nn.Module) -> None:
        for _, module in list(self.layers(model)):
            module.__class__ = nn.Linear
            del module.__dict__["_acceler8_layer"]
        for module in model.modules():
            module.__dict__.pop("toy", None)
        model.__dict__.pop("toy_steps", None)

    def expected_output(self, layer: nn.Module, x: Tensor) -> Tensor:
        return F.linear(x, Rounding.apply(layer.weight), layer.bias)

    def on_step(self, model: nn.Module) -> None:
        model.__dict__["toy_steps"] += 1

    def state(self, model: nn.Module) -> dict[str, Tensor]:
        state_of(model)
        return {"toy.steps_seen": torch.tensor(model.__dict__["toy_steps"])}

    def load_state(self, model: nn.Module, state: dict[str, Tensor]) -> None:
        model.__dict__["toy_steps"] = int(state["toy.steps_seen"])
