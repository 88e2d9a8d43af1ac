"""The Triton kernels of ``gated.py`` and ``activation.py`` (formula, reference, dispatch); ``_gated_launch.py`` starts
them. Without a gate (GATED False) ``up`` is one, ``x`` [M, F] is what ``gate`` is else, and its gradient the left half.

Forward and backward take ``f`` and its slope from one function and compute ``act`` by the same operations in the same
order, so what backward casts for wgrad are the bits that forward cast. FP32, no fused multiply-add, every element
alone: nothing depends on tiles or warps, but sums over tokens, whose tiles are those of a table.
"""

from __future__ import annotations

import torch

from acceler8.kernels._quantize_kernel import quantize_both, quantize_tile
from acceler8.kernels._triton import (
    INTERPRETED,
    as_fp32,
    constexpr,
    decode_e4m3,
    encode,
    hidden,
    jit,
    magnitude_bits,
    rounded_to,
    scale_of,
    tile_offsets,
    tile_origin,
    tl,
)
from acceler8.kernels._words_kernel import largest_bits, quantize_four, stage, words_origin
from acceler8.kernels.amax import is_known, max_into

# the exponential and the reciprocal of NVIDIA's special function unit
_PTX = constexpr(not INTERPRETED and torch.version.hip is None)


@jit
def _sigmoid(t):  # type: ignore[no-untyped-def]
    """``1 / (1 + exp(-t))``: 0 where the exponential overflows, 1 where it vanishes.

    In PTX: Triton's own exponential and division guard against denormal numbers, ten instructions an element of
    thirty; here those lie beside 1, or give a sigmoid below 2^-126, which is flushed to zero.
    """
    if _PTX:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1; add.f32 $0, $0, 0f3F800000; rcp.approx.ftz.f32 $0, $0;", "=f,f",
            [t * -1.4426950408889634], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return 1.0 / (1.0 + tl.exp(-t))


