"""Casts with one scale for the whole tensor, four rows at a time; ``_quantize_launch.py`` starts them.

One cast serves both orientations then. Codes of columns are the transposed tile, which goes through shared memory;
moved as FP32 numbers, to be cast behind it, that takes four bytes an element and a second cast. Here a thread holds
four neighbours of a column, one in each of four blocks of every fourth row: cast where they are, they move, and are
stored, as one word of 32 bits. Where rows and columns have scales of their own this gains nothing (gated backward,
H200, 2026-11-30: 1.59 ms against 1.47), so those casts are ``_quantize_kernel.py``'s.
"""

from __future__ import annotations

import torch

from acceler8.kernels._triton import (
    INTERPRETED,
    as_fp32,
    constexpr,
    encode,
    hidden,
    jit,
    magnitude_bits,
    scale_of,
    tl,
)
from acceler8.kernels.amax import is_known

_PTX = constexpr(not INTERPRETED and torch.version.hip is None)


@jit
def words_of(c0, c1, c2, c3):  # type: ignore[no-untyped-def]
    """Four blocks of codes -> a block of words, the first code lowest."""
    if _PTX:  # a transposition of 4 x 4 bytes: half an instruction a code, where shifts and ors took two
        return tl.inline_asm_elementwise(
            "{ .reg .b32 a, b, c, d; prmt.b32 a, $4, $5, 0x5140; prmt.b32 b, $6, $7, 0x5140;"
            " prmt.b32 c, $4, $5, 0x7362; prmt.b32 d, $6, $7, 0x7362; prmt.b32 $0, a, b, 0x5410;"
            " prmt.b32 $1, a, b, 0x7632; prmt.b32 $2, c, d, 0x5410; prmt.b32 $3, c, d, 0x7632; }",
            "=r,=r,=r,=r,r,r,r,r", [c0, c1, c2, c3], dtype=tl.int32, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        return c0.to(tl.int32) | c1.to(tl.int32) << 8 | c2.to(tl.int32) << 16 | c3.to(tl.int32) << 24


@jit
def words_origin(across, ROWS: tl.constexpr, COLS: tl.constexpr, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """First row and column of this program's tile, of which each row has ``across``; int64. From the last to the first:
    a pass for amax ended there, and the L2 cache still holds it (1 to 4 % of a cast, H200, 2026-11-30).

    Programs that run at once go down GROUP tiles before they go across: then what they write of a column, as what they
    read and write of a row, lies together in memory.
    """
    number = tl.num_programs(0) - 1 - tl.program_id(0)
    down = tl.num_programs(0) // across
    first = number // (GROUP * across) * GROUP
    height = min(down - first, GROUP)
    within = number % (GROUP * across)
    return (first + within % height).to(tl.int64) * ROWS, (within // height).to(tl.int64) * COLS


@jit
def largest_bits(x0, x1, x2, x3):  # type: ignore[no-untyped-def]
    """Bits of the largest magnitude of four blocks, place by place."""
    first = tl.maximum(magnitude_bits(x0), magnitude_bits(x1))
    second = tl.maximum(magnitude_bits(x2), magnitude_bits(x3))
    return tl.maximum(first, second)


@jit
def stage(bits, staging_ptr):  # type: ignore[no-untyped-def]
    """Max the largest of a block into ``staging``: both dimensions at once, so the warps wait for each other once."""
    tl.atomic_max(staging_ptr, tl.max(bits), sem="relaxed")


@jit
def _tensor_scale(  # type: ignore[no-untyped-def]
    amax_ptr, known_ptr, TARGET: tl.constexpr, POW2: tl.constexpr, DELAYED: tl.constexpr
):  # fmt: skip
    """``(scale, scale_inv)`` [1, 1] of the amax found, or of that of earlier steps if it is good."""
    zero = tl.zeros([1, 1], tl.int32)
    amax = tl.load(amax_ptr + zero)
    if DELAYED:
        amax = tl.where(is_known(known_ptr), tl.load(known_ptr + zero), amax)
    return scale_of(amax, TARGET, POW2, False)


@jit
def _store_row(codes, rows, cols, row_count, stop, codes_ptr, width):  # type: ignore[no-untyped-def]
    inside = (rows < row_count)[:, None] & (cols < stop)[None, :]
    tl.store(codes_ptr + rows[:, None] * width + cols[None, :], codes, mask=inside)


@jit
def _store_byte(codes, rows, cols, stop, col_count, codes_ptr, width):  # type: ignore[no-untyped-def]
    inside = (rows < stop)[:, None] & (cols < col_count)[None, :]
    tl.store(codes_ptr + cols[None, :] * width + rows[:, None], codes, mask=inside)


@jit
def quantize_four(  # type: ignore[no-untyped-def]
    x0, x1, x2, x3, rows, cols, first_row, first_col, row_count, col_count,
    amax_ptr, known_ptr, row_codes_ptr, row_inv_ptr, col_codes_ptr, col_inv_ptr,
    row_width, row_stop, col_width, col_stop,
    ROW: tl.constexpr, COL: tl.constexpr, ROW_E5M2: tl.constexpr, COL_E5M2: tl.constexpr,
    ROW_MAX: tl.constexpr, COL_MAX: tl.constexpr, POW2: tl.constexpr, MARGIN: tl.constexpr,
    DELAYED: tl.constexpr, WORDS: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Quantise a tile in the orientations asked; store codes and scale. DELAYED: with the amax known, if it is good.

    ``x0`` holds ``rows``, ``x1`` those behind each, and so on; zeros outside. Codes are stored up to ``row_stop`` along
    a row and up to ``col_stop`` along a column, so that filler is stored as the zeros it is. WORDS: ``rows`` and
    ``col_width`` are multiples of four.
    """
    zero = tl.zeros([1, 1], tl.int64)
    is_first = zero + first_row + first_col == 0
    if ROW:
        scale, scale_inv = _tensor_scale(amax_ptr, known_ptr, ROW_MAX * MARGIN, POW2, DELAYED)
        tl.store(row_inv_ptr + zero, scale_inv, mask=is_first)
        c0 = encode(x0, scale, ROW_MAX, ROW_E5M2, HARDWARE)
        c1 = encode(x1, scale, ROW_MAX, ROW_E5M2, HARDWARE)
        c2 = encode(x2, scale, ROW_MAX, ROW_E5M2, HARDWARE)
        c3 = encode(x3, scale, ROW_MAX, ROW_E5M2, HARDWARE)
        _store_row(c0, rows, cols, row_count, row_stop, row_codes_ptr, row_width)
        _store_row(c1, rows + 1, cols, row_count, row_stop, row_codes_ptr, row_width)
        _store_row(c2, rows + 2, cols, row_count, row_stop, row_codes_ptr, row_width)
        _store_row(c3, rows + 3, cols, row_count, row_stop, row_codes_ptr, row_width)
    if COL:
        scale, scale_inv = _tensor_scale(amax_ptr, known_ptr, COL_MAX * MARGIN, POW2, DELAYED)
        tl.store(col_inv_ptr + zero, scale_inv, mask=is_first)
        if not ROW or ROW_E5M2 != COL_E5M2:
            c0 = encode(x0, scale, COL_MAX, COL_E5M2, HARDWARE)
            c1 = encode(x1, scale, COL_MAX, COL_E5M2, HARDWARE)
            c2 = encode(x2, scale, COL_MAX, COL_E5M2, HARDWARE)
            c3 = encode(x3, scale, COL_MAX, COL_E5M2, HARDWARE)
        if WORDS:
            words_ptr = col_codes_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
            inside = (rows < col_stop)[:, None] & (cols < col_count)[None, :]
            at = words_ptr + cols[None, :] * (col_width // 4) + (rows // 4)[:, None]
            tl.store(at, words_of(c0, c1, c2, c3), mask=inside)
        else:
            _store_byte(c0, rows, cols, col_stop, col_count, col_codes_ptr, col_width)
            _store_byte(c1, rows + 1, cols, col_stop, col_count, col_codes_ptr, col_width)
            _store_byte(c2, rows + 2, cols, col_stop, col_count, col_codes_ptr, col_width)
            _store_byte(c3, rows + 3, cols, col_stop, col_count, col_codes_ptr, col_width)


@jit
def _load(x_ptr, rows, cols, row_stride, col_stride, row_count, col_count):  # type: ignore[no-untyped-def]
    inside = (rows < row_count)[:, None] & (cols < col_count)[None, :]
    return as_fp32(tl.load(x_ptr + rows[:, None] * row_stride + cols[None, :] * col_stride, mask=inside, other=0.0))


@jit
def quantize_words_kernel(  # type: ignore[no-untyped-def]
    x_ptr, amax_ptr, known_ptr, staging_ptr, row_codes_ptr, row_inv_ptr, col_codes_ptr, col_inv_ptr, partial_ptr,
    row_count, col_count, row_stride, col_stride, across, row_offset, col_offset,
    row_width, row_stop, col_width, col_stop, sums_width,
    ROW: tl.constexpr, COL: tl.constexpr, ROW_E5M2: tl.constexpr, COL_E5M2: tl.constexpr,
    ROW_MAX: tl.constexpr, COL_MAX: tl.constexpr, POW2: tl.constexpr, MARGIN: tl.constexpr,
    DELAYED: tl.constexpr, WORDS: tl.constexpr, HARDWARE: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, GROUP: tl.constexpr,
    SUM_OF_COLS: tl.constexpr, SUM_OF_ROWS: tl.constexpr,
):  # fmt: skip
    """A tile a program. ``x`` lies at ``row_offset``, ``col_offset`` of the matrix that is written. ``partial`` as in
    ``quantize_tiles_kernel``.
    """
    first_row, first_col = words_origin(across, ROWS, COLS, GROUP)
    rows, cols = first_row + 4 * tl.arange(0, ROWS // 4), first_col + tl.arange(0, COLS)
    row_count, col_count = hidden(row_count, ROWS), hidden(col_count, COLS)
    x0 = _load(x_ptr, rows, cols, row_stride, col_stride, row_count, col_count)
    x1 = _load(x_ptr, rows + 1, cols, row_stride, col_stride, row_count, col_count)
    x2 = _load(x_ptr, rows + 2, cols, row_stride, col_stride, row_count, col_count)
    x3 = _load(x_ptr, rows + 3, cols, row_stride, col_stride, row_count, col_count)
    if DELAYED:
        stage(largest_bits(x0, x1, x2, x3), staging_ptr)
    if SUM_OF_COLS:
        at = partial_ptr + first_row // ROWS * sums_width + col_offset + cols
        tl.store(at, tl.sum((x0 + x1) + (x2 + x3), 0), mask=cols < col_count)
    if SUM_OF_ROWS:
        at = partial_ptr + first_col // COLS * sums_width + row_offset + rows
        tl.store(at, tl.sum(x0, 1), mask=rows < row_count)
        tl.store(at + 1, tl.sum(x1, 1), mask=rows + 1 < row_count)
        tl.store(at + 2, tl.sum(x2, 1), mask=rows + 2 < row_count)
        tl.store(at + 3, tl.sum(x3, 1), mask=rows + 3 < row_count)
    quantize_four(
        x0, x1, x2, x3, rows + row_offset, cols + col_offset, first_row + row_offset, first_col + col_offset,
        row_count + row_offset, col_count + col_offset, amax_ptr, known_ptr,
        row_codes_ptr, row_inv_ptr, col_codes_ptr, col_inv_ptr, row_width, hidden(row_stop, COLS), col_width,
        hidden(col_stop, ROWS), ROW, COL, ROW_E5M2, COL_E5M2, ROW_MAX, COL_MAX, POW2, MARGIN, DELAYED, WORDS, HARDWARE,
    )  # fmt: skip
