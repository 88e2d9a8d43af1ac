"""E4M3 and E5M2 against ml_dtypes, an independent implementation of the same formats. Everything is bit-exact."""

from __future__ import annotations

import copy
import math
import pickle

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from acceler8.errors import Acceler8Error, DtypeError
from acceler8.formats import E4M3, E5M2, FORMATS, Format, decode, encode

INDEPENDENT = {"E4M3": ml_dtypes.float8_e4m3fn, "E5M2": ml_dtypes.float8_e5m2}
both = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)


def all_codes(fmt: Format) -> Tensor:
    return torch.arange(256, dtype=torch.uint8).view(fmt.torch_dtype)


def independent_values(fmt: Format) -> np.ndarray:
    return np.arange(256, dtype=np.uint8).view(INDEPENDENT[fmt.name]).astype(np.float32)


def independent_encode(x: np.ndarray, fmt: Format) -> np.ndarray:
    """Our contract on top of ml_dtypes' rounding: finite overflow saturates, what is not finite is code 0x7F."""
    finite = np.isfinite(x)
    rounded = np.where(finite, np.clip(x, -fmt.max, fmt.max), 0).astype(np.float32).astype(INDEPENDENT[fmt.name])
    return np.where(finite, rounded.view(np.uint8), np.uint8(0x7F))


def codes_of(x: Tensor, fmt: Format) -> np.ndarray:
    codes = encode(x, fmt)
    assert codes.dtype == fmt.torch_dtype
    assert codes.shape == x.shape
    return codes.view(torch.uint8).numpy()


def assert_encodes_like_ml_dtypes(x: np.ndarray, fmt: Format) -> None:
    got, expected = codes_of(torch.from_numpy(x), fmt), independent_encode(x, fmt)
    wrong = np.flatnonzero(got != expected)
    assert not len(wrong), [(x.flat[i], hex(got.flat[i]), hex(expected.flat[i])) for i in wrong[:5]]


@both
@pytest.mark.parametrize("traced", [False, True], ids=["eager", "compiled"])
def test_all_256_codes_decode_like_ml_dtypes(fmt, traced):
    function = torch.compile(decode, fullgraph=True, backend="aot_eager") if traced else decode
    values, expected = function(all_codes(fmt)).numpy(), independent_values(fmt)
    number = ~np.isnan(expected)
    assert np.array_equal(values[number].view(np.uint32), expected[number].view(np.uint32))  # with the sign of -0
    assert np.isnan(values[~number]).all()
    assert number.sum() == {"E4M3": 254, "E5M2": 250}[fmt.name]


@both
@pytest.mark.parametrize("nan", [None, 0x7F, 0xFF])
def test_decode_does_not_depend_on_what_lies_beside_a_code(fmt, nan):
    """NaN codes take another path through decode: the numbers beside them must come out the same."""
    numbers = all_codes(fmt)[independent_values(fmt) == independent_values(fmt)]
    raw = numbers.view(torch.uint8)
    codes = raw if nan is None else torch.cat([raw, torch.tensor([nan], dtype=torch.uint8)])
    values = decode(codes.view(fmt.torch_dtype))
    assert torch.equal(values[: len(raw)], torch.from_numpy(independent_values(fmt))[raw.long()])
    assert nan is None or values[-1].isnan()


@both
def test_limits_are_those_of_the_codes(fmt):
    values = independent_values(fmt).astype(np.float64)
    finite = np.sort(np.unique(values[np.isfinite(values) & (values > 0)]))
    assert finite[-1] == fmt.max == float(ml_dtypes.finfo(INDEPENDENT[fmt.name]).max)
    assert finite[0] == fmt.min_subnormal == float(ml_dtypes.finfo(INDEPENDENT[fmt.name]).smallest_subnormal)
    assert fmt.min_normal == float(ml_dtypes.finfo(INDEPENDENT[fmt.name]).smallest_normal)
    assert fmt.bias == 2 ** (fmt.exponent_bits - 1) - 1
    assert 1 + fmt.exponent_bits + fmt.mantissa_bits == 8
    # saturates_above: the last FP32 that rounds to max in the format continued by one more binade
    next_up = fmt.max + (finite[-1] - finite[-2])
    tie = (fmt.max + next_up) / 2
    goes_down = int(fmt.max / (next_up - fmt.max)) % 2 == 0  # a tie goes to the even mantissa
    assert fmt.saturates_above == (tie if goes_down else float(np.nextafter(np.float32(tie), np.float32(0))))


@both
def test_each_number_encodes_to_its_own_code(fmt):
    values = independent_values(fmt)
    finite = np.isfinite(values)
    assert np.array_equal(codes_of(torch.from_numpy(values), fmt)[finite], np.arange(256, dtype=np.uint8)[finite])


