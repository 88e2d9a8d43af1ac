"""What an optimizer's state takes: a line for each group and kind of state, before or after the first step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from acceler8.formats import BLOCK, block_count
from acceler8.optim.formats import StateFormats
from acceler8.optim.state import Moment, local

if TYPE_CHECKING:
    from acceler8.optim.base import StateFormatsOptimizer

_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
_MASTER_BYTES = {"none": 0, "stochastic": 0, "fp32": 4, "bf16_remainder": 2, "fp16": 2}


@dataclass(frozen=True)
class SummaryRow:
    """Parameters of one group that are stored alike. Bytes are this rank's."""

    group: int
    formats: StateFormats
    names: tuple[str, ...]
    """How each moment is stored, in words."""
    tensors: int
    parameters: int
    param_bytes: int
    moment_bytes: int
    master_bytes: int

    @property
    def moment_bytes_per_parameter(self) -> float:
        """Bytes of the moments with their scales, over the parameters."""
        return self.moment_bytes / max(self.parameters, 1)

    @property
    def master_bytes_per_parameter(self) -> float:
        """Bytes of master weights beside the parameter, over the parameters."""
        return self.master_bytes / max(self.parameters, 1)


@dataclass(frozen=True)
class StateSummary:
    """Rows, and a table of them as text."""

    moments: tuple[str, ...]
    rows: tuple[SummaryRow, ...]
    has_names: bool

    @property
    def state_bytes(self) -> int:
        """Bytes of all moments and master weights of this rank, without the parameters."""
        return sum(row.moment_bytes + row.master_bytes for row in self.rows)

    def __str__(self) -> str:
        head = ("group", "tensors", "parameters", *self.moments, "master", "bytes a parameter", "MiB", "")
        table = [head]
        for row in self.rows:
            each = f"{row.moment_bytes_per_parameter:.2f} + {row.master_bytes_per_parameter:.2f}"
            size = f"{(row.moment_bytes + row.master_bytes) / 2**20:.1f}"
            table.append(
                (
                    str(row.group), str(row.tensors), str(row.parameters), *row.names, row.formats.master, each, size,
                    row.formats.reason,
                )
            )  # fmt: skip
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in table]
        lines.append(f"moments + master weights beside the parameters: {self.state_bytes / 2**20:.1f} MiB")
        if not self.has_names and any(row.formats.has_blocks for row in self.rows):
            lines.append(
                "Names are not known, so embeddings and output heads are stored like other matrices; build the"
                " optimizer from acceler8.optim.parameter_groups(model) or model.named_parameters() to keep them FP32."
            )
        return "\n".join(line.rstrip() for line in lines)


def summarise(optimizer: StateFormatsOptimizer) -> StateSummary:
    """Rows in the order of groups."""
    found: dict[tuple[int, StateFormats], list[Tensor]] = {}
    for index, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            found.setdefault((index, optimizer.formats_of(p)), []).append(p)
    rows = tuple(_row(optimizer.MOMENTS, index, formats, ps) for (index, formats), ps in found.items())
    has_names = all("param_names" in g or g.get("quantize") == "none" for g in optimizer.param_groups)
    return StateSummary(optimizer.moment_names(), rows, has_names or len(optimizer.param_groups) > 1)


def _row(moments: tuple[Moment, ...], group: int, formats: StateFormats, ps: list[Tensor]) -> SummaryRow:
    tensors = [local(p) for p in ps]
    elements = sum(t.numel() for t in tensors)
    scales = 4 * sum(block_count(t.numel()) for t in tensors)
    codes = [moment.code(fmt) for moment, fmt in zip(moments, formats.moments, strict=True)]
    moment_bytes = sum(
        elements * _BYTES[fmt] + (scales if code else 0) for fmt, code in zip(formats.moments, codes, strict=True)
    )
    names = tuple(
        f"{code.name.split(',')[0]} / {BLOCK}" if code else fmt.upper()
        for code, fmt in zip(codes, formats.moments, strict=True)
    )
    master = elements * _MASTER_BYTES[formats.master] + (scales if formats.master == "fp16" else 0)
    size = sum(t.numel() * t.element_size() for t in tensors)
    return SummaryRow(group, formats, names, len(ps), elements, size, moment_bytes, master)
