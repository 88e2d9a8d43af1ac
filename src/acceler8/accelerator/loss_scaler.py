"""FP16's loss scaler, for any number of optimizers that step together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class LossScaler:
    """``torch.amp.GradScaler`` whose scale changes between steps, not between two optimizers of one step.

    ``GradScaler.update`` forgets which optimizers were unscaled and changes the scale; called behind the first of two
    optimizers it makes the second step on gradients that are scaled by another number. So it is called before the next
    backward.

    options: of GradScaler. agree: makes a flag the largest of all processes, so that all skip a step or none does.
    """

    def __init__(
        self,
        device_type: str,
        options: Mapping[str, Any] | None = None,
        agree: Callable[[Tensor], None] | None = None,
    ) -> None:
        self._scaler = torch.amp.GradScaler(device_type, **(options or {}))
        self._agree = agree
        self._has_stepped = False

    def scale(self, loss: Tensor) -> Tensor:
        """``loss`` times the scale; first the scale follows what the last step met."""
        self._follow()
        return self._scaler.scale(loss)

    def _follow(self) -> None:
        if self._has_stepped:
            self._scaler.update()
            self._has_stepped = False

    def unscale(self, optimizer: Optimizer) -> None:
        """Bring this optimizer's gradients to their own units, once a step."""
        if self._found(optimizer):
            return
        self._scaler.unscale_(optimizer)
        found = self._found(optimizer)
        if self._agree is not None and found:
            met = torch.stack([flag.reshape(()).to(found[0].device) for flag in found]).amax(0, keepdim=True)
            self._agree(met)
            for flag in found:
                flag.copy_(met.reshape(flag.shape))

    def _found(self, optimizer: Optimizer) -> list[Tensor]:
        return list(self._scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values())

    def step(self, optimizer: Optimizer) -> tuple[Any, bool]:
        """Step unless a gradient is NaN or inf: ``(what the step returned, whether it was skipped)``. Synchronises."""
        self.unscale(optimizer)
        was_skipped = any(bool(flag.item()) for flag in self._found(optimizer))
        out = self._scaler.step(optimizer)
        self._has_stepped = True
        return out, was_skipped

    def state_dict(self) -> dict[str, Any]:
        """The scale and its counters, up to date."""
        self._follow()
        return self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the scale."""
        self._scaler.load_state_dict(state)
