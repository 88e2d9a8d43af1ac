"""Quick divisions, roots and codes: their PTX against IEEE and the formats on the CPU, and on a GPU against its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from acceler8.formats import decode_ue5m3, encode_ue5m3
from acceler8.kernels import _adam_math as quick
from acceler8.kernels import _ue5m3
from acceler8.kernels._triton import jit, tl
from tests.kernels.ptx import Ptx, approximate, fma

LEAST, MOST = np.float32(2.0**-56), np.float32(2.0**80)
ONE = 0x3F800000


def text(constant) -> str:  # a constexpr where there is Triton
    return getattr(constant, "value", constant)


def ratio(first, second, factor, eps, ulps, lifted=None):
    """What the PTX gives, and who took its slow side; eight elements a lane."""
    count = len(first) // 8
    lifted = factor * np.float32(2.0**-quick.LIFT) if lifted is None else lifted
    values = [first, second, *(np.full_like(first, v) for v in (lifted, factor, eps))]
    operands = {
        8 + 8 * j + i: v.view(np.uint32).reshape(count, 8)[:, i].copy() for j, v in enumerate(values) for i in range(8)
    }
    ran = Ptx(text(quick._RATIO_PTX), operands, ulps)
    q = np.stack([ran.registers[f"${i}"] for i in range(8)], 1).reshape(-1)
    return q, ran.slow[-1].repeat(8)


def expected_ratio(first, second, factor, eps):
    with np.errstate(all="ignore"):
        return (first / (np.sqrt(second) * np.float32(factor) + np.float32(eps))).view(np.uint32)


def same(q, expected):
    nan = np.isnan(expected.view(np.float32))
    return np.where(nan, np.isnan(q.view(np.float32)), q == expected)


def magnitudes(rng, count, low, high):
    """Random mantissas under exponents from low to high, the ends often."""
    exponent = np.clip(rng.integers(low - 20, high + 20, count), low, min(high, 128) - 1)
    return np.ldexp(1 + rng.integers(0, 2**23, count) * 2.0**-23, exponent).astype(np.float32)


@pytest.mark.parametrize("ulps", [-1, 0, 1])
@pytest.mark.parametrize("eps", [1e-8, 2.0**-40, 1.0])
@pytest.mark.parametrize("factor", [31.6227766, 1.0, 2.0**14])
def test_ratio_of_ordinary_numbers_is_quick_and_right(ulps, eps, factor):
    rng = np.random.default_rng(0)
    first = magnitudes(rng, 2**16, -20, 20) * rng.choice([-1, 1], 2**16).astype(np.float32)
    second = magnitudes(rng, 2**16, -50, 20)
    first[rng.random(2**16) < 0.05] = 0.0
    first[rng.random(2**16) < 0.05] = -0.0
    second[rng.random(2**16) < 0.05] = 0.0
    q, slow = ratio(first, second, np.float32(factor), np.float32(eps), ulps)
    assert same(q, expected_ratio(first, second, factor, eps)).all()
    assert not slow.any()


@pytest.mark.parametrize("ulps", [-1, 0, 1])
@pytest.mark.parametrize("eps", [1e-8, 2.0**-40, 2.0**40, 0.0])
@pytest.mark.parametrize("factor", [1.0, 2.0**14])
def test_ratio_of_any_numbers_is_right(ulps, eps, factor):
    """All exponents, subnormal numbers, infinity and NaN: each in a lane with seven others like it."""
    rng = np.random.default_rng(1)
    is_quick = quick.EPS_LEAST <= eps <= quick.EPS_MOST
    for low in range(-150, 128, 6):
        first = magnitudes(rng, 2**10, low, low + 6) * rng.choice([-1, 1], 2**10).astype(np.float32)
        second = magnitudes(rng, 2**10, -149, 127)
        first[::97], first[5::101], second[::89], second[7::103] = np.nan, np.inf, np.inf, np.nan
        second = np.sort(second)
        q, _ = ratio(first, second, np.float32(factor), np.float32(eps), ulps, None if is_quick else np.float32("nan"))
        assert same(q, expected_ratio(first, second, factor, eps)).all(), low


@pytest.mark.parametrize("ulps", [-1, 0, 1])
def test_quotient_of_scales_is_right(ulps):
    rng = np.random.default_rng(2)
    amax = magnitudes(rng, 2**17, -100, 128)
    for most in (448.0, 61440.0, 65504.0):
        for a, b in ((np.full_like(amax, most), amax), (amax, np.full_like(amax, most))):
            ran = Ptx(text(quick._QUOTIENT_PTX), {1: a.view(np.uint32), 2: b.view(np.uint32)}, ulps)
            assert np.array_equal(ran.registers["$0"].view(np.float32), a / b)
            assert ran.slow[0].mean() < 0.2


def reciprocals(ulps):
    b = (ONE + np.arange(2**23, dtype=np.uint32)).view(np.float32)
    y0 = approximate(1 / b.astype(np.float64), ulps)
    y = fma(y0, fma(-b, y0, np.ones_like(b)), y0)
    return b, y, 1 / b


@pytest.mark.slow
@pytest.mark.parametrize(("ulps", "exceptions"), [(-1, 1), (0, 0), (1, 32)])
def test_reciprocal_is_rounded_correctly_but_for_few(ulps, exceptions):
    """With those no dividend is wrong but one of each of the two largest odd divisors."""
    b, y, expected = reciprocals(ulps)
    odd = np.flatnonzero(y != expected)
    assert len(odd) == exceptions
    every = (ONE + np.arange(2**23, dtype=np.uint32)).view(np.float32)
    for i in odd:  # all dividends of those that have a wrong one, and a part of the others': 2 s a divisor
        has_wrong = b[i] in (np.float32(2 - 2**-23), np.float32(2 - 3 * 2**-23))
        a = every if has_wrong else every[i % 31 :: 31]
        divisor, y_i = np.full_like(a, b[i]), np.full_like(a, y[i])
        q = a * y_i
        q = fma(fma(-divisor, q, a), y_i, q)
        assert (q != a / divisor).sum() == has_wrong


@pytest.mark.slow
@pytest.mark.parametrize(("ulps", "exceptions"), [(-1, 3), (0, 0), (1, 2)])
def test_root_is_rounded_correctly_but_for_few(ulps, exceptions):
    wrong = 0
    for start in (ONE, ONE + 2**23):
        x = (start + np.arange(2**23, dtype=np.uint32)).view(np.float32)
        y = approximate(1 / np.sqrt(x.astype(np.float64)), ulps)
        s = x * y
        wrong += int((fma(fma(-s, s, x), y * np.float32(0.5), s) != np.sqrt(x)).sum())
    assert wrong == exceptions


@pytest.mark.parametrize("scale", [1.0, 3.7e5, 2.0**-60])
def test_codes_of_the_second_moment_are_those_of_the_format(scale):
    rng = np.random.default_rng(3)
    scale = np.float32(scale)
    y = magnitudes(rng, 2**16, -40, 15)
    y[::3] = np.ldexp(rng.integers(0, 2**9, len(y[::3])), rng.integers(-38, 7, len(y[::3]))).astype(np.float32)  # ties
    x = (np.minimum(y, np.float32(61440)) / scale).astype(np.float32)
    if scale == 1:  # that of blocks which are not finite
        x[::5], x[1::7], x[2::11] = np.inf, np.nan, np.float32(3e38)
    lanes = x.reshape(-1, 8)
    operands = {2 + i: lanes[:, i].copy().view(np.uint32) for i in range(8)}
    operands |= {10 + i: np.full(len(lanes), scale).view(np.uint32) for i in range(8)}
    ran = Ptx(text(_ue5m3._ENCODE_PTX), operands)
    got = np.stack([ran.registers["$0"], ran.registers["$1"]], 1).view(np.uint8).reshape(-1)
    with np.errstate(over="ignore"):
        expected = encode_ue5m3(torch.from_numpy(x * scale), keep_nonzero=True).numpy()
    assert np.array_equal(got, expected)
    assert ran.slow[0].all() == (scale == 1)


def test_values_of_codes_of_the_second_moment_are_those_of_the_format():
    codes = np.arange(256, dtype=np.uint8)
    ran = Ptx(text(_ue5m3._DECODE_PTX), {4: codes.view(np.uint32)})
    got = np.stack([ran.registers[f"${i}"].view(np.float32) for i in range(4)], 1).reshape(-1)
    assert np.array_equal(got, decode_ue5m3(torch.from_numpy(codes)).numpy(), equal_nan=True)


@jit
def ratios_kernel(  # type: ignore[no-untyped-def]
    first_ptr, second_ptr, quick_ptr, exact_ptr, factor, eps, LIFTED: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    at = tl.program_id(0) * N + tl.arange(0, N)
    first, second = tl.load(first_ptr + at), tl.load(second_ptr + at)
    tl.store(quick_ptr + at, quick.adam_ratio(first, second, factor * LIFTED, factor, eps))
    tl.store(exact_ptr + at, tl.div_rn(first, tl.sqrt_rn(second) * factor + eps))


def run_ratios(first, second, factor, eps):
    results = torch.empty_like(first), torch.empty_like(first)
    ratios_kernel[(first.numel() // 1024,)](
        first, second, *results, factor, eps, 2.0**-quick.LIFT, 1024, num_warps=4, enable_fp_fusion=False
    )
    return (result.view(torch.int32) for result in results)


@pytest.mark.requires(sm=80)
def test_every_mantissa_has_the_root_of_the_gpus_own_instruction(make_generator):
    """All 2**24 of both parities, as divisors; and all dividends of the two divisors that rest on ``div.rn``."""
    second = (ONE + torch.arange(2**24, dtype=torch.int32, device="cuda")).view(torch.float32)
    for power in (-60, -20, 0, 20):
        first = torch.randn(2**24, generator=make_generator(0, "cuda"), device="cuda")
        got, exact = run_ratios(first, second * 2.0**power, 1.0, 2.0**-40)
        assert torch.equal(got, exact)
        got, exact = run_ratios(torch.ones_like(first), second * 2.0**power, 1.0, 2.0**-40)
        assert torch.equal(got, exact)
    first = (ONE + torch.arange(2**23, dtype=torch.int32, device="cuda")).view(torch.float32)
    for divisor in (2 - 2.0**-23, 2 - 3 * 2.0**-23):  # with a root of 0
        got, exact = run_ratios(first, torch.zeros_like(first), 1.0, divisor)
        assert torch.equal(got, exact)