@jit
def _activate(gate, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """``(f(gate), f'(gate))``. An exponential that overflows is divided by, and its argument is bounded where it also
    multiplies, so both are finite for every finite gate.
    """
    if KIND == "silu":
        sigmoid = _sigmoid(gate)
        value = gate * sigmoid
        slope = sigmoid * (1.0 + gate * (1.0 - sigmoid))
    elif KIND == "quick_gelu":  # the factor behind the product that vanishes: gate * 1.702 may overflow
        sigmoid = _sigmoid(1.702 * gate)
        value = gate * sigmoid
        slope = sigmoid + 1.702 * (gate * (sigmoid * (1.0 - sigmoid)))
    elif KIND == "gelu":
        normal = 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
        value = gate * normal
        slope = normal + gate * (0.3989422804014327 * tl.exp(-0.5 * (gate * gate)))
    elif KIND == "gelu_tanh":  # 0.5 * (1 + tanh(t / 2)) is sigmoid(t), which does not cancel
        near = tl.where(gate > 32.0, 32.0, gate)
        near = tl.where(near < -32.0, -32.0, near)
        square = near * near
        sigmoid = _sigmoid(1.5957691216057308 * near * (1.0 + 0.044715 * square))
        value = gate * sigmoid
        inner = 1.5957691216057308 * (1.0 + 0.134145 * square)
        slope = sigmoid + near * (sigmoid * (1.0 - sigmoid)) * inner
    else:  # relu; a NaN is neither above nor below
        value = tl.where(gate <= 0.0, 0.0, gate)
        slope = tl.where(gate > 0.0, 1.0, value)
    return value, slope


@jit
def _load_gated(  # type: ignore[no-untyped-def]
    x_ptr, rows, cols, row_stride, features, inside, KIND: tl.constexpr, GATED: tl.constexpr
):  # fmt: skip
    """``(up, f(gate), f'(gate))`` of a tile; ``f`` is zero outside, and so is ``up``, unless it is one."""
    at = x_ptr + rows[:, None] * row_stride + cols[None, :]
    gate = as_fp32(tl.load(at, mask=inside, other=0.0))
    up = as_fp32(tl.load(at + features, mask=inside, other=0.0)) if GATED else 1.0
    value, slope = _activate(gate, KIND)
    return up, value, slope


@jit
def _store_high(x, out_ptr, rows, cols, width, inside):  # type: ignore[no-untyped-def]
    """Store FP32 ``x`` in the dtype of ``out`` [., width]."""
    tl.store(out_ptr + rows[:, None] * width + cols[None, :], rounded_to(x, out_ptr.dtype.element_ty), mask=inside)


# ------------------------------------------------------------------------------------------------------- forward


@jit
def gated_rows_kernel(  # type: ignore[no-untyped-def]
    x_ptr, codes_ptr, inv_ptr, out_ptr, row_count, features, row_stride, width,
    KIND: tl.constexpr, GATED: tl.constexpr, E5M2: tl.constexpr, FMT_MAX: tl.constexpr, POW2: tl.constexpr,
    MARGIN: tl.constexpr, HIGH: tl.constexpr, HARDWARE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Whole rows of ``act`` in a program, so that their amax needs no pass of its own: ``x`` is read once."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, COLS)
    row_count, features = hidden(row_count, ROWS), hidden(features, COLS)
    inside = (rows < row_count)[:, None] & (cols < features)[None, :]
    up, value, _ = _load_gated(x_ptr, rows, cols, row_stride, features, inside, KIND, GATED)
    act = value * up
    if HIGH:
        _store_high(act, out_ptr, rows, cols, features, inside)
    scale, scale_inv = scale_of(tl.max(magnitude_bits(act), 1)[:, None], FMT_MAX * MARGIN, POW2, False)
    codes = encode(act, scale, FMT_MAX, E5M2, HARDWARE)
    inside = (rows < row_count)[:, None] & (cols < width)[None, :]
    tl.store(codes_ptr + rows[:, None] * width + cols[None, :], codes, mask=inside)
    tl.store(inv_ptr + rows[:, None], scale_inv, mask=(rows < row_count)[:, None])


@jit
def gated_amax_kernel(  # type: ignore[no-untyped-def]
    x_ptr, known_ptr, out_ptr, row_count, features, row_stride, cols_at, tile_count,
    KIND: tl.constexpr, GATED: tl.constexpr, TENSOR: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    UNLESS_KNOWN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Amaxes of ``act`` into ``out``, which holds zeros: the tensor's, or those of rows and of columns."""
    if UNLESS_KNOWN and is_known(known_ptr):
        return
    for number in range(tl.program_id(0), tile_count, tl.num_programs(0)):
        first_row, first_col = tile_origin(number, features, TILE)
        rows, cols = tile_offsets(first_row, first_col, TILE)
        inside = (rows < row_count)[:, None] & (cols < features)[None, :]
        up, value, _ = _load_gated(x_ptr, rows, cols, row_stride, features, inside, KIND, GATED)
        bits = magnitude_bits(value * up)
        max_into(bits, out_ptr, out_ptr, out_ptr + cols_at, rows, cols, row_count, features, TENSOR, ROWS, COLS)


@jit
def gated_words_kernel(  # type: ignore[no-untyped-def]
    x_ptr, amax_ptr, known_ptr, staging_ptr, row_codes_ptr, row_inv_ptr, col_codes_ptr, col_inv_ptr, out_ptr,
    row_count, features, row_stride, across, row_width, col_width,
    KIND: tl.constexpr, GATED: tl.constexpr, ROW: tl.constexpr, COL: tl.constexpr, HIGH: tl.constexpr,
    ROW_E5M2: tl.constexpr, COL_E5M2: tl.constexpr, ROW_MAX: tl.constexpr, COL_MAX: tl.constexpr,
    POW2: tl.constexpr, MARGIN: tl.constexpr,
    DELAYED: tl.constexpr, HARDWARE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """A tile of ``act`` a program."""
    first_row, first_col = words_origin(across, ROWS, COLS, GROUP)
    rows, cols = first_row + 4 * tl.arange(0, ROWS // 4), first_col + tl.arange(0, COLS)
    row_count, features = hidden(row_count, ROWS), hidden(features, COLS)
    a0 = _act(x_ptr, out_ptr, rows, cols, row_stride, row_count, features, KIND, GATED, HIGH)
    a1 = _act(x_ptr, out_ptr, rows + 1, cols, row_stride, row_count, features, KIND, GATED, HIGH)
    a2 = _act(x_ptr, out_ptr, rows + 2, cols, row_stride, row_count, features, KIND, GATED, HIGH)
    a3 = _act(x_ptr, out_ptr, rows + 3, cols, row_stride, row_count, features, KIND, GATED, HIGH)
    if DELAYED and (ROW or COL):
        stage(largest_bits(a0, a1, a2, a3), staging_ptr)
    quantize_four(
        a0, a1, a2, a3, rows, cols, first_row, first_col, row_count, features, amax_ptr, known_ptr,
        row_codes_ptr, row_inv_ptr, col_codes_ptr, col_inv_ptr, row_width, row_width, col_width, col_width,
        ROW, COL, ROW_E5M2, COL_E5M2, ROW_MAX, COL_MAX, POW2, MARGIN, DELAYED, True, HARDWARE,
    )  # fmt: skip


@jit
def _act(  # type: ignore[no-untyped-def]
    x_ptr, out_ptr, rows, cols, row_stride, row_count, features, KIND: tl.constexpr, GATED: tl.constexpr,
    HIGH: tl.constexpr,
):  # fmt: skip
    """``act`` of some rows, stored if HIGH; zeros outside."""
    inside = (rows < row_count)[:, None] & (cols < features)[None, :]
    up, value, _ = _load_gated(x_ptr, rows, cols, row_stride, features, inside, KIND, GATED)
    act = value * up
    if HIGH:
        _store_high(act, out_ptr, rows, cols, features, inside)
    return act


@jit
def gated_tiles_kernel(  # type: ignore[no-untyped-def]
    x_ptr, amax_ptr, row_codes_ptr, row_inv_ptr, col_codes_ptr, col_inv_ptr, out_ptr,
    row_count, features, row_stride, cols_at, row_width, col_width,
    KIND: tl.constexpr, GATED: tl.constexpr, ROW: tl.constexpr, COL: tl.constexpr, HIGH: tl.constexpr,
    ROW_E5M2: tl.constexpr, COL_E5M2: tl.constexpr, ROW_MAX: tl.constexpr, COL_MAX: tl.constexpr,
    POW2: tl.constexpr, MARGIN: tl.constexpr, GROUP_ROWS: tl.constexpr, GROUP_COLS: tl.constexpr,
    HARDWARE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A tile of ``act`` a program, from the last to the first, as ``quantize_tiles_kernel``."""
    first_row, first_col = tile_origin(tl.num_programs(0) - 1 - tl.program_id(0), features, TILE)
    rows, cols = tile_offsets(first_row, first_col, TILE)
    row_count, features = hidden(row_count, TILE), hidden(features, TILE)
    act = _act(x_ptr, out_ptr, rows, cols, row_stride, row_count, features, KIND, GATED, HIGH)
    quantize_both(
        act, rows, cols, first_row, first_col, row_count, features, amax_ptr, cols_at, row_codes_ptr, row_inv_ptr,
        col_codes_ptr, col_inv_ptr, row_width, col_width, col_width, ROW, COL, ROW_E5M2, COL_E5M2, ROW_MAX, COL_MAX,
        POW2, MARGIN, GROUP_ROWS, GROUP_COLS, HARDWARE, TILE,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------ backward


@jit
def _load_kept(  # type: ignore[no-untyped-def]
    codes_ptr, inv_ptr, rows, cols, block, width, inside, row_count, KEPT: tl.constexpr, HARDWARE: tl.constexpr
):  # fmt: skip
    """A tile of E4M3 codes with a scale for 128 elements of a row, all of whose columns lie in ``block``: what
    ``dequantize`` gives in the dtype KEPT, in FP32.
    """
    codes = tl.load(codes_ptr + rows[:, None] * width + cols[None, :], mask=inside, other=0)
    inv = tl.load(inv_ptr + rows * (width // 128) + block, mask=rows < row_count, other=0.0)
    return as_fp32(rounded_to(decode_e4m3(codes, HARDWARE) * inv[:, None], KEPT))


@jit
def _load_backward(  # type: ignore[no-untyped-def]
    d_ptr, x_ptr, inv_ptr, rows, cols, first_col, d_row_stride, d_col_stride, row_stride, row_count, features, inside,
    KIND: tl.constexpr, GATED: tl.constexpr, KEPT: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """``(d_act, up, f(gate), f'(gate))`` of a tile; zeros outside. ``x`` is what ``dequantize`` would give of codes in
    the dtype KEPT, unless that is None.
    """
    d = as_fp32(tl.load(d_ptr + rows[:, None] * d_row_stride + cols[None, :] * d_col_stride, mask=inside, other=0.0))
    if KEPT is None:
        up, value, slope = _load_gated(x_ptr, rows, cols, row_stride, features, inside, KIND, GATED)
    else:
        block, width = first_col // 128, (2 if GATED else 1) * features
        gate = _load_kept(x_ptr, inv_ptr, rows, cols, block, width, inside, row_count, KEPT, HARDWARE)
        if GATED:
            block, cols = (first_col + features) // 128, cols + features
            up = _load_kept(x_ptr, inv_ptr, rows, cols, block, width, inside, row_count, KEPT, HARDWARE)
        else:
            up = 1.0
        value, slope = _activate(gate, KIND)
    return d, up, value, slope


@jit
def gated_backward_amax_kernel(  # type: ignore[no-untyped-def]
    d_ptr, x_ptr, inv_ptr, known_ptr, act_known_ptr, out_ptr, row_count, features, d_row_stride, d_col_stride,
    row_stride, cols_at, act_at, tile_count,
    KIND: tl.constexpr, GATED: tl.constexpr, TENSOR: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    ACT_TENSOR: tl.constexpr, ACT_COLS: tl.constexpr, UNLESS_KNOWN: tl.constexpr, KEPT: tl.constexpr,
    HARDWARE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Amaxes into ``out``, which holds zeros: of ``d_gate_up`` its own or those of its rows, from ``cols_at`` on those
    of its 2F columns; from ``act_at`` on of ``act`` its own or those of its columns. Returns if all are known.
    """
    if UNLESS_KNOWN and is_known(known_ptr) and is_known(act_known_ptr):
        return
    for number in range(tl.program_id(0), tile_count, tl.num_programs(0)):
        first_row, first_col = tile_origin(number, features, TILE)
        rows, cols = tile_offsets(first_row, first_col, TILE)
        inside = (rows < row_count)[:, None] & (cols < features)[None, :]
        d, up, value, slope = _load_backward(
            d_ptr, x_ptr, inv_ptr, rows, cols, first_col, d_row_stride, d_col_stride, row_stride, row_count, features,
            inside, KIND, GATED, KEPT, HARDWARE,
        )  # fmt: skip
        of_gate = magnitude_bits(d * up * slope)
        of_both = of_gate
        if GATED:
            of_up = magnitude_bits(d * value)
            of_both = tl.maximum(of_gate, of_up)
        cols_ptr, act_ptr = out_ptr + cols_at, out_ptr + act_at
        max_into(of_both, out_ptr, out_ptr, cols_ptr, rows, cols, row_count, features, TENSOR, ROWS, False)
        max_into(of_gate, out_ptr, out_ptr, cols_ptr, rows, cols, row_count, features, False, False, COLS)
        if GATED:
            max_into(of_up, out_ptr, out_ptr, cols_ptr + features, rows, cols, row_count, features, False, False, COLS)
        of_act = magnitude_bits(value * up)
        max_into(of_act, act_ptr, act_ptr, act_ptr, rows, cols, row_count, features, ACT_TENSOR, False, ACT_COLS)


@jit
def _three(  # type: ignore[no-untyped-def]
    d_ptr, x_ptr, inv_ptr, out_ptr, rows, cols, first_col, d_row_stride, d_col_stride, row_stride, row_count, features,
    KIND: tl.constexpr, GATED: tl.constexpr, HIGH: tl.constexpr, KEPT: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """``d_gate``, ``d_up`` (if GATED) and ``act`` of some rows, the first two stored if HIGH; zeros outside."""
    inside = (rows < row_count)[:, None] & (cols < features)[None, :]
    d, up, value, slope = _load_backward(
        d_ptr, x_ptr, inv_ptr, rows, cols, first_col, d_row_stride, d_col_stride, row_stride, row_count, features,
        inside, KIND, GATED, KEPT, HARDWARE,
    )  # fmt: skip
    d_gate, d_up = d * up * slope, d * value
    if HIGH:
        _store_high(d_gate, out_ptr, rows, cols, (2 if GATED else 1) * features, inside)
        if GATED:
            _store_high(d_up, out_ptr, rows, cols + features, 2 * features, inside)
    return d_gate, d_up, value * up


@jit
def _store_sums(x, sums_ptr, tile, cols, features):  # type: ignore[no-untyped-def]
    """Sums over the rows of a tile, which is the ``tile``-th from above, into ``sums`` [., features]."""
    tl.store(sums_ptr + tile * features + cols, tl.sum(x, 0), mask=cols < features)


@jit
def gated_backward_words_kernel(  # type: ignore[no-untyped-def]
    d_ptr, x_ptr, inv_ptr, amax_ptr, known_ptr, staging_ptr, act_known_ptr, act_staging_ptr,
    row_codes_ptr, row_inv_ptr, col_codes_ptr, col_inv_ptr, act_codes_ptr, act_inv_ptr, out_ptr, sums_ptr,
    row_count, features, d_row_stride, d_col_stride, row_stride, across, row_width, col_width,
    KIND: tl.constexpr, GATED: tl.constexpr, ROW: tl.constexpr, COL: tl.constexpr, ACT: tl.constexpr,
    HIGH: tl.constexpr, SUMS: tl.constexpr, ROW_E5M2: tl.constexpr, COL_E5M2: tl.constexpr, ACT_E5M2: tl.constexpr,
    ROW_MAX: tl.constexpr, COL_MAX: tl.constexpr, ACT_MAX: tl.constexpr,
    POW2: tl.constexpr, MARGIN: tl.constexpr,
    DELAYED: tl.constexpr, KEPT: tl.constexpr, HARDWARE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """A tile of ``d_gate``, ``d_up`` and ``act`` a program; three tiles read, up to five or seven written. SUMS: those
    of ``d_gate`` over the tile's rows too.
    """
    first_row, first_col = words_origin(across, ROWS, COLS, GROUP)
    rows, cols = first_row + 4 * tl.arange(0, ROWS // 4), first_col + tl.arange(0, COLS)
    row_count, features = hidden(row_count, ROWS), hidden(features, COLS)
    width = 2 * features if GATED else hidden(row_width, COLS)
    g0, u0, a0 = _three(
        d_ptr, x_ptr, inv_ptr, out_ptr, rows, cols, first_col, d_row_stride, d_col_stride, row_stride, row_count,
        features, KIND, GATED, HIGH, KEPT, HARDWARE,
    )  # fmt: skip
    g1, u1, a1 = _three(
        d_ptr, x_ptr, inv_ptr, out_ptr, rows + 1, cols, first_col, d_row_stride, d_col_stride, row_stride, row_count,
        features, KIND, GATED, HIGH, KEPT, HARDWARE,
    )  # fmt: skip
    g2, u2, a2 = _three(
        d_ptr, x_ptr, inv_ptr, out_ptr, rows + 2, cols, first_col, d_row_stride, d_col_stride, row_stride, row_count,
        features, KIND, GATED, HIGH, KEPT, HARDWARE,
    )  # fmt: skip
    g3, u3, a3 = _three(
        d_ptr, x_ptr, inv_ptr, out_ptr, rows + 3, cols, first_col, d_row_stride, d_col_stride, row_stride, row_count,
        features, KIND, GATED, HIGH, KEPT, HARDWARE,
    )  # fmt: skip
    if DELAYED:
        if ROW or COL:
            of_d = largest_bits(g0, g1, g2, g3)
            if GATED:
                of_d = tl.maximum(of_d, largest_bits(u0, u1, u2, u3))
            stage(of_d, staging_ptr)
        if ACT:
            stage(largest_bits(a0, a1, a2, a3), act_staging_ptr)
    if SUMS:
        _store_sums((g0 + g1) + (g2 + g3), sums_ptr, first_row // ROWS, cols, features)
    quantize_four(
        g0, g1, g2, g3, rows, cols, first_row, first_col, row_count, features, amax_ptr, known_ptr,
        row_codes_ptr, row_inv_ptr, col_codes_ptr, col_inv_ptr, width, features if GATED else width, col_width,
        col_width, ROW, COL, ROW_E5M2, COL_E5M2, ROW_MAX, COL_MAX, POW2, MARGIN, DELAYED, True, HARDWARE,
    )  # fmt: skip
    if GATED:  # codes of rows are not filled then: half of their width is a multiple already
        quantize_four(
            u0, u1, u2, u3, rows, cols + features, first_row, first_col + features, row_count, 2 * features, amax_ptr,
            known_ptr, row_codes_ptr, row_inv_ptr, col_codes_ptr, col_inv_ptr, width, width, col_width,
            col_width, ROW, COL, ROW_E5M2, COL_E5M2, ROW_MAX, COL_MAX, POW2, MARGIN, DELAYED, True, HARDWARE,
        )  # fmt: skip
    quantize_four(
        a0, a1, a2, a3, rows, cols, first_row, first_col, row_count, features, amax_ptr + 1, act_known_ptr,
        act_codes_ptr, act_inv_ptr, act_codes_ptr, act_inv_ptr, features, features, col_width,
        col_width, False, ACT, ACT_E5M2, ACT_E5M2, ACT_MAX, ACT_MAX, POW2, MARGIN, DELAYED, True, HARDWARE,
    )  # fmt: skip


@jit
def _store_half(  # type: ignore[no-untyped-def]
    x, rows, cols, first_row, first_col, row_count, stop, row_stop, row_width, amax_ptr, cols_at,
    row_codes_ptr, row_inv_ptr, col_codes_ptr, col_inv_ptr, col_width,
    ROW: tl.constexpr, COL: tl.constexpr, ROW_E5M2: tl.constexpr, COL_E5M2: tl.constexpr,
    ROW_MAX: tl.constexpr, COL_MAX: tl.constexpr, POW2: tl.constexpr, MARGIN: tl.constexpr,
    GROUP_ROWS: tl.constexpr, GROUP_COLS: tl.constexpr, HARDWARE: tl.constexpr, TILE: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    """A tile of one half of ``d_gate_up``, at its place in the whole; the half ends at column ``stop``, its codes of
    rows, with filler, at ``row_stop``.
    """
    if ROW:
        quantize_tile(
            x, rows, cols, first_row, first_col, row_count, stop, amax_ptr, row_codes_ptr, row_inv_ptr,
            row_width, row_stop, ROW_E5M2, ROW_MAX, POW2, MARGIN, GROUP_ROWS, GROUP_COLS, HARDWARE, TILE, SCALED,
        )  # fmt: skip
    if COL:
        quantize_tile(
            tl.trans(x), cols, rows, first_col, first_row, stop, row_count, amax_ptr + cols_at, col_codes_ptr,
            col_inv_ptr, col_width, col_width, COL_E5M2, COL_MAX, POW2, MARGIN, GROUP_ROWS, GROUP_COLS, HARDWARE, TILE,
            SCALED,
        )  # fmt: skip


@jit
def gated_backward_tiles_kernel(  # type: ignore[no-untyped-def]
    d_ptr, x_ptr, inv_ptr, amax_ptr,
    row_codes_ptr, row_inv_ptr, col_codes_ptr, col_inv_ptr, act_codes_ptr, act_inv_ptr, out_ptr, sums_ptr,
    row_count, features, d_row_stride, d_col_stride, row_stride, cols_at, act_at, row_width, col_width,
    KIND: tl.constexpr, GATED: tl.constexpr, ROW: tl.constexpr, COL: tl.constexpr, ACT: tl.constexpr,
    HIGH: tl.constexpr, SUMS: tl.constexpr, ROW_E5M2: tl.constexpr, COL_E5M2: tl.constexpr, ACT_E5M2: tl.constexpr,
    ROW_MAX: tl.constexpr, COL_MAX: tl.constexpr, ACT_MAX: tl.constexpr,
    POW2: tl.constexpr, MARGIN: tl.constexpr, GROUP_ROWS: tl.constexpr, GROUP_COLS: tl.constexpr,
    KEPT: tl.constexpr, HARDWARE: tl.constexpr, TILE: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """As ``gated_backward_words_kernel``, one tile after the other, with scales for rows and columns, which
    ``scales_kernel`` has made (SCALED), or for blocks. From the last to the first, as ``quantize_tiles_kernel``.
    """
    first_row, first_col = tile_origin(tl.num_programs(0) - 1 - tl.program_id(0), features, TILE)
    rows, cols = tile_offsets(first_row, first_col, TILE)
    row_count, features = hidden(row_count, TILE), hidden(features, TILE)
    width = 2 * features if GATED else hidden(row_width, TILE)
    d_gate, d_up, act = _three(
        d_ptr, x_ptr, inv_ptr, out_ptr, rows, cols, first_col, d_row_stride, d_col_stride, row_stride, row_count,
        features, KIND, GATED, HIGH, KEPT, HARDWARE,
    )  # fmt: skip
    if SUMS:
        _store_sums(d_gate, sums_ptr, first_row // TILE, cols, features)
    _store_half(
        d_gate, rows, cols, first_row, first_col, row_count, features, features if GATED else width, width,
        amax_ptr, cols_at, row_codes_ptr, row_inv_ptr, col_codes_ptr, col_inv_ptr, col_width,
        ROW, COL, ROW_E5M2, COL_E5M2, ROW_MAX, COL_MAX, POW2, MARGIN, GROUP_ROWS, GROUP_COLS, HARDWARE, TILE, SCALED,
    )  # fmt: skip
    if GATED:  # codes of rows are not filled then: half of their width is a multiple already
        _store_half(
            d_up, rows, cols + features, first_row, first_col + features, row_count, 2 * features, width,
            width, amax_ptr, cols_at, row_codes_ptr, row_inv_ptr, col_codes_ptr, col_inv_ptr, col_width,
            ROW, COL, ROW_E5M2, COL_E5M2, ROW_MAX, COL_MAX, POW2, MARGIN, GROUP_ROWS, GROUP_COLS, HARDWARE, TILE,
            SCALED,
        )  # fmt: skip
    if ACT:
        quantize_tile(
            tl.trans(act), cols, rows, first_col, first_row, features, row_count, amax_ptr + act_at, act_codes_ptr,
            act_inv_ptr, col_width, col_width, ACT_E5M2, ACT_MAX, POW2, MARGIN, GROUP_ROWS, GROUP_COLS, HARDWARE, TILE,
            SCALED,
        )  # fmt: skip
