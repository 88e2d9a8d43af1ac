"""The loader that ``prepare`` returns: batches on the device, and word of the last one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader

from acceler8.accelerator.gradients import GradientState


class AcceleratedLoader:
    """Wraps a DataLoader; reads one batch ahead, so that the last batch is known while it is used."""

    def __init__(self, loader: DataLoader[Any], device: torch.device, gradients: GradientState) -> None:
        self.loader, self.device, self.gradients = loader, device, gradients

    def __getattr__(self, name: str) -> Any:
        if "loader" not in self.__dict__:  # while being copied or unpickled
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        self.gradients.end_of_dataloader = False
        batches = iter(self.loader)
        try:
            batch = next(batches)
        except StopIteration:
            return
        for following in batches:
            yield self._to_device(batch)
            batch = following
        self.gradients.end_of_dataloader = True
        yield self._to_device(batch)

    def _to_device(self, batch: Any) -> Any:
        if hasattr(batch, "to") and not isinstance(batch, Tensor):  # transformers' BatchEncoding
            return batch.to(self.device)
        return tree_map_only(Tensor, lambda t: t.to(self.device, non_blocking=True), batch)
