"""What a converted model remembers of its conversion, and how to find it again behind wrappers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from acceler8.errors import PlanError
from acceler8.nn.linear import Fp8Linear
from acceler8.scaling import AmaxState, StepClock

ATTRIBUTE = "_acceler8_model"


@dataclass
class ModelState:
    """Lives on the converted root module as a plain attribute; a deep copy of the model has its own."""

    backend: str
    clock: StepClock
    plan: Any
    ties: list[tuple[str, ...]]
    requires_grad: dict[str, bool]
    dtypes: dict[str, torch.dtype]
    amax: AmaxState | None = None
    codes: list[Any] = field(default_factory=list)
    attached: list[Any] = field(default_factory=list)

    def drop_codes(self) -> None:
        """Step boundary: weights changed, so kept codes go; open windows stay open."""
        for codes in self.codes:
            codes.drop()


def state_of(model: nn.Module) -> ModelState:
    """The conversion state of ``model`` or of a module inside it (behind DDP, PEFT or another wrapper).

    Raises: PlanError if nothing in ``model`` was converted.
    """
    for module in model.modules():
        state = module.__dict__.get(ATTRIBUTE)
        if state is not None:
            assert isinstance(state, ModelState)
            return state
    raise PlanError(
        f"{type(model).__name__} is not converted; call acceler8.convert(model, acceler8.plan(model)) first"
    )


def find_state(model: nn.Module) -> ModelState | None:
    """As ``state_of``, or None."""
    return next((s for m in model.modules() if (s := m.__dict__.get(ATTRIBUTE)) is not None), None)


def fp8_layers(model: nn.Module) -> Iterator[tuple[str, Fp8Linear]]:
    """``(name, layer)`` of every converted layer, names as in ``model.named_modules()``."""
    for name, module in model.named_modules():
        if isinstance(module, Fp8Linear):
            yield name, module


def fp8_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The FP8 state that a checkpoint keeps: amax histories (delayed scaling), by layer name. Empty if there
    is none.

    Shape: ``{"amax": [2 + amax_history_len, slots] FP32, "steps": [] int64}``, slots in the order of the
    plan's layers.
    """
    amax = state_of(model).amax
    if amax is None:
        return {}
    return {"amax": amax.data.detach().clone(), "steps": torch.tensor(amax.steps)}


def load_fp8_state_dict(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Restore what ``fp8_state_dict`` gave; an empty dict leaves fresh histories (the first step then uses
    its own amax).

    Raises: PlanError if the shapes do not fit the model's plan.
    """
    model_state = state_of(model)
    model_state.drop_codes()
    amax = model_state.amax
    if not state:
        return
    if amax is None:
        raise PlanError("got FP8 state but the model's recipe keeps none; convert it with the recipe that was saved")
    if state["amax"].shape != amax.data.shape:
        raise PlanError(
            f"got FP8 state of shape {tuple(state['amax'].shape)}; allowed: {tuple(amax.data.shape)} for this plan;"
            " convert the model with the plan that was saved"
        )
    amax.data.copy_(state["amax"])
    amax.steps = int(state["steps"])
