"""E8M0 against ml_dtypes and exact arithmetic."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from acceler8.errors import DtypeError
from acceler8.formats import E8M0, decode_e8m0, encode_e8m0


def test_all_256_codes_decode_like_ml_dtypes():
    raw = np.arange(256, dtype=np.uint8)
    values = decode_e8m0(torch.from_numpy(raw).view(torch.float8_e8m0fnu)).numpy()
    expected = raw.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    assert np.array_equal(values[:255].view(np.uint32), expected[:255].view(np.uint32))
    assert np.isnan(values[255])
    assert np.isnan(expected[255])
    assert (values[0], values[254]) == (E8M0.min, E8M0.max)
    assert raw[127:128].view(ml_dtypes.float8_e8m0fnu).astype(np.float32) == 1.0 == values[E8M0.bias]


def test_each_power_of_two_encodes_to_itself():
    codes = torch.arange(255, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    assert torch.equal(encode_e8m0(decode_e8m0(codes)).view(torch.uint8), codes.view(torch.uint8))


def test_rounding_is_up_to_the_next_power_of_two():
    """A million positive FP32 bit patterns, denormals among them, against exact exponents from frexp."""
    rng = np.random.default_rng(0)
    bits = rng.integers(1, 0x7F800000, 1_000_000, dtype=np.uint32)
    bits[:2000] = np.arange(1, 2001)  # the smallest denormals
    bits[2000:4000] = 0x400000 + np.arange(-1000, 1000)  # around 2**-127, which is one
    x = bits.view(np.float32)
    mantissa, exponent = np.frexp(x.astype(np.float64))
    up = np.where(mantissa == 0.5, exponent - 1, exponent)
    expected = np.clip(up, -127, 127) + 127
    got = encode_e8m0(torch.from_numpy(x)).view(torch.uint8).numpy()
    assert np.array_equal(got, expected.astype(np.uint8))
    value = decode_e8m0(encode_e8m0(torch.from_numpy(x))).numpy()
    fits = x <= E8M0.max
    assert (value[fits] >= x[fits]).all()  # never below, so nothing that it scales can saturate
    assert (value[fits & (x >= E8M0.min)] < 2 * x[fits & (x >= E8M0.min)]).all()


@pytest.mark.parametrize(
    ("x", "code"),
    [
        (0.0, 0), (-0.0, 0), (1e-45, 0), (2.0**-127, 0), (2.0**-126, 1), (1.0, 127), (1.0000001, 128), (1.5, 128),
        (2.0**127, 254), (3.0e38, 254), (3.4028234e38, 254), (math.inf, 255), (-math.inf, 255), (math.nan, 255),
        (-1.0, 255), (-1e-40, 255),
    ],
)  # fmt: skip
def test_edges(x, code):
    assert encode_e8m0(torch.tensor([x])).view(torch.uint8).item() == code


def test_shape_strides_and_dtype():
    x = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    assert encode_e8m0(x.t()).shape == (3, 2)
    assert torch.equal(decode_e8m0(encode_e8m0(x.t())), decode_e8m0(encode_e8m0(x)).t())
    assert encode_e8m0(torch.zeros(0, 4)).shape == (0, 4)
    with pytest.raises(DtypeError, match=r"encode_e8m0 got torch.bfloat16; allowed: torch.float32"):
        encode_e8m0(x.bfloat16())
    with pytest.raises(DtypeError, match=r"decode_e8m0 got torch.float32; allowed: torch.float8_e8m0fnu"):
        decode_e8m0(x)
