"""The two kernels of ``adam.py``: the numbers of a step, one parameter a program; then all elements, one launch a kind.

What differs from tensor to tensor is in a table on the device, a row a parameter: addresses, elements, and which of
the optimizer's groups it is in. A program of the second kernel reads which row and which chunk of it are its own. Its
blocks of 128 lie in its registers, so it knows their new amax before it stores a code: one pass, and nothing in FP32
anywhere but there.
"""

from __future__ import annotations

from acceler8.formats import BLOCK_AMAX_FLOOR
from acceler8.kernels._adam_math import (
    EPS_LEAST,
    EPS_MOST,
    FACTOR_LEAST,
    FACTOR_MOST,
    LIFT,
    PTX,
    adam_ratio,
    quotient,
)
from acceler8.kernels._triton import (
    HAVE_TRITON,
    as_fp32,
    constexpr,
    decode_e4m3,
    encode,
    jit,
    magnitude_bits,
    rounded_to,
    saturate,
    tl,
)
from acceler8.kernels._ue5m3 import decode_ue5m3, encode_ue5m3

HEADER = 2  # int64 before the rows: addresses of found_inf and grad_scale, 0 for none
COLUMNS = (
    *("param", "grad", "exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale", "master", "master_scale"),
    *("step", "grad_scale", "numel", "group", "number"),
)
GROUP_COLUMNS = ("lr", "lr_address", "beta1", "beta2", "eps", "weight_decay", "sign", "decoupled")
NUMBERS = 16  # int32 a parameter, in the order in which the first kernel stores them; a cache line

# How a tensor is stored, as the kernel's constants say it.
FP32, BF16, FP16, FP8 = 0, 1, 2, 3
NONE, STOCHASTIC, MASTER_FP32, REMAINDER, MASTER_FP16 = 0, 1, 2, 3, 4

_HEADER, _COLUMNS, _GROUP_COLUMNS = constexpr(HEADER), constexpr(len(COLUMNS)), constexpr(len(GROUP_COLUMNS))
(
    _PARAM_AT,
    _GRAD_AT,
    _FIRST_AT,
    _,
    _SECOND_AT,
    _,
    _MASTER_AT,
    _MASTER_SCALE_AT,
    _STEP_AT,
    _GRAD_SCALE_AT,
    _NUMEL_AT,
    _GROUP_AT,
    _NUMBER_AT,
) = (constexpr(column) for column in range(len(COLUMNS)))
_NUMBERS, _FLOOR = constexpr(NUMBERS), constexpr(BLOCK_AMAX_FLOOR)
_BF16, _FP16, _FP8 = constexpr(BF16), constexpr(FP16), constexpr(FP8)
_NONE, _STOCHASTIC, _MASTER_FP32 = constexpr(NONE), constexpr(STOCHASTIC), constexpr(MASTER_FP32)
_REMAINDER, _MASTER_FP16 = constexpr(REMAINDER), constexpr(MASTER_FP16)
_DTYPES = constexpr((tl.float32, tl.bfloat16, tl.float16, tl.uint8) if HAVE_TRITON else None)
_MASTER_DTYPES = constexpr((tl.int8, tl.int8, tl.float32, tl.int16, tl.float16) if HAVE_TRITON else None)
_F32 = constexpr(tl.float32 if HAVE_TRITON else None)
_U8 = constexpr(tl.uint8 if HAVE_TRITON else None)
_FP16_LEAST = constexpr(2.0**-24)
_PTX = constexpr(PTX)
_EPS_LEAST, _EPS_MOST = constexpr(EPS_LEAST), constexpr(EPS_MOST)
_FACTOR_LEAST, _FACTOR_MOST, _LIFT = constexpr(FACTOR_LEAST), constexpr(FACTOR_MOST), constexpr(2.0**-LIFT)
# lowbias32's and the seed's factors, as the signed numbers that int32 arithmetic takes
_FIRST, _SECOND, _GOLDEN = constexpr(0x7FEB352D), constexpr(0x846CA68B - 2**32), constexpr(0x9E3779B9 - 2**32)


