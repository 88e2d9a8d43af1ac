"""Launches the kernels of ``adam.py`` over all parameters of a device: two launches and one more for each further kind.

What the kernels must be told of 300 parameters (addresses, learning rates) goes to the device as one table, in one copy
from pinned memory that the host does not wait for, and only in steps that differ from the one before. Which program has
which chunk of which parameter stays there as long as the parameters do. Nothing is read back.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from acceler8.errors import GradientError
from acceler8.formats import BLOCK
from acceler8.kernels import _triton
from acceler8.kernels._adam_kernel import (
    BF16,
    COLUMNS,
    FP8,
    FP16,
    FP32,
    GROUP_COLUMNS,
    HEADER,
    MASTER_FP16,
    MASTER_FP32,
    NONE,
    NUMBERS,
    REMAINDER,
    STOCHASTIC,
    adam_kernel,
    adam_numbers_kernel,
)
from acceler8.kernels._launch import Launch, Plans, address, stream_of

if TYPE_CHECKING:
    from acceler8.kernels.adam import AdamKind, AdamNumbers, AdamRow


class Shape(NamedTuple):
    """How the kernel is spread: blocks of 128 and warps of a program, registers of a thread (None: as it wants)."""

    blocks: int
    warps: int
    registers: int | None = None


# 16 elements a thread: what a thread does once is a quarter of its instructions with 8. The path that exact divisions
# rarely take wants 99 to 124 registers; with 96, which spill 3 to 21 words (of some 1200 instructions), 20 warps run at
# once and not 16 (SASS for sm_90). ``bench_optimizer.py --sweep`` compares.
SHAPE = Shape(16, 4, 96)
_SPARE = 4
_FORMATS = {"fp32": FP32, "bf16": BF16, "fp16": FP16, "fp8": FP8}
_MASTERS = {
    "none": NONE, "stochastic": STOCHASTIC, "fp32": MASTER_FP32, "bf16_remainder": REMAINDER, "fp16": MASTER_FP16,
}  # fmt: skip
_NUMEL, _GROUP, _NUMBER = COLUMNS.index("numel"), COLUMNS.index("group"), COLUMNS.index("number")
_ELEMENTWISE = [COLUMNS.index(name) for name in ("param", "grad", "exp_avg", "exp_avg_sq", "master", "numel")]


@dataclass
class _Chunks:
    """The programs of one kind: which chunk of which row each has."""

    key: tuple[Any, ...]
    launches: list[tuple[Launch, Tensor]]


class AdamLaunches:
    """Steps parameters of one device. Keeps tables between steps; one for each optimizer."""

    def __init__(self, device: torch.device, shape: Shape = SHAPE) -> None:
        self.device, self._shape = device, shape
        self._index = device.index if device.type == "cuda" else -1
        self._told: list[Any] = []
        self._table: Tensor | None = None
        self._numbers = torch.empty(0, dtype=torch.int32, device=device)
        self._chunks: _Chunks | None = None
        self._spare: list[Tensor] = []  # pinned memory for captures, in which none can be got
        self._captured: list[Any] = []  # what replays of graphs read
        self._launches: Plans[Launch] = Plans()

    def step(
        self,
        rows: Sequence[AdamRow],
        groups: Sequence[AdamNumbers],
        grad_scale: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> None:
        """Update every row, as ``adam.adam_step`` says."""
        with torch.cuda.device(self.device) if self._index >= 0 else nullcontext():
            stream = stream_of(self._index)
            is_captured = self._index >= 0 and torch.cuda.is_current_stream_capturing()
            if is_captured and self._chunks is None:
                raise GradientError(
                    "an optimizer step was captured in a CUDA graph before it ran; allowed: after an eager step over"
                    " the same parameters, which makes state and tables; run one or more as warm-up, on a side stream"
                )
            told = self._tell(rows, groups, grad_scale, found_inf, is_captured)
            table, numbers = address(told), address(self._numbers)
            count = self._launches.get((len(rows),), partial(self._count_launch, len(rows)))
            count(stream, table, numbers)
            assert self._chunks is not None
            for launch, chunks in self._chunks.launches:
                launch(stream, table, numbers, address(chunks))
            if is_captured:
                self._captured.append((told, self._numbers, self._chunks))

    def _tell(
        self,
        rows: Sequence[AdamRow],
        groups: Sequence[AdamNumbers],
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
        is_captured: bool,
    ) -> Tensor:
        """The table of this step, on the device."""
        told: list[Any] = [0 if flag is None else flag.data_ptr() for flag in (found_inf, grad_scale)]
        for _, tensors, group, number in rows:
            told += [0 if t is None else t.data_ptr() for t in tensors]
            told += (tensors[0].numel(), group, number)
        of_groups = [numbers.columns(self.device) for numbers in groups]
        kinds = [row.kind for row in rows]
        told += (of_groups, kinds)
        if self._table is not None and told == self._told and not is_captured:
            self._keep_spare(self._table.numel())
            return self._table
        table = np.array(told[:-2], dtype=np.int64)
        by_row = table[HEADER:].reshape(len(rows), len(COLUMNS))
        self._assign(kinds, by_row, is_captured)
        numbers = np.array(of_groups, dtype=np.float64).reshape(-1, len(GROUP_COLUMNS))
        at = GROUP_COLUMNS.index("lr_address")
        as_bits = numbers.view(np.int64)
        as_bits[:, at] = [row[at] for row in of_groups]
        on_device = self._upload(np.concatenate([table, as_bits.reshape(-1)]), is_captured)
        if not is_captured:  # a captured table is filled when its graph is replayed, and never here
            self._told, self._table = told, on_device
        return on_device

    def _keep_spare(self, count: int) -> None:
        if self._index < 0:
            return
        self._spare = [spare for spare in self._spare if spare.numel() >= count]
        while len(self._spare) < _SPARE:
            self._spare.append(torch.empty(count, dtype=torch.int64, pin_memory=True))

    def _upload(self, table: np.ndarray[Any, Any], is_captured: bool) -> Tensor:
        host = torch.from_numpy(table)
        if self._index < 0:
            return host
        if not is_captured:
            self._keep_spare(len(table))
            return host.pin_memory().to(self.device, non_blocking=True)
        if not self._spare or self._spare[-1].numel() < len(table):
            raise GradientError(
                f"an optimizer step was captured in more than {_SPARE} CUDA graphs without an eager step between them;"
                " allowed: one behind a few captures, for memory that the host shares can't be got during one"
            )
        pinned = self._spare.pop()[: len(table)]
        pinned.copy_(host)
        self._captured.append(pinned)
        return torch.empty(len(table), dtype=torch.int64, device=self.device).copy_(pinned, non_blocking=True)

    def _assign(self, kinds: list[AdamKind], by_row: np.ndarray[Any, Any], is_captured: bool) -> None:
        """Give each chunk of each parameter to a program, unless they have theirs."""
        numels = by_row[:, _NUMEL]
        is_aligned = (np.bitwise_or.reduce(by_row[:, _ELEMENTWISE], axis=1) & 15) == 0
        key = (tuple(kinds), tuple(numels.tolist()), tuple(is_aligned.tolist()))
        if self._chunks is not None and self._chunks.key == key:
            return
        if is_captured:  # a copy from memory that is not pinned would wait, and kernels may have to be compiled
            raise GradientError(
                "an optimizer step over other parameters or gradients of another dtype than before was captured in a"
                " CUDA graph; allowed: those of the last eager step; run the step eagerly once more"
            )
        self._numbers = torch.empty(len(kinds) * NUMBERS, dtype=torch.int32, device=self.device)
        members: dict[tuple[AdamKind, bool], list[int]] = {}
        for index, (kind, aligned) in enumerate(zip(kinds, is_aligned.tolist(), strict=True)):
            members.setdefault((kind, aligned), []).append(index)
        launches = []
        for (kind, aligned), indices in members.items():
            counts = -(-numels[indices] // (self._shape.blocks * BLOCK))
            programs = int(counts.sum())
            if not programs:
                continue
            entries = np.empty((programs, 2), np.int32)
            entries[:, 0] = np.repeat(indices, counts)
            entries[:, 1] = np.arange(programs) - np.repeat(np.cumsum(counts) - counts, counts)
            made = self._launches.get((kind, aligned, programs), partial(self._launch, kind, aligned, programs))
            launches.append((made, torch.from_numpy(entries.reshape(-1)).to(self.device)))
        self._chunks = _Chunks(key, launches)

    def _count_launch(self, rows: int) -> Launch:
        return Launch(adam_numbers_kernel, rows, (torch.int64, torch.int32), (rows,), 1)

    def _launch(self, kind: AdamKind, is_aligned: bool, programs: int) -> Launch:
        return Launch(
            adam_kernel,
            programs,
            (torch.int64, torch.int32, torch.int32),
            (
                _triton.type_of(kind.param), _gradient_type(kind.grad), _FORMATS[kind.exp_avg],
                _FORMATS[kind.exp_avg_sq], _MASTERS[kind.master], kind.decoupled, is_aligned,
                _triton.has_fp8_conversion(self.device), self._shape.blocks, BLOCK,
            ),
            self._shape.warps,
            self._shape.registers,
        )  # fmt: skip


def _gradient_type(dtype: torch.dtype) -> Any:
    """Triton's name of what a gradient is stored as: codes are bytes."""
    return _triton.tl.uint8 if dtype is torch.float8_e4m3fn else _triton.type_of(dtype)
