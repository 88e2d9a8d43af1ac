"""The scales of delayed scaling, updated once per step of acceler8's clock.

TransformerEngine updates them when an outermost ``te.autocast`` ends and when its first module's backward ran, for
every module of the process. With contexts bound to layers each layer's forward would be such an end, recomputation
would count twice, and micro-batches that share cached weight codes would see their scale change under them. So layers
are kept out of its global buffers, their casts only raise the staging row of the history (an atomic maximum, so that
repetition changes nothing), and at a step boundary its own kernel makes the scales of the next step: for one
micro-batch per step the same numbers as TransformerEngine's, bit for bit. Only an amax that is not finite is dropped.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from acceler8.backends.transformer_engine.region import state_manager
from acceler8.errors import PlanError

if TYPE_CHECKING:
    from acceler8.backends.transformer_engine._modules import TeLinear

_SIDES = (("fwd", "scaling_fwd"), ("bwd", "scaling_bwd"))
STEPS = "steps"


def keep_out(fp8_meta: dict[str, Any]) -> None:
    """Keep a module's histories out of TransformerEngine's own updates: it looks as if they were registered."""
    fp8_meta[state_manager().get_buffer_info()] = (0, "acceler8", 0, "acceler8")


class _Side:
    """The tensors of forward or backward of all layers that share a recipe, looked up once."""

    def __init__(self, layers: list[TeLinear], key: str) -> None:
        self.recipe = layers[0]._acceler8_layer.te_recipe
        states = [layer.fp8_meta[key] for layer in layers]
        self.owners = [(weakref.ref(layer), state) for layer, state in zip(layers, states, strict=True)]
        self.key = key
        self.histories = [state.amax_history for state in states]
        self.scales = [state.scale for state in states]
        self.staging = [history[0] for history in self.histories]
        self.sizes = [row.numel() for row in self.staging]
        self.dtype = states[0].dtype

    def is_current(self) -> bool:
        """False once a layer has other tensors."""
        layers = ((find(), state) for find, state in self.owners)
        return all(layer is not None and layer.fp8_meta.get(self.key) is state for layer, state in layers)

    def update(self) -> None:
        """Push this step's amaxes and make the scales of the next."""
        import transformer_engine_torch as tex

        amaxes = torch.cat(self.staging)
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            torch.distributed.all_reduce(amaxes, op=torch.distributed.ReduceOp.MAX)
        amaxes = torch.where(amaxes.isfinite(), amaxes, 0.0)  # one would freeze the scale for as long as it is kept
        torch._foreach_copy_(self.staging, amaxes.split(self.sizes))
        tex.fused_amax_and_scale_update_after_reduction(
            amaxes, self.histories, self.scales, self.recipe.amax_compute_algo, self.dtype, self.recipe.margin
        )


class AmaxHistories:
    """Those of all layers of one model under delayed scaling.

    Each of these layers has it, so it does not have them: it looks them up in the model, and remembers them weakly.
    """

    def __init__(self, interval: int) -> None:
        self.interval = interval
        self.steps = 0
        self._layers: list[tuple[str, weakref.ref[TeLinear]]] = []
        self._sides: list[_Side] = []

    def layers(self, model: nn.Module) -> list[tuple[str, TeLinear]]:
        """``(name, layer)`` of every layer inside ``model`` whose histories these are, by its name when converted."""
        known = [(name, layer) for name, find in self._layers if (layer := find()) is not None]
        if known and len(known) == len(self._layers):
            return known
        found: list[tuple[str, TeLinear]] = []
        for module in model.modules():
            state: Any = module.__dict__.get("_acceler8_layer")
            if getattr(state, "histories", None) is self:
                found.append((state.name, cast("TeLinear", module)))
        self._layers = [(name, weakref.ref(layer)) for name, layer in found]
        return found

    def initialise(self, model: nn.Module) -> None:
        """Give every layer its tensors, on the device of its weight, also those that did not run yet: processes then
        reduce the same number of them.
        """
        for _, layer in self.layers(model):
            if not layer.fp8_initialized:
                layer.initialise()

    def update(self, model: nn.Module) -> None:
        """A step is over: push its amaxes and make new scales, every ``interval`` steps."""
        self.steps += 1
        if self.steps % self.interval or not any(layer.fp8_initialized for _, layer in self.layers(model)):
            return
        if not self._sides or not all(side.is_current() for side in self._sides):
            self._sides = self._find_sides(model)
        for side in self._sides:
            side.update()

    def _find_sides(self, model: nn.Module) -> list[_Side]:
        self.initialise(model)
        groups: dict[int, list[TeLinear]] = {}
        for _, layer in self.layers(model):
            groups.setdefault(id(layer._acceler8_layer.te_recipe), []).append(layer)
        return [_Side(layers, key) for layers in groups.values() for _, key in _SIDES]

    def __getstate__(self) -> dict[str, Any]:
        """A copy looks its layers and tensors up anew."""
        return {**self.__dict__, "_layers": [], "_sides": []}

    def state(self, model: nn.Module) -> dict[str, Tensor]:
        """Copies of histories and scales by layer name, for a checkpoint.

        Shape: ``<layer>.amax_history_fwd`` [amax_history_len, 3] (x, w, y), ``..._bwd`` [amax_history_len, 2] (dy, dx),
        row 0 the staging row; ``<layer>.scale_fwd`` [3], ``..._bwd`` [2], multipliers into FP8; all FP32; ``steps`` [].
        """
        self.initialise(model)
        found = {
            f"{name}.{what}_{side}".lstrip("."): getattr(layer.fp8_meta[key], what).clone()
            for name, layer in self.layers(model)
            for side, key in _SIDES
            for what in ("amax_history", "scale")
        }
        return {**found, STEPS: torch.tensor(self.steps)}

    def load_state(self, model: nn.Module, state: dict[str, Tensor]) -> None:
        """Restore what ``state`` gave. Raises PlanError if names or shapes differ; nothing is changed then."""
        own = self.state(model)
        if differ := sorted(set(own) ^ set(state)):
            raise PlanError(
                f"the FP8 state and the model's plan differ in {len(differ)} entries, such as {differ[0]!r}; convert"
                " the model with the plan that was saved"
            )
        for name, tensor in own.items():
            if state[name].shape != tensor.shape or state[name].dtype != tensor.dtype:
                raise PlanError(
                    f"FP8 state {name!r} is {state[name].dtype} {tuple(state[name].shape)}; allowed: {tensor.dtype}"
                    f" {tuple(tensor.shape)}; convert the model with the recipe that was saved"
                )
        for name, layer in self.layers(model):
            for side, key in _SIDES:
                for what in ("amax_history", "scale"):
                    target = getattr(layer.fp8_meta[key], what)
                    target.copy_(state[f"{name}.{what}_{side}".lstrip(".")])
        self.steps = int(state[STEPS])
