"""Launches the kernels of ``_quantize_kernel.py``: which of them, on what grid, into what memory."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from acceler8.formats import E5M2, FORMATS, Format
from acceler8.kernels import _triton
from acceler8.kernels._launch import Launch, Plans, address, alignment, stream_of, zeros
from acceler8.kernels._quantize_kernel import quantize_rows_kernel, quantize_tiles_kernel
from acceler8.kernels.amax import amax_launch
from acceler8.scaling import GRANULARITIES, ROWWISE, Granularity

# Local blocks must not straddle tiles; elsewhere small tiles hide the latency of transposing better. Multiples of every
# fill. Both orientations of 16384 x 4096 in BF16 (H200, 2026-11-30): rowwise 89 us after its amax (tiles of 128: 94,
# with 8 warps 120); 1x128 122 us (8 warps 184, 16 warps 231).
_BLOCK_TILE, _TILE, _WARPS = 128, 64, 4
# Rows that a program holds whole: 32 elements a thread, 4096 in a program if the row is not longer
WIDEST_ROW, _ELEMENTS, _PER_WARP = 16384, 4096, 1024


class _Plan(NamedTuple):
    """What one kind of cast allocates and launches."""

    outputs: list[tuple[tuple[int, ...], torch.dtype]]
    device: torch.device
    find_amax: Launch | None
    amax_count: int
    quantize: Launch
    is_one_pass: bool  # the kernel takes x and its outputs alone


_plans: Plans[_Plan] = Plans()


def quantize_triton(
    x: Tensor,
    rows: str,
    cols: str,
    granularity: str,
    pow2: bool,
    margin: int,
    amax: Tensor | None = None,
    staging: Tensor | None = None,
    column_amax: Tensor | None = None,
) -> list[Tensor]:
    """Launch the kernels: ``[codes, scale_inv]`` of ``rows``, then of ``cols``, as asked.

    ``x`` [R, C] is not empty and lies on a device that runs Triton; any strides, more than 2**31 elements
    too. At most 2**31 - 1 tiles. Arguments as in ``quantize``, formats and granularity by name ("" where an orientation
    is not wanted). ``column_amax`` as there, with row scales and without ``rows``. Deterministic.
    """
    device = x.get_device()
    if device >= 0 and device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return quantize_triton(x, rows, cols, granularity, pow2, margin, amax, staging, column_amax)
    delayed = None if amax is None or staging is None else (alignment(amax), alignment(staging))
    columns = None if column_amax is None else alignment(column_amax)
    key = (x.shape, x.stride(), x.dtype, device, alignment(x), rows, cols, granularity, pow2, margin, delayed, columns)
    plan = _plans.get(
        key,
        lambda: _make_plan(
            x, FORMATS.get(rows), FORMATS.get(cols), GRANULARITIES[granularity], pow2, margin, amax, staging,
            column_amax,
        ),
    )  # fmt: skip
    out = [torch.empty(shape, dtype=dtype, device=plan.device) for shape, dtype in plan.outputs]
    stream, at_x = stream_of(device), address(x)
    at_out = [address(t) for t in out]
    if plan.is_one_pass:
        plan.quantize(stream, at_x, *at_out)
        return out
    found = kept = at_x  # an address that is not asked for is not read
    known = at_x if amax is None else address(amax.view(torch.int32))
    staged = at_x if staging is None else address(staging.view(torch.int32))
    if column_amax is not None:
        found = address(column_amax)
    elif plan.find_amax is not None:
        found, kept = zeros(plan.amax_count, x, device, stream)
        plan.find_amax(stream, at_x, known, found)
    if not rows:
        at_out = [at_x, at_x, *at_out]
    elif not cols:
        at_out += [at_x, at_x]
    plan.quantize(stream, at_x, found, known, staged, *at_out)
    del kept
    return out


def _make_plan(
    x: Tensor,
    rows: Format | None,
    cols: Format | None,
    granularity: Granularity,
    pow2: bool,
    margin: int,
    amax: Tensor | None,
    staging: Tensor | None,
    column_amax: Tensor | None,
) -> _Plan:
    row_count, col_count = x.shape
    multiple = granularity.contraction_multiple
    row_width, col_width = col_count + -col_count % multiple, row_count + -row_count % multiple
    outputs: list[tuple[tuple[int, ...], torch.dtype]] = []
    for fmt, shape, width in ((rows, (row_count, col_count), row_width), (cols, (col_count, row_count), col_width)):
        if fmt is not None:
            outputs += [((shape[0], width), fmt.torch_dtype), (granularity.scale_shape(*shape), torch.float32)]
    if granularity is ROWWISE and rows is not None and cols is None and x.stride(1) == 1 and row_width <= WIDEST_ROW:
        return _Plan(outputs, x.device, None, 0, rows_launch(x, rows, row_width, pow2, margin), True)
    quantize = tiles_launch(
        x, rows, cols, granularity, (row_width, col_width), pow2, margin, amax, staging,
        cols_at=row_count if granularity is ROWWISE and rows is not None else 0, found=column_amax,
    )  # fmt: skip
    if granularity.is_blockwise or column_amax is not None:
        return _Plan(outputs, x.device, None, 0, quantize, False)
    if granularity is ROWWISE:
        count = row_count * (rows is not None) + col_count * (cols is not None)
        find_amax = amax_launch(x, rows=rows is not None, cols=cols is not None)
        return _Plan(outputs, x.device, find_amax, count, quantize, False)
    return _Plan(outputs, x.device, amax_launch(x, tensor=True, known=as_bits(amax)), 1, quantize, False)


def tiles_launch(
    x: Tensor,
    rows: Format | None,
    cols: Format | None,
    granularity: Granularity,
    widths: tuple[int, int],
    pow2: bool,
    margin: int,
    amax: Tensor | None,
    staging: Tensor | None,
    *,
    cols_at: int,
    row_offset: int = 0,
    col_stop: int | None = None,
    found: Tensor | None = None,
) -> Launch:
    """The kernel that casts tensors like ``x``: called with ``x``, amaxes found (of columns from ``cols_at`` on), known
    amax, staging, codes and scales of rows, codes and scales of columns.

    ``widths`` are those of the codes of rows and of columns. Where ``x`` is rows ``row_offset`` on of a matrix, its
    codes go to their places in that matrix's, those of columns up to ``col_stop``.
    """
    row_count, col_count = x.shape
    fmt, cols_fmt = rows or cols, cols or rows
    assert fmt is not None
    assert cols_fmt is not None
    stop = widths[1] if col_stop is None else col_stop
    tile = _BLOCK_TILE if granularity.is_blockwise else _TILE
    bits = [torch.int32 if t is None else t for t in (found, as_bits(amax), as_bits(staging))]
    return Launch(
        quantize_tiles_kernel,
        _triton.tiles(max(row_count, stop - row_offset), col_count, tile),
        (
            x, *bits, torch.uint8, torch.float32, torch.uint8, torch.float32,
        ),
        (
            row_count, col_count, *x.stride(), row_offset, cols_at, *widths, stop, rows is not None, cols is not None,
            fmt is E5M2, cols_fmt is E5M2, fmt.max, cols_fmt.max, pow2, 2.0**-margin,
            granularity.rows, granularity.cols, amax is not None, _triton.has_fp8_conversion(x.device), tile,
        ),
        _WARPS,
    )  # fmt: skip


def as_bits(amax: Tensor | None) -> Tensor | None:
    """An amax as kernels take it, ordered like an integer."""
    return None if amax is None else amax.view(torch.int32)


def rows_launch(x: Tensor, fmt: Format, width: int, pow2: bool, margin: int, row_offset: int = 0) -> Launch:
    """The kernel that casts rows of tensors like ``x``, each with its own scale, from one read: called with ``x``,
    codes and scales. ``width`` of the codes and ``row_offset`` as in ``tiles_launch``.
    """
    row_count, col_count = x.shape
    extent = 1 << (width - 1).bit_length()
    rows = max(1, _ELEMENTS // extent)
    return Launch(
        quantize_rows_kernel,
        -(-row_count // rows),
        (x, torch.uint8, torch.float32),
        (
            row_count, col_count, x.stride(0), row_offset, width, fmt is E5M2, fmt.max, pow2, 2.0**-margin,
            _triton.has_fp8_conversion(x.device), rows, extent,
        ),
        rows * extent // _PER_WARP,
    )  # fmt: skip
