"""Launches the kernels of ``quantize.py``: which of them, on what grid, into what memory."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from acceler8.formats import E5M2, FORMATS, Format
from acceler8.kernels import _triton
from acceler8.kernels._launch import Launch, Plans, address, alignment, stream_of, zeros
from acceler8.kernels._quantize_kernel import quantize_rows_kernel, quantize_tiles_kernel
from acceler8.kernels._sums import Sums, Total, total_of
from acceler8.kernels._words_kernel import quantize_words_kernel
from acceler8.kernels.amax import amax_launch
from acceler8.scaling import GRANULARITIES, ROWWISE, Granularity

# Local blocks must not straddle tiles; elsewhere small tiles hide the latency of transposing better. Multiples of every
# fill. Both orientations of 16384 x 4096 in BF16 (H200, 2026-11-30): rowwise 89 us after its amax (tiles of 128: 94,
# with 8 warps 120); 1x128 122 us (8 warps 184, 16 warps 231).
_BLOCK_TILE, _TILE, _WARPS = 128, 64, 4
# One scale a tensor, both orientations of 28672 x 4096 (H200, 2026-11-30): 138 us (8 warps and 128 rows 152, GROUP of 1
# 145; as tiles 145)
_ROWS, _COLS, GROUP, _WORDS_WARPS = 64, 64, 4, 4
# Rows that a program holds whole: 32 elements a thread, 4096 in a program if the row is not longer
WIDEST_ROW, _ELEMENTS, _PER_WARP = 16384, 4096, 1024


class CastLaunch:
    """A launch that picks its pointers: of ``x``, amax found, amax known, staging, codes and scales of rows and of
    columns, and partial sums, of which it stores ``sum_count`` rows. One that is not picked is not read.
    """

    def __init__(self, launch: Launch, order: Sequence[int], sum_count: int = 0) -> None:
        self._launch, self._pick, self.sum_count = launch, operator.itemgetter(*order), sum_count

    def __call__(self, stream: int, *pointers: Any) -> None:
        self._launch(stream, *self._pick(pointers))


class _Plan(NamedTuple):
    """What one kind of cast allocates and launches."""

    outputs: list[tuple[tuple[int, ...], torch.dtype]]
    device: torch.device
    find_amax: Launch | None
    amax_count: int
    quantize: CastLaunch
    total: Total | None


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
    column_sums: bool = False,
) -> list[Tensor]:
    """Launch the kernels: ``[codes, scale_inv]`` of ``rows``, then of ``cols``, then FP32 sums of columns, as asked.

    ``x`` [R, C] is not empty and lies on a device that runs Triton; any strides, more than 2**31 elements
    too. At most 2**31 - 1 tiles. Arguments as in ``quantize``, formats and granularity by name ("" where an orientation
    is not wanted). ``column_amax`` as there, with row scales and without ``rows``. Deterministic.
    """
    device = x.get_device()
    if device >= 0 and device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return quantize_triton(x, rows, cols, granularity, pow2, margin, amax, staging, column_amax, column_sums)
    delayed = None if amax is None or staging is None else (alignment(amax), alignment(staging))
    columns = None if column_amax is None else alignment(column_amax)
    key = (
        x.shape, x.stride(), x.dtype, device, alignment(x), rows, cols, granularity, pow2, margin, delayed, columns,
        column_sums,
    )  # fmt: skip
    plan = _plans.get(
        key,
        lambda: _make_plan(
            x, FORMATS.get(rows), FORMATS.get(cols), GRANULARITIES[granularity], pow2, margin, amax, staging,
            column_amax, column_sums,
        ),
    )  # fmt: skip
    out = [torch.empty(shape, dtype=dtype, device=plan.device) for shape, dtype in plan.outputs]
    stream, at_x = stream_of(device), address(x)
    at_out = [address(t) for t in out]
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
    if plan.total is None:
        plan.quantize(stream, at_x, found, known, staged, *at_out, at_x)
    else:
        partial = torch.empty(plan.total.partial, dtype=torch.float32, device=plan.device)
        out.append(torch.empty(x.shape[1], dtype=torch.float32, device=plan.device))
        plan.quantize(stream, at_x, found, known, staged, *at_out, address(partial))
        plan.total.launch(stream, address(partial), address(out[-1]), address(out[-1]))
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
    column_sums: bool,
) -> _Plan:
    row_count, col_count = x.shape
    multiple = granularity.contraction_multiple
    row_width, col_width = col_count + -col_count % multiple, row_count + -row_count % multiple
    outputs: list[tuple[tuple[int, ...], torch.dtype]] = []
    for fmt, shape, width in ((rows, (row_count, col_count), row_width), (cols, (col_count, row_count), col_width)):
        if fmt is not None:
            outputs += [((shape[0], width), fmt.torch_dtype), (granularity.scale_shape(*shape), torch.float32)]
    sums = Sums(0, col_count) if column_sums else None
    one_pass = granularity is ROWWISE and cols is None and x.stride(1) == 1 and row_width <= WIDEST_ROW
    if one_pass and rows is not None and sums is None:  # a program that holds one long row has nothing to add up
        return _Plan(outputs, x.device, None, 0, rows_cast(x, rows, row_width, pow2, margin), None)
    if not granularity.rows:
        quantize = words_cast(x, rows, cols, (row_width, col_width), pow2, margin, amax, staging, sums=sums)
        find_amax = amax_launch(x, tensor=True, known=as_bits(amax))
        return _Plan(outputs, x.device, find_amax, 1, quantize, total_of(sums, quantize.sum_count))
    by_row = granularity is ROWWISE
    quantize = tiles_cast(
        x, rows, cols, granularity, (row_width, col_width), pow2, margin,
        cols_at=row_count if by_row and rows is not None else 0, found=column_amax, sums=sums,
    )  # fmt: skip
    total = total_of(sums, quantize.sum_count)
    if granularity.is_blockwise or column_amax is not None:
        return _Plan(outputs, x.device, None, 0, quantize, total)
    count = row_count * (rows is not None) + col_count * (cols is not None)
    find_amax = amax_launch(x, rows=rows is not None, cols=cols is not None)
    return _Plan(outputs, x.device, find_amax, count, quantize, total)


def tiles_cast(
    x: Tensor,
    rows: Format | None,
    cols: Format | None,
    granularity: Granularity,
    widths: tuple[int, int],
    pow2: bool,
    margin: int,
    *,
    cols_at: int,
    row_offset: int = 0,
    col_stop: int | None = None,
    found: Tensor | None = None,
    sums: Sums | None = None,
) -> CastLaunch:
    """Cast tensors like ``x`` with a scale for each row and column, whose amaxes were found, those of columns from
    ``cols_at`` on, or for each block.

    ``widths`` are those of the codes of rows and of columns. Where ``x`` is rows ``row_offset`` on of a matrix, its
    codes go to their places in that matrix's, those of columns up to ``col_stop``, and so do ``sums`` of its rows.
    """
    row_count, col_count = x.shape
    fmt, cols_fmt = rows or cols or E5M2, cols or rows or E5M2
    stop = widths[1] if col_stop is None else col_stop
    tile = _BLOCK_TILE if granularity.is_blockwise else _TILE
    extent = max(row_count, stop - row_offset), col_count
    codes = (torch.uint8, torch.float32, torch.uint8, torch.float32)
    launch = Launch(
        quantize_tiles_kernel,
        _triton.tiles(*extent, tile),
        (x, torch.int32 if found is None else found, *codes, torch.float32),
        (
            row_count, col_count, *x.stride(), row_offset, cols_at, *widths, stop, 0 if sums is None else sums.width,
            rows is not None, cols is not None, fmt is E5M2, cols_fmt is E5M2, fmt.max, cols_fmt.max,
            pow2, 2.0**-margin, granularity.rows, granularity.cols, _triton.has_fp8_conversion(x.device), tile,
            *_sums_of_cols_and_rows(sums),
        ),
        _WARPS,
    )  # fmt: skip
    return CastLaunch(launch, (0, 1, 4, 5, 6, 7, 8), 0 if sums is None else -(-extent[sums.dim] // tile))


def _sums_of_cols_and_rows(sums: Sums | None) -> tuple[bool, bool]:
    return sums is not None and sums.dim == 0, sums is not None and sums.dim == 1


def words_cast(
    x: Tensor,
    rows: Format | None,
    cols: Format | None,
    widths: tuple[int, int],
    pow2: bool,
    margin: int,
    amax: Tensor | None,
    staging: Tensor | None,
    *,
    row_offset: int = 0,
    col_stop: int | None = None,
    sums: Sums | None = None,
) -> CastLaunch:
    """Cast tensors like ``x`` with one scale. Otherwise as ``tiles_cast``."""
    fmt, cols_fmt = rows or cols or E5M2, cols or rows or E5M2
    stop = widths[1] if col_stop is None else col_stop
    known, staged = (torch.int32 if t is None else t for t in (as_bits(amax), as_bits(staging)))
    # length, stride, offset, width and stop of codes, whether asked, format: of rows and of columns
    sides = [
        (x.shape[0], x.stride(0), row_offset, widths[0], widths[0], rows is not None, fmt),
        (x.shape[1], x.stride(1), 0, widths[1], stop, cols is not None, cols_fmt),
    ]
    is_column_major = x.stride(0) == 1 and x.stride(1) != 1
    if is_column_major:  # the kernel reads along rows: it casts the transposed tensor, whose rows are these columns
        sides.reverse()
        sums = None if sums is None else sums._replace(dim=1 - sums.dim)
    lengths, strides, offsets, codes, stops, asked, formats = zip(*sides, strict=True)
    down, across = (
        -(-max(length, end - offset) // tile)
        for length, offset, end, tile in zip(lengths, offsets, stops[::-1], (_ROWS, _COLS), strict=True)
    )
    launch = Launch(
        quantize_words_kernel,
        down * across,
        (x, torch.int32, known, staged, torch.uint8, torch.float32, torch.uint8, torch.float32, torch.float32),
        (
            *lengths, *strides, across, *offsets, codes[0], stops[0], codes[1], stops[1],
            0 if sums is None else sums.width, *asked, *(f is E5M2 for f in formats), *(f.max for f in formats),
            pow2, 2.0**-margin, amax is not None, offsets[0] % 4 == 0, _triton.has_fp8_conversion(x.device),
            _ROWS, _COLS, GROUP, *_sums_of_cols_and_rows(sums),
        ),
        _WORDS_WARPS,
    )  # fmt: skip
    sum_count = 0 if sums is None else (down, across)[sums.dim]
    return CastLaunch(launch, (0, 1, 2, 3, 6, 7, 4, 5, 8) if is_column_major else range(9), sum_count)


def as_bits(amax: Tensor | None) -> Tensor | None:
    """An amax as kernels take it, ordered like an integer."""
    return None if amax is None else amax.view(torch.int32)


def rows_cast(x: Tensor, fmt: Format, width: int, pow2: bool, margin: int, row_offset: int = 0) -> CastLaunch:
    """Cast rows of tensors like ``x``, each with its own scale, from one read. ``width`` of the codes and
    ``row_offset`` as in ``tiles_cast``.
    """
    row_count, col_count = x.shape
    extent = 1 << (width - 1).bit_length()
    rows = max(1, _ELEMENTS // extent)
    launch = Launch(
        quantize_rows_kernel,
        -(-row_count // rows),
        (x, torch.uint8, torch.float32),
        (
            row_count, col_count, x.stride(0), row_offset, width, fmt is E5M2, fmt.max, pow2, 2.0**-margin,
            _triton.has_fp8_conversion(x.device), rows, extent,
        ),
        rows * extent // _PER_WARP,
    )  # fmt: skip
    return CastLaunch(launch, (0, 4, 5))
