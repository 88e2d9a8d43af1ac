"""Processes that do one thing together: what fails in one raises in all, so that none waits for the others for ever."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import distributed

from acceler8.errors import CheckpointError

_T = TypeVar("_T")


@dataclass(frozen=True)
class Together:
    """This process among ``count`` with one process group; numbers travel on ``device``."""

    index: int
    count: int
    device: torch.device

    def run(self, action: Callable[[], _T], target: Path | None = None) -> _T:
        """What ``action`` returns here, once it is through in every process.

        Raises: its own error; CheckpointError for an OSError (``target`` is what was written), and, with what it
            said, where another process failed.
        """
        error: Exception | None = None
        try:
            result = action()
        except OSError as failure:
            what = f"write {target}" if target else "read the checkpoint"
            error = CheckpointError(
                f"could not {what}: {failure}; what was there before is untouched; check space and permissions"
            )
            error.__cause__ = failure
        except Exception as failure:
            error = failure
        if self.count > 1:
            failed = torch.tensor([error is not None], dtype=torch.int32, device=self.device)
            distributed.all_reduce(failed, distributed.ReduceOp.MAX)
            if bool(failed.item()):
                told = self.gather(None if error is None else str(error))
                number, text = next((i, text) for i, text in enumerate(told) if text is not None)
                error = error or CheckpointError(f"process {number} could not do its part of the checkpoint: {text}")
        if error is not None:
            raise error
        return result

    def gather(self, value: _T) -> list[_T]:
        """What each process gives, plain values only, in the order of the processes."""
        if self.count == 1:
            return [value]
        found: list[Any] = [None] * self.count
        distributed.all_gather_object(found, value)
        return found

    def agree(self, choose: Callable[[], int]) -> int:
        """The number that process 0 chooses, in every process."""
        chosen = self.run(lambda: choose() if self.index == 0 else 0)
        if self.count == 1:
            return chosen
        number = torch.tensor([chosen], dtype=torch.int64, device=self.device)
        distributed.broadcast(number, 0)
        return int(number.item())
