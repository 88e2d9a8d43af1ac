"""E8M0, the power-of-two scale of the MX block formats.

A code is a biased exponent and nothing else: value 2**(code - 127), no sign, no zero, 0xFF is NaN. A block's
scale is rounded **up** here: the spec's floor leaves the largest element above the element format's maximum
in up to a third of the blocks, where it saturates; rounding up costs at most one bit of range and never
overflows.

Source: OCP Microscaling Formats (MX) 1.0, section 5.4.1; rounding up as in NVIDIA's MXFP8 recipe.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from acceler8.errors import DtypeError


@dataclass(frozen=True)
class ScaleFormat:
    """Limits of an exponent-only scale format."""

    name: str
    bias: int
    max: float
    min: float
    nan_code: int
    torch_dtype: torch.dtype


E8M0 = ScaleFormat("E8M0", 127, 2.0**127, 2.0**-127, 0xFF, torch.float8_e8m0fnu)


def encode_e8m0(x: Tensor) -> Tensor:
    """Round positive FP32 values up to a power of two.

    Shape: any -> same shape, ``torch.float8_e8m0fnu``. Dimensionless.
    Numerics: exact powers of two stay; zero (of either sign) gives 2**-127; values above 2**127 saturate to
        it; NaN, inf and negative values give NaN (0xFF).
    Raises: DtypeError if ``x`` is not FP32.
    """
    if x.dtype != torch.float32:
        raise DtypeError(f"encode_e8m0 got {x.dtype}; allowed: torch.float32, so that rounding up is exact")
    bits = x.contiguous().view(torch.int32) & 0x7FFFFFFF  # without the sign: -0.0 is zero
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0)  # a mantissa above zero rounds up; carries into the exponent
    # float32 subnormals lie below 2**-126: code 1 for all above 2**-127, code 0 from there down
    exponent = torch.where((bits > 0) & (bits <= 0x400000), 0, exponent).clamp(max=254)
    bad = ~x.isfinite() | (x < 0)
    return torch.where(bad, E8M0.nan_code, exponent).to(torch.uint8).view(E8M0.torch_dtype)


def decode_e8m0(codes: Tensor) -> Tensor:
    """The FP32 value 2**(code - 127) of each E8M0 code; 0xFF gives NaN. Exact (2**-127 is an FP32
    subnormal).
    """
    if codes.dtype != E8M0.torch_dtype:
        raise DtypeError(f"decode_e8m0 got {codes.dtype}; allowed: {E8M0.torch_dtype}")
    raw = codes.contiguous().view(torch.uint8).to(torch.int32)
    bits = torch.where(raw == 0, 0x400000, raw << 23)
    bits = torch.where(raw == E8M0.nan_code, 0x7FC00000, bits)
    return bits.view(torch.float32)
