"""Stochastic rounding with counted random bits, and BF16 with the 16 bits that FP32 has behind it.

Random bits are a hash of the element's number and a seed, not the state of a generator: the same on every device, in a
kernel and in PyTorch, in any order, and a resumed training draws what the uninterrupted one would have drawn.

Source: lowbias32, Chris Wellons 2018, "Prospecting for Hash Functions" (bias 0.17 of the ideal 0). BF16 and remainder:
TransformerEngine's ``store_param_remainders``.
"""

from __future__ import annotations

import torch
from torch import Tensor

_FIRST, _SECOND = 0x7FEB352D, 0x846CA68B - 2**32  # as int32


def hash32(x: Tensor) -> Tensor:
    """lowbias32 of each int32: a bijection whose every output bit depends on every input bit. int32 -> int32."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * _FIRST
    x = (x ^ ((x >> 15) & 0x1FFFF)) * _SECOND
    return x ^ ((x >> 16) & 0xFFFF)


def hash32_int(x: int) -> int:
    """``hash32`` of one number, as a signed 32-bit integer."""
    x &= 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * _FIRST) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * (_SECOND & 0xFFFFFFFF)) & 0xFFFFFFFF
    x ^= x >> 16
    return x - 2**32 if x >= 2**31 else x


def random_bits(start: int, count: int, seed: int, device: torch.device) -> Tensor:
    """Random bits of elements ``start`` to ``start + count`` of a tensor: int32 [count], by a signed 32-bit seed."""
    numbers = torch.arange(start, start + count, dtype=torch.int64, device=device).to(torch.int32)
    return hash32(numbers ^ seed)


def round_stochastic_bf16(x: Tensor, bits16: Tensor) -> Tensor:
    """FP32 ``x`` rounded to BF16, up with the probability of how far it is from the number below.

    Shape: x any FP32, bits16 the same shape, int32 from 0 to 65535, uniform -> BF16. NaN stays NaN and inf inf; the
        expected value is ``x`` exactly.
    """
    raw = x.contiguous().view(torch.int32)
    up = (raw + bits16) & -0x10000
    is_finite = (raw & 0x7FFFFFFF) < 0x7F800000
    return torch.where(is_finite, up.view(torch.float32), x).to(torch.bfloat16)


def split_bf16(x: Tensor) -> tuple[Tensor, Tensor]:
    """FP32 as BF16, rounded to nearest, and the signed 16 bits that ``join_bf16`` makes FP32 of again, exactly.

    Shape: any FP32 -> BF16 and int16 of the same shape. A tie rounds away from zero, for a remainder of +32768 has no
        int16. NaN becomes the canonical one.
    """
    raw = x.contiguous().view(torch.int32)
    raw = torch.where((raw & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, raw)
    high = ((raw >> 16) & 0xFFFF) + ((raw >> 15) & 1)
    return high.to(torch.int16).view(torch.bfloat16), raw.to(torch.int16)


def join_bf16(high: Tensor, remainder: Tensor) -> Tensor:
    """The FP32 number that ``split_bf16`` split: BF16 and int16 -> FP32, exact."""
    return ((high.contiguous().view(torch.int16).to(torch.int32) << 16) + remainder.to(torch.int32)).view(torch.float32)
