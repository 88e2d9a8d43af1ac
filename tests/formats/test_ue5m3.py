"""UE5M3 against FP16's own table and exact search, and golden codes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from acceler8.errors import DtypeError
from acceler8.formats import UE5M3, decode_ue5m3, encode_ue5m3

FINITE = 0xF8  # codes below it are numbers


def test_all_256_codes_are_the_upper_bits_of_fp16():
    raw = np.arange(256, dtype=np.uint16)
    expected = (raw << 7).view(np.float16).astype(np.float32)
    got = decode_ue5m3(torch.arange(256, dtype=torch.uint8)).numpy()
    assert np.array_equal(got.view(np.uint32)[:FINITE], expected.view(np.uint32)[:FINITE])
    assert np.isnan(got[UE5M3.nan_code])
    by_definition = [
        2.0 ** (e - 15) * (1 + m / 8) if e else 2.0**-14 * m / 8 for e in range(31) for m in range(8)
    ]  # fmt: skip
    assert got[:FINITE].tolist() == by_definition
    assert (got[1], got[8], got[FINITE - 1]) == (UE5M3.min_subnormal, UE5M3.min_normal, UE5M3.max)


def nearest(x: np.ndarray) -> np.ndarray:
    """Codes by search in exact arithmetic: FP64 holds every midpoint, and the code's parity decides a tie."""
    values = decode_ue5m3(torch.arange(FINITE, dtype=torch.uint8)).numpy().astype(np.float64)
    middles = (values[1:] + values[:-1]) / 2
    x = x.astype(np.float64)
    below = np.searchsorted(middles, x, side="left")
    is_tie = (below < len(middles)) & (middles[np.minimum(below, len(middles) - 1)] == x)
    codes = below + (is_tie & (below % 2 == 1))
    return np.where(x >= 63488.0, 255, codes).astype(np.uint8)  # half way to what would be the next number


def test_rounding_is_to_nearest_even_for_half_a_million_bit_patterns():
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 0x7F800000, 500_000, dtype=np.uint32)
    bits[:250_000] = rng.integers(0x36000000, 0x47800000, 250_000)  # from 2**-19 to 2**16: what the format covers
    x = bits.view(np.float32)
    small = x < 2.0**-14  # which are rounded to a multiple of 2**-37 first
    x[small] = np.rint(x[small].astype(np.float64) * 2.0**37) / 2.0**37
    got = encode_ue5m3(torch.from_numpy(x)).numpy()
    assert np.array_equal(got, nearest(x))


def test_ties_go_to_the_even_code():
    values = decode_ue5m3(torch.arange(FINITE, dtype=torch.uint8))
    ties = (values[1:] + values[:-1]) / 2
    codes = encode_ue5m3(ties).int()
    lower = torch.arange(FINITE - 1)
    assert torch.equal(codes, lower + lower % 2)


GOLDEN = [
    (0.0, 0), (-0.0, 0), (-1.0, 255), (1e-45, 0), (2.0**-18, 0), (2.0**-18 * 1.00001, 1), (2.0**-17, 1),
    (2.0**-17 * 1.5, 2), (2.0**-17 * 2.5, 2), (2.0**-14, 8), (1.0, 120), (1.0625, 120), (1.0626, 121), (1.1875, 122),
    (3.14159, 133), (1000.0, 200), (61440.0, 247), (63487.0, 247), (63488.0, 255), (3.0e38, 255),
    (math.inf, 255), (-math.inf, 255), (math.nan, 255),
]  # fmt: skip


@pytest.mark.parametrize(("x", "code"), GOLDEN)
def test_golden_codes(x, code):
    assert encode_ue5m3(torch.tensor([x])).item() == code


def test_kept_nonzero_only_zero_is_zero():
    x = torch.tensor([0.0, -0.0, 1e-45, 1e-30, 2.0**-18, 2.0**-17, 5.0])
    assert encode_ue5m3(x, keep_nonzero=True).tolist() == [0, 0, 1, 1, 1, 1, 138]


def test_other_dtypes_are_refused():
    with pytest.raises(DtypeError, match=r"encode_ue5m3 got torch.bfloat16; allowed: torch.float32"):
        encode_ue5m3(torch.ones(2, dtype=torch.bfloat16))
    with pytest.raises(DtypeError, match=r"decode_ue5m3 got torch.int8; allowed: torch.uint8"):
        decode_ue5m3(torch.ones(2, dtype=torch.int8))
