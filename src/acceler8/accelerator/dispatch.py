"""Rank 0 reads, every rank gets its part: for streams that only one process should open."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from acceler8.accelerator.nested import batch_size_of, concatenate, map_tensors, tensors
from acceler8.accelerator.processes import Processes


class Part(NamedTuple):
    """What one round gives to this process, and how many samples all processes got before any was repeated."""

    batch: Any
    observed: int


class Reader:
    """Rounds of a loader that rank 0 iterates.

    split: a round is one batch of the loader; else it is as many as there are processes, one behind the other.
    A round that the processes do not divide is completed with the first samples of the epoch; ``beginning`` on rank 0.
    resume_from: the ``beginning`` of an epoch that was interrupted.
    """

    def __init__(self, processes: Processes, *, split: bool, drop_last: bool) -> None:
        self.processes, self.split, self.drop_last = processes, split, drop_last
        self.beginning: Any = None
        self.resume_from: Any = None

    def rounds(self, start: Callable[[], Iterator[Any]]) -> Iterator[Part]:
        """This process's part of each round. ``start`` begins to iterate the loader, and is called on rank 0 only.

        Raises: on every rank, if rank 0 cannot read; there what it met, elsewhere RuntimeError that names it.
        """
        count, index = self.processes.num_processes, self.processes.process_index
        source: Iterator[tuple[Any, int]] | None = self._read(start()) if index == 0 else None
        while True:
            message: Any = None
            failure: Exception | None = None
            if source is not None:
                try:
                    message = next(source, None)
                except Exception as error:  # the others wait for word
                    failure, message = error, error
            batch = self._send(message)
            if failure is not None:
                raise failure
            if batch is None:
                return
            size = batch_size_of(batch[0]) // count
            mine = slice(size * index, size * (index + 1))
            yield Part(map_tensors(lambda t, mine=mine: t[mine], batch[0]), batch[1])  # type: ignore[misc]

    def _read(self, batches: Iterator[Any]) -> Iterator[tuple[Any, int]]:
        """Rounds whose size the processes divide, and their size before that."""
        count = self.processes.num_processes
        self.beginning, self.resume_from = self.resume_from, None
        while read := list(islice(batches, 1 if self.split else count)):
            if self.drop_last and not self.split and len(read) < count:
                return
            whole = concatenate(read)
            if self.beginning is None:
                self.beginning = map_tensors(lambda t: t[:count].clone(), whole)
            observed = batch_size_of(whole)
            while (missing := -batch_size_of(whole) % count) > 0:
                filler = map_tensors(lambda t, missing=missing: t[:missing], self.beginning)  # type: ignore[misc]
                whole = concatenate([whole, filler])
            yield whole, observed

    def _send(self, message: tuple[Any, int] | Exception | None) -> tuple[Any, int] | None:
        """From rank 0 to all: the shapes as an object, then each tensor's bytes."""
        if self.processes.num_processes == 1:
            return message if not isinstance(message, Exception) else None
        device = self.processes.device
        outline: list[Any] = [None]
        if isinstance(message, Exception):
            outline = [f"{type(message).__name__}: {message}"]
        elif message is not None:
            outline = [(map_tensors(lambda t: t.to("meta"), message[0]), message[1])]
        dist.broadcast_object_list(outline, 0, device=device if device.type == "cuda" else None)
        if isinstance(outline[0], str) and self.processes.process_index != 0:
            raise RuntimeError(f"rank 0 could not read the next batch: {outline[0]}")
        if outline[0] is None or isinstance(outline[0], str):
            return None
        if message is None or isinstance(message, Exception):
            received = map_tensors(lambda t: torch.empty(t.shape, dtype=t.dtype, device=device), outline[0][0])
        else:
            received = map_tensors(lambda t: t.to(device).contiguous(), message[0])
        for tensor in tensors(received):
            if tensor.numel():
                dist.broadcast(as_bytes(tensor), 0)
        return received, outline[0][1]


def as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor's memory as uint8, which every process group carries whatever the dtype."""
    return tensor.reshape(-1).view(torch.uint8)
