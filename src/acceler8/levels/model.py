"""Bringing a converted model to a level: 16-bit weights, gradients in FP8, weight codes that are kept."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from acceler8 import backends
from acceler8.conversion.verify import fresh_weight_codes
from acceler8.errors import PlanError
from acceler8.functional.weight_codes import PersistentCodes
from acceler8.levels.registry import Level
from acceler8.nn import Fp8Linear, ModelState, find_states, fp8_layers
from acceler8.nn.gradients import clear_with_model, store_gradients, stored_gradient

_log = logging.getLogger("acceler8")
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def apply_level(model: nn.Module, level: Level) -> dict[str, nn.Parameter]:
    """Store the weights of a converted model's FP8 layers as ``level`` says, in place; these weights, by name.

    They stay the same Parameters; with 16 bits they are rounded to nearest once. Gradients that are there are kept.
    What is left: weights that do not require a gradient, and those tied to something that is not FP8.
    Raises: PlanError for a model that is not converted or has no FP8 layer; for a sharded one; for a level that keeps
        weight codes on another backend than native.
    """
    states = find_states(model)
    if not states:
        raise PlanError(f"level {level.name} got a {type(model).__name__} that is not converted; convert it first")
    weights, left = _level_weights(model, states)
    if not weights:
        raise PlanError(
            f"level {level.name} found no weight of an FP8 layer that trains in {type(model).__name__}"
            f"{': ' + '; '.join(left) if left else ''}; allowed: models with FP8 layers; print the plan for the reasons"
        )
    if sharded := [name for name, p in weights.items() if isinstance(p, DTensor)]:
        raise PlanError(f"level {level.name} got sharded weights, such as {sharded[0]!r}; allowed: whole ones")
    others = sorted({state.backend for state in states if state.backend != "native"})
    if level.keeps_weight_codes and others:
        raise PlanError(
            f"level {level.name} keeps FP8 codes of weights, which backend {', '.join(others)} casts for itself;"
            " allowed: backend native, or level O2, which keeps none"
        )
    for why in left:
        _log.info("level %s leaves %s", level.name, why)
    _cast(model, weights, level, states)
    store_gradients(weights.values(), stores=level.gradient == "fp8")
    clear_with_model(model)
    if level.keeps_weight_codes:
        _keep_codes(model, weights, states)
    return weights


def level_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """The weights of ``model`` that a level stores in few bits, by name."""
    return {name: p for name, p in model.named_parameters() if stored_gradient(p) is not None}


def _level_weights(model: nn.Module, states: list[ModelState]) -> tuple[dict[str, nn.Parameter], list[str]]:
    inside = {id(layer) for state in states for _, layer in backends.get(state.backend).layers(model)}
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        if id(module) not in inside:
            for key, p in module._parameters.items():
                if p is not None:
                    owners.setdefault(id(p), []).append(f"{name}.{key}".lstrip("."))
    weights: dict[str, nn.Parameter] = {}
    left: list[str] = []
    for name, p in _weights_of(model, inside):
        if not p.requires_grad:
            left.append(f"{name}: it requires no gradient")
        elif id(p) in owners:
            left.append(f"{name}: it is tied to {owners[id(p)][0]}, which is not FP8")
        elif not any(p is known for known in weights.values()):
            weights[name] = p
    return weights, left


def _weights_of(model: nn.Module, inside: set[int]) -> Iterator[tuple[str, nn.Parameter]]:
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if id(module) in inside and isinstance(weight, nn.Parameter) and weight.ndim == 2:
            yield f"{name}.weight".lstrip("."), weight


@torch.no_grad()
def _cast(model: nn.Module, weights: dict[str, nn.Parameter], level: Level, states: list[ModelState]) -> None:
    dtype = _DTYPES.get(level.weight)
    if dtype is None:
        return
    for p in weights.values():
        grad, p.grad = p.grad, None
        p.data = p.data.to(dtype)
        if grad is not None:
            p.grad = grad.to(dtype)
    ours = {id(p) for p in weights.values()}
    for state in states:  # the dtypes that ``verify`` holds against the model
        for name, p in model.named_parameters(remove_duplicate=False):
            if id(p) in ours and name in state.dtypes:
                state.dtypes[name] = dtype


class _Refresh:
    """At step boundaries: make the kept codes of the weights as they now are. Knows its model weakly, as clocks live
    longer than models; a copy of the model keeps none.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model: weakref.ref[nn.Module] | None = weakref.ref(model)

    @torch.no_grad()
    def __call__(self) -> None:
        model = None if self._model is None else self._model()
        if model is not None:
            for _, layer in fp8_layers(model):
                refresh(layer)

    def __getstate__(self) -> dict[str, Any]:
        return {"_model": None}


def _keep_codes(model: nn.Module, weights: dict[str, nn.Parameter], states: list[ModelState]) -> None:
    ours = {id(p) for p in weights.values()}
    for _, layer in fp8_layers(model):
        state = layer._acceler8_layer
        if id(layer.weight) in ours and state.recipe.fprop.b.is_fp8:
            state.kept = PersistentCodes()
    made = _Refresh(model)
    made()
    for owner in states:
        owner.on_step.append(made)
        owner.clock.subscribe(made)


def refresh(layer: Fp8Linear) -> None:
    """Make the kept codes of one layer anew, if it keeps any."""
    kept = layer._acceler8_layer.kept
    if kept is not None:
        kept.put(layer.weight, fresh_weight_codes(layer, "rows"))
