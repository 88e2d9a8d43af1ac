"""What a converted model remembers of its conversion, and how to find it again behind wrappers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from acceler8.errors import PlanError
from acceler8.nn.linear import Fp8Linear, LayerState
from acceler8.scaling import LINE, AmaxState, Schedule, StepClock

ATTRIBUTE = "_acceler8_model"
LAYER_ATTRIBUTE = "_acceler8_layer"


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
    schedules: dict[str, Schedule] = field(default_factory=dict)
    """Of each FP8 layer, by name; layers that change together share one. Empty: FP8 in every step."""
    codes: list[Any] = field(default_factory=list)
    """Caches of cast weights, which owners of windows open and close: ``acceler8.backends.Window``."""
    attached: list[Any] = field(default_factory=list)
    on_step: list[Callable[[], None]] = field(default_factory=list)
    """What the backend does at each step boundary, behind the dropping of codes."""
    evaluates_in_fp8: bool = False
    """True inside ``evaluate_in_fp8``."""

    def drop_codes(self) -> None:
        """Step boundary: weights changed, so kept codes go; open windows stay open."""
        for codes in self.codes:
            codes.drop()

    def follow_clock(self) -> None:
        """From now on a step boundary updates the amax state and drops weight codes."""
        if self.amax is not None:
            self.clock.subscribe(self.amax.update)
        self.clock.subscribe(self.drop_codes)
        for on_step in self.on_step:
            self.clock.subscribe(on_step)
        self.clock.watch_weights(self.drop_codes)
        for schedule in self.own_schedules():
            self.clock.follow(schedule.follow)

    def leave(self) -> None:
        """Undo ``follow_clock`` and everything that was attached since."""
        for attachment in list(self.attached):
            attachment.remove()
        if self.amax is not None:
            self.clock.unsubscribe(self.amax.update)
        self.clock.unsubscribe(self.drop_codes)
        for on_step in self.on_step:
            self.clock.unsubscribe(on_step)
        self.clock.unwatch_weights(self.drop_codes)
        for schedule in self.own_schedules():
            self.clock.unfollow(schedule.follow)

    def own_schedules(self) -> list[Schedule]:
        """The schedules, each once."""
        return list({id(schedule): schedule for schedule in self.schedules.values()}.values())

    def __getstate__(self) -> dict[str, Any]:
        """A copy has its own clock and state, and nothing that belongs to this process's optimizers."""
        return {**self.__dict__, "attached": []}


def check_is_module(model: object) -> None:
    """Raise PlanError for what is no ``nn.Module``."""
    if not isinstance(model, nn.Module):
        raise PlanError(f"model got {type(model).__qualname__}; allowed: an nn.Module; pass the model itself")


def find_states(model: nn.Module) -> list[ModelState]:
    """The conversion states inside ``model``: one for each part that was converted on its own.

    Raises: PlanError for what is no module.
    """
    check_is_module(model)
    return [state for m in model.modules() if (state := m.__dict__.get(ATTRIBUTE)) is not None]


def find_state(model: nn.Module) -> ModelState | None:
    """The first of ``find_states``, or None."""
    return next(iter(find_states(model)), None)


def state_of(model: nn.Module) -> ModelState:
    """The conversion state of ``model`` or of a module inside it (behind DDP, PEFT or another wrapper).

    Raises: PlanError if nothing in ``model`` was converted, or parts of it were converted on their own.
    """
    states = find_states(model)
    if not states:
        raise PlanError(
            f"{type(model).__name__} is not converted; call acceler8.convert(model, acceler8.plan(model)) first"
        )
    if len(states) > 1:
        raise PlanError(
            f"{type(model).__name__} holds {len(states)} parts that were converted on their own; allowed: one; call"
            " this for each part, or convert the whole model with one plan"
        )
    return states[0]


def converted_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """``(name, layer)`` of every layer that some backend made FP8, names as in ``model.named_modules()``."""
    for name, module in model.named_modules():
        if isinstance(module.__dict__.get(LAYER_ATTRIBUTE), LayerState):
            yield name, module


def keeps_history(model: nn.Module) -> bool:
    """True if a layer inside ``model`` takes its scales from earlier steps, whichever backend's it is."""
    return any(layer.__dict__[LAYER_ATTRIBUTE].keeps_history for _, layer in converted_layers(model))


def fp8_layers(model: nn.Module) -> Iterator[tuple[str, Fp8Linear]]:
    """``(name, layer)`` of every layer of the native backend, names as in ``model.named_modules()``."""
    for name, module in model.named_modules():
        if isinstance(module, Fp8Linear):
            yield name, module


def fp8_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The FP8 state that a checkpoint keeps: amax histories (delayed scaling), by layer name; else nothing.

    Shape: ``{"<layer>.amax": [2 + amax_history_len, 3] FP32, ..., "steps": [] int64}``; the columns are x, w and
        dy, the rows as in ``AmaxState``. Copies, on the state's device.
    """
    amax = state_of(model).amax
    if amax is None:
        return {}
    columns = {name: amax.data[:, place].clone() for name, place in _places(amax).items()}
    return {**columns, "steps": torch.tensor(amax.steps)}


def load_fp8_state_dict(model: nn.Module, state: dict[str, Tensor], *, strict: bool = True) -> None:
    """Restore what ``fp8_state_dict`` gave.

    Raises: PlanError if layers or shapes do not fit the model's plan, or if ``state`` is empty and the model keeps
        histories (``strict=False`` then leaves those as they are); nothing is changed then.
    """
    model_state = state_of(model)
    model_state.drop_codes()
    amax = model_state.amax
    if not state:
        if amax is not None and strict:
            raise PlanError(
                "got no FP8 state for a model with amax histories: it would go on with fresh ones; load the state that"
                " fp8_state_dict(model) gave, or pass strict=False"
            )
        return
    if amax is None:
        raise PlanError("got FP8 state but the model's recipe keeps none; convert it with the recipe that was saved")
    places = _places(amax)
    if differ := sorted({*places, "steps"} ^ set(state)):
        raise PlanError(
            f"the FP8 state and the model's plan differ in {len(differ)} entries, such as {differ[0]!r}; convert the"
            " model with the plan that was saved"
        )
    expected = (len(amax.data), 3)
    for name in places:
        if tuple(state[name].shape) != expected or state[name].dtype != torch.float32:
            raise PlanError(
                f"FP8 state {name!r} is {state[name].dtype} {tuple(state[name].shape)}; allowed: torch.float32"
                f" {expected} (2 + amax_history_len, operands); convert the model with the recipe that was saved"
            )
    for name, place in places.items():
        amax.data[:, place].copy_(state[name])
    amax.unite()
    amax.steps = int(state["steps"])


def _places(amax: AmaxState) -> dict[str, slice]:
    """Columns of the amax state by the name that a checkpoint gives them."""
    layers = [name.rpartition(".")[0] for name in amax.names[::LINE]]  # "<layer>.x", ".w", ".dy", and an empty one
    return {f"{layer}.amax".lstrip("."): slice(LINE * i, LINE * i + 3) for i, layer in enumerate(layers)}
