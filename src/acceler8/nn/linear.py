"""``Fp8Linear``: an ``nn.Linear`` whose class was changed.

It owns nothing but a plain attribute with its FP8 state: same Parameters, same state_dict keys, same hooks,
``isinstance(m, nn.Linear)`` still true. Setting the class back restores the original layer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from acceler8.functional import LinearSlots, WeightCodes, linear
from acceler8.functional.call import Observer
from acceler8.functional.weight_codes import PersistentCodes
from acceler8.nn.group import LinearGroup
from acceler8.recipes import Recipe
from acceler8.scaling import AmaxState, Schedule, StepClock

_log = logging.getLogger("acceler8")
_UNMARKED_CALLS = 256


@dataclass
class LayerState:
    """FP8 state of one layer. Plain data: never a buffer, never in a state_dict."""

    name: str
    recipe: Recipe
    clock: StepClock
    codes: WeightCodes = field(default_factory=WeightCodes)
    amax: AmaxState | None = None
    slots: LinearSlots | None = None
    """This layer's places in the model's amax state; None for current scaling."""
    readers: int = 1
    """Layers that read the same activation, this one included."""
    group: LinearGroup | None = None
    """Those layers, if they can run as one operation."""
    kept: PersistentCodes | None = None
    """Codes of the weight that stay from step to step; level O3 only."""
    observer: Observer | None = None
    evaluates_in_fp8: bool = False
    schedule: Schedule | None = None
    unmarked_calls: int = 0

    @property
    def keeps_history(self) -> bool:
        """True if its scales come from amaxes of earlier steps."""
        return self.amax is not None

    def is_fp8(self, training: bool) -> bool:
        """True if a forward now computes by the recipe: in its schedule's window, and evaluations if they are to."""
        in_window = self.schedule is None or self.schedule.is_on
        return in_window if training else self.evaluates_in_fp8 or (in_window and self.recipe.eval == "fp8")

    def codes_for(self, training: bool) -> WeightCodes | None:
        """Where a forward finds and leaves weight codes: an evaluation inside a window casts the weight as it is (it
        may be swapped for an average), unless a sharding engine brings the codes.
        """
        return self.codes if training or type(self.codes) is not WeightCodes else None

    def count_unmarked_call(self) -> None:
        """Without step boundaries delayed scaling silently is current scaling, and a schedule stands: say so, once."""
        if not (self.keeps_history or self.schedule) or self.clock.ticks:
            return
        self.unmarked_calls += 1
        if self.unmarked_calls == _UNMARKED_CALLS:
            delayed = "under delayed scaling and no step boundary was marked, so no amax history exists"
            scheduled = f"with {self.schedule and self.schedule.setting} and no step boundary was marked, so"
            _log.warning(
                "%s: %d training forwards %s; use Accelerator, or acceler8.attach(model, optimizer), or call"
                " acceler8.step(model)",
                self.name,
                _UNMARKED_CALLS,
                delayed if self.schedule is None else f"{scheduled} all are in step 0",
            )


class Fp8Linear(nn.Linear):
    """A linear layer that computes in the formats of its recipe. Made by conversion, not constructed.

    Shape: [..., in_features] -> [..., out_features], bf16, fp16 or fp32; any number of tokens.
    In eval() mode it computes in high precision unless its recipe's ``eval`` is ``"fp8"``; outside its window of FP8
    steps it does what ``nn.Linear`` does.
    """

    _acceler8_layer: LayerState

    def forward(self, input: Tensor) -> Tensor:
        """``input @ weight.T + bias`` by the layer's recipe."""
        state = self._acceler8_layer
        if self.training and not torch.compiler.is_compiling():
            state.count_unmarked_call()
        if not state.is_fp8(self.training):
            return F.linear(input, state.codes.in_high_precision(self.weight), self.bias)
        if state.group is not None and self.training and (y := state.group.result_of(self, input)) is not None:
            return y
        slots = state.slots
        if slots is not None and not self.training:
            slots = slots._replace(records=False)  # what an evaluation sees must not move the scales of training
        return linear(
            input,
            self.weight,
            self.bias,
            recipe=state.recipe,
            slots=slots,
            codes=state.codes_for(self.training),
            observer=state.observer,
            readers=state.readers,
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        out = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        state = self._acceler8_layer
        state.codes.drop()
        if state.amax is not None:  # follows the module to its device, never to its dtype
            state.amax.to(self.weight.device)
        return out

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._acceler8_layer.codes.drop()
        super()._load_from_state_dict(*args, **kwargs)
        state = self._acceler8_layer
        if state.amax is not None:  # load_state_dict(assign=True) may have brought the weight to another device
            state.amax.to(self.weight.device)

    def requires_grad_(self, requires_grad: bool = True) -> Fp8Linear:
        """Change whether autograd records operations on the parameters; drops kept weight codes."""
        self._acceler8_layer.codes.drop()
        super().requires_grad_(requires_grad)
        return self

    def extra_repr(self) -> str:
        """The plain layer's description and the recipe."""
        return f"{super().extra_repr()}, fp8={self._acceler8_layer.recipe.name}"
