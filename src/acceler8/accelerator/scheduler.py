"""The scheduler that ``prepare`` returns: moves only when the optimizer really stepped."""

from __future__ import annotations

from typing import Any

from acceler8.accelerator.gradients import GradientState
from acceler8.accelerator.optimizer import AcceleratedOptimizer


class AcceleratedScheduler:
    """Wraps a learning-rate scheduler; attributes are the wrapped scheduler's own.

    moves: how often the wrapped one moves in a step. A script counts its steps for one process; where each of several
        processes takes whole batches, an epoch has that many times fewer, and the schedule goes that many times faster.
    with_optimizer: move only where a step is complete and was not skipped; else at every call, once.
    """

    def __init__(
        self,
        scheduler: Any,
        gradients: GradientState,
        optimizers: list[AcceleratedOptimizer],
        *,
        moves: int = 1,
        with_optimizer: bool = True,
    ) -> None:
        self.scheduler, self.gradients, self._all_optimizers = scheduler, gradients, optimizers
        self.moves, self.with_optimizer = moves, with_optimizer

    def __getattr__(self, name: str) -> Any:
        if "scheduler" not in self.__dict__:  # while being copied or unpickled
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    @property
    def optimizers(self) -> list[AcceleratedOptimizer]:
        """The prepared optimizer that the scheduler belongs to; all of them if it belongs to none."""
        own = getattr(self.scheduler, "optimizer", None)
        return [o for o in self._all_optimizers if own is o or own is o.optimizer] or self._all_optimizers

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Move if this micro-batch completed a step and no optimizer of this scheduler skipped it."""
        if not self.with_optimizer:
            self.scheduler.step(*args, **kwargs)
            return
        if not self.gradients.sync_gradients or any(o.step_was_skipped for o in self.optimizers):
            return
        for _ in range(self.moves):
            total = getattr(self.scheduler, "total_steps", None)  # OneCycleLR raises past its end
            if total is None or self.scheduler._step_count <= total:
                self.scheduler.step(*args, **kwargs)

    def __repr__(self) -> str:
        return f"AcceleratedScheduler({self.scheduler!r})"
