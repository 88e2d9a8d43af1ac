"""FP8 layers that read one activation and run as one operation: q, k and v of an attention.

The attention's own code is not touched: it calls one layer after the other. The first one called computes the results
of all and leaves those of the others on the activation itself, where each finds its own, if it is called with that very
tensor. Whether they can run as one is asked anew at each call; else each computes its own, as ever.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from acceler8.functional.linears import linears
from acceler8.functional.shared_input import can_carry, shared_input
from acceler8.functional.weight_codes import WeightCodes
from acceler8.nn.class_change import is_to_be_called

if TYPE_CHECKING:
    from acceler8.nn.linear import Fp8Linear

_TRIALS = 4  # results that nobody took before the group gives up: the model does not call its layers as they seem to be


@dataclass
class LinearGroup:
    """Layers of one module that read one activation. Plain data; a copied model has its own."""

    name: str
    layers: list[Fp8Linear]
    codes: WeightCodes = field(default_factory=WeightCodes)
    """Of all the weights together."""
    why_not: str | None = None
    """Why the last forward in training mode did not run as one; None if it did, or there was none."""
    left_behind: int = 0
    """Results in a row that no layer took."""

    def result_of(self, layer: Fp8Linear, x: Tensor) -> Tensor | None:
        """``layer``'s result on ``x``, computed with those of the others; None if it is to compute its own."""
        if not can_carry(x):
            return None
        shared = shared_input(x)
        assert shared is not None
        known = shared.take_result(x, id(layer))
        if known is not None:
            self.left_behind = 0
            return known
        if shared.results:  # a second call on the same activation
            return None
        self.why_not = self._why_not(x)
        if self.why_not is not None:
            return None
        self.left_behind += 1
        state = layer._acceler8_layer
        results = linears(
            x,
            [member.weight for member in self.layers],
            [member.bias for member in self.layers],
            recipe=state.recipe,
            slots=state.slots,
            codes=self.codes,
        )
        own, left = None, shared_input(x)  # the one of before may have gone with its codes
        assert left is not None
        for member, result in zip(self.layers, results, strict=True):
            if member is layer:
                own = result
            else:
                left.results[id(member)] = result
        return own

    def _why_not(self, x: Tensor) -> str | None:
        from acceler8.nn.linear import Fp8Linear

        if self.left_behind >= _TRIALS:
            return "its layers are not called on one activation"
        first = self.layers[0]
        autocast = torch.is_autocast_enabled(x.device.type)
        for layer in self.layers:
            if type(layer) is not Fp8Linear:
                return f"a layer is a {type(layer).__name__}"
            if not layer.training:
                return "a layer is in eval mode"
            if why := is_to_be_called(layer):
                return f"a layer {why}"
            state = layer._acceler8_layer
            if not state.is_fp8(True):
                return "high precision"
            if state.observer is not None:
                return "its layers are observed"
            if type(state.codes) is not WeightCodes:
                return "its weights are gathered in FP8"
            weight = layer.weight
            if type(weight) is not nn.Parameter:
                return "a weight is no plain Parameter"
            if weight.dtype is not first.weight.dtype or weight.device != x.device:
                return "dtypes or devices differ"
            if x.dtype is not weight.dtype and not autocast:
                return "dtypes or devices differ"
            if weight.shape[1] != x.shape[-1]:
                return "its input does not fit"
        return None
