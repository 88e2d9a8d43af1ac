"""Where the blocks of a flat gradient buffer lie, and which process sums which of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from acceler8.formats import BLOCK
from acceler8.kernels.gradient_blocks import MessageShape


@dataclass(frozen=True)
class Span:
    """A parameter's gradient inside a flat buffer."""

    start: int
    length: int
    is_coded: bool
    """False: travels in FP32, as gradients of norms and biases do."""


@dataclass(frozen=True)
class Layout:
    """Which elements of a buffer are in which process's message, block by block.

    A block has up to 128 elements of one parameter. Messages to all processes have one shape; what fills them up are
    blocks of no elements, and plain places of which none is real.
    """

    shape: MessageShape
    processes: int
    starts: Tensor
    """int64 ``[processes * shape.blocks]``: first element of each block."""
    counts: Tensor
    """int32, the same shape: elements of each block, 0 to 128."""
    plain: Tensor
    """int64 ``[processes, shape.plain]``: places of elements that travel in FP32; 0 where there is none."""
    is_plain: Tensor
    """bool, the same shape: whether there is such an element."""
    plain_places: Tensor
    """int64: ``plain`` where there is one, in order; with ``plain_numbers`` it spares a GPU the search for them."""
    plain_numbers: Tensor
    """int64: which of all ``processes * shape.plain`` those are."""

    @classmethod
    def balanced(cls, spans: Sequence[Span], processes: int, device: torch.device) -> Layout:
        """For an all-reduce: every process sums an equal share, whatever parameters that cuts."""
        starts, counts, plain = _blocks_of(spans)
        return cls._from(
            _rows(starts, processes), _rows(counts, processes), _rows(plain, processes),
            _rows(torch.ones_like(plain), processes) > 0, device,
        )  # fmt: skip

    @classmethod
    def chunked(cls, spans: Sequence[Span], chunk: int, processes: int, device: torch.device) -> Layout:
        """For a reduce-scatter: the buffer is one chunk of ``chunk`` elements a process, with ``spans`` in each."""
        starts, counts, plain = _blocks_of(spans)
        first = torch.arange(processes)[:, None] * chunk
        return cls._from(
            starts + first, counts.expand(processes, -1), plain + first,
            torch.ones(processes, plain.numel(), dtype=torch.bool), device,
        )  # fmt: skip

    @classmethod
    def _from(cls, starts: Tensor, counts: Tensor, plain: Tensor, is_plain: Tensor, device: torch.device) -> Layout:
        """From ``[processes, ...]`` each."""
        return cls(
            shape=MessageShape(starts.shape[1], plain.shape[1]),
            processes=starts.shape[0],
            starts=starts.reshape(-1).to(device),
            counts=counts.reshape(-1).to(device, torch.int32),
            plain=plain.to(device),
            is_plain=is_plain.to(device),
            plain_places=plain[is_plain].to(device),
            plain_numbers=is_plain.reshape(-1).nonzero().view(-1).to(device),
        )

    def bytes_sent(self) -> int:
        """By one process in an all-to-all of messages, or in an all-gather of one each."""
        return self.shape.size * (self.processes - 1)


def _rows(values: Tensor, processes: int) -> Tensor:
    """Equal shares, one behind another, filled up with zeros."""
    each = -(-values.numel() // processes)
    return F.pad(values, (0, each * processes - values.numel())).view(processes, each)


def _blocks_of(spans: Sequence[Span]) -> tuple[Tensor, Tensor, Tensor]:
    """``(starts, counts, plain)``: the blocks of all spans, and the places of what travels in FP32."""
    nothing = torch.zeros(0, dtype=torch.int64)
    starts, counts, plain = [nothing], [nothing], [nothing]
    for span in spans:
        end = span.start + span.length
        if not span.is_coded:
            plain.append(torch.arange(span.start, end))
            continue
        first = torch.arange(span.start, end, BLOCK)
        starts.append(first)
        counts.append((end - first).clamp_(max=BLOCK))
    return torch.cat(starts), torch.cat(counts), torch.cat(plain)
