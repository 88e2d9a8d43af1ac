"""Carry a plan out, undo it, and mark step boundaries and windows in a hand-written loop."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from acceler8 import backends
from acceler8.backends import Backend, Conversion, Fusion
from acceler8.conversion.filters import tied_names
from acceler8.conversion.fusions import Known, fits
from acceler8.conversion.layers import ROOT, check_is_plain, largest_shape, matrix_modules, module_name, row_name
from acceler8.conversion.on_step import OnStep, untie
from acceler8.conversion.plan import Plan
from acceler8.conversion.plan import plan as make_plan
from acceler8.errors import PlanError
from acceler8.nn import ModelState, state_of
from acceler8.nn.gradients import close_windows, leave_zero_grad, open_windows, release_gradients
from acceler8.nn.model_state import ATTRIBUTE
from acceler8.recipes import LayerRecipes, Recipe
from acceler8.recipes.layers import recipe_of_layer
from acceler8.scaling import LastLayers, Schedule, StepClock, StepWindow


def convert(
    model: nn.Module,
    plan: Plan | str | Recipe | LayerRecipes | Mapping[str, str | Recipe | None] | None = None,
    *,
    clock: StepClock | None = None,
    fp8_steps: str | StepWindow | None = None,
    fp8_last_layers: str | Mapping[Any, Any] | LastLayers | None = None,
    save_for_backward: str | None = None,
) -> nn.Module:
    """Make the layers that ``plan`` names FP8, in place, and return the same model.

    Modules, Parameters, hooks, state_dict keys and ties stay as they are; layers get another class, and so do the MLPs
    and norms that the plan lists as fused, each a subclass of the class that it had. In training the sums of such a
    norm run in another order than its author's. ``plan`` may also be what ``plan()`` takes as a recipe; then the plan
    is made here, with ``fp8_steps``, ``fp8_last_layers`` and ``save_for_backward``.
    ``clock`` shares a step clock among several models.
    Raises: PlanError if the model is converted already or is not the one that was planned (what differs is
        named), or such a setting stands beside a plan, which has its own; nothing is changed then.
    """
    settings: dict[str, Any] = {
        "fp8_steps": fp8_steps,
        "fp8_last_layers": fp8_last_layers,
        "save_for_backward": save_for_backward,
    }
    if not isinstance(plan, Plan):
        plan = make_plan(model, plan, **settings)
    elif given := [name for name, value in settings.items() if value is not None]:
        raise PlanError(f"convert got {given[0]} beside a Plan, which says it already; give it to acceler8.plan")
    check_is_plain(model)
    engine = backends.get(plan.backend)
    engine.check_options(plan.options)
    layers = _planned_layers(model, plan)
    for name, module, recipe in layers:
        if reason := engine.refuses(module, recipe):
            raise PlanError(f"layer {name!r} cannot become FP8 any more: {reason}; plan the model again")
    fusions = _planned_fusions(model, plan, {name: recipe for name, _, recipe in layers})
    also = _planned_also(model, plan)
    named = dict(model.named_parameters(remove_duplicate=False))
    clock = clock or StepClock()
    state = ModelState(
        backend=plan.backend,
        clock=clock,
        plan=plan,
        ties=tied_names(model),
        requires_grad={name: p.requires_grad for name, p in named.items()},
        dtypes={name: p.dtype for name, p in named.items()},
        schedules=_schedules(plan, [name for name, _, _ in layers], clock),
    )
    engine.convert_layers(
        Conversion(model=model, layers=layers, state=state, fusions=fusions, also=also, options=plan.options)
    )
    if type(engine).on_step is not Backend.on_step:
        on_step = OnStep(engine.name)
        on_step.tie(model)
        state.on_step.append(on_step.tick)
    state.follow_clock()
    model.__dict__[ATTRIBUTE] = state
    return model


def _planned_layers(model: nn.Module, plan: Plan) -> list[tuple[str, nn.Module, Recipe]]:
    """``(name, module, recipe)`` of the rows that become FP8, once every row is known to fit the model."""
    found = {row_name(name): (name, module, weights) for name, module, weights in matrix_modules(model)}
    kind = type(model).__name__
    if missing := [row.name for row in plan.rows if row.name not in found]:
        raise PlanError(f"the plan names layer {missing[0]!r}, which this {kind} lacks; plan it again")
    planned = {row.name for row in plan.rows}
    if extra := [name for name in found if name not in planned]:
        raise PlanError(f"this {kind} has layer {extra[0]!r}, which the plan does not name; plan it again")
    layers = []
    for row in plan.rows:
        name, module, weights = found[row.name]
        shape = largest_shape(weights)
        if shape != row.shape:
            raise PlanError(f"layer {row.name!r} has shape {shape}, the plan says {row.shape}; plan the model again")
        if row.is_fp8:
            _, recipe = recipe_of_layer(plan.recipe, name)
            if recipe is None:
                raise PlanError(f"layer {row.name!r} is planned FP8 and the plan's recipes leave it; plan it again")
            layers.append((name, module, recipe))
    return layers


def _planned_fusions(model: nn.Module, plan: Plan, recipes: dict[str, Recipe]) -> list[tuple[Fusion, nn.Module]]:
    """The plan's fusions with the modules that they are in."""
    modules, known = dict(model.named_modules()), Known()
    for fusion in plan.fusions:
        if fusion.name not in modules or not fits(fusion, modules[fusion.name], recipes, known):
            what = "in one kernel" if fusion.kind == "norm" else "together"
            raise PlanError(
                f"the plan runs {', '.join(fusion.parts)} of {fusion.name or ROOT!r} {what} ({fusion.kind}), which"
                f" this {type(model).__name__} does not have like that; plan the model again"
            )
    return [(fusion, modules[fusion.name]) for fusion in plan.fusions]


