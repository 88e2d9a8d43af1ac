"""What acceler8 asks of a strategy."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor, nn


class Strategy(Protocol):
    """Places a model on this process's device and keeps processes in step."""

    name: str
    device: torch.device
    process_index: int
    num_processes: int

    def place(self, model: nn.Module) -> None:
        """Bring the model to this process's device, before it is converted. Its Parameters stay the same objects."""
        ...

    def wrap(self, model: nn.Module) -> nn.Module:
        """Put around a converted model what keeps replicas or shards in step; returns what the script then calls."""
        ...

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The model behind what ``wrap`` put around it; a model that was not wrapped, as it is."""
        ...

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Inside, backward does not exchange gradients."""
        ...

    def clip_grad_norm(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float) -> Tensor:
        """Clip the global gradient norm; returns the norm before clipping."""
        ...

    def agree(self, flag: Tensor) -> None:
        """Make ``flag`` (one number) in place the largest of all processes: what one met, all act on."""
        ...
