"""One process, one device."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn


class SingleProcess:
    """The strategy without communication."""

    name = "single"
    process_index = 0
    num_processes = 1

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def place(self, model: nn.Module) -> None:
        """Move the model to the device."""
        model.to(self.device)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Nothing to put around it."""
        return model

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Nothing was put around it."""
        return model

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Nothing to hold back."""
        return nullcontext()

    def clip_grad_norm(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float) -> Tensor:
        """As ``torch.nn.utils.clip_grad_norm_``."""
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    def agree(self, flag: Tensor) -> None:
        """Nobody to ask."""
