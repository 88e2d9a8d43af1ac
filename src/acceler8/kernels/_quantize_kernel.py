"""The Triton kernels of ``quantize.py`` (formula, reference, dispatch) for scales of rows, columns and blocks.

``_quantize_launch.py`` starts them; those for one scale a tensor are in ``_words_kernel.py``.
"""

from __future__ import annotations

from acceler8.kernels._triton import (
    as_fp32,
    encode,
    hidden,
    jit,
    magnitude_bits,
    scale_of,
    tile_offsets,
    tile_origin,
    tl,
)


@jit
def _group_scale(  # type: ignore[no-untyped-def]
    bits, amax_ptr, rows, row_count, TARGET: tl.constexpr, POW2: tl.constexpr,
    GROUP_ROWS: tl.constexpr, GROUP_COLS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """``(scale, scale_inv)`` of a tile's groups, which run along dim 1: a block ``[TILE or 1, groups]``."""
    if GROUP_COLS == 0:
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
    scale_inv, ptr, rows, first_row, first_col, row_count, col_count, width,
    GROUP_ROWS: tl.constexpr, GROUP_COLS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Each tile stores the scales of the groups that start in it. Blocks end where the codes' rows do."""
    zero = tl.zeros([1, 1], tl.int64)
    if GROUP_COLS == 0:
        tl.store(ptr + rows[:, None], scale_inv, mask=(rows < row_count)[:, None] & (zero + first_col == 0))
    elif GROUP_COLS == TILE:
        blocks = width // TILE
        block = first_col // TILE
        if GROUP_ROWS == TILE:
            tl.store(ptr + zero + (first_row // TILE) * blocks + block, scale_inv)
        else:
            tl.store(ptr + (rows * blocks + block)[:, None], scale_inv, mask=(rows < row_count)[:, None])
    else:
        blocks = width // GROUP_COLS
        block = first_col // GROUP_COLS + tl.arange(0, TILE // GROUP_COLS)
        inside = (rows < row_count)[:, None] & (block < tl.cdiv(col_count, GROUP_COLS))[None, :]
        tl.store(ptr + rows[:, None] * blocks + block[None, :], scale_inv, mask=inside)


@jit
def quantize_tile(  # type: ignore[no-untyped-def]
    x, rows, cols, first_row, first_col, row_count, col_count, amax_ptr, codes_ptr, inv_ptr, width, stop,
    E5M2: tl.constexpr, FMT_MAX: tl.constexpr, POW2: tl.constexpr, MARGIN: tl.constexpr,
    GROUP_ROWS: tl.constexpr, GROUP_COLS: tl.constexpr,
    HARDWARE: tl.constexpr, TILE: tl.constexpr, SCALED: tl.constexpr = False,
):  # fmt: skip
    """Quantise a tile [rows, cols] whose groups and contraction run along dim 1; store codes and scales.

    ``SCALED``: where amaxes lie, ``scales_kernel`` has put scales, and has stored their inverses. Codes have ``width``
    columns and are stored up to column ``stop``: that is ``width``, so that filler is stored as the zeros it is, unless
    the tile is of a part of them that has a neighbour behind it.
    """
    if SCALED:
        scale = tl.load(amax_ptr + rows, mask=rows < row_count, other=0).to(tl.float32, bitcast=True)[:, None]
    else:
        scale, scale_inv = _group_scale(
            magnitude_bits(x), amax_ptr, rows, row_count, FMT_MAX * MARGIN, POW2, GROUP_ROWS, GROUP_COLS, TILE,
        )  # fmt: skip
        _store_scale_inv(
            scale_inv, inv_ptr, rows, first_row, first_col, row_count, col_count, width, GROUP_ROWS, GROUP_COLS, TILE
        )  # fmt: skip
    codes = encode(x, _spread(scale, GROUP_COLS, TILE), FMT_MAX, E5M2, HARDWARE)
    inside = (rows < row_count)[:, None] & (cols < stop)[None, :]
    tl.store(codes_ptr + rows[:, None] * width + cols[None, :], codes, mask=inside)


@jit
def quantize_both(  # type: ignore[no-untyped-def]
    x, rows, cols, first_row, first_col, row_count, col_count, amax_ptr, cols_at,
    row_codes_ptr, row_inv_ptr, col_codes_ptr, col_inv_ptr, row_width, col_width, col_stop,
    ROW: tl.constexpr, COL: tl.constexpr, ROW_E5M2: tl.constexpr, COL_E5M2: tl.constexpr,
    ROW_MAX: tl.constexpr, COL_MAX: tl.constexpr,
    POW2: tl.constexpr, MARGIN: tl.constexpr, GROUP_ROWS: tl.constexpr, GROUP_COLS: tl.constexpr,
    HARDWARE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Quantise a tile in the orientations asked; the amaxes of columns lie ``cols_at`` behind those of rows."""
    if ROW:
        quantize_tile(
            x, rows, cols, first_row, first_col, row_count, col_count, amax_ptr, row_codes_ptr, row_inv_ptr,
            row_width, row_width, ROW_E5M2, ROW_MAX, POW2, MARGIN, GROUP_ROWS, GROUP_COLS, HARDWARE, TILE,
        )  # fmt: skip
    if COL:
        quantize_tile(
            tl.trans(x), cols, rows, first_col, first_row, col_count, row_count, amax_ptr + cols_at,
            col_codes_ptr, col_inv_ptr, col_width, col_stop, COL_E5M2, COL_MAX, POW2, MARGIN, GROUP_ROWS, GROUP_COLS,
            HARDWARE, TILE,
        )  # fmt: skip


@jit
def quantize_tiles_kernel(  # type: ignore[no-untyped-def]
    x_ptr, amax_ptr, row_codes_ptr, row_inv_ptr, col_codes_ptr, col_inv_ptr, partial_ptr,
    row_count, col_count, row_stride, col_stride, row_offset, cols_at, row_width, col_width, col_stop, sums_width,
    ROW: tl.constexpr, COL: tl.constexpr, ROW_E5M2: tl.constexpr, COL_E5M2: tl.constexpr,
    ROW_MAX: tl.constexpr, COL_MAX: tl.constexpr,
    POW2: tl.constexpr, MARGIN: tl.constexpr, GROUP_ROWS: tl.constexpr, GROUP_COLS: tl.constexpr,
    HARDWARE: tl.constexpr, TILE: tl.constexpr, SUM_OF_COLS: tl.constexpr, SUM_OF_ROWS: tl.constexpr,
):  # fmt: skip
    """A tile a program, from the last to the first: the pass for amax ended there, and the L2 cache still holds it
    (1 to 4 % of a cast, H200, 2026-11-30). What is written is ``row_offset`` rows further down than ``x``.

    ``partial`` [tiles, sums_width] gets the FP32 sums of a tile's columns, or of its rows; at most one is asked.
    """
    # a filled width ends in the tile in which the unfilled one does (or in one that the grid adds), so tiles of x cover
    # the codes as well
    first_row, first_col = tile_origin(tl.num_programs(0) - 1 - tl.program_id(0), col_count, TILE)
    rows, cols = tile_offsets(first_row, first_col, TILE)
    row_count, col_count = hidden(row_count, TILE), hidden(col_count, TILE)
    inside = (rows < row_count)[:, None] & (cols < col_count)[None, :]
    x = as_fp32(tl.load(x_ptr + rows[:, None] * row_stride + cols[None, :] * col_stride, mask=inside, other=0.0))
    if SUM_OF_COLS:
        tl.store(partial_ptr + first_row // TILE * sums_width + cols, tl.sum(x, 0), mask=cols < col_count)
    if SUM_OF_ROWS:
        at = partial_ptr + first_col // TILE * sums_width + row_offset + rows
        tl.store(at, tl.sum(x, 1), mask=rows < row_count)
    quantize_both(
        x, rows + row_offset, cols, first_row + row_offset, first_col, row_count + row_offset, col_count,
        amax_ptr, cols_at, row_codes_ptr, row_inv_ptr, col_codes_ptr, col_inv_ptr,
        row_width, col_width, hidden(col_stop, TILE), ROW, COL, ROW_E5M2, COL_E5M2, ROW_MAX, COL_MAX,
        POW2, MARGIN, GROUP_ROWS, GROUP_COLS, HARDWARE, TILE,
    )  # fmt: skip


@jit
def quantize_rows_kernel(  # type: ignore[no-untyped-def]
    x_ptr, codes_ptr, inv_ptr, row_count, col_count, row_stride, row_offset, width,
    E5M2: tl.constexpr, FMT_MAX: tl.constexpr, POW2: tl.constexpr, MARGIN: tl.constexpr, HARDWARE: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Whole rows in a program, so that their amax needs no pass of its own: ``x`` is read once. What is written is
    ``row_offset`` rows further down.
    """
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, COLS)
    row_count, col_count = hidden(row_count, ROWS), hidden(col_count, COLS)
    inside = (rows < row_count)[:, None] & (cols < col_count)[None, :]
    x = as_fp32(tl.load(x_ptr + rows[:, None] * row_stride + cols[None, :], mask=inside, other=0.0))
    scale, scale_inv = scale_of(tl.max(magnitude_bits(x), 1)[:, None], FMT_MAX * MARGIN, POW2, False)
    codes = encode(x, scale, FMT_MAX, E5M2, HARDWARE)
    inside = (rows < row_count)[:, None] & (cols < width)[None, :]
    tl.store(codes_ptr + (rows + row_offset)[:, None] * width + cols[None, :], codes, mask=inside)
    tl.store(inv_ptr + (rows + row_offset)[:, None], scale_inv, mask=(rows < row_count)[:, None])


@jit
def scales_kernel(  # type: ignore[no-untyped-def]
    amax_ptr, first_inv_ptr, second_inv_ptr, third_inv_ptr, second_at, third_at, stop,
    FIRST_TARGET: tl.constexpr, SECOND_TARGET: tl.constexpr, THIRD_TARGET: tl.constexpr, POW2: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Scales in the place of amaxes, and their inverses where they belong: of three operands, one behind the other.

    A tile's threads each need most of its scales, so a kernel of many tiles would divide where this one divides once.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    bits = tl.load(amax_ptr + at, mask=at < stop, other=0)
    is_first, is_third = at < second_at, at >= third_at
    scale, inv = scale_of(bits, SECOND_TARGET, POW2, False)
    of_first, inv_of_first = scale_of(bits, FIRST_TARGET, POW2, False)
    of_third, inv_of_third = scale_of(bits, THIRD_TARGET, POW2, False)
    scale = tl.where(is_first, of_first, tl.where(is_third, of_third, scale))
    tl.store(amax_ptr + at, scale.to(tl.int32, bitcast=True), mask=at < stop)
    tl.store(first_inv_ptr + at, inv_of_first, mask=is_first & (at < stop))
    tl.store(second_inv_ptr + at - second_at, inv, mask=(at >= second_at) & (at < third_at) & (at < stop))
    tl.store(third_inv_ptr + at - third_at, inv_of_third, mask=is_third & (at < stop))
