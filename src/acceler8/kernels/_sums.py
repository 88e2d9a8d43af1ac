"""Sums over many programs in a fixed order: each stores its own, and a second kernel adds them. No float atomics."""

from __future__ import annotations

from typing import NamedTuple

import torch

from acceler8.kernels._launch import Launch
from acceler8.kernels._triton import jit, tl

# Partial sums that a program holds side by side, columns of a program
TALL, _COLS, _WARPS = 32, 64, 4


class Sums(NamedTuple):
    """Sums that a cast gives beside its codes, over ``dim`` of what it reads; ``width`` numbers."""

    dim: int
    width: int


class Total(NamedTuple):
    """The addition of partial sums: what they lie in, and the launch, as ``sum_partials_launch``."""

    partial: tuple[int, int]
    launch: Launch


@jit
def sum_partials_kernel(  # type: ignore[no-untyped-def]
    partial_ptr, first_ptr, second_ptr, count, col_count, PARTS: tl.constexpr, TALL: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """``partial`` [count, PARTS, D] summed over its programs, in an order that depends on the shape alone."""
    blocks = tl.cdiv(col_count, COLS)
    part = tl.program_id(0) // blocks
    cols = (tl.program_id(0) % blocks) * COLS + tl.arange(0, COLS)
    total = tl.zeros([TALL, COLS], tl.float32)
    for start in range(0, count, TALL):
        rows = start + tl.arange(0, TALL)
        at = partial_ptr + (rows[:, None] * PARTS + part) * col_count + cols[None, :]
        total += tl.load(at, mask=(rows < count)[:, None] & (cols < col_count)[None, :], other=0.0)
    total = tl.sum(total, 0)
    if part == 0:
        tl.store(first_ptr + cols, total, mask=cols < col_count)
    else:
        tl.store(second_ptr + cols, total, mask=cols < col_count)


def sum_partials_launch(count: int, parts: int, cols: int) -> Launch:
    """Takes ``partial`` [count, parts, cols] and two sums [cols] FP32, the same one twice where ``parts`` is 1."""
    return Launch(
        sum_partials_kernel,
        parts * -(-cols // _COLS),
        (torch.float32, torch.float32, torch.float32),
        (count, cols, parts, TALL, _COLS),
        _WARPS,
    )


def total_of(sums: Sums | None, count: int) -> Total | None:
    """Adds ``count`` rows of partial sums; None for no sums."""
    return None if sums is None else Total((count, sums.width), sum_partials_launch(count, 1, sums.width))