@jit
def _hash32(x):  # type: ignore[no-untyped-def]
    """lowbias32, as ``formats.rounding`` has it."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * _FIRST
    x = (x ^ ((x >> 15) & 0x1FFFF)) * _SECOND
    return x ^ ((x >> 16) & 0xFFFF)


@jit
def _power(beta, exponent):  # type: ignore[no-untyped-def]
    """``beta ** exponent`` in FP64 by squaring, the products of ``adam.power`` in its order."""
    result, base = beta * 0.0 + 1.0, beta
    for _ in range(31):
        result = tl.where((exponent & 1) != 0, result * base, result)
        base = base * base
        exponent = exponent >> 1
    return result


@jit
def _bits(x):  # type: ignore[no-untyped-def]
    return x.to(tl.float32).to(tl.int32, bitcast=True)


@jit
def adam_numbers_kernel(table_ptr, numbers_ptr, row_count):  # type: ignore[no-untyped-def]
    """Advance one parameter's step, unless a gradient was not finite, and store the FP32 numbers of its update."""
    row_index = tl.program_id(0)
    row = table_ptr + _HEADER + row_index * _COLUMNS
    found_inf, grad_scale = tl.load(table_ptr), tl.load(table_ptr + 1)
    found = tl.load(found_inf.to(tl.pointer_type(tl.float32)), mask=found_inf != 0, other=0.0)
    divisor = tl.load(grad_scale.to(tl.pointer_type(tl.float32)), mask=grad_scale != 0, other=1.0)
    step_ptr = tl.load(row + _STEP_AT).to(tl.pointer_type(tl.float32))
    number = tl.load(row + _NUMBER_AT).to(tl.int32)
    group = table_ptr + _HEADER + row_count * _COLUMNS + tl.load(row + _GROUP_AT) * _GROUP_COLUMNS
    values = group.to(tl.pointer_type(tl.float64), bitcast=True)
    lr_address = tl.load(group + 1)
    lr = tl.load(lr_address.to(tl.pointer_type(tl.float32)), mask=lr_address != 0, other=0.0).to(tl.float64)
    lr = tl.where(lr_address != 0, lr, tl.load(values))
    beta1, beta2, eps = tl.load(values + 2), tl.load(values + 3), tl.load(values + 4)
    weight_decay, sign, decoupled = tl.load(values + 5), tl.load(values + 6), tl.load(values + 7)

    is_skipped = found != 0.0
    step = tl.load(step_ptr) + tl.where(is_skipped, 0.0, 1.0)
    tl.store(step_ptr, step)
    n = step.to(tl.int32)
    one = beta1 * 0.0 + 1.0
    correction1, correction2 = one - _power(beta1, n), one - _power(beta2, n)
    out = numbers_ptr + row_index * _NUMBERS
    tl.store(out + 0, tl.where(is_skipped, 1, 0))
    tl.store(out + 1, _hash32(number * _GOLDEN + n))
    tl.store(out + 2, _bits(sign / divisor.to(tl.float64)))
    tl.store(out + 3, _bits(one - beta1))
    tl.store(out + 4, _bits(beta2))
    tl.store(out + 5, _bits(one - beta2))
    tl.store(out + 6, _bits(eps))
    factor = one / tl.sqrt(correction2)
    tl.store(out + 7, _bits(factor))
    is_quick = (eps >= _EPS_LEAST) & (eps <= _EPS_MOST) & (factor >= _FACTOR_LEAST) & (factor <= _FACTOR_MOST)
    tl.store(out + 11, _bits(tl.where(is_quick, factor * _LIFT, float("nan"))))
    tl.store(out + 8, _bits(lr / correction1))
    tl.store(out + 9, _bits(tl.where(decoupled != 0.0, one - lr * weight_decay, one)))
    tl.store(out + 10, _bits(tl.where(decoupled != 0.0, one * 0.0, weight_decay)))


