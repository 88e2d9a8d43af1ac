"""UE5M3, an 8-bit format without a sign, for numbers that have none: second moments.

A code is ``exponent (5) | mantissa (3)``: E4M3's precision and E5M2's range in one byte, for the bit that would be the
sign is an exponent bit. It is FP16 without its sign and its last seven mantissa bits, so a code shifted left by seven
*is* the FP16 number, and hardware decodes it. 61440 is the largest number, 2**-17 the smallest above zero; as in FP16,
the highest exponent is not finite, and 0xFF is the one NaN that is written. Nothing saturates: what is too large is
NaN, in sight, and a block's scale leaves nothing too large.

A second moment that is rounded to zero divides its first moment by eps alone: one such element in ten thousand makes an
update hundreds of times too large. So with ``keep_nonzero`` nothing but zero becomes zero: what lies below the smallest
number becomes it, and errs towards a smaller step.

Source: FP16 is IEEE 754-2008 binary16.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from acceler8.errors import DtypeError


@dataclass(frozen=True)
class UnsignedFormat:
    """Limits of a format without a sign. All values are exact in FP32."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max: float
    min_normal: float
    min_subnormal: float
    nan_code: int

    def __str__(self) -> str:
        return self.name


UE5M3 = UnsignedFormat("UE5M3", 5, 3, 15, 61440.0, 2.0**-14, 2.0**-17, 0xFF)

_SHIFT = 23 - UE5M3.mantissa_bits
_REBIAS = 2.0 ** (UE5M3.bias - 127)


def encode_ue5m3(x: Tensor, *, keep_nonzero: bool = False) -> Tensor:
    """Round numbers from 0 to UE5M3.

    Shape: any FP32 -> same shape, uint8. Dimensionless.
    Numerics: round to nearest even, below 2**-14 after rounding to a multiple of 2**-37; what rounds above 61440, NaN
        and inf become 0xFF, and so does what is below 0. With ``keep_nonzero`` whatever is above 0 becomes at least 1.
    Raises: DtypeError if ``x`` is not FP32.
    """
    if x.dtype != torch.float32:
        raise DtypeError(f"encode_ue5m3 got {x.dtype}; allowed: torch.float32; convert it with .float() first")
    # With UE5M3's bias in FP32, subnormal numbers are FP32's: one rounding serves both. Half an ulp, and the parity bit
    # for ties, then cut: a carry runs into the exponent, as it should.
    bits = (x.contiguous() * _REBIAS).view(torch.int32)
    code = (bits + ((1 << (_SHIFT - 1)) - 1) + ((bits >> _SHIFT) & 1)) >> _SHIFT
    if keep_nonzero:
        code = torch.where(x > 0, code.clamp(min=1), code)
    code = torch.where((code >= 0) & (code < 0xF8), code, UE5M3.nan_code)
    return torch.where(x == 0, 0, code).to(torch.uint8)  # -0 has the bits of a negative number


def decode_ue5m3(codes: Tensor) -> Tensor:
    """The FP32 value of each UE5M3 code, exact.

    Shape: any uint8 -> same shape, FP32. Codes above 0xF7, of which only 0xFF is ever written, give inf (0xF8) or NaN.
    Raises: DtypeError if ``codes`` is not uint8.
    """
    if codes.dtype != torch.uint8:
        raise DtypeError(f"decode_ue5m3 got {codes.dtype}; allowed: torch.uint8, as encode_ue5m3 gives")
    return (codes.to(torch.int16) << 7).view(torch.float16).float()
