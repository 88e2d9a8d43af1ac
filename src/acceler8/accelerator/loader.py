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
        self._resume_point: Any = None

    def __getattr__(self, name: str) -> Any:
        if "loader" not in self.__dict__:  # while being copied or unpickled
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.loader)
        with self.gradients.loader() as place:
            try:
                batch = next(batches)
            except StopIteration:
                return
            while True:
                self._remember()  # where to resume once this batch is used: before the next is read
                following = next(batches, self)
                place.is_last = following is self
                yield self._to_device(batch)
                if following is self:
                    return
                batch = following

    def _remember(self) -> None:
        if hasattr(self.loader, "state_dict"):
            self._resume_point = self.loader.state_dict()

    def state_dict(self) -> Any:
        """Where the loop stands: behind the batch that was given out last, not the one read ahead.

        Raises: AttributeError if the wrapped loader has no state (torchdata's StatefulDataLoader has).
        """
        state_of: Any = self.loader.state_dict  # type: ignore[attr-defined]
        return state_of() if self._resume_point is None else self._resume_point

    def load_state_dict(self, state: Any) -> None:
        """Resume the wrapped loader there."""
        self._resume_point = None
        self.loader.load_state_dict(state)  # type: ignore[attr-defined]

    def _to_device(self, batch: Any) -> Any:
        if hasattr(batch, "to") and not isinstance(batch, Tensor):  # transformers' BatchEncoding
            return batch.to(self.device)
        return tree_map_only(Tensor, lambda t: t.to(self.device, non_blocking=True), batch)
