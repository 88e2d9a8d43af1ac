"""torchao's ``Float8Linear`` under acceler8's rules. Imported on use only, for it imports torchao.

Its forward and backward are torchao's own, so numbers are equal to torchao's bit for bit. What is added: eval() mode
and steps outside of a schedule's window are in high precision, autocast counts on the CPU too, and an input without
tokens works.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_training_tensor import Float8TrainingTensor

from acceler8.backends.torchao.library import library
from acceler8.nn import LayerState
from acceler8.nn.class_change import clash, swap_class


class TorchaoLinear(Float8Linear):  # type: ignore[misc]
    """A linear layer that computes as torchao's. Made by conversion, not constructed.

    Shape: [..., in_features] -> [..., out_features], bf16, fp16 or fp32; any number of tokens.
    """

    _acceler8_layer: LayerState

    def forward(self, input: Tensor) -> Tensor:
        """``input @ weight.T + bias`` by the layer's config."""
        state = self._acceler8_layer
        if self.training and not torch.compiler.is_compiling():
            state.count_unmarked_call()
        if not state.is_fp8(self.training) or not input.numel():
            return F.linear(input, _in_high_precision(self.weight), self.bias)
        return self.in_fp8(input)

    def in_fp8(self, input: Tensor) -> Tensor:
        """The forward of torchao. That asks for autocast on CUDA only, so other devices' is applied here."""
        kind = input.device.type
        if kind != "cuda" and torch.is_autocast_enabled(kind):
            input = input.to(torch.get_autocast_dtype(kind))
        out: Tensor = Float8Linear.forward(self, input)
        return out

    def extra_repr(self) -> str:
        """The plain layer's description and the recipe."""
        return f"{nn.Linear.extra_repr(self)}, fp8=torchao {self._acceler8_layer.recipe.name}"


def _in_high_precision(weight: Tensor) -> Tensor:
    """The values of a weight that FSDP2 gathered as FP8 codes; any other weight itself."""
    if not isinstance(weight, Float8TrainingTensor):
        return weight
    values: Tensor = weight.to_original_precision()
    return values


def attributes_of(config: Any) -> dict[str, Any]:
    """What torchao's constructor sets on a layer beside those of ``nn.Linear``, whatever its version."""
    with torch.device("meta"):
        made, plain = Float8Linear(16, 16, bias=False, config=config), nn.Linear(16, 16, bias=False)
    return {name: value for name, value in made.__dict__.items() if name not in plain.__dict__}


@functools.cache
def _plain_attributes() -> dict[str, Any]:
    return attributes_of(library().Float8LinearConfig())


def attribute_clash(module: nn.Module) -> str | None:
    """Why a linear layer stays: an attribute of its owner's that torchao uses, whatever the config; None if none is."""
    return clash(module, _plain_attributes(), "torchao's Float8Linear")


def make_fp8(module: nn.Module, state: LayerState, attributes: dict[str, Any]) -> None:
    """Change the class of a linear layer."""
    module.__dict__.update(attributes, _acceler8_layer=state)
    swap_class(module, nn.Linear, TorchaoLinear)


def make_plain(module: TorchaoLinear) -> None:
    """Undo ``make_fp8``."""
    for name in attributes_of(module.config):
        module.__dict__.pop(name, None)
    del module.__dict__["_acceler8_layer"]
    swap_class(module, TorchaoLinear, nn.Linear)
