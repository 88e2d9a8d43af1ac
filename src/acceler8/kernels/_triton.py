"""Triton, if it is there, and the device functions that several kernels share.

``import triton`` is guarded, so the package imports on macOS and Windows; without Triton (or without a GPU)
every operation runs its plain-PyTorch reference. Under ``TRITON_INTERPRET=1`` kernels run on CPU tensors, to
check indexing and logic. The interpreter's own float8 casts do not round like the hardware (seen in 3.9.0: 2
to 5 % of E4M3 codes differ), so there, and on GPUs before sm_89 which have no FP8 conversion, codes come from
integer arithmetic.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from acceler8.scaling.scale import AMAX_FLOOR, SCALE_MAX, SCALE_MIN

HAVE_TRITON = importlib.util.find_spec("triton") is not None
tl: Any = None
if HAVE_TRITON:
    import triton

    tl = triton.language
    jit: Callable[[Callable[..., Any]], Any] = triton.jit
    constexpr: Callable[[Any], Any] = tl.constexpr
    INTERPRETED: bool = triton.knobs.runtime.interpret  # decided once, when the kernels below are decorated
else:
    INTERPRETED = False

    def constexpr(value: Any) -> Any:
        """Leave the constant what it is."""
        return value

    def jit(function: Callable[..., Any]) -> Any:
        """Leave the kernel's source uncompiled: there is nothing to run it."""
        return function


# without FMA, x * scale rounds as the reference's does
LAUNCH_OPTIONS: dict[str, Any] = {"enable_fp_fusion": False}
# kernels may read a global only if it is a constexpr
_INTERPRETED = constexpr(INTERPRETED)
_FLOOR, _LEAST, _MOST = constexpr(AMAX_FLOOR), constexpr(SCALE_MIN), constexpr(SCALE_MAX)


def runs_on(x: Tensor) -> bool:
    """True if Triton kernels can take ``x``: a CUDA tensor (or any, in the interpreter) and Triton
    installed.
    """
    return HAVE_TRITON and (x.is_cuda or INTERPRETED)


@functools.cache
def has_fp8_conversion(device: torch.device) -> bool:
    """True if the device converts FP32 to FP8 in hardware (sm_89 on)."""
    return device.type == "cuda" and not INTERPRETED and torch.cuda.get_device_capability(device) >= (8, 9)


def type_of(dtype: torch.dtype) -> Any:
    """Triton's name of bf16, fp16 or fp32."""
    return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}[dtype]


