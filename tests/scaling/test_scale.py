"""From amax to scale: the formula in exact arithmetic, and every edge of it."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from acceler8.formats import E4M3, E5M2, decode, decode_e8m0, encode, encode_e8m0
from acceler8.scaling import AMAX_FLOOR, compute_scale, compute_scale_e8m0

both = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
FLOAT_MAX = 3.4028234663852886e38
FLOOR = float(np.float32(AMAX_FLOOR))
EDGES = [0.0, 1e-45, 1e-38, 1e-20, 9.9e-13, AMAX_FLOOR, 1.1e-12, 1.0, 447.9, 448.0, 1e10, FLOAT_MAX, math.inf, math.nan]


def random_amax(count: int = 20_000) -> Tensor:
    """Positive FP32 numbers of every exponent above the floor."""
    rng = np.random.default_rng(0)
    low, high = np.array([1e-12, FLOAT_MAX], dtype=np.float32).view(np.uint32)
    return torch.from_numpy(rng.integers(low + 1, high, count, dtype=np.uint32).view(np.float32))


def is_power_of_two(x: Tensor) -> bool:
    return bool((x.view(torch.int32) & 0x7FFFFF == 0).all())


def rounded_quotient(a: float, b: float) -> float:
    """a / b rounded once to FP32: the two neighbours of the quotient compared in exact fractions."""
    exact = Fraction(a) / Fraction(b)
    near = np.float32(a / b)
    candidates = [near, np.nextafter(near, np.float32(0)), np.nextafter(near, np.float32(np.inf))]
    return float(min(candidates, key=lambda c: (abs(Fraction(float(c)) - exact), int(c.view(np.uint32)) & 1)))


@both
@pytest.mark.parametrize("margin", [0, 1, 3, -2])
def test_formula_rounds_once(fmt, margin):
    amax = random_amax(2000)
    scale, scale_inv = compute_scale(amax, fmt, margin=margin)
    assert scale.dtype == scale_inv.dtype == torch.float32
    for a, s, inv in zip(amax.tolist(), scale.tolist(), scale_inv.tolist(), strict=True):
        assert s == rounded_quotient(fmt.max * 2.0**-margin, a)
        assert inv == rounded_quotient(1.0, s)


@both
def test_the_largest_element_becomes_the_largest_number(fmt):
    amax = random_amax()
    scale, scale_inv = compute_scale(amax, fmt)
    codes = encode(amax * scale, fmt)
    assert (decode(codes) == fmt.max).all()
    assert ((decode(codes) * scale_inv - amax).abs() <= amax * 2.0**-22).all()  # three roundings of half an ulp


@both
@pytest.mark.parametrize("pow2", [False, True])
def test_edges(fmt, pow2):
    scale, scale_inv = compute_scale(torch.tensor(EDGES), fmt, pow2=pow2)
    of = dict(zip(EDGES[:-1], zip(scale.tolist(), scale_inv.tolist(), strict=True), strict=False))
    assert scale.isfinite().all()
    assert (scale > 0).all()
    assert scale_inv.isfinite().all()
    assert (scale_inv > 0).all()
    for below in (0.0, 1e-45, 1e-38, 1e-20, 9.9e-13):  # one floor for all: zeros give zeros, not 0 * inf
        assert of[below] == of[AMAX_FLOOR]
    assert of[1.1e-12][0] < of[AMAX_FLOOR][0] or pow2
    assert of[math.inf] == (1.0, 1.0)
    assert (scale[-1].item(), scale_inv[-1].item()) == (1.0, 1.0)  # NaN
    exact = rounded_quotient(fmt.max, FLOOR)
    assert of[0.0][0] == (2.0 ** math.floor(math.log2(exact)) if pow2 else exact)


@both
@pytest.mark.parametrize("margin", [0, 2])
def test_power_of_two_scales_are_rounded_down_and_exact(fmt, margin):
    amax = torch.cat([random_amax(), fmt.max * 2.0 ** torch.arange(-40.0, 80.0)])  # exact powers of two too
    plain, _ = compute_scale(amax, fmt, margin=margin)
    scale, scale_inv = compute_scale(amax, fmt, pow2=True, margin=margin)
    assert is_power_of_two(scale)
    assert is_power_of_two(scale_inv)
    assert torch.equal(scale * scale_inv, torch.ones_like(scale))
    assert ((scale <= plain) & (scale * 2 > plain)).all()
    assert torch.equal(scale[-120:], plain[-120:])  # a power of two stays what it is
    x = amax * 0.7
    assert torch.equal((x * scale) * scale_inv, x)


@both
def test_margin_leaves_powers_of_two_of_headroom(fmt):
    amax = random_amax()
    plain, plain_inv = compute_scale(amax, fmt)
    scale, scale_inv = compute_scale(amax, fmt, margin=2)
    usual = amax < 1e30
    assert torch.equal(scale[usual] * 4, plain[usual])
    assert torch.equal(scale_inv[usual], plain_inv[usual] * 4)
    saturated, _ = compute_scale(amax, fmt, margin=-1)
    assert (amax * saturated > fmt.max).all()


@both
@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize("margin", [16, 100, -16, -100])
def test_no_margin_makes_a_scale_without_reciprocal(fmt, margin, pow2):
    """The quotient can be denormal (or overflow); its reciprocal would be inf (or zero) and wipe out the tensor."""
    amax = torch.tensor([0.0, 1e-12, 1.0, 1e30, FLOAT_MAX])
    for scale, scale_inv in (
        compute_scale(amax, fmt, pow2=pow2, margin=margin),
        compute_scale_e8m0(amax, fmt, margin=margin),
    ):
        assert scale.isfinite().all()
        assert scale_inv.isfinite().all()
        assert (torch.minimum(scale, scale_inv) >= 2.0**-126).all()


@both
@pytest.mark.parametrize("margin", [0, 1, -1])
def test_e8m0_scales_are_the_next_power_of_two_up(fmt, margin):
    amax = torch.cat([random_amax(), fmt.max * 2.0 ** torch.arange(-39.0, 80.0)])
    scale, scale_inv = compute_scale_e8m0(amax, fmt, margin=margin)
    assert is_power_of_two(scale)
    assert is_power_of_two(scale_inv)
    ratio = amax.double() / (fmt.max * 2.0**-margin)
    tolerance = 1 + 2.0**-23  # the ratio is rounded to FP32 first
    assert (scale_inv.double() * tolerance >= ratio).all()
    assert (scale_inv.double() < 2 * ratio * tolerance).all()
    assert torch.equal(scale * scale_inv, torch.ones_like(scale))
    assert torch.equal(decode_e8m0(encode_e8m0(scale_inv)), scale_inv)  # an E8M0 number, whichever way it is stored


@both
def test_e8m0_never_saturates(fmt):
    """Rounding down, as the MX specification does, would saturate the largest element of a third of the blocks."""
    amax = random_amax()
    scale, _ = compute_scale_e8m0(amax, fmt)
    assert (amax * scale <= fmt.saturates_above).all()
    assert (amax * scale > fmt.max / 2 * (1 - 2.0**-20)).all()
    rounded_down = amax * scale * 2
    assert (rounded_down > fmt.saturates_above).float().mean() > 0.2


@both
def test_e8m0_edges(fmt):
    scale, scale_inv = compute_scale_e8m0(torch.tensor(EDGES), fmt)
    smallest = 2.0 ** math.ceil(math.log2(FLOOR / fmt.max))
    assert scale_inv[:6].tolist() == [smallest] * 6
    assert scale_inv[-2:].tolist() == scale[-2:].tolist() == [1.0, 1.0]  # inf, NaN
    assert scale.isfinite().all()
    assert (scale > 0).all()


def test_amax_is_not_changed_and_shapes_are_kept():
    for shape in ((), (3, 1), (2, 5), (0, 1)):
        amax = torch.full(shape, 1e-20)
        before = amax.clone()
        for scales in (compute_scale(amax, E4M3, pow2=True), compute_scale_e8m0(amax, E4M3)):
            assert [s.shape for s in scales] == [amax.shape, amax.shape]
        assert torch.equal(amax, before)


@pytest.mark.requires(sm=89)
@both
def test_a_gpu_computes_the_same_scales(fmt):
    amax = torch.cat([random_amax(), torch.tensor(EDGES)])
    for function in (compute_scale, compute_scale_e8m0):
        for on_cpu, on_gpu in zip(function(amax, fmt), function(amax.cuda(), fmt), strict=True):
            assert torch.equal(on_cpu, on_gpu.cpu())
