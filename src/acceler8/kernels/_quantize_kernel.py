"""The Triton kernel of ``quantize.py`` and its launcher. Formula, reference and dispatch are there."""

from __future__ import annotations

import torch
from torch import Tensor

from acceler8.formats import E5M2, Format
from acceler8.kernels import _triton
from acceler8.kernels._triton import (
    LAUNCH_OPTIONS,
    TILE,
    as_fp32,
    hidden,
    jit,
    magnitude_bits,
    round_to_format,
    saturate,
    scale_of,
    tile_offsets,
    tl,
)
from acceler8.kernels.amax import amax_bits, is_known
from acceler8.scaling import Granularity


@jit
def _group_scale(  # type: ignore[no-untyped-def]
    bits, amax_ptr, own_ptr, rows, row_count, TARGET: tl.constexpr, POW2: tl.constexpr,
    GROUP_ROWS: tl.constexpr, GROUP_COLS: tl.constexpr, DELAYED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """``(scale, scale_inv)`` of a tile's groups, which run along dim 1: a block ``[TILE or 1, groups]``."""
    if GROUP_COLS == 0:
        if GROUP_ROWS == 0:
            group = tl.load(amax_ptr + tl.zeros([1, 1], tl.int32))
            if DELAYED:
                own = tl.load(own_ptr + tl.zeros([1, 1], tl.int32))
                group = tl.where(is_known(amax_ptr), group, own)
        else:
            group = tl.load(amax_ptr + rows, mask=rows < row_count, other=0)[:, None]
    elif GROUP_COLS == TILE:
        group = tl.max(bits, 1)[:, None]
        if GROUP_ROWS == TILE:
            group = tl.max(group, 0)[None, :]
    else:
        group = tl.max(tl.reshape(bits, [TILE, TILE // GROUP_COLS, GROUP_COLS]), 2)
    return scale_of(group, TARGET, POW2, GROUP_COLS == 32)


@jit
def _spread(group, GROUP_COLS: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """A value per group -> a block that broadcasts against the tile."""
    if GROUP_COLS == 32:
        return tl.reshape(tl.broadcast_to(group[:, :, None], [TILE, TILE // 32, 32]), [TILE, TILE])
    else:
        return group


@jit
def _store_scale_inv(  # type: ignore[no-untyped-def]
    scale_inv, ptr, rows, cols, row_count, col_count,
    GROUP_ROWS: tl.constexpr, GROUP_COLS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Each tile stores the scales of the groups that start in it."""
    first_row = tl.min(rows, 0)
    first_col = tl.min(cols, 0)
    zero = tl.zeros([1, 1], tl.int64)
    if GROUP_COLS == 0:
        if GROUP_ROWS == 0:
            tl.store(ptr + zero, scale_inv, mask=zero + first_row + first_col == 0)
        else:
            tl.store(ptr + rows[:, None], scale_inv, mask=(rows < row_count)[:, None] & (zero + first_col == 0))
    elif GROUP_COLS == TILE:
        blocks = tl.cdiv(col_count, TILE)
        block = first_col // TILE
        if GROUP_ROWS == TILE:
            tl.store(ptr + zero + (first_row // TILE) * blocks + block, scale_inv)
        else:
            tl.store(ptr + (rows * blocks + block)[:, None], scale_inv, mask=(rows < row_count)[:, None])
    else:
        blocks = tl.cdiv(col_count, GROUP_COLS)
        block = first_col // GROUP_COLS + tl.arange(0, TILE // GROUP_COLS)
        inside = (rows < row_count)[:, None] & (block < blocks)[None, :]
        tl.store(ptr + rows[:, None] * blocks + block[None, :], scale_inv, mask=inside)


@jit
def _quantize_tile(  # type: ignore[no-untyped-def]
    x, rows, cols, row_count, col_count, amax_ptr, own_ptr, codes_ptr, inv_ptr, width,
    E5M2: tl.constexpr, FMT_MAX: tl.constexpr, POW2: tl.constexpr, MARGIN: tl.constexpr,
    GROUP_ROWS: tl.constexpr, GROUP_COLS: tl.constexpr, DELAYED: tl.constexpr,
    HARDWARE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Quantise a tile [rows, cols] whose groups and contraction run along dim 1; store codes and scales."""
    scale, scale_inv = _group_scale(
        magnitude_bits(x), amax_ptr, own_ptr, rows, row_count, FMT_MAX * MARGIN, POW2, GROUP_ROWS, GROUP_COLS,
        DELAYED, TILE,
    )  # fmt: skip
    y = x * _spread(scale, GROUP_COLS, TILE)
    codes = round_to_format(saturate(x, y, FMT_MAX), E5M2, HARDWARE)
    inside = (rows < row_count)[:, None] & (cols < width)[None, :]  # width: filler is stored too, as the zeros it is
    tl.store(codes_ptr + rows[:, None] * width + cols[None, :], codes, mask=inside)
    _store_scale_inv(scale_inv, inv_ptr, rows, cols, row_count, col_count, GROUP_ROWS, GROUP_COLS, TILE)


@jit
def _quantize_kernel(  # type: ignore[no-untyped-def]
    x_ptr, row_amax_ptr, col_amax_ptr, own_ptr, staging_ptr,
    row_codes_ptr, row_inv_ptr, col_codes_ptr, col_inv_ptr,
    row_count, col_count, row_stride, col_stride, row_width, col_width,
    ROW: tl.constexpr, COL: tl.constexpr, ROW_E5M2: tl.constexpr, COL_E5M2: tl.constexpr,
    ROW_MAX: tl.constexpr, COL_MAX: tl.constexpr,
    POW2: tl.constexpr, MARGIN: tl.constexpr, GROUP_ROWS: tl.constexpr, GROUP_COLS: tl.constexpr,
    DELAYED: tl.constexpr, HARDWARE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    # a filled width ends in the tile in which the unfilled one does, so tiles of x cover the codes as well
    rows, cols = tile_offsets(row_count, col_count, TILE)
    row_count, col_count = hidden(row_count, TILE), hidden(col_count, TILE)
    inside = (rows < row_count)[:, None] & (cols < col_count)[None, :]
    x = as_fp32(tl.load(x_ptr + rows[:, None] * row_stride + cols[None, :] * col_stride, mask=inside, other=0.0))
    if DELAYED:
        tl.atomic_max(staging_ptr, tl.max(tl.max(magnitude_bits(x), 1), 0), sem="relaxed")
    if ROW:
        _quantize_tile(
            x, rows, cols, row_count, col_count, row_amax_ptr, own_ptr, row_codes_ptr, row_inv_ptr, row_width,
            ROW_E5M2, ROW_MAX, POW2, MARGIN, GROUP_ROWS, GROUP_COLS, DELAYED, HARDWARE, TILE,
        )  # fmt: skip
    if COL:
        _quantize_tile(
            tl.trans(x), cols, rows, col_count, row_count, col_amax_ptr, own_ptr, col_codes_ptr, col_inv_ptr,
            col_width, COL_E5M2, COL_MAX, POW2, MARGIN, GROUP_ROWS, GROUP_COLS, DELAYED, HARDWARE, TILE,
        )  # fmt: skip


def _amax_of(
    x: Tensor, granularity: Granularity, rows: bool, cols: bool, amax: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Where the kernel reads amax: of row groups, of column groups, and (delayed scaling) the tensor's
    own.
    """
    if amax is not None:
        own, _, _ = amax_bits(x, tensor=True, unless_known=amax)
        known = amax.view(torch.int32)
        return known, known, own
    if granularity.rows == 0:
        own, _, _ = amax_bits(x, tensor=True)
        return own, own, own
    unused, of_rows, of_cols = amax_bits(x, rows=rows, cols=cols) if granularity.cols == 0 else (x, x, x)
    return of_rows, of_cols, unused


def quantize_triton(
    x: Tensor,
    rows: Format | None,
    cols: Format | None,
    granularity: Granularity,
    *,
    pow2: bool = False,
    margin: int = 0,
    amax: Tensor | None = None,
    staging: Tensor | None = None,
) -> list[Tensor]:
    """Launch the kernel: ``[codes, scale_inv]`` of ``rows``, then of ``cols``, as asked.

    ``x`` [R, C] is not empty and lies on a device that runs Triton; any strides, more than 2**31 elements
    too. At most 2**31 - 1 tiles of 128 x 128. Arguments as in ``quantize``. Deterministic.
    """
    row_count, col_count = x.shape
    fmt, cols_fmt = rows or cols, cols or rows
    assert fmt is not None
    assert cols_fmt is not None
    row_codes = row_inv = col_codes = col_inv = x  # a pointer that is not asked for is not read
    out: list[Tensor] = []
    if rows is not None:
        row_codes, row_inv = _outputs(x, row_count, col_count, granularity)
        out += [row_codes.view(rows.torch_dtype), row_inv]
    if cols is not None:
        col_codes, col_inv = _outputs(x, col_count, row_count, granularity)
        out += [col_codes.view(cols.torch_dtype), col_inv]
    programs = _triton.tiles(row_count, col_count)
    row_amax, col_amax, own = _amax_of(x, granularity, rows is not None, cols is not None, amax)
    with torch.cuda.device_of(x):
        _quantize_kernel[(programs,)](
            x, row_amax, col_amax, own, x if staging is None else staging.view(torch.int32),
            row_codes, row_inv, col_codes, col_inv, row_count, col_count, x.stride(0), x.stride(1),
            col_count + -col_count % granularity.contraction_multiple,
            row_count + -row_count % granularity.contraction_multiple,
            rows is not None, cols is not None, fmt is E5M2, cols_fmt is E5M2, fmt.max, cols_fmt.max,
            pow2, 2.0**-margin, granularity.rows, granularity.cols, amax is not None,
            _triton.has_fp8_conversion(x.device), TILE,
            **LAUNCH_OPTIONS,
        )  # fmt: skip
    return out


def _outputs(x: Tensor, rows: int, cols: int, granularity: Granularity) -> tuple[Tensor, Tensor]:
    """Room for the codes (bytes, with filler) and scales of an operand ``[rows, cols]``."""
    width = cols + -cols % granularity.contraction_multiple
    codes = torch.empty(rows, width, dtype=torch.uint8, device=x.device)
    return codes, torch.empty(granularity.scale_shape(rows, cols), dtype=torch.float32, device=x.device)