@both
def test_ties_and_their_neighbours(fmt):
    """Half way between every two neighbouring numbers, and one FP32 ulp to each side of it."""
    values = independent_values(fmt).astype(np.float64)
    numbers = np.sort(np.unique(values[np.isfinite(values)]))
    ties = ((numbers[1:] + numbers[:-1]) / 2).astype(np.float32)
    up, down = np.nextafter(ties, np.float32(np.inf)), np.nextafter(ties, np.float32(-np.inf))
    assert_encodes_like_ml_dtypes(np.concatenate([ties, up, down]), fmt)
    even = codes_of(torch.from_numpy(ties), fmt) & 1
    assert not even.any()  # every tie went to an even code


@both
def test_overflow_saturates_and_what_is_not_finite_becomes_nan(fmt):
    top = np.float32(fmt.max)
    past = [
        np.nextafter(top, np.float32(np.inf)), fmt.saturates_above, np.nextafter(np.float32(fmt.saturates_above), 1e9),
        fmt.max * 1.0625, fmt.max * 1.25, fmt.max * 2, 1e30, np.finfo(np.float32).max,
    ]  # fmt: skip
    for x in past:
        codes = encode(torch.tensor([x, -x], dtype=torch.float32), fmt)
        assert codes.float().tolist() == [fmt.max, -fmt.max]
    bad = torch.tensor([math.inf, -math.inf, math.nan, -math.nan])
    assert codes_of(bad, fmt).tolist() == [0x7F] * 4


@both
def test_zero_and_underflow_keep_their_sign(fmt):
    half = fmt.min_subnormal / 2  # the tie between zero and the smallest number: even, so zero
    x = torch.tensor([0.0, -0.0, half, -half, 1e-40, -1e-40, 1.0001 * half, -1.0001 * half])
    assert codes_of(x, fmt).tolist() == [0, 0x80, 0, 0x80, 0, 0x80, 1, 0x81]


@both
def test_random_bit_patterns_encode_like_ml_dtypes(fmt):
    """Two million FP32 bit patterns: every exponent, NaN payloads, denormals; and as many within the format's range."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 2_000_000, dtype=np.uint32).view(np.float32)
    exponents = rng.uniform(math.log2(fmt.min_subnormal) - 2, math.log2(fmt.max) + 1, 2_000_000)
    inside = (rng.choice([-1, 1], 2_000_000) * 2.0**exponents).astype(np.float32)
    # every FP32 that is cut from a number's neighbourhood in its low bits: exact codes, ties, just past them
    near = independent_values(fmt).view(np.uint32)[:, None] + (np.arange(-8, 9)[None] << 17).astype(np.uint32)
    assert_encodes_like_ml_dtypes(np.concatenate([bits, inside, near.view(np.float32).ravel()]), fmt)


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_number_encodes_like_ml_dtypes(fmt, dtype):
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    assert np.array_equal(codes_of(x, fmt), independent_encode(x.float().numpy(), fmt))


@both
def test_float64_is_rounded_to_fp32_first(fmt):
    x = torch.tensor([1.0625 + 1e-12, 1e300, -1e-300], dtype=torch.float64)
    assert np.array_equal(codes_of(x, fmt), independent_encode(x.float().numpy(), fmt))


@both
@pytest.mark.parametrize("shape", [(0,), (0, 3), (), (1,), (3, 5, 7)])
def test_shapes_and_strides_are_kept(fmt, shape, make_generator):
    x = torch.randn(shape, generator=make_generator(1))
    assert decode(encode(x, fmt)).shape == x.shape
    if x.ndim > 1:
        assert torch.equal(decode(encode(x.transpose(0, 1), fmt)), decode(encode(x, fmt)).transpose(0, 1))


def test_encode_leaves_its_input_alone(make_generator):
    x = torch.randn(100, generator=make_generator(2)) * 1e3
    before = x.clone()
    encode(x, E4M3)
    assert torch.equal(x, before)


def test_formats_are_the_same_object_when_copied():
    for fmt in FORMATS.values():
        assert copy.deepcopy(fmt) is fmt
        assert pickle.loads(pickle.dumps(fmt)) is fmt
        assert str(fmt) == fmt.name


def test_wrong_dtypes_are_named():
    with pytest.raises(DtypeError, match=r"encode got torch.int32; allowed: a floating point tensor; convert"):
        encode(torch.ones(2, dtype=torch.int32), E4M3)
    with pytest.raises(DtypeError, match=r"decode got torch.bfloat16; allowed: torch.float8_e4m3fn, torch.float8_e5m2"):
        decode(torch.ones(2, dtype=torch.bfloat16))
    assert issubclass(DtypeError, ValueError)
    assert issubclass(DtypeError, Acceler8Error)


@pytest.mark.requires(sm=89)
@both
def test_a_gpu_encodes_and_decodes_the_same(fmt):
    rng = np.random.default_rng(1)
    x = torch.from_numpy(rng.integers(0, 2**32, 1_000_000, dtype=np.uint32).view(np.float32))
    codes = encode(x, fmt)
    on_gpu = encode(x.cuda(), fmt)
    assert torch.equal(on_gpu.cpu().view(torch.uint8), codes.view(torch.uint8))
    values, expected = decode(on_gpu).cpu(), decode(codes)
    assert torch.equal(values.isnan(), expected.isnan())
    assert torch.equal(values.nan_to_num(0), expected.nan_to_num(0))
