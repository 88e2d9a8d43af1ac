"""A replica of the model in each process, gradients averaged in backward: PyTorch's DistributedDataParallel.

FP8 needs one thing beside it. With current scaling each process scales by the amax of its own tensors: codes differ,
their values agree within rounding, and DDP averages the gradients. With delayed scaling the scale comes from a history,
and histories of different data drift apart: a replica would clip what another holds. So in front of each step boundary
the staged amaxes of all processes become their maximum, in one collective a step and model, and every process then
scales by the amax of the global batch. They travel as integers: the bits of a non-negative FP32 are ordered as their
values are, NaN on top, while an FP32 MAX may lose a NaN. What one process saw and another did not (a branch that was
not taken) counts for all.

A process that runs other modules or another number of steps leaves the rest waiting in such a collective, or in that of
the gradients. ``backward`` and the exchange of amaxes then name what differs; see ``disagreement``.

Weights are equal on all ranks because the averaged gradients are, bit for bit, and the optimizer is deterministic.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from acceler8.nn import ModelState, find_states
from acceler8.parallel.disagreement import explained
from acceler8.parallel.protocol import Strategy
from acceler8.scaling import AmaxState, StepClock
from acceler8.scaling.delayed import STAGING


class SharedAmaxes:
    """Completes one model's staged amaxes with those of the other ranks, in front of each step boundary's update."""

    def __init__(self, amax: AmaxState, clock: StepClock) -> None:
        self._amax, self._clock = amax, clock
        clock.unsubscribe(amax.update)
        clock.subscribe(self.complete)
        clock.subscribe(amax.update)

    @torch.no_grad()
    def complete(self) -> None:
        """One MAX over ranks of the staging row. Every rank comes here, for every rank's step ends here."""
        bits = self._amax.data[STAGING].abs().view(torch.int32)  # abs: a NaN of either sign is on top
        with explained("the exchange of amaxes", lambda: self._clock.ticks, self._done):
            dist.all_reduce(bits, dist.ReduceOp.MAX)
        self._amax.data[STAGING].copy_(bits.view(torch.float32))

    def _done(self) -> dict[str, list[str]]:
        """Operands whose amax was staged in this step; the names of layers are in them."""
        staged = (self._amax.data[STAGING] != 0).tolist()
        return {"FP8 operands": [name for name, is_staged in zip(self._amax.names, staged, strict=True) if is_staged]}

    def remove(self) -> None:
        """Stop; ``restore`` asks for it."""
        self._clock.unsubscribe(self.complete)


def share_amaxes(state: ModelState) -> None:
    """Start with rank 0's amax state on all ranks, and keep it equal. Without delayed scaling there is none."""
    amax = state.amax
    if amax is None or any(isinstance(known, SharedAmaxes) for known in state.attached):
        return
    steps = torch.tensor([amax.steps], device=amax.data.device)
    dist.broadcast(amax.data, 0)
    dist.broadcast(steps, 0)
    amax.steps = int(steps.item())
    state.attached.append(SharedAmaxes(amax, state.clock))


class ReplicatedProcesses(Strategy):
    """The strategy of several processes that each hold the whole model. The process group runs already.

    options: keyword arguments of ``torch.nn.parallel.DistributedDataParallel``. register: called with each wrapped
        model, to give it a communication hook.
    """

    name = "ddp"

    def __init__(
        self,
        device: torch.device,
        process_index: int,
        num_processes: int,
        options: Mapping[str, Any] | None = None,
        register: Callable[[DistributedDataParallel], None] | None = None,
    ) -> None:
        super().__init__(device)
        self.process_index, self.num_processes = process_index, num_processes
        self._options, self._register = dict(options or {}), register
        self._wrapped: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()

    def wrap(self, model: nn.Module, optimizers: Sequence[Optimizer] = ()) -> nn.Module:
        """``model`` in DistributedDataParallel: Parameters and buffers become rank 0's on all ranks.

        A model without a trainable parameter comes back as it is, for there is nothing to average, and so does one that
        is wrapped already.
        """
        wrapped = model
        if not isinstance(model, DistributedDataParallel) and any(p.requires_grad for p in model.parameters()):
            device_ids = [self.device.index] if self.device.type == "cuda" else None
            wrapped = DistributedDataParallel(model, device_ids=device_ids, **self._options)
            if self._register is not None:
                self._register(wrapped)
        if isinstance(wrapped, DistributedDataParallel):
            self._wrapped.add(wrapped)
        for state in find_states(model):
            share_amaxes(state)
        return wrapped

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The ``module`` of a wrapped model."""
        return model.module if isinstance(model, DistributedDataParallel) else model

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Inside, gradients add up on this rank; the first backward outside averages them. Takes either model."""
        for wrapped in self._wrapped:
            if model is wrapped or model is wrapped.module:
                return wrapped.no_sync()
        return nullcontext()

    def backward(self, loss: Tensor, *, is_last: bool, **options: Any) -> None:
        """Backward of one micro-batch. Raises ProcessesDisagreeError if the others do not come to average gradients."""
        with explained("backward", self._step, self._done):
            super().backward(loss, is_last=is_last, **options)

    def _step(self) -> int:
        return max((state.clock.ticks for model in self._wrapped for state in find_states(model.module)), default=0)

    def _done(self) -> dict[str, list[str]]:
        """Parameters that have a gradient by now."""
        named = [named for model in self._wrapped for named in model.module.named_parameters()]
        return {"parameters with a gradient": [name for name, p in named if p.grad is not None]}

    def agree(self, flag: Tensor) -> None:
        """A MAX over ranks, in place."""
        dist.all_reduce(flag, dist.ReduceOp.MAX)
