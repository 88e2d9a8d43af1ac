"""Codes with one FP32 scale for each block of 128 elements, in which optimizers keep moments and master weights.

    scale_inv = amax / code.max        stored beside the codes        x ~ decode(codes) * scale_inv
    codes     = round(x * (code.max / amax))

The scale is *not* rounded to a power of two. The second moment moves by (1 - beta2) of the distance to the squared
gradient, 0.1 % a step at beta2 = 0.999, and half an ulp of an 8-bit float is 3 to 6 %: under a scale that stands still
every step rounds back to the code before it, and the moment is frozen. A scale that is the block's own amax falls with
it and takes the other codes along. A master weight wants the opposite: what is not updated should stay bit for bit, so
``FP16_POW2`` has powers of two.

Blocks run along the flattened tensor; the last may be shorter. A block whose amax is NaN or inf gets scale 1, and what
was not finite becomes NaN, in sight and confined to the block (in UE5M3 also what is above 61440 there). Below 2**-100
amax counts as that, so that scale and inverse stay normal FP32 numbers: with squared gradients as small as 1e-30, eps
has long decided the step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from acceler8.errors import DtypeError, ShapeError
from acceler8.formats.fp8 import E4M3, decode, encode
from acceler8.formats.ue5m3 import UE5M3, decode_ue5m3, encode_ue5m3

BLOCK = 128
BLOCK_AMAX_FLOOR = 2.0**-100


@dataclass(frozen=True)
class BlockCode:
    """What a block's elements are stored as.

    is_unsigned: for numbers from 0, of which none but zero becomes zero. has_pow2_scale: the scale is a power of two.
    """

    name: str
    dtype: torch.dtype
    max: float
    is_unsigned: bool = False
    has_pow2_scale: bool = False

    def __str__(self) -> str:
        return self.name


E4M3_BLOCK = BlockCode("E4M3", torch.float8_e4m3fn, E4M3.max)
UE5M3_BLOCK = BlockCode("UE5M3", torch.uint8, UE5M3.max, is_unsigned=True)
FP16_BLOCK = BlockCode("FP16", torch.float16, 65504.0)
FP16_UNSIGNED = BlockCode("FP16, unsigned", torch.float16, 65504.0, is_unsigned=True)
FP16_POW2 = BlockCode("FP16, powers of two", torch.float16, 32768.0, has_pow2_scale=True)
_FP16_LEAST = 2.0**-24


def block_count(elements: int) -> int:
    """Blocks, and so scales, of a tensor."""
    return -(-elements // BLOCK)


def encode_blocks(x: Tensor, code: BlockCode) -> tuple[Tensor, Tensor]:
    """Quantise ``x`` in blocks of 128 along its flattened elements.

    Shape: x any FP32, contiguous -> codes of the same shape, ``code.dtype``; scale_inv [ceil(n / 128)] FP32, so that
        ``x ~ codes * scale_inv``.
    Numerics: as the module says; round to nearest even. Same codes on every device.
    Raises: DtypeError if ``x`` is not FP32.
    """
    if x.dtype != torch.float32:
        raise DtypeError(f"encode_blocks got {x.dtype}; allowed: torch.float32; convert it with .float() first")
    flat = x.reshape(-1)
    blocks = F.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
    scale, scale_inv = _scales(blocks.abs().amax(1), code)
    codes = _round(blocks * scale[:, None], blocks, code).view(-1)[: flat.numel()]
    return codes.view(x.shape), scale_inv


def decode_blocks(codes: Tensor, scale_inv: Tensor, code: BlockCode) -> Tensor:
    """What ``encode_blocks`` stored, in FP32 and the shape of ``codes``.

    Raises: DtypeError for codes of another dtype, ShapeError unless there is one scale a block.
    """
    if codes.dtype != code.dtype:
        raise DtypeError(f"decode_blocks of {code} got {codes.dtype}; allowed: {code.dtype}")
    if scale_inv.shape != (block_count(codes.numel()),):
        raise ShapeError(
            f"decode_blocks got scales {list(scale_inv.shape)} for {codes.numel()} codes; allowed:"
            f" [{block_count(codes.numel())}], one for each {BLOCK}"
        )
    flat = codes.reshape(-1)
    values = decode_ue5m3(flat) if code is UE5M3_BLOCK else decode(flat) if code is E4M3_BLOCK else flat.float()
    values = F.pad(values, (0, -flat.numel() % BLOCK)).view(-1, BLOCK) * scale_inv[:, None]
    return values.view(-1)[: flat.numel()].view(codes.shape)


def _scales(amax: Tensor, code: BlockCode) -> tuple[Tensor, Tensor]:
    is_finite = amax.isfinite()
    amax = torch.where(is_finite, amax.clamp(min=BLOCK_AMAX_FLOOR), 1.0)
    if code.has_pow2_scale:  # amax * scale is from 2**14 to below 2**15
        exponent = amax.view(torch.int32) >> 23
        scale, scale_inv = (((127 + 127 + 14 - exponent) << 23), (exponent - 14) << 23)
        return tuple(torch.where(is_finite, s.view(torch.float32), 1.0) for s in (scale, scale_inv))  # type: ignore[return-value]
    most = torch.full_like(amax, code.max)  # a number over a tensor would be rounded twice
    return torch.where(is_finite, most / amax, 1.0), torch.where(is_finite, amax / most, 1.0)


def _round(y: Tensor, x: Tensor, code: BlockCode) -> Tensor:
    if code is UE5M3_BLOCK:  # y was x times a positive number, and where that left zero x itself may be above it
        return encode_ue5m3(torch.where((x > 0) & (y == 0), UE5M3.min_subnormal, y), keep_nonzero=True)
    y = torch.where(x.isfinite(), y.clamp(-code.max, code.max), math.nan)
    if code is E4M3_BLOCK:
        return encode(y, E4M3)
    if code.is_unsigned:
        y = torch.where(x > 0, y.clamp(min=_FP16_LEAST), y)
    return y.to(torch.float16)