def tiles(rows: int, cols: int, tile: int) -> int:
    """Number of programs that cover ``[rows, cols]``, one tile of ``tile x tile`` each."""
    return -(-rows // tile) * -(-cols // tile)


@jit
def tile_origin(number, col_count, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """First row and column of a tile, counted along rows; int64 so that tensors beyond 2**31 elements work."""
    columns_of_tiles = tl.cdiv(col_count, TILE)
    return (number // columns_of_tiles).to(tl.int64) * TILE, (number % columns_of_tiles).to(tl.int64) * TILE


@jit
def tile_offsets(first_row, first_col, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Row and column indices of the tile that starts there."""
    return first_row + tl.arange(0, TILE), first_col + tl.arange(0, TILE)


@jit
def hidden(count, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """``count``, but not as a constant, though Triton specialises on an argument that is 1.

    With a constant bound the elements outside it are constants as well. ptxas (seen in 12.8 and 12.9, which
    Triton 3.6 and 3.9 bring) then shares the FP8 conversion of equal pairs and merges the codes with bits of
    another register: codes outside the bound come out as garbage. The grid has one dimension, so nothing is
    added.
    """
    return count + tl.program_id(1) * TILE


@jit
def as_fp32(x):  # type: ignore[no-untyped-def]
    """``x`` (bf16, fp16 or fp32) in FP32, exact."""
    if _INTERPRETED and x.dtype == tl.bfloat16:  # whose cast of denormals is off by up to a binade there
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@jit
def rounded_to(x, DTYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    """FP32 ``x`` in ``DTYPE`` (bf16, fp16 or fp32), round to nearest even."""
    if _INTERPRETED and tl.bfloat16 == DTYPE:  # whose cast truncates there
        bits = x.to(tl.uint32, bitcast=True)
        high = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        high = tl.where(magnitude_bits(x) > 0x7F800000, 0x7FC0, high)
        return high.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(DTYPE)


@jit
def magnitude_bits(x):  # type: ignore[no-untyped-def]
    """|x| as the integer of its FP32 bits: ordered like the value, with NaN above inf, so max never loses a
    NaN.
    """
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@jit
def scale_of(amax_bits, TARGET: tl.constexpr, POW2: tl.constexpr, E8M0: tl.constexpr):  # type: ignore[no-untyped-def]
    """``(scale, scale_inv)`` that map amax onto TARGET: the rules of ``acceler8.scaling.scale``, bit for
    bit.
    """
    is_finite = amax_bits < 0x7F800000
    amax = amax_bits.to(tl.float32, bitcast=True)
    one = tl.zeros_like(amax) + 1.0
    floor = tl.where(is_finite & (amax > _FLOOR), amax, _FLOOR)
    if E8M0:
        ratio = tl.div_rn(floor, one * TARGET)
        ratio = tl.where(ratio < _LEAST, _LEAST, ratio)
        ratio = tl.where(ratio > _MOST, _MOST, ratio)
        bits = ratio.to(tl.int32, bitcast=True)
        exponent = (bits >> 23) + tl.where((bits & 0x7FFFFF) != 0, 1, 0)
        scale_inv = tl.where(is_finite, (exponent << 23).to(tl.float32, bitcast=True), 1.0)
        scale = tl.div_rn(one, scale_inv)
    else:
        scale = tl.div_rn(one * TARGET, floor)
        scale = tl.where(scale < _LEAST, _LEAST, scale)
        scale = tl.where(scale > _MOST, _MOST, scale)
        if POW2:
            scale = (scale.to(tl.int32, bitcast=True) & -0x800000).to(tl.float32, bitcast=True)
        scale = tl.where(is_finite, scale, 1.0)
        scale_inv = tl.div_rn(one, scale)
    return scale, scale_inv


@jit
def round_to_format(y, E5M2: tl.constexpr, HARDWARE: tl.constexpr):  # type: ignore[no-untyped-def]
    """FP32 within +-max, or NaN -> uint8 codes, round to nearest even."""
    if HARDWARE:
        codes = y.to(tl.float8e5 if E5M2 else tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        MANTISSA: tl.constexpr = 2 if E5M2 else 3
        BIAS: tl.constexpr = 15 if E5M2 else 7
        SHIFT: tl.constexpr = 23 - MANTISSA
        bits = y.to(tl.int32, bitcast=True)
        sign = bits & -0x80000000
        magnitude = bits & 0x7FFFFFFF
        # normal numbers: add half an ulp (and the parity bit for ties), cut; a carry runs into the exponent,
        # as it should
        rounded = magnitude + ((1 << (SHIFT - 1)) - 1) + ((magnitude >> SHIFT) & 1)
        normal_code = (rounded >> SHIFT) - ((127 - BIAS) << MANTISSA)
        # subnormal numbers: adding a constant whose ulp is min_subnormal makes the FP32 adder do the rounding
        MAGIC_BITS: tl.constexpr = (127 + (1 - BIAS - MANTISSA) + 23) << 23
        magic = (tl.zeros_like(magnitude) + MAGIC_BITS).to(tl.float32, bitcast=True)
        lifted = magnitude.to(tl.float32, bitcast=True) + magic
        subnormal_code = lifted.to(tl.int32, bitcast=True) - MAGIC_BITS
        code = tl.where(magnitude >= ((127 + 1 - BIAS) << 23), normal_code, subnormal_code)
        codes = tl.where(magnitude > 0x7F800000, 0x7F, code | ((sign >> 24) & 0x80)).to(tl.uint8)
    return codes


@jit
def decode_e4m3(codes, HARDWARE: tl.constexpr):  # type: ignore[no-untyped-def]
    """E4M3 codes in FP32, exact."""
    if HARDWARE:
        value = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:  # exponent and mantissa at their place in FP32; the bias, and subnormal numbers, by a multiplication
        bits = codes.to(tl.int32)
        magnitude = ((bits & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
        value = (magnitude.to(tl.int32, bitcast=True) | ((bits & 0x80) << 24)).to(tl.float32, bitcast=True)  # -0 too
        value = tl.where((bits & 0x7F) == 0x7F, float("nan"), value)
    return value


@jit
def encode(x, scale, FMT_MAX: tl.constexpr, E5M2: tl.constexpr, HARDWARE: tl.constexpr):  # type: ignore[no-untyped-def]
    """``x * scale`` -> uint8 codes, saturating, round to nearest even, NaN where ``x`` is not finite.

    The hardware's conversion saturates by itself, infinity too. Where ``x`` itself is infinite, and not only its
    product, ``x * 0`` is NaN; else it is a zero of ``x``'s sign, and adding it changes nothing, not the sign of a zero
    either. One instruction an element where clamping and testing took ten, which halved the kernel (SASS for sm_90).
    """
    y = tl.fma(x, tl.zeros_like(x), x * scale) if HARDWARE else saturate(x, x * scale, FMT_MAX)
    return round_to_format(y, E5M2, HARDWARE)


@jit
def saturate(x, y, FMT_MAX: tl.constexpr):  # type: ignore[no-untyped-def]
    """``clamp(y)`` for ``y = x * scale``, NaN where ``x`` is not finite.

    ``tl.where``, not NaN-propagating min and max: Triton versions of 2026 miscompile transposed FP8 stores
    next to those (triton-lang #11111).
    """
    y = tl.where(y > FMT_MAX, FMT_MAX, y)
    y = tl.where(y < -FMT_MAX, -FMT_MAX, y)
    return tl.where(magnitude_bits(x) < 0x7F800000, y, float("nan"))
