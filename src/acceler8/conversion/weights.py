"""Which weights a training step changed, also where an engine holds them in parts.

A Parameter of DeepSpeed's ZeRO-3 is empty between uses; what it is made of are each process's part, and the FP32
masters. An optimizer that knows its masters (``master_of``) is asked for those: a BF16 Parameter that a small step
leaves as it is would say nothing. Every process calls this alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from acceler8.conversion.replicas import shard


class Weights:
    """The weights of a model before a step, to compare those behind it with."""

    def __init__(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        self._model = model
        self._master_of: Callable[[Tensor], Tensor] | None = getattr(optimizer, "master_of", None)
        self._value_of: Callable[[Tensor], Tensor] | None = getattr(optimizer, "value_of", None)
        self._before = {name: self._read(p).clone() for name, p in self._trained()}

    @property
    def rounds(self) -> bool:
        """True if a small step may leave a Parameter as it is: these are no masters."""
        return self._master_of is None

    def changed(self) -> set[str]:
        """Names of those that are not as they were, on any process that holds a part."""
        names = list(self._before)
        now = dict(self._trained())
        flags = [name not in now or not torch.equal(self._read(now[name]), self._before[name]) for name in names]
        if any(hasattr(p, "ds_tensor") for p in now.values()) and self._master_of is None:
            seen = torch.tensor(flags, dtype=torch.int32, device=next(iter(now.values())).device)
            torch.distributed.all_reduce(seen, torch.distributed.ReduceOp.MAX)
            flags = seen.bool().tolist()
        return {name for name, is_changed in zip(names, flags, strict=True) if is_changed}

    def stale(self) -> list[str]:
        """What is wrong with Parameters that are not their masters rounded, as sentences."""
        if self._master_of is None or self._value_of is None:
            return []
        bad = []
        for name, p in self._trained():
            value, master = self._value_of(p), self._master_of(p)
            if not torch.equal(value.nan_to_num(), master.to(value).nan_to_num()):
                bad.append(f"{name} is not its FP32 master rounded: the engine did not gather it behind the step")
        return bad

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self._model.named_parameters() if p.requires_grad]

    def _read(self, p: Any) -> Tensor:
        """What tells whether a Parameter moved."""
        if self._master_of is not None:
            return self._master_of(p).detach().cpu()
        part: Tensor = getattr(p, "ds_tensor", p)
        return shard(part)
