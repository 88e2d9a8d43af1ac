"""The Triton kernels of ``norm.py`` (formula, reference, dispatch); ``_norm_launch.py`` starts them."""

from __future__ import annotations

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

_INTERPRETED = constexpr(INTERPRETED)


@jit
def _stored(y, ptr):  # type: ignore[no-untyped-def]
    """``(y in the dtype behind ptr, that value in FP32)``: round to nearest even."""
    if _INTERPRETED and ptr.dtype.element_ty == tl.bfloat16:  # whose own rounding is not the hardware's
        bits = y.to(tl.uint32, bitcast=True)
        rounded = ((bits >> 16) + (((bits & 0xFFFF) + 0x7FFF + ((bits >> 16) & 1)) >> 16)).to(tl.uint16)
        rounded = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded).to(tl.uint16)
        narrow = rounded.to(tl.bfloat16, bitcast=True)
        value = (rounded.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        narrow = y.to(ptr.dtype.element_ty)
        value = narrow.to(tl.float32)
    return narrow, value


@jit
def _block_rows(step, row_count, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows of a program's ``step``-th block: blocks go round the programs. int64: offsets may pass 2**31."""
    return (step.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * ROWS + tl.arange(0, ROWS)


@jit
def _factor(weight, OFFSET: tl.constexpr):  # type: ignore[no-untyped-def]
    """What the normalised value is multiplied by."""
    if OFFSET != 0.0:
        return as_fp32(weight) + OFFSET
    else:
        return as_fp32(weight)


@jit
def _mean(x, count):  # type: ignore[no-untyped-def]
    """Mean of each row [ROWS, 1], whose elements beyond ``count`` are zeros."""
    total = tl.sum(x, 1)[:, None]
    return tl.div_rn(total, tl.zeros_like(total) + count.to(tl.float32))


@jit
def _row_scale(  # type: ignore[no-untyped-def]
    bits, FMT_MAX: tl.constexpr, POW2: tl.constexpr, MARGIN: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """``(scale, scale_inv)`` of the groups along each row, [ROWS, groups]: whole rows, or blocks of GROUP."""
    grouped = bits if GROUP == 0 else tl.reshape(bits, [ROWS, COLS // GROUP, GROUP])
    largest = tl.max(bits, 1)[:, None] if GROUP == 0 else tl.max(grouped, 2)
    return scale_of(largest, FMT_MAX * MARGIN, POW2, GROUP == 32)


@jit
def _spread(scale, GROUP: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):  # type: ignore[no-untyped-def]
    """A value per group -> a block that broadcasts against [ROWS, COLS]."""
    if GROUP == 0:
        return scale
    else:
        return tl.reshape(tl.broadcast_to(scale[:, :, None], [ROWS, COLS // GROUP, GROUP]), [ROWS, COLS])


@jit
def norm_forward_kernel(  # type: ignore[no-untyped-def]
    x_ptr, residual_ptr, weight_ptr, bias_ptr, known_ptr, staging_ptr, found_ptr, column_ptr,
    h_ptr, y_ptr, inverse_std_ptr, mean_ptr, codes_ptr, scale_inv_ptr,
    row_count, col_count, row_stride, residual_stride, width, steps,
    RESIDUAL: tl.constexpr, EPS: tl.constexpr, LAYER: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    OFFSET: tl.constexpr, CAST_FIRST: tl.constexpr,
    CODES: tl.constexpr, TENSOR: tl.constexpr, DELAYED: tl.constexpr, COLUMN: tl.constexpr,
    E5M2: tl.constexpr, FMT_MAX: tl.constexpr, POW2: tl.constexpr, MARGIN: tl.constexpr, GROUP: tl.constexpr,
    HARDWARE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Whole rows in a program, ``steps`` blocks of them; maxima of columns stay in its registers until its end.

    y does not depend on which codes are asked for, to the bit. RESIDUAL: what is normalised is h = x + residual, as it
    is stored.
    TENSOR: ``found`` gets the amax of y. CODES of a tensor that has one scale are made here only if DELAYED; else, and
    where the amax of earlier steps is no good, ``cast_rows_kernel`` makes them.
    """
    cols = tl.arange(0, COLS)
    row_count, col_count = hidden(row_count, ROWS), hidden(col_count, COLS)
    in_row = (cols < col_count)[None, :]
    if WEIGHT:
        weight = tl.load(weight_ptr + cols[None, :], mask=in_row, other=0.0)
    if BIAS:
        bias = tl.load(bias_ptr + cols[None, :], mask=in_row, other=0.0)
    if DELAYED:
        zero = tl.zeros([1, 1], tl.int32)
        scale, scale_inv = scale_of(tl.load(known_ptr + zero), FMT_MAX * MARGIN, POW2, False)
        if CODES:
            tl.store(scale_inv_ptr + zero, scale_inv, mask=zero + tl.program_id(0) == 0)
    largest = tl.zeros([ROWS, COLS], tl.int32)
    for step in range(steps):
        rows = _block_rows(step + tl.program_id(1), row_count, ROWS)
        is_row = (rows < row_count)[:, None]
        inside = is_row & in_row
        x = as_fp32(tl.load(x_ptr + rows[:, None] * row_stride + cols[None, :], mask=inside, other=0.0))
        if RESIDUAL:
            residual = tl.load(residual_ptr + rows[:, None] * residual_stride + cols[None, :], mask=inside, other=0.0)
            narrow, x = _stored(x + as_fp32(residual), h_ptr)
            tl.store(h_ptr + rows[:, None] * col_count + cols[None, :], narrow, mask=inside)
        if LAYER:
            mean = _mean(x, col_count)
            x = tl.where(inside, x - mean, 0.0)
            tl.store(mean_ptr + rows[:, None], mean, mask=is_row)
        square = _mean(x * x, col_count) + EPS
        inverse_std = tl.div_rn(tl.zeros_like(square) + 1.0, tl.sqrt_rn(square))
        tl.store(inverse_std_ptr + rows[:, None], inverse_std, mask=is_row)
        y = x * inverse_std
        if CAST_FIRST:
            y = _stored(y, x_ptr)[1]  # h has the dtype of x, or FP32, for which this is not asked
        if WEIGHT:
            y = y * _factor(weight, OFFSET)
        if BIAS:
            y = y + as_fp32(bias)
        narrow, y = _stored(tl.where(inside, y, 0.0), y_ptr)  # filler stays zero beside a NaN
        tl.store(y_ptr + rows[:, None] * col_count + cols[None, :], narrow, mask=inside)
        bits = magnitude_bits(y)
        if CODES:
            if not DELAYED:
                scale, scale_inv = _row_scale(bits, FMT_MAX, POW2, MARGIN, GROUP, ROWS, COLS)
                if GROUP == 0:
                    tl.store(scale_inv_ptr + rows[:, None], scale_inv, mask=is_row)
                else:
                    groups = tl.cdiv(col_count, GROUP)
                    group = tl.arange(0, COLS // GROUP)[None, :]
                    tl.store(scale_inv_ptr + rows[:, None] * groups + group, scale_inv, mask=is_row & (group < groups))
            codes = encode(y, _spread(scale, GROUP, ROWS, COLS), FMT_MAX, E5M2, HARDWARE)
            tl.store(codes_ptr + rows[:, None] * width + cols[None, :], codes, mask=is_row & (cols < width)[None, :])
        else:  # stores nothing: Triton lays y out for its widest store, and the layout is the order of the sums
            tl.store(
                codes_ptr + rows[:, None] * width + cols[None, :], (bits >> 20).to(tl.uint8),
                mask=is_row & (cols < -width)[None, :],
            )  # fmt: skip
        if TENSOR or COLUMN:
            largest = tl.maximum(largest, bits)
    if TENSOR or COLUMN:
        column = tl.max(largest, 0)
        if COLUMN:
            tl.atomic_max(column_ptr + cols, column, mask=cols < col_count, sem="relaxed")
        if TENSOR:
            amax = tl.max(column, 0)
            if DELAYED:
                tl.atomic_max(staging_ptr, amax, sem="relaxed")
            tl.atomic_max(found_ptr, amax, sem="relaxed")


@jit
def cast_rows_kernel(  # type: ignore[no-untyped-def]
    y_ptr, known_ptr, found_ptr, codes_ptr, scale_inv_ptr,
    row_count, col_count, width, steps,
    E5M2: tl.constexpr, FMT_MAX: tl.constexpr, POW2: tl.constexpr, MARGIN: tl.constexpr,
    UNLESS_KNOWN: tl.constexpr, HARDWARE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Codes of y, contiguous, with one scale, from the amax that the norm found; nothing to do where the norm could
    take that of earlier steps.
    """
    if UNLESS_KNOWN and is_known(known_ptr):
        return
    cols = tl.arange(0, COLS)
    row_count, col_count = hidden(row_count, ROWS), hidden(col_count, COLS)
    zero = tl.zeros([1, 1], tl.int32)
    scale, scale_inv = scale_of(tl.load(found_ptr + zero), FMT_MAX * MARGIN, POW2, False)
    tl.store(scale_inv_ptr + zero, scale_inv, mask=zero + tl.program_id(0) == 0)
    for step in range(steps):
        rows = _block_rows(step + tl.program_id(1), row_count, ROWS)
        is_row = (rows < row_count)[:, None]
        inside = is_row & (cols < col_count)[None, :]
        y = as_fp32(tl.load(y_ptr + rows[:, None] * col_count + cols[None, :], mask=inside, other=0.0))
        codes = encode(y, scale, FMT_MAX, E5M2, HARDWARE)
        tl.store(codes_ptr + rows[:, None] * width + cols[None, :], codes, mask=is_row & (cols < width)[None, :])


@jit
def norm_backward_kernel(  # type: ignore[no-untyped-def]
    dy_ptr, dh_ptr, x_ptr, weight_ptr, inverse_std_ptr, mean_ptr, dx_ptr, partial_ptr,
    row_count, col_count, dy_stride, dh_stride, x_stride, steps,
    DH: tl.constexpr, LAYER: tl.constexpr, WEIGHT: tl.constexpr, OFFSET: tl.constexpr, CAST_FIRST: tl.constexpr,
    DWEIGHT: tl.constexpr, DBIAS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Gradient dx of ``steps`` blocks of rows; sums for dweight and dbias: ``partial`` [programs, 1 or 2, D]. DH: x has
    readers beside the norm, whose gradient dh is added.
    """
    cols = tl.arange(0, COLS)
    row_count, col_count = hidden(row_count, ROWS), hidden(col_count, COLS)
    in_row = (cols < col_count)[None, :]
    if WEIGHT:
        weight = tl.load(weight_ptr + cols[None, :], mask=in_row, other=0.0)
    dweight = tl.zeros([ROWS, COLS], tl.float32)
    dbias = tl.zeros([ROWS, COLS], tl.float32)
    for step in range(steps):
        rows = _block_rows(step + tl.program_id(1), row_count, ROWS)
        is_row = (rows < row_count)[:, None]
        inside = is_row & in_row
        x = as_fp32(tl.load(x_ptr + rows[:, None] * x_stride + cols[None, :], mask=inside, other=0.0))
        dy = as_fp32(tl.load(dy_ptr + rows[:, None] * dy_stride + cols[None, :], mask=inside, other=0.0))
        inverse_std = tl.load(inverse_std_ptr + rows[:, None], mask=is_row, other=0.0)
        if LAYER:
            x = x - tl.load(mean_ptr + rows[:, None], mask=is_row, other=0.0)
        normal = tl.where(inside, x * inverse_std, 0.0)
        if DBIAS:
            dbias += dy
        if DWEIGHT:
            if CAST_FIRST:
                dweight += dy * _stored(normal, x_ptr)[1]
            else:
                dweight += dy * normal
        if WEIGHT:
            dy = dy * _factor(weight, OFFSET)
        along = _mean(dy * normal, col_count)
        if LAYER:
            dy = dy - _mean(dy, col_count)
        dx = (dy - normal * along) * inverse_std
        if DH:
            dx += as_fp32(tl.load(dh_ptr + rows[:, None] * dh_stride + cols[None, :], mask=inside, other=0.0))
        tl.store(dx_ptr + rows[:, None] * col_count + cols[None, :], _stored(dx, dx_ptr)[0], mask=inside)
    if DWEIGHT or DBIAS:
        PARTS: tl.constexpr = 2 if DWEIGHT and DBIAS else 1
        partial_ptr += tl.program_id(0).to(tl.int64) * col_count * PARTS
        if DWEIGHT:
            tl.store(partial_ptr + cols, tl.sum(dweight, 0), mask=cols < col_count)
        if DBIAS:
            tl.store(partial_ptr + (PARTS - 1) * col_count + cols, tl.sum(dbias, 0), mask=cols < col_count)
