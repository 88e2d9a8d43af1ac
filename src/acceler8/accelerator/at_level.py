"""Levels O1, O2 and O3 of prepared models and optimizers, in any order of their calls."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from acceler8 import levels
from acceler8.accelerator.optimizer import AcceleratedOptimizer
from acceler8.config.backend_choice import level_of
from acceler8.config.code import RecipeHandlers
from acceler8.config.sources import Effective
from acceler8.errors import NotInThisVersionError
from acceler8.levels.optimizer import check_optimizer, level_optimizer
from acceler8.nn.gradients import GradientWindow, drop_gradients, stored_gradient
from acceler8.optim import Adam
from acceler8.parallel import Strategy

_log = logging.getLogger("acceler8")


class AtLevel:
    """What ``Accelerator`` does for a level. ``level`` is None without one, and then nothing here does anything."""

    level: levels.Level | None
    """O1, O2 or O3 with the choices of ``MSAMPRecipeKwargs``; None: gradients and states are PyTorch's."""
    effective: Effective
    handlers: RecipeHandlers
    strategy: Strategy
    _optimizers: list[AcceleratedOptimizer]
    _models: list[nn.Module]
    _windows: list[GradientWindow]

    def _level(self) -> levels.Level | None:
        asked = level_of(self.effective)
        if asked is None:
            return None
        handler = self.handlers.msamp or self.handlers.fp8
        _log.info("opt_level %s (%s) is acceler8's own: no package msamp is used", asked.value, asked.source)
        return levels.level(asked.value, **({} if handler is None else handler.choices()))

    def _start_level(self) -> None:
        self._windows = []
        if self.level is not None:
            self.register_load_state_pre_hook(self._drop_gradients)  # type: ignore[attr-defined]

    def _drop_gradients(self, *_: Any) -> None:
        """What a checkpoint is loaded over has no gradients of before."""
        for model in self._models:
            drop_gradients(model.parameters())

    def _check_level_runs_there(self) -> None:
        if self.level is not None and self.strategy.name != "single":
            raise NotInThisVersionError(
                f"opt_level {self.level.name} in {self.strategy.num_processes} processes is not in this version yet,"
                " for gradients in FP8 are not exchanged between them; allowed: levels in one process; leave opt_level"
                " and MSAMPRecipeKwargs out and name backend NATIVE"
            )

    def _bring_to_level(self, model: nn.Module) -> None:
        """Right behind conversion."""
        if self.level is None:
            return
        if known := levels.level_weights(model):
            _log.info("%s was brought to a level before prepare, and keeps it", type(model).__name__)
        weights = known or levels.apply_level(model, self.level)
        found = {id(store.window): store.window for p in weights.values() if (store := stored_gradient(p))}
        self._windows += found.values()

    def _at_level(self, optimizer: Optimizer) -> Optimizer:
        """The optimizer to step: ours, where a model needs it. One that holds no weight of a level stays as it is."""
        if self.level is None:
            return optimizer
        if isinstance(optimizer, Adam) or type(optimizer) in (torch.optim.Adam, torch.optim.AdamW):
            return level_optimizer(optimizer, self.level)
        if _holds_level_weights(optimizer):
            check_optimizer(optimizer, self.level)
        return optimizer

    def _complete_optimizers(self) -> None:
        """A model came to its level behind these: formats are found anew, and what cannot step it is said.

        Raises: ConfigError for a prepared optimizer of another class that holds weights of the level.
        """
        if self.level is None:
            return
        for known in self._optimizers:
            optimizer = known.optimizer
            if isinstance(optimizer, Adam):
                optimizer._formats.clear()
            elif _holds_level_weights(optimizer):
                check_optimizer(optimizer, self.level)


def _holds_level_weights(optimizer: Optimizer) -> bool:
    return any(stored_gradient(p) is not None for group in optimizer.param_groups for p in group["params"])
