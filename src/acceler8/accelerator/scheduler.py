"""The scheduler that ``prepare`` returns: moves only when the optimizer really stepped."""

from __future__ import annotations

from typing import Any

from acceler8.accelerator.gradients import GradientState
from acceler8.accelerator.optimizer import AcceleratedOptimizer


class AcceleratedScheduler:
    """Wraps a learning-rate scheduler; attributes are the wrapped scheduler's own."""

    def __init__(self, scheduler: Any, gradients: GradientState, optimizers: list[AcceleratedOptimizer]) -> None:
        self.scheduler, self.gradients, self.optimizers = scheduler, gradients, optimizers

    def __getattr__(self, name: str) -> Any:
        if "scheduler" not in self.__dict__:  # while being copied or unpickled
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step if this micro-batch completed a window and no optimizer of it skipped its step."""
        if self.gradients.sync_gradients and not any(o.step_was_skipped for o in self.optimizers):
            self.scheduler.step(*args, **kwargs)
