"""Carry a plan out, undo it, and mark step boundaries and windows in a hand-written loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer

from acceler8 import backends
from acceler8.conversion.filters import tied_names
from acceler8.conversion.plan import Plan
from acceler8.conversion.plan import plan as make_plan
from acceler8.errors import PlanError
from acceler8.nn import Fp8Linear, ModelState, fp8_layers, state_of
from acceler8.nn.model_state import ATTRIBUTE, find_state
from acceler8.recipes import Recipe
from acceler8.scaling import StepClock


def convert(model: nn.Module, plan: Plan | str | Recipe | None = None, *, clock: StepClock | None = None) -> nn.Module:
    """Make the layers that ``plan`` names FP8, in place, and return the same model.

    Modules, Parameters, hooks, state_dict keys and ties stay as they are. ``plan`` may also be a recipe or
    its name; then the plan is made here. ``clock`` shares a step clock among several models.
    Raises: PlanError if the model is converted already or is not the one that was planned (what differs is
    named);
        nothing is changed then.
    """
    if not isinstance(plan, Plan):
        plan = make_plan(model, plan)
    if find_state(model) is not None:
        raise PlanError(f"{type(model).__name__} is converted already; call acceler8.restore(model) first")
    engine = backends.get(plan.backend)
    layers = _planned_layers(model, plan)
    for name, module in layers:
        if reason := engine.refuses(module, plan.recipe):
            raise PlanError(f"layer {name!r} cannot become FP8 any more: {reason}; plan the model again")
    named = dict(model.named_parameters(remove_duplicate=False))
    state = ModelState(
        backend=plan.backend,
        clock=clock or StepClock(),
        plan=plan,
        ties=tied_names(model),
        requires_grad={name: p.requires_grad for name, p in named.items()},
        dtypes={name: p.dtype for name, p in named.items()},
    )
    engine.convert_layers(layers, plan.recipe, state)
    model.__dict__[ATTRIBUTE] = state
    return model


def _planned_layers(model: nn.Module, plan: Plan) -> list[tuple[str, nn.Module]]:
    modules = {name or "(root)": module for name, module in model.named_modules()}
    layers = []
    for row in plan.rows:
        if not row.is_fp8:
            continue
        module = modules.get(row.name)
        if module is None:
            raise PlanError(
                f"the plan names layer {row.name!r}, which this {type(model).__name__} lacks; plan it again"
            )
        shape = tuple(module.weight.shape)
        if shape != row.shape:
            raise PlanError(f"layer {row.name!r} has shape {shape}, the plan says {row.shape}; plan the model again")
        layers.append(("" if row.name == "(root)" else row.name, module))
    return layers


def restore(model: nn.Module) -> nn.Module:
    """Undo ``convert``: the layers are plain again, with the values that they have now. Returns the same
    model.

    Raises: PlanError if the model is not converted.
    """
    state = state_of(model)
    for handle in state.attached:
        handle.remove()
    backends.get(state.backend).restore_layers(model)
    for module in model.modules():
        module.__dict__.pop(ATTRIBUTE, None)
    return model


def attach(model: nn.Module, optimizer: Optimizer) -> Any:
    """Let ``optimizer.step()`` mark the step boundaries of a converted model; returns a handle with
    ``remove()``.

    With several optimizers attach the one that steps last. Raises: PlanError if the model is not converted.
    """
    state = state_of(model)
    handle = optimizer.register_step_post_hook(_Tick(state.clock))
    state.attached.append(handle)
    return handle


class _Tick:
    """Step hook as an object, so that an optimizer with it can be copied and pickled."""

    def __init__(self, clock: StepClock) -> None:
        self.clock = clock

    def __call__(self, *args: Any) -> None:
        self.clock.tick()


def step(model: nn.Module) -> None:
    """Mark a step boundary by hand: call it after ``optimizer.step()`` in a loop without ``attach`` or
    Accelerator.
    """
    state_of(model).clock.tick()


@contextmanager
def window(model: nn.Module) -> Iterator[None]:
    """Reuse weight codes across the forwards inside: for micro-batches that see one set of weights.

    The caller answers for the weights not changing inside, other than by a step that is marked on the model's
    clock, ``load_state_dict`` or a move; after those codes are made anew. Codes are dropped when the window
    closes.
    Raises: PlanError if the model is not converted.
    """
    codes = state_of(model).codes
    for c in codes:
        c.open()
    try:
        yield
    finally:
        for c in codes:
            c.close()


@contextmanager
def evaluate_in_fp8(model: nn.Module) -> Iterator[None]:
    """Inside, layers in eval() mode compute in FP8 too, whatever their recipe's eval policy."""
    state_of(model)
    layers: list[Fp8Linear] = [layer for _, layer in fp8_layers(model)]
    before = [layer._acceler8_layer.evaluates_in_fp8 for layer in layers]
    for layer in layers:
        layer._acceler8_layer.evaluates_in_fp8 = True
    try:
        yield
    finally:
        for layer, was in zip(layers, before, strict=True):
            layer._acceler8_layer.evaluates_in_fp8 = was
