"""FP16's loss scaler, for any number of optimizers that step together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from acceler8.errors import GradientError


class _Unscaled:
    """An optimizer whose gradients are in their own units, for they were unscaled and it has not stepped since."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.has_more = False
        """A backward has added scaled gradients since."""
        self._handles: list[RemovableHandle] = []

    def parameters(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def watch(self) -> None:
        """Note from now on if a gradient is added to."""
        if not self._handles:
            self._handles = [
                p.register_post_accumulate_grad_hook(self._note) for p in self.parameters() if p.requires_grad
            ]

    def _note(self, _: Tensor) -> None:
        self.has_more = True

    def leave(self) -> None:
        for handle in self._handles:
            handle.remove()


class LossScaler:
    """``torch.amp.GradScaler`` whose scale changes between steps, not between two optimizers of one step.

    ``GradScaler.update`` forgets which optimizers were unscaled and changes the scale; called behind the first of two
    optimizers it makes the second step on gradients that are scaled by another number. So it is called before the next
    backward.

    Gradients that were unscaled, to be clipped, and those that a later backward adds have different units; that raises
    before they are clipped or stepped on. Optimizers that the later backward leaves alone, or whose gradients were
    cleared before it, are no matter.

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
        self._unscaled: dict[int, _Unscaled] = {}

    def scale(self, loss: Tensor) -> Tensor:
        """``loss`` times the scale; first the scale follows what the last step met."""
        self._follow()
        for one in list(self._unscaled.values()):
            if all(p.grad is None for p in one.parameters()):
                self.forget(one.optimizer)
            else:
                one.watch()
        return self._scaler.scale(loss)

    def _follow(self) -> None:
        if self._has_stepped:
            states = self._scaler._per_optimizer_states
            waiting = {key: states.pop(key) for key in self._unscaled if key in states}  # they count when they step
            self._scaler.update()
            self._scaler._per_optimizer_states.update(waiting)
            self._has_stepped = False

    def unscale(self, optimizer: Optimizer) -> None:
        """Bring this optimizer's gradients to their own units, once a step.

        Raises: GradientError if a backward has added to gradients that were unscaled before.
        """
        known = self._unscaled.get(id(optimizer))
        if known is not None and known.has_more:
            raise GradientError(
                f"{type(optimizer).__name__} got scaled gradients on top of those that were unscaled before in this"
                " step; allowed under fp16: to clip or unscale once a step, behind its last backward; clip only where"
                " accelerator.sync_gradients is True, and call optimizer.step() or optimizer.zero_grad() before the"
                " next backward"
            )
        if known is not None or self._scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.STEPPED:
            return
        self._scaler.unscale_(optimizer)
        self._unscaled[id(optimizer)] = _Unscaled(optimizer)
        found = self._found(optimizer)
        if self._agree is not None and found:
            met = torch.stack([flag.reshape(()).to(found[0].device) for flag in found]).amax(0, keepdim=True)
            self._agree(met)
            for flag in found:
                flag.copy_(met.reshape(flag.shape))

    def forget(self, optimizer: Optimizer) -> None:
        """This optimizer's gradients were cleared: those to come have to be unscaled."""
        if known := self._unscaled.pop(id(optimizer), None):
            known.leave()
            self._scaler._per_optimizer_states.pop(id(optimizer), None)

    def is_unscaled(self, optimizer: Optimizer) -> bool:
        """True if gradients of this optimizer were unscaled and neither stepped on nor cleared since."""
        return id(optimizer) in self._unscaled

    def current_scale(self) -> float:
        """What gradients that were not unscaled are multiplied by. Synchronises."""
        return float(self._scaler.get_scale())

    def _found(self, optimizer: Optimizer) -> list[Tensor]:
        return list(self._scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values())

    def step(self, optimizer: Optimizer) -> tuple[Any, bool]:
        """Step unless a gradient is NaN or inf: ``(what the step returned, whether it was skipped)``. Synchronises.

        Raises: GradientError as ``unscale``.
        """
        self.unscale(optimizer)
        found = self._found(optimizer)
        if not found:  # no gradients, of which GradScaler asks for some
            self.forget(optimizer)
            return optimizer.step(), False
        was_skipped = any(bool(flag.item()) for flag in found)
        out = self._scaler.step(optimizer)
        if known := self._unscaled.pop(id(optimizer), None):
            known.leave()
        self._has_stepped = True
        return out, was_skipped

    def state_dict(self) -> dict[str, Any]:
        """The scale and its counters, up to date."""
        self._follow()
        return self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the scale."""
        for one in list(self._unscaled.values()):
            self.forget(one.optimizer)
        self._scaler.load_state_dict(state)
