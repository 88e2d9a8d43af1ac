"""All-reduce and reduce-scatter of gradients that travel as FP8: quantise once, exchange bytes, sum in FP32.

    all-reduce      all-to-all of messages, FP32 sum, quantise again, all-gather of messages
    reduce-scatter  all-to-all of messages, FP32 sum

Ordinary collectives carry bytes, so any process group does, NCCL or Gloo, and none of them adds FP8 numbers. A value is
rounded once or twice, whatever the number of processes; what every process decodes behind an all-gather are the same
bytes, so replicas stay equal bit for bit; and sums are made in the order of ranks, so runs repeat. NaN and infinity
come out as NaN in their places.

Over several machines the flat exchange would send most bytes through the slow network. ``Groups`` with an ``inner``
and an ``outer`` group sum inside each machine first, exchange the sums between machines, each process its share, and
gather inside again: one more rounding, and 1/inner of the bytes between machines.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from acceler8.comm.layout import Layout, Span
from acceler8.formats import BLOCK
from acceler8.kernels import gradient_blocks as blocks
from acceler8.kernels.gradient_blocks import MessageShape

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13


@dataclass(frozen=True)
class Groups:
    """Who exchanges with whom. ``outer`` None: all are in ``inner``."""

    inner: Any = None
    """The group that sums first: all processes (None), or those of one machine."""
    outer: Any = None
    """Those with this process's place in each machine."""

    @property
    def inner_size(self) -> int:
        """Processes that sum first."""
        return dist.get_world_size(self.inner)

    @property
    def size(self) -> int:
        """Processes whose gradients are summed."""
        return self.inner_size * (dist.get_world_size(self.outer) if self.outer is not None else 1)


class Exchange:
    """The collectives for buffers of one layout."""

    def __init__(self, layout: Layout, groups: Groups | None = None) -> None:
        self.layout, self.groups = layout, groups or Groups()
        device = layout.starts.device
        self._factors: dict[float, Tensor] = {}
        self._between: Exchange | None = None
        if self.groups.outer is not None:  # of the sums that this process makes: their blocks, then plain elements
            shape, machines = layout.shape, dist.get_world_size(self.groups.outer)
            spans = [Span(0, shape.blocks * BLOCK, True), Span(shape.blocks * BLOCK, shape.plain, False)]
            self._between = Exchange(Layout.balanced(spans, machines, device), Groups(self.groups.outer))
            self._starts = torch.arange(shape.blocks, device=device) * BLOCK
            self._counts = torch.full((shape.blocks,), BLOCK, dtype=torch.int32, device=device)

    def all_reduce(self, flat: Tensor, factor: float, residual: Tensor | None = None) -> None:
        """``flat`` becomes the sum of all processes' times ``factor``, the same bits on each."""
        shape = self.layout.shape
        received = self._send(flat, residual)
        message = self._combined(received, factor) if self._between is None else self._across(received, factor)
        gathered = message.new_empty(self.layout.processes, shape.size)
        _all_gather(gathered.view(-1), message, group=self.groups.inner)
        self._receive(gathered, flat)

    def reduce_scatter(self, flat: Tensor, out: Tensor, factor: float) -> None:
        """``out`` becomes this process's chunk of the sum times ``factor``; ``flat`` has a chunk for each process.

        The layout is a ``chunked`` one.
        """
        shape = self.layout.shape
        received = self._send(flat, None)
        starts, counts = self.layout.starts[: shape.blocks], self.layout.counts[: shape.blocks]
        blocks.combine_into(received, shape, self._factor(factor), starts, counts, out)
        if shape.plain:
            out.index_copy_(0, self.layout.plain[0], (shape.plain_of(received).sum(0) * factor).to(out.dtype))

    def bytes_sent(self) -> int:
        """By one process in an all-reduce: two exchanges of messages, and those between machines."""
        between = 0 if self._between is None else self._between.bytes_sent()
        return 2 * self.layout.bytes_sent() + between

    def _send(self, flat: Tensor, residual: Tensor | None) -> Tensor:
        """Messages of all for this process, ``[inner, size]``."""
        layout, shape = self.layout, self.layout.shape
        messages = torch.empty(layout.processes, shape.size, dtype=torch.uint8, device=flat.device)
        blocks.pack(flat, layout.starts, layout.counts, messages, shape, residual)
        _fill(shape, messages, flat, layout)
        received = torch.empty_like(messages)
        dist.all_to_all_single(received.view(-1), messages.view(-1), group=self.groups.inner)
        return received

    def _combined(self, received: Tensor, factor: float) -> Tensor:
        shape = self.layout.shape
        message = received.new_empty(shape.size)
        blocks.combine(received, shape, self._factor(factor), message)
        if shape.plain:
            shape.plain_of(message).copy_(shape.plain_of(received).sum(0) * factor)
        return message

    def _across(self, received: Tensor, factor: float) -> Tensor:
        """The message of this process's share of the sum over machines."""
        assert self._between is not None
        shape = self.layout.shape
        sums = torch.empty(shape.blocks * BLOCK + shape.plain, device=received.device)
        blocks.combine_into(received, shape, self._factor(1.0), self._starts, self._counts, sums)
        if shape.plain:
            sums[shape.blocks * BLOCK :] = shape.plain_of(received).sum(0)
        self._between.all_reduce(sums, factor)
        # what the machines agreed on is E4M3 codes times a scale, so casting it again gives these codes again
        message = received.new_empty(shape.size)
        blocks.pack(sums, self._starts, self._counts, message.view(1, -1), shape)
        if shape.plain:
            shape.plain_of(message).copy_(sums[shape.blocks * BLOCK :])
        return message

    def _receive(self, gathered: Tensor, flat: Tensor) -> None:
        layout, shape = self.layout, self.layout.shape
        blocks.unpack(gathered, shape, layout.starts, layout.counts, flat)
        if shape.plain:
            arrived = shape.plain_of(gathered).reshape(-1).index_select(0, layout.plain_numbers)
            flat.index_copy_(0, layout.plain_places, arrived.to(flat.dtype))

    def _factor(self, value: float) -> Tensor:
        if value not in self._factors:
            self._factors[value] = torch.tensor([value], device=self.layout.starts.device)
        return self._factors[value]


def _fill(shape: MessageShape, messages: Tensor, flat: Tensor, layout: Layout) -> None:
    """Plain elements, zeros where there are none."""
    if shape.plain:
        shape.plain_of(messages).copy_(torch.where(layout.is_plain, flat[layout.plain].float(), 0.0))
