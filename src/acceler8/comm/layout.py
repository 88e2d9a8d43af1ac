"""Where the blocks of a flat gradient buffer lie, and which process sums which of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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
    blocks of no elements, and plain places that are not real.
    """

    shape: MessageShape
    processes: int
    starts: Tensor
    """int64 ``[processes * shape.blocks]``: first element of each block."""
    counts: Tensor
    """int32, the same shape: elements of each block, 0 to 128."""
    plain: Tensor
    """int64 ``[processes, shape.plain]``: places of elements that travel in FP32."""
    is_plain: Tensor
    """bool, the same shape: whether there is such an element."""

    @classmethod
    def balanced(cls, spans: Sequence[Span], processes: int, device: torch.device) -> Layout:
        """For an all-reduce: every process sums an equal share, whatever parameters that cuts."""
        starts, counts, plain = _blocks_of(spans)
        per, per_plain = -(-len(starts) // processes), -(-len(plain) // processes)
        return cls._from(
            [(starts[i * per : (i + 1) * per], counts[i * per : (i + 1) * per]) for i in range(processes)],
            [plain[i * per_plain : (i + 1) * per_plain] for i in range(processes)],
            device,
        )

    @classmethod
    def chunked(cls, spans: Sequence[Span], chunk: int, processes: int, device: torch.device) -> Layout:
        """For a reduce-scatter: the buffer is one chunk of ``chunk`` elements a process, with ``spans`` in each."""
        starts, counts, plain = _blocks_of(spans)
        return cls._from(
            [([s + i * chunk for s in starts], counts) for i in range(processes)],
            [[place + i * chunk for place in plain] for i in range(processes)],
            device,
        )

    @classmethod
    def _from(cls, blocks: list[tuple[list[int], list[int]]], plain: list[list[int]], device: torch.device) -> Layout:
        most, most_plain = max(len(s) for s, _ in blocks), max(map(len, plain))
        filled = [(s + [0] * (most - len(s)), c + [0] * (most - len(c))) for s, c in blocks]
        places = [p + [0] * (most_plain - len(p)) for p in plain]
        return cls(
            shape=MessageShape(most, most_plain),
            processes=len(blocks),
            starts=torch.tensor([s for row, _ in filled for s in row], dtype=torch.int64, device=device),
            counts=torch.tensor([c for _, row in filled for c in row], dtype=torch.int32, device=device),
            plain=torch.tensor(places, dtype=torch.int64, device=device).view(len(blocks), most_plain),
            is_plain=torch.tensor(
                [[i < len(p) for i in range(most_plain)] for p in plain], dtype=torch.bool, device=device
            ).view(len(blocks), most_plain),
        )

    def bytes_sent(self) -> int:
        """By one process in an all-to-all of messages, or in an all-gather of one each."""
        return self.shape.size * (self.processes - 1)


def _blocks_of(spans: Sequence[Span]) -> tuple[list[int], list[int], list[int]]:
    starts: list[int] = []
    counts: list[int] = []
    plain: list[int] = []
    for span in spans:
        if not span.is_coded:
            plain += range(span.start, span.start + span.length)
            continue
        for start in range(span.start, span.start + span.length, BLOCK):
            starts.append(start)
            counts.append(min(BLOCK, span.start + span.length - start))
    return starts, counts, plain
