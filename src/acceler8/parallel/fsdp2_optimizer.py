"""Optimizers of a model whose Parameters FSDP2 replaced: they get the new ones, with their state.

``fully_shard`` puts new Parameters into the modules. An optimizer that was made of the old ones would go on changing
those, which nothing reads any more: the loss would not fall, and no error would be raised. So every old Parameter is
remembered, for as long as somebody holds it, with the one that took its place.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from acceler8.errors import ConfigError
from acceler8.parallel.fsdp2_reshard import reshard
from acceler8.parallel.fsdp2_whole import shard_of


class _New(NamedTuple):
    """What took a Parameter's place, and its name."""

    parameter: nn.Parameter
    name: str


class ReplacedParameters:
    """Old Parameters with their new ones, and the guard against optimizers that still hold old ones."""

    def __init__(self) -> None:
        self._new: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._checked: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        guard = _StaleGuard(self)
        weakref.finalize(self, register_optimizer_step_pre_hook(guard).remove)

    def note(self, old: Tensor, new: nn.Parameter, name: str) -> None:
        """``new`` took the place of ``old``."""
        if old is not new:
            self._new[old] = _New(new, name)

    def add_model(self, model: nn.Module) -> None:
        """A model whose Parameters optimizers may hold."""
        self._models.add(model)

    def reshard(self) -> None:
        """Free what is gathered of all models."""
        for model in self._models:
            reshard(model)

    def stale(self, optimizer: Optimizer) -> list[str]:
        """Names of the Parameters that the optimizer holds and that were replaced."""
        if not len(self._new):  # mostly: nobody holds an old one any more
            return []
        params = (p for group in optimizer.param_groups for p in group["params"])
        return [self._new[p].name for p in params if p in self._new]

    def put_into(self, optimizer: Optimizer) -> None:
        """Let the optimizer hold the new Parameters, with what it knows of the old ones.

        Raises: ConfigError for a state that is neither a number nor of its parameter's shape; nothing is changed then.
        """
        if not self.stale(optimizer):
            return
        state = {p: self._convert(p, values) for p, values in optimizer.state.items() if p in self._new}
        for group in optimizer.param_groups:
            group["params"] = [self._new[p].parameter if p in self._new else p for p in group["params"]]
        for old, values in state.items():
            del optimizer.state[old]
            optimizer.state[self._new[old].parameter] = values

    def _convert(self, old: Tensor, values: dict[str, Any]) -> dict[str, Any]:
        new, name = self._new[old]
        return {key: self._sharded(value, new, f"{name}: {key}") for key, value in values.items()}

    def _sharded(self, value: Any, new: nn.Parameter, what: str) -> Any:
        if not isinstance(value, Tensor) or value.ndim == 0 or not isinstance(new, DTensor):
            return value
        if value.shape != new.shape or value.dtype.itemsize == 1:
            raise ConfigError(
                f"the optimizer stepped before prepare, and its state {what} is {value.dtype} {tuple(value.shape)};"
                f" allowed: numbers of the parameter's shape {tuple(new.shape)}; prepare it before its first step, or"
                " load its state_dict afterwards"
            )
        with torch.no_grad():
            return shard_of(value.to(new.device_mesh.device_type), new)

    def check(self, optimizer: Optimizer) -> None:
        """Raise ConfigError if a prepared optimizer holds Parameters of no prepared model, naming them."""
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        if self._checked.get(optimizer) == count:
            return
        own = {id(p) for model in self._models for p in model.parameters()}
        strangers = [
            f"group {i} parameter {j} of shape {tuple(p.shape)}"
            for i, group in enumerate(optimizer.param_groups)
            for j, p in enumerate(group["params"])
            if id(p) not in own
        ]
        if strangers:
            raise ConfigError(
                f"{type(optimizer).__name__} holds {len(strangers)} Parameters of no prepared model, such as"
                f" {strangers[0]}; allowed under FSDP: those of prepared models, for nothing keeps others equal between"
                " processes; prepare the model that they belong to"
            )
        self._checked[optimizer] = count


class _StaleGuard:
    """Hook in front of every optimizer's step in this process: one that holds replaced Parameters must not step."""

    def __init__(self, replaced: ReplacedParameters) -> None:
        self._replaced = weakref.ref(replaced)

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Raise ConfigError if it would."""
        replaced = self._replaced()
        if replaced is not None and (names := replaced.stale(optimizer)):
            raise ConfigError(
                f"{type(optimizer).__name__} holds {len(names)} Parameters that sharding replaced, such as {names[0]}:"
                " its step would change nothing that the model reads; allowed: optimizers that were prepared, or made"
                " after the model was; pass it to accelerator.prepare"
            )


class StepGuard:
    """Hook in front of a prepared optimizer's step: models hold shards, and its Parameters are prepared models'.

    What is still gathered would hold the weights of before the step, and hide the Parameters that optimizers hold.
    """

    def __init__(self, replaced: ReplacedParameters) -> None:
        self._replaced = weakref.ref(replaced)

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Free gathered weights. Raise ConfigError if it holds other Parameters."""
        if (replaced := self._replaced()) is not None:
            replaced.reshard()
            replaced.check(optimizer)


__all__ = ["ReplacedParameters", "StepGuard"]
