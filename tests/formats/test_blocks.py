"""Block codes against definitions in NumPy and ml_dtypes, a block at a time."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from acceler8.errors import DtypeError, ShapeError
from acceler8.formats import (
    BLOCK,
    BLOCK_AMAX_FLOOR,
    E4M3_BLOCK,
    FP16_BLOCK,
    FP16_POW2,
    FP16_UNSIGNED,
    UE5M3_BLOCK,
    decode_blocks,
    encode_blocks,
    encode_ue5m3,
)

CODES = (E4M3_BLOCK, UE5M3_BLOCK, FP16_BLOCK, FP16_UNSIGNED, FP16_POW2)
SHAPES = [(1,), (127,), (128,), (129,), (5, 77), (3, 128), (0,), (2, 3, 100)]


def data(shape, code, generator, spread=1.0):
    x = torch.randn(shape, generator=generator) * torch.exp(spread * torch.randn(shape, generator=generator))
    return x.square() if code.is_unsigned else x


def expected(x, code):
    """``(codes, scale_inv)`` of one block, NumPy FP32."""
    amax = np.maximum(np.abs(x).max(), np.float32(BLOCK_AMAX_FLOOR))
    if code.has_pow2_scale:
        scale_inv = np.float32(2.0 ** (math.floor(math.log2(float(amax))) - 14))
        scale = np.float32(1) / scale_inv
    else:
        scale, scale_inv = np.float32(code.max) / amax, amax / np.float32(code.max)
    y = np.clip(x * scale, -code.max, code.max)
    if code is E4M3_BLOCK:
        return y.astype(ml_dtypes.float8_e4m3fn).view(np.uint8), scale_inv
    if code is UE5M3_BLOCK:
        codes = encode_ue5m3(torch.from_numpy(y)).numpy()  # against exact search in test_ue5m3.py
        return np.where((x > 0) & (codes == 0), 1, codes).astype(np.uint8), scale_inv
    codes = y.astype(np.float16)
    least = np.float16(2.0**-24)
    return (np.where((x > 0) & (codes < least), least, codes) if code.is_unsigned else codes).view(np.uint16), scale_inv


@pytest.mark.parametrize("code", CODES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("factor", [1.0, 1e-20, 1e-33, 1e20])
def test_codes_and_scales_are_as_defined(make_generator, code, shape, factor):
    x = data(shape, code, make_generator(1)) * factor
    codes, scales = encode_blocks(x, code)
    assert (codes.shape, codes.dtype) == (x.shape, code.dtype)
    raw = codes.reshape(-1).view(torch.uint8 if code.dtype.itemsize == 1 else torch.int16).numpy()
    for block in range(-(-x.numel() // BLOCK)):
        part = slice(block * BLOCK, (block + 1) * BLOCK)
        want, scale_inv = expected(x.reshape(-1)[part].numpy(), code)
        assert np.array_equal(raw[part], want.view(raw.dtype))
        assert scales[block].item() == scale_inv


@pytest.mark.parametrize("code", CODES, ids=str)
def test_relative_error_is_half_an_ulp(make_generator, code):
    x = data((64, BLOCK), code, make_generator(2), spread=0.3)
    back = decode_blocks(*encode_blocks(x, code), code)
    normal = x.abs() > x.abs().amax(1, keepdim=True) * (2.0**-14 if code is E4M3_BLOCK else 2.0**-27)
    error = ((back - x) / x).abs()[normal].max().item()
    assert error <= (2.0**-4 if code in (E4M3_BLOCK, UE5M3_BLOCK) else 2.0**-11) * 1.001


@pytest.mark.parametrize("code", [UE5M3_BLOCK, FP16_UNSIGNED], ids=str)
def test_nothing_above_zero_becomes_zero(make_generator, code):
    x = data((64, BLOCK), code, make_generator(3), spread=4.0)
    x[:, ::7] = 0
    codes, scales = encode_blocks(x, code)
    assert torch.equal(decode_blocks(codes, scales, code) == 0, x == 0)
    zeros_of_e4m3 = decode_blocks(*encode_blocks(x, E4M3_BLOCK), E4M3_BLOCK) == 0
    assert zeros_of_e4m3.sum() > 2 * (x == 0).sum()  # the data would show it


@pytest.mark.parametrize("code", CODES, ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_nan_and_confined_to_its_block(make_generator, code, bad):
    x = data((4, BLOCK), code, make_generator(4))
    x[1, 5] = bad
    codes, scales = encode_blocks(x, code)
    back = decode_blocks(codes, scales, code)
    assert back.isnan().nonzero().tolist() == [[1, 5]]
    assert scales[1] == 1.0
    others = torch.tensor([0, 2, 3])
    fine = decode_blocks(*encode_blocks(x[others].contiguous(), code), code)
    assert torch.equal(back[others], fine)


@pytest.mark.parametrize("code", CODES, ids=str)
def test_zeros_stay_zeros(code):
    codes, scales = encode_blocks(torch.zeros(300), code)
    assert (decode_blocks(codes, scales, code) == 0).all()
    assert scales.isfinite().all()
    assert (decode_blocks(torch.zeros(300, dtype=code.dtype), torch.zeros(3), code) == 0).all()  # a fresh state


def test_a_master_that_is_not_updated_stays_bit_for_bit(make_generator):
    """Rounding again under the same power of two changes nothing; under a scale that is amax's own it might."""
    x = data((64, BLOCK), FP16_POW2, make_generator(5))
    first = encode_blocks(x, FP16_POW2)
    again = encode_blocks(decode_blocks(*first, FP16_POW2), FP16_POW2)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])


