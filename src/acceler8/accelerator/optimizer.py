"""The optimizer that ``prepare`` returns: steps only where an accumulation window ends, and marks the boundary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from acceler8.accelerator.gradients import GradientState
from acceler8.accelerator.loss_scaler import LossScaler
from acceler8.errors import ConfigError
from acceler8.scaling import StepClock


class AcceleratedOptimizer(Optimizer):
    """Wraps ``optimizer``; attributes, groups and state are the wrapped optimizer's own.

    given: the optimizer that the script made, where its engine put another in its place; default ``optimizer``.
    number: which of its Accelerator's optimizers it is; ``StepClock`` counts the steps of several by it.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        gradients: GradientState,
        clock: StepClock,
        scaler: LossScaler | None,
        number: int = 0,
        *,
        given: Optimizer | None = None,
    ) -> None:
        self.optimizer, self.gradients, self.clock, self.scaler = optimizer, gradients, clock, scaler
        self.given = optimizer if given is None else given
        self.number, self.step_was_skipped = number, False

    def __getattr__(self, name: str) -> Any:
        if "optimizer" not in self.__dict__:  # while being copied or unpickled
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's groups."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        """The wrapped optimizer's state."""
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the wrapped optimizer if this micro-batch completes a window, then tell the step clock."""
        if not self.gradients.sync_gradients:
            return None
        if self.scaler is None:
            out = self.optimizer.step(closure)
            self.step_was_skipped = bool(getattr(self.optimizer, "step_was_skipped", False))
        elif closure is not None:
            raise ConfigError(
                "optimizer.step got a closure under fp16, whose loss scaler cannot call it; use bf16 or fp8"
            )
        else:
            out, self.step_was_skipped = self.scaler.step(self.optimizer)
        self.clock.optimizer_stepped(self.number)
        return out

    def unscale(self) -> None:
        """Bring gradients back to their own units, once a step, before they are clipped or read (FP16 only)."""
        if self.scaler is not None:
            self.scaler.unscale(self.optimizer)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients where a window ends; inside one they keep adding up."""
        if self.gradients.sync_gradients:
            self.optimizer.zero_grad(set_to_none)
            if self.scaler is not None:
                self.scaler.forget(self.optimizer)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state_dict."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load into the wrapped optimizer."""
        self.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the wrapped optimizer."""
        self.optimizer.add_param_group(param_group)

    def __repr__(self) -> str:
        return f"AcceleratedOptimizer({self.optimizer!r})"