def _planned_also(model: nn.Module, plan: Plan) -> list[tuple[str, nn.Module]]:
    """The modules beside the layers that the plan says are taken over."""
    modules = dict(model.named_modules())
    names = [module_name(row.name) for row in plan.also if not row.reason]
    if missing := [name for name in names if name not in modules]:
        raise PlanError(f"the plan names {missing[0]!r}, which this {type(model).__name__} lacks; plan it again")
    return [(name, modules[name]) for name in names]


def _schedules(plan: Plan, layers: list[str], clock: StepClock) -> dict[str, Schedule]:
    """The schedule of each layer, one for all that have the same window; none if all are in FP8 in every step."""
    if not plan.schedule_said:
        return {}
    windows = {name: plan.window_of(row_name(name)) for name in layers}
    made = {window: Schedule(window, clock, plan.schedule_said) for window in set(windows.values())}
    return {name: made[window] for name, window in windows.items()}


def restore(model: nn.Module) -> nn.Module:
    """Undo ``convert``: the same model, its layers plain again, with the values that they have now.

    Gradients of a training level are plain again too; weights that it made 16 bit stay so.

    Raises: PlanError if the model is not converted.
    """
    state = state_of(model)
    state.leave()
    backends.get(state.backend).restore_layers(model)
    release_gradients(model.parameters())
    for module in model.modules():
        module.__dict__.pop(ATTRIBUTE, None)
        untie(module)
        leave_zero_grad(module)
    return model


def attach(model: nn.Module, optimizer: Optimizer) -> Attachment:
    """Let ``optimizer.step()`` mark the step boundaries of a converted model.

    Returns a handle with ``remove()``. With several optimizers attach the one that steps last.
    Raises: PlanError if the model is not converted, the optimizer is not this model's, or marks its steps already.
    """
    state = state_of(model)
    if not isinstance(optimizer, Optimizer):
        raise PlanError(
            f"attach got {type(optimizer).__qualname__} as the optimizer; allowed: a torch.optim.Optimizer; pass the"
            " one that steps this model"
        )
    own = {id(p) for p in model.parameters()}
    if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
        raise PlanError("this optimizer holds no Parameter of the model; attach the one that steps this model")
    if any(isinstance(known, Attachment) and known.optimizer() is optimizer for known in state.attached):
        raise PlanError("this optimizer marks the model's steps already; call acceler8.attach once for it")
    return Attachment(state, optimizer)


class Attachment:
    """The hook behind an optimizer's step, and the handle that removes it."""

    def __init__(self, state: ModelState, optimizer: Optimizer) -> None:
        self._state = state
        self.optimizer = weakref.ref(optimizer)  # a model does not keep an optimizer and its state alive
        self._handle = optimizer.register_step_post_hook(self)
        state.attached.append(self)

    def __call__(self, *args: Any) -> None:
        """Mark a step boundary; called by the optimizer behind its step."""
        self._state.clock.tick()

    def remove(self) -> None:
        """Stop marking step boundaries. A second call does nothing."""
        self._handle.remove()
        if self in self._state.attached:
            self._state.attached.remove(self)


def step(model: nn.Module) -> None:
    """Mark a step boundary by hand, after ``optimizer.step()``, in a loop without ``attach`` or Accelerator."""
    state_of(model).clock.tick()


@contextmanager
def window(model: nn.Module) -> Iterator[None]:
    """Reuse weight codes across the forwards inside: for micro-batches that see one set of weights.

    Codes are made anew after a step that is marked on the model's clock, ``load_state_dict``, a move, an
    assignment, and in-place changes that PyTorch counts. The caller answers for the rest: edits through
    ``.data`` and fused optimizer steps that nobody marks. ``verify`` finds stale codes. A window inside a window
    is the outer one. Codes are dropped when it closes. Gradients that a training level stores in FP8 add up in 16 or 32
    bits inside, and become FP8 once, when it closes or the optimizer steps.
    Raises: PlanError if the model is not converted.
    """
    opened = [codes for codes in state_of(model).codes if not codes.is_open]
    for codes in opened:
        codes.open()
    adding = open_windows(model)
    try:
        yield
    finally:
        for codes in opened:
            codes.close()
        close_windows(model, adding)


@contextmanager
def evaluate_in_fp8(model: nn.Module) -> Iterator[None]:
    """Inside, layers in eval() mode compute in FP8 too, whatever their recipe's eval policy.

    PyTorch's fused inference path of ``nn.TransformerEncoderLayer``, which never calls its linears, is off inside.
    """
    state = state_of(model)
    engine = backends.get(state.backend)
    fastpath = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    before, state.evaluates_in_fp8 = state.evaluates_in_fp8, True
    engine.set_evaluates_in_fp8(model, True)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath)
        state.evaluates_in_fp8 = before
        engine.set_evaluates_in_fp8(model, before)