@jit
def _at(row, COLUMN: tl.constexpr, DTYPE: tl.constexpr, start, ALIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where element ``start`` of a column's tensor is. ALIGNED: it and the number of elements are multiples of 16."""
    pointer = tl.load(row + COLUMN).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer + start


@jit
def _side_by_side(pointer, at, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Addresses of which a thread takes WIDTH neighbours, 16 bytes of the widest tensor. Left alone it would take 16
    bytes of each, and pass most numbers on to another thread, through shared memory.
    """
    return tl.max_contiguous(pointer + at, [1, WIDTH])


@jit
def _block_scale(amax_bits, MAX: tl.constexpr, POW2: tl.constexpr):  # type: ignore[no-untyped-def]
    """``(scale, scale_inv)`` of ``formats.blocks``, bit for bit."""
    is_finite = amax_bits < 0x7F800000
    amax = amax_bits.to(tl.float32, bitcast=True)
    amax = tl.where(is_finite & (amax > _FLOOR), amax, _FLOOR)
    if POW2:
        exponent = amax.to(tl.int32, bitcast=True) >> 23
        scale = ((268 - exponent) << 23).to(tl.float32, bitcast=True)
        scale_inv = ((exponent - 14) << 23).to(tl.float32, bitcast=True)
    else:
        most = tl.zeros_like(amax) + MAX
        scale, scale_inv = quotient(most, amax), quotient(amax, most)
    return tl.where(is_finite, scale, 1.0), tl.where(is_finite, scale_inv, 1.0)


@jit
def _to_fp16(x, scale, MAX: tl.constexpr, UNSIGNED: tl.constexpr):  # type: ignore[no-untyped-def]
    if _PTX:  # ``encode`` says why this is NaN where x is not finite; two instructions, and one to clamp
        y = tl.clamp(tl.fma(x, tl.zeros_like(x), x * scale), -MAX, MAX, propagate_nan=tl.PropagateNan.ALL)
    else:
        y = saturate(x, x * scale, MAX)
    if UNSIGNED:
        y = tl.where((x > 0.0) & (y < _FP16_LEAST), _FP16_LEAST, y)
    return y.to(tl.float16)


@jit
def _larger(a, b):  # type: ignore[no-untyped-def]
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@jit
def _amax_bits(x):  # type: ignore[no-untyped-def]
    """Bits of the largest magnitude of each block, NaN above infinity."""
    if _PTX:  # the magnitude costs no instruction of its own there
        return tl.reduce(tl.abs(x), 1, _larger).to(tl.int32, bitcast=True)
    else:
        return tl.max(magnitude_bits(x), 1)


@jit
def _round_stochastic(x, bits16):  # type: ignore[no-untyped-def]
    """FP32 to BF16, up with the probability of the part that is cut."""
    if _PTX:  # infinity has no bits to round
        up = (_with_one_nan(x) + bits16) & -0x10000
        return (up >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        up = ((x.to(tl.int32, bitcast=True) + bits16) & -0x10000).to(tl.float32, bitcast=True)
        return rounded_to(tl.where(magnitude_bits(x) < 0x7F800000, up, x), tl.bfloat16)


@jit
def _with_one_nan(x):  # type: ignore[no-untyped-def]
    """The bits of a result of FP32 arithmetic, NaN as 0x7FC00000, so that rounding up doesn't carry into its sign."""
    bits = x.to(tl.int32, bitcast=True)
    if _PTX:  # the one NaN of arithmetic there is the largest integer
        return tl.minimum(bits, 0x7FC00000)
    else:
        return tl.where(magnitude_bits(x) > 0x7F800000, 0x7FC00000, bits)


@jit
def _load_moment(  # type: ignore[no-untyped-def]
    pointers, scale_pointer, inside, blocks, block_inside,
    FORMAT: tl.constexpr, UNSIGNED: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """A moment in FP32, zeros outside."""
    if FORMAT == _FP8:
        codes = tl.load(pointers, mask=inside, other=0)
        value = decode_ue5m3(codes) if UNSIGNED else decode_e4m3(codes, HARDWARE)
    else:
        value = as_fp32(tl.load(pointers, mask=inside, other=0.0))
    if FORMAT == _FP8 or FORMAT == _FP16:  # noqa: SIM109  # no tuples in kernels
        value = value * tl.load(scale_pointer + blocks, mask=block_inside, other=0.0)[:, None]
    return value


@jit
def _store_moment(  # type: ignore[no-untyped-def]
    x, bits16, pointers, scale_pointer, inside, blocks, block_inside,
    FORMAT: tl.constexpr, UNSIGNED: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    if FORMAT == _FP8:
        MAX: tl.constexpr = 61440.0 if UNSIGNED else 448.0
        scale, scale_inv = _block_scale(_amax_bits(x), MAX, False)
        codes = encode_ue5m3(x, scale[:, None]) if UNSIGNED else encode(x, scale[:, None], MAX, False, HARDWARE)
        tl.store(pointers, codes, mask=inside)
        tl.store(scale_pointer + blocks, scale_inv, mask=block_inside)
    elif FORMAT == _FP16:
        scale, scale_inv = _block_scale(_amax_bits(x), 65504.0, False)
        tl.store(pointers, _to_fp16(x, scale[:, None], 65504.0, UNSIGNED), mask=inside)
        tl.store(scale_pointer + blocks, scale_inv, mask=block_inside)
    elif FORMAT == _BF16:
        value = _round_stochastic(x, bits16) if UNSIGNED else rounded_to(x, tl.bfloat16)
        tl.store(pointers, value, mask=inside)
    else:
        tl.store(pointers, x, mask=inside)


@jit
def _load_weight(param, master, master_scale, inside, blocks, block_inside, MASTER: tl.constexpr):  # type: ignore[no-untyped-def]
    """The weight to update, in FP32."""
    if MASTER == _REMAINDER:
        high = tl.load(param, mask=inside, other=0).to(tl.int32)
        weight = ((high << 16) + tl.load(master, mask=inside, other=0).to(tl.int32)).to(tl.float32, bitcast=True)
    elif MASTER == _MASTER_FP32 or MASTER == _MASTER_FP16:  # noqa: SIM109  # no tuples in kernels
        weight = as_fp32(tl.load(master, mask=inside, other=0.0))
        if MASTER == _MASTER_FP16:
            weight = weight * tl.load(master_scale + blocks, mask=block_inside, other=0.0)[:, None]
    else:
        weight = as_fp32(tl.load(param, mask=inside, other=0.0))
    return weight


@jit
def _store_weight(  # type: ignore[no-untyped-def]
    weight, bits16, param, master, master_scale, inside, blocks, block_inside,
    PARAM: tl.constexpr, MASTER: tl.constexpr,
):  # fmt: skip
    if MASTER == _REMAINDER:
        raw = _with_one_nan(weight)
        tl.store(param, ((raw + 0x8000) >> 16).to(tl.int16), mask=inside)
        tl.store(master, raw.to(tl.int16), mask=inside)
    else:
        if MASTER == _MASTER_FP32:
            tl.store(master, weight, mask=inside)
        if MASTER == _MASTER_FP16:
            weight = tl.where(inside, weight, 0.0)
            scale, scale_inv = _block_scale(_amax_bits(weight), 32768.0, True)
            codes = _to_fp16(weight, scale[:, None], 32768.0, False)
            tl.store(master, codes, mask=inside)
            tl.store(master_scale + blocks, scale_inv, mask=block_inside)
            weight = as_fp32(codes) * scale_inv[:, None]
        value = _round_stochastic(weight, bits16) if MASTER == _STOCHASTIC else rounded_to(weight, PARAM)
        tl.store(param, value, mask=inside)


@jit
def _load_gradient(  # type: ignore[no-untyped-def]
    pointers, row, first_block, inside, blocks, block_inside, GRAD: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """A gradient in FP32: plain numbers, or E4M3 codes (GRAD is uint8) with their blocks' scales."""
    if GRAD == _U8:
        scales = _at(row, _GRAD_SCALE_AT, tl.float32, first_block, False)
        value = decode_e4m3(tl.load(pointers, mask=inside, other=0), HARDWARE)
        value = value * tl.load(scales + blocks, mask=block_inside, other=0.0)[:, None]
    else:
        value = as_fp32(tl.load(pointers, mask=inside, other=0.0))
    return value


@jit
def _number(numbers, INDEX: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.load(numbers + INDEX).to(tl.float32, bitcast=True)


@jit
def adam_kernel(  # type: ignore[no-untyped-def]
    table_ptr, numbers_ptr, chunks_ptr,
    PARAM: tl.constexpr, GRAD: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, MASTER: tl.constexpr,
    DECOUPLED: tl.constexpr, ALIGNED: tl.constexpr, HARDWARE: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update BLOCKS blocks of one parameter and its state. FIRST, SECOND, MASTER: how they are stored."""
    entry = chunks_ptr + 2 * tl.program_id(0)
    row_index, chunk = tl.load(entry), tl.load(entry + 1)
    row = table_ptr + _HEADER + row_index * _COLUMNS
    numbers = numbers_ptr + row_index * _NUMBERS
    # Everything of the row is asked for at once: a branch between would add one latency of memory to each program.
    start, first_block = chunk.to(tl.int64) * (BLOCKS * BLOCK), chunk.to(tl.int64) * BLOCKS
    STORED_FIRST: tl.constexpr = _DTYPES[FIRST]
    STORED_SECOND: tl.constexpr = _DTYPES[SECOND]
    STORED_MASTER: tl.constexpr = _MASTER_DTYPES[MASTER]
    param_ptr = _at(row, _PARAM_AT, tl.int16 if MASTER == _REMAINDER else PARAM, start, ALIGNED)
    grad_ptr = _at(row, _GRAD_AT, GRAD, start, ALIGNED)
    first_ptr = _at(row, _FIRST_AT, STORED_FIRST, start, ALIGNED)
    first_scale_ptr = _at(row, _FIRST_AT + 1, tl.float32, first_block, False)
    second_ptr = _at(row, _SECOND_AT, STORED_SECOND, start, ALIGNED)
    second_scale_ptr = _at(row, _SECOND_AT + 1, tl.float32, first_block, False)
    master_ptr = _at(row, _MASTER_AT, STORED_MASTER, start, ALIGNED)
    master_scale_ptr = _at(row, _MASTER_SCALE_AT, tl.float32, first_block, False)
    left = tl.minimum(tl.load(row + _NUMEL_AT) - start, BLOCKS * BLOCK).to(tl.int32)
    if tl.load(numbers) == 0:
        if ALIGNED:
            left = tl.multiple_of(left, 16)
        blocks = tl.arange(0, BLOCKS)
        at = (blocks * BLOCK)[:, None] + tl.arange(0, BLOCK)[None, :]
        inside, block_inside = at < left, blocks * BLOCK < left
        HAS_FP32: tl.constexpr = _F32 == PARAM or _F32 == GRAD  # no tuples in kernels
        WIDTH: tl.constexpr = 4 if HAS_FP32 or FIRST * SECOND == 0 or MASTER == _MASTER_FP32 else 8
        params, grads = _side_by_side(param_ptr, at, WIDTH), _side_by_side(grad_ptr, at, WIDTH)
        firsts, seconds = _side_by_side(first_ptr, at, WIDTH), _side_by_side(second_ptr, at, WIDTH)
        masters = _side_by_side(master_ptr, at, WIDTH)
        random = tl.zeros([BLOCKS, BLOCK], tl.int32)
        if MASTER == _STOCHASTIC or SECOND == _BF16:
            random = _hash32((start.to(tl.int32) + at) ^ tl.load(numbers + 1))

        gradient = _load_gradient(grads, row, first_block, inside, blocks, block_inside, GRAD, HARDWARE)
        gradient = gradient * _number(numbers, 2)
        weight = _load_weight(params, masters, master_scale_ptr, inside, blocks, block_inside, MASTER)
        first = _load_moment(firsts, first_scale_ptr, inside, blocks, block_inside, FIRST, False, HARDWARE)
        second = _load_moment(seconds, second_scale_ptr, inside, blocks, block_inside, SECOND, True, HARDWARE)
        if not DECOUPLED:
            gradient = gradient + weight * _number(numbers, 10)
        first = first + (gradient - first) * _number(numbers, 3)
        second = second * _number(numbers, 4) + gradient * gradient * _number(numbers, 5)
        ratio = adam_ratio(first, second, _number(numbers, 11), _number(numbers, 7), _number(numbers, 6))
        if DECOUPLED:
            weight = weight * _number(numbers, 9)
        weight = weight - ratio * _number(numbers, 8)

        above = (random >> 16) & 0xFFFF
        _store_weight(
            weight, random & 0xFFFF, params, masters, master_scale_ptr, inside, blocks, block_inside, PARAM,
            MASTER,
        )  # fmt: skip
        _store_moment(first, random, firsts, first_scale_ptr, inside, blocks, block_inside, FIRST, False, HARDWARE)
        _store_moment(second, above, seconds, second_scale_ptr, inside, blocks, block_inside, SECOND, True, HARDWARE)
