"""Quantise and add up: FP8 codes, and the FP32 sum of each column, from the same read.

    sums[c] = sum over r of x[r, c]

The gradient of a linear layer's bias is the sum of dy over tokens. dy is read for its cast anyway; a pass of its own
reads all of it once more. Here each tile of the cast stores the sums of its columns, FP32, into ``[tiles down, C]``,
1/64 of dy's elements (1/128 with blocks), and a second kernel adds those.

The order depends on the shape and on the tile alone: inside a tile at most 64 (with blocks 128) additions in a row;
then each of 32 places adds every 32nd tile from the first to the last; then the places are added. No float atomics,
so a sum has the same bits at each call. They are not those of PyTorch's sum, nor of the transposed tensor's, whose
additions run in another order; all are within ``additions in a row * 2**-24 * sum |x|`` of float64.

Source: TransformerEngine fuses dbias with its casts in the same way (``cast_transpose_dbias``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from acceler8.formats import FORMATS, Format
from acceler8.kernels import _triton
from acceler8.kernels._library import library, may_go_direct
from acceler8.kernels._quantize_launch import quantize_triton
from acceler8.kernels.concatenated import check_concatenated, concatenated_triton
from acceler8.kernels.operand import Quantized
from acceler8.kernels.quantize import cast_fake, cast_ref, check_cast
from acceler8.scaling import GRANULARITIES, TENSORWISE, Granularity


def column_sums_ref(x: Tensor) -> Tensor:
    """Reference: sums [C] of the columns of ``x`` [R, C] in FP32 (FP64 for an FP64 ``x``), plain PyTorch."""
    return x.sum(0, dtype=torch.promote_types(x.dtype, torch.float32))


def _cast(
    x: Tensor, rows: str, cols: str, granularity: str, pow2: bool, margin: int, statistics: bool,
    amax: Tensor | None = None, staging: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    """``[codes, scale_inv]`` of rows, of columns, statistics, as asked, and sums."""
    if _triton.runs_on(x) and x.numel() and not statistics:  # statistics come from the reference, as in ``quantize``
        return quantize_triton(x, rows, cols, granularity, pow2, margin, amax, staging, column_sums=True)
    out = cast_ref(
        x, FORMATS.get(rows), FORMATS.get(cols), GRANULARITIES[granularity], pow2=pow2, margin=margin, amax=amax,
        staging=staging, statistics=statistics,
    )  # fmt: skip
    return [*out, column_sums_ref(x)]


def _cast_fake(
    x: Tensor, rows: str, cols: str, granularity: str, pow2: bool, margin: int, statistics: bool
) -> list[Tensor]:
    out = cast_fake(x, rows, cols, granularity, pow2, margin, statistics)
    return [*out, x.new_empty(x.shape[1], dtype=torch.float32)]


def _concatenated(
    weights: list[Tensor], rows: str, cols: str, granularity: str, pow2: bool, margin: int,
    amax: Tensor | None = None, staging: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    if _triton.runs_on(weights[0]) and all(w.numel() for w in weights):
        return concatenated_triton(weights, rows, cols, granularity, pow2, margin, amax, staging, row_sums=True)
    out = cast_ref(
        torch.cat(weights), FORMATS.get(rows), FORMATS.get(cols), GRANULARITIES[granularity], pow2=pow2, margin=margin,
        amax=amax, staging=staging,
    )  # fmt: skip
    return [*out, torch.cat([column_sums_ref(w.t()) for w in weights])]


def _concatenated_fake(
    weights: list[Tensor], rows: str, cols: str, granularity: str, pow2: bool, margin: int
) -> list[Tensor]:
    whole = torch.cat(weights)
    out = cast_fake(whole, rows, cols, granularity, pow2, margin, False)
    return [*out, whole.new_empty(whole.shape[0], dtype=torch.float32)]


# Delayed scaling maxes into ``staging`` and does not declare it: see ``quantize.py``.


def _cast_delayed(
    x: Tensor, amax: Tensor, staging: Tensor, rows: str, cols: str, pow2: bool, margin: int, statistics: bool
) -> list[Tensor]:
    return _cast(x, rows, cols, TENSORWISE.name, pow2, margin, statistics, amax, staging)


def _cast_delayed_fake(
    x: Tensor, amax: Tensor, staging: Tensor, rows: str, cols: str, pow2: bool, margin: int, statistics: bool
) -> list[Tensor]:
    return _cast_fake(x, rows, cols, TENSORWISE.name, pow2, margin, statistics)


def _concatenated_delayed(
    weights: list[Tensor], amax: Tensor, staging: Tensor, rows: str, cols: str, pow2: bool, margin: int
) -> list[Tensor]:
    return _concatenated(weights, rows, cols, TENSORWISE.name, pow2, margin, amax, staging)


def _concatenated_delayed_fake(
    weights: list[Tensor], amax: Tensor, staging: Tensor, rows: str, cols: str, pow2: bool, margin: int
) -> list[Tensor]:
    return _concatenated_fake(weights, rows, cols, TENSORWISE.name, pow2, margin)


_HOW = "str rows, str cols, str granularity, bool pow2, int margin"
_HOW_DELAYED = "Tensor amax, Tensor staging, str rows, str cols, bool pow2, int margin"
for _name, _arguments, _run, _fake in (
    ("quantize_and_sum", f"Tensor x, {_HOW}, bool statistics", _cast, _cast_fake),
    ("quantize_and_sum_delayed", f"Tensor x, {_HOW_DELAYED}, bool statistics", _cast_delayed, _cast_delayed_fake),
    ("quantize_concatenated_and_sum", f"Tensor[] weights, {_HOW}", _concatenated, _concatenated_fake),
    (
        "quantize_concatenated_and_sum_delayed",
        f"Tensor[] weights, {_HOW_DELAYED}",
        _concatenated_delayed,
        _concatenated_delayed_fake,
    ),
):
    library.define(f"{_name}({_arguments}) -> Tensor[]")
    library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"acceler8::{_name}", _fake, lib=library)


def quantize_and_sum(
    x: Tensor,
    rows: Format | None,
    cols: Format | None,
    granularity: Granularity,
    *,
    pow2: bool = False,
    margin: int = 0,
    amax: Tensor | None = None,
    staging: Tensor | None = None,
    statistics: bool = False,
) -> tuple[Quantized | None, Quantized | None, Tensor | None, Tensor]:
    """``quantize(x, rows, cols, granularity, ...)``, and the sum of each column of ``x``.

    Shape: as ``quantize``, bit for bit, and sums [C] FP32 of ``x`` [R, C]; zeros where R is 0.
    Numerics: sums of ``x`` itself, not of its codes, in FP32: within ``(R / 2048 + 161) * 2**-24 * sum |x|`` of float64
        from the kernels, ``R * 2**-24 * sum |x|`` from the reference. NaN and inf reach the sum of their column.
        Deterministic.
    Row scales of ``rows`` alone have no cast of one pass with sums: an amax is found first.
    Raises: ShapeError, DtypeError as ``quantize``.
    """
    check_cast(x, rows, cols, granularity, amax, staging)
    how = "" if rows is None else rows.name, "" if cols is None else cols.name
    out: list[Tensor]
    if not statistics and may_go_direct(x) and _triton.runs_on(x) and x.numel():
        out = quantize_triton(x, *how, granularity.name, pow2, margin, amax, staging, column_sums=True)
    elif amax is not None and staging is not None:
        out = torch.ops.acceler8.quantize_and_sum_delayed.default(x, amax, staging, *how, pow2, margin, statistics)
    else:
        out = torch.ops.acceler8.quantize_and_sum.default(x, *how, granularity.name, pow2, margin, statistics)
    as_rows, as_cols = _operands(out, rows, cols, granularity)
    return as_rows, as_cols, out[-2] if statistics else None, out[-1]


def quantize_concatenated_and_sum(
    weights: Sequence[Tensor],
    rows: Format | None,
    cols: Format | None,
    granularity: Granularity,
    *,
    pow2: bool = False,
    margin: int = 0,
    amax: Tensor | None = None,
    staging: Tensor | None = None,
) -> tuple[Quantized | None, Quantized | None, Tensor]:
    """``quantize_concatenated(weights, ...)``, and the sum of each row: of transposed gradients, those over tokens.

    Shape: as ``quantize_concatenated``, bit for bit, and sums [N] FP32 of weights [N_i, K].
    Numerics: as ``quantize_and_sum`` of the transposed weights, in another order inside of a tile. Deterministic.
    Raises: ShapeError, DtypeError as ``quantize_concatenated``.
    """
    check_concatenated(weights, rows, cols, granularity, amax, staging)
    how = "" if rows is None else rows.name, "" if cols is None else cols.name
    out: list[Tensor]
    if _triton.runs_on(weights[0]) and all(may_go_direct(w) and w.numel() for w in weights):
        out = concatenated_triton(weights, *how, granularity.name, pow2, margin, amax, staging, row_sums=True)
    elif amax is not None and staging is not None:
        run = torch.ops.acceler8.quantize_concatenated_and_sum_delayed.default
        out = run(list(weights), amax, staging, *how, pow2, margin)
    else:
        run = torch.ops.acceler8.quantize_concatenated_and_sum.default
        out = run(list(weights), *how, granularity.name, pow2, margin)
    return *_operands(out, rows, cols, granularity), out[-1]


def _operands(
    out: list[Tensor], rows: Format | None, cols: Format | None, granularity: Granularity
) -> tuple[Quantized | None, Quantized | None]:
    as_rows = Quantized(out[0], out[1], granularity) if rows is not None else None
    behind = 0 if rows is None else 2  # not bool(rows): torch 2.11's Dynamo cannot trace it
    as_cols = Quantized(out[behind], out[behind + 1], granularity) if cols is not None else None
    return as_rows, as_cols


__all__ = ["column_sums_ref", "quantize_and_sum", "quantize_concatenated_and_sum"]
