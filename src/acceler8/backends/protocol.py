"""What acceler8 asks of a backend: a base class of small hooks, each of which works as it is.

A backend overrides the few that it needs. The least is ``name``, ``capabilities``, ``convert_layers``,
``restore_layers`` and ``layers``. What every backend promises, and ``acceler8.verify`` proves:

- The Parameters of a converted model are the same objects as before, with their values, ties, ``requires_grad``, device
  and dtype, also where a module is replaced: optimizers made before and after ``convert`` hold the right ones.
- Every converted layer has an ``acceler8.nn.LayerState`` as ``_acceler8_layer`` in its ``__dict__``, which holds its
  name at conversion, its recipe and its schedule. Its forward asks ``state.is_fp8(self.training)`` at each call and
  computes in high precision where that is False: in ``eval()`` mode unless the recipe or ``evaluate_in_fp8`` says
  otherwise, and outside its window of FP8 steps. So no context has to be around the model's forward.
- ``state_dict`` has the keys and the tensors of the plain model, no more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from acceler8.backends.capability import Capability, lacking
from acceler8.backends.fusion import Fusion
from acceler8.backends.layer_rules import refuse_linear
from acceler8.backends.options import BackendOptions
from acceler8.errors import PlanError
from acceler8.nn import LayerState, ModelState, converted_layers, fp8_state_dict, load_fp8_state_dict
from acceler8.recipes import LayerRecipes, Recipe
from acceler8.recipes.layers import resolve_layers
from acceler8.recipes.registry import DEFAULT

PlannedLayer = tuple[str, nn.Module, Recipe]
"""A layer that becomes FP8: its name, itself, its recipe."""


class Window(Protocol):
    """A cache of cast weights. A backend puts its own into ``ModelState.codes``, and owners of windows, such as
    ``Accelerator.accumulate``, open and close all that are there. ``acceler8.functional.WeightCodes`` is one.
    """

    is_open: bool
    """True while casts may be used again."""

    def open(self) -> None:
        """Keep casts, and use them again, from now on."""

    def pause(self) -> None:
        """Neither use nor keep casts until ``open``; those that are kept stay for then (between micro-batches)."""

    def close(self) -> None:
        """Drop casts and keep none."""

    def drop(self) -> None:
        """Drop casts, for weights changed (a step, a checkpoint that was loaded); an open window stays open."""


@dataclass(frozen=True, kw_only=True)
class AlsoConverted:
    """A module beside the linear layers that a backend takes over, such as a norm, or why it does not."""

    name: str
    module: nn.Module
    refusal: str | None = None


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """What a backend is to carry out."""

    model: nn.Module
    layers: list[PlannedLayer]
    state: ModelState
    """Of this model. A backend adds its windows to ``codes`` and gives layers their ``schedules``, by name."""
    fusions: Sequence[tuple[Fusion, nn.Module]] = ()
    """With the modules that they are in; empty unless the backend fuses."""
    also: list[tuple[str, nn.Module]] = field(default_factory=list)
    """Modules beside the layers that the plan says are taken over, of those that ``also_converts`` named."""
    options: BackendOptions | None = None

    def layer_state(self, name: str, recipe: Recipe) -> LayerState:
        """A new state for the layer of this name, with its schedule."""
        return LayerState(name, recipe, self.state.clock, schedule=self.state.schedules.get(name))


class Backend:
    """Turns chosen layers of a model into FP8 layers, and back. Every hook here does nothing, or what is usual."""

    name: str = ""
    fuses: bool = False
    """True if it runs layers that share work together, where a plan says so."""
    replaces_modules: bool = False
    """True if converted layers are other module objects than before, so that the model itself cannot be one."""
    filter_decides: bool = False
    """True if a ``filter_fn`` takes the place of what is left by default, as in the library itself."""
    options_type: type[BackendOptions] | None = None
    """What ``options`` must be; None: it has none."""
    slow_in_eager: str | None = None
    """What to tell a user on a GPU who does not compile the model; None: it needs no compiler."""
    default_recipe: str = DEFAULT
    """The recipe where none is named."""

    def unavailable(self) -> str | None:
        """Why this backend cannot be used here, such as a missing library, with the versions found and needed, and
        what to do; None if it can. Asked before each use, so it remembers what is slow to find out.
        """
        return None

    def capabilities(self) -> tuple[Capability, ...]:
        """Recipes by device and strategy. Needs no library. Empty: no recipe at all."""
        return ()

    def lacks(self, recipe: Recipe, device: torch.device, strategy: str = "single") -> str | None:
        """Why ``recipe`` does not run on this device under this strategy, with the recipes that do; None if it does.

        A backend that also cannot do some settings of a recipe that it has adds these.
        """
        return lacking(self.name, self.capabilities(), recipe, device, strategy)

    def check_options(self, options: BackendOptions | None) -> None:
        """Raise PlanError for options of another backend."""
        if options is not None and (self.options_type is None or not isinstance(options, self.options_type)):
            allowed = "None" if self.options_type is None else self.options_type.__name__
            raise PlanError(
                f"backend {self.name!r} got options {type(options).__name__}; allowed: {allowed}; leave them out, or"
                " name the backend that they are of"
            )

    def recipe_for(self, recipe: Any, options: BackendOptions | None) -> Recipe | LayerRecipes:
        """The recipe that a user means: a name, a Recipe, a mapping of patterns to such, or None for the default.

        Raises: RecipeError for what is none. A backend whose options say it all raises PlanError for one beside them.
        """
        return resolve_layers(self.default_recipe if recipe is None else recipe)

    def notes(self, recipe: Recipe, device: torch.device, options: BackendOptions | None = None) -> list[str]:
        """What a plan should say about this recipe on this device, such as emulation."""
        return []

    def strategy_notes(self, options: BackendOptions | None, strategy: str) -> list[str]:
        """What a plan should say about options that have no effect under this way of spreading a model."""
        return []

    def kept_input_bytes(self, recipe: Recipe, dtype: torch.dtype) -> float | None:
        """Bytes that stay until backward of each element of a layer's input in this dtype; None: not known."""
        return None

    def refuses(self, module: nn.Module, recipe: Recipe) -> str | None:
        """Why this layer stays in high precision; None if the backend takes it."""
        return refuse_linear(module, recipe)

    def left_by_default(self, model: nn.Module, options: BackendOptions | None = None) -> dict[int, str]:
        """Layers, by ``id``, that the library leaves in high precision unless told otherwise, with the reason."""
        return {}

    def also_converts(
        self, model: nn.Module, recipe: Recipe | LayerRecipes, options: BackendOptions | None = None
    ) -> list[AlsoConverted]:
        """Modules beside the linear layers that it takes over, or would but for a reason: the plan shows them."""
        return []

    def convert_layers(self, conversion: Conversion) -> None:
        """Make these layers FP8, each by its own recipe. All or none: raise PlanError before changing the first."""
        raise NotImplementedError

    def restore_layers(self, model: nn.Module) -> None:
        """Undo ``convert_layers`` for everything inside ``model``."""
        raise NotImplementedError

    def layers(self, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """``(name, layer)`` of every layer inside ``model`` that this backend made FP8, names as they are now."""
        return converted_layers(model)

    def expected_output(self, layer: nn.Module, x: Tensor) -> Tensor | None:
        """What ``layer`` gives for ``x`` in training if it casts its weight as it now is, without changing any state.

        ``verify`` compares it with what the layer gave, bit for bit; None: it cannot be said.
        """
        return None

    def set_evaluates_in_fp8(self, model: nn.Module, value: bool) -> None:
        """Let layers in ``eval()`` mode compute in FP8 too, or by their recipe again."""
        for _, layer in self.layers(model):
            layer.__dict__["_acceler8_layer"].evaluates_in_fp8 = value

    def on_step(self, model: nn.Module) -> None:
        """A step boundary: weights have their new values, no backward is pending. Windows were dropped before."""

    def state(self, model: nn.Module) -> dict[str, Tensor]:
        """What a checkpoint keeps beside the model and the optimizer, such as amax histories, by name: copies."""
        return fp8_state_dict(model)

    def initial_state(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """What ``state`` gives right after conversion, here zeros: for entries that a checkpoint lacks."""
        return {name: torch.zeros_like(tensor) for name, tensor in state.items()}

    def load_state(self, model: nn.Module, state: dict[str, Tensor]) -> None:
        """Restore what ``state`` gave. Raises PlanError if it does not fit; nothing is changed then."""
        load_fp8_state_dict(model, state)
