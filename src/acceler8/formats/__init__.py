"""Number formats: limits, rounding, saturation, encode and decode."""

from __future__ import annotations

from acceler8.formats.blocks import (
    BLOCK,
    BLOCK_AMAX_FLOOR,
    E4M3_BLOCK,
    FP16_BLOCK,
    FP16_POW2,
    FP16_UNSIGNED,
    UE5M3_BLOCK,
    BlockCode,
    block_count,
    decode_blocks,
    encode_blocks,
)
from acceler8.formats.fp8 import E4M3, E5M2, FORMATS, Format, decode, encode
from acceler8.formats.mx import E8M0, decode_e8m0, encode_e8m0
from acceler8.formats.rounding import (
    hash32,
    hash32_int,
    join_bf16,
    random_bits,
    round_stochastic_bf16,
    split_bf16,
)
from acceler8.formats.ue5m3 import UE5M3, decode_ue5m3, encode_ue5m3

__all__ = [
    "BLOCK",
    "BLOCK_AMAX_FLOOR",
    "E4M3",
    "E4M3_BLOCK",
    "E5M2",
    "E8M0",
    "FORMATS",
    "FP16_BLOCK",
    "FP16_POW2",
    "FP16_UNSIGNED",
    "UE5M3",
    "UE5M3_BLOCK",
    "BlockCode",
    "Format",
    "block_count",
    "decode",
    "decode_blocks",
    "decode_e8m0",
    "decode_ue5m3",
    "encode",
    "encode_blocks",
    "encode_e8m0",
    "encode_ue5m3",
    "hash32",
    "hash32_int",
    "join_bf16",
    "random_bits",
    "round_stochastic_bf16",
    "split_bf16",
]