# By hand: 1e-3 times 224 is 0.224, 1.792 * 2**-3, whose nearest mantissa is 1.75: (7 - 3) * 8 + 6 = 0x26.
GOLDEN = {
    E4M3_BLOCK: ([0x7E, 0xF6, 0x26, 0x00, 0x01], [2.0, -1.0, 1e-3, 0.0, 8e-6], 448),
    UE5M3_BLOCK: ([0xF7, 0x00, 0x9F, 0x00, 0x52], [2.0, 0.0, 1e-3, 0.0, 1.3e-6], 61440),
    FP16_BLOCK: ([0x7BFF, 0xF7FF, 0x5018, 0x0000, 0x2973], [2.0, -1.0, 1e-3, 0.0, 1.3e-6], 65504),
    FP16_UNSIGNED: ([0x7BFF, 0x0001, 0x5018, 0x0000, 0x2973], [2.0, 1e-30, 1e-3, 0.0, 1.3e-6], 65504),
    FP16_POW2: ([0x7400, 0xF000, 0x4819, 0x0000, 0x2174], [2.0, -1.0, 1e-3, 0.0, 1.3e-6], 16384),
}


@pytest.mark.parametrize("code", GOLDEN, ids=str)
def test_golden_vectors(code):
    raw, x, of_two = GOLDEN[code]
    codes, scales = encode_blocks(torch.tensor(x), code)
    assert codes.view(torch.uint8 if code.dtype.itemsize == 1 else torch.uint16).tolist() == raw
    assert scales.tolist() == [float(np.float32(2.0) / np.float32(of_two))]


def test_errors_say_what_is_allowed():
    with pytest.raises(DtypeError, match=r"encode_blocks got torch.bfloat16; allowed: torch.float32"):
        encode_blocks(torch.ones(4, dtype=torch.bfloat16), E4M3_BLOCK)
    with pytest.raises(DtypeError, match=r"decode_blocks of UE5M3 got torch.float16; allowed: torch.uint8"):
        decode_blocks(torch.ones(4, dtype=torch.float16), torch.ones(1), UE5M3_BLOCK)
    with pytest.raises(ShapeError, match=r"got scales \[1\] for 129 codes; allowed: \[2\]"):
        decode_blocks(torch.ones(129, dtype=torch.uint8), torch.ones(1), UE5M3_BLOCK)
