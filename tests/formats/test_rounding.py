"""Hashed random bits, stochastic rounding, and BF16 with its remainder."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from acceler8.formats import hash32, hash32_int, join_bf16, random_bits, round_stochastic_bf16, split_bf16


def lowbias32(x: np.ndarray) -> np.ndarray:
    """The author's C, in NumPy."""
    x = x.astype(np.uint32)
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x7FEB352D)
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x846CA68B)
    x ^= x >> np.uint32(16)
    return x


def any_bits(count: int, seed: int = 0) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.integers(0, 2**32, count, dtype=np.uint32).view(np.float32))


def test_the_hash_is_lowbias32():
    x = np.random.default_rng(0).integers(0, 2**32, 10_000, dtype=np.uint32)
    assert np.array_equal(hash32(torch.from_numpy(x.view(np.int32))).numpy().view(np.uint32), lowbias32(x))
    assert [hash32_int(int(n)) % 2**32 for n in x[:100]] == lowbias32(x[:100]).tolist()


def test_random_bits_of_a_slice_are_those_of_the_whole():
    whole = random_bits(0, 1000, -7, torch.device("cpu"))
    assert torch.equal(random_bits(256, 512, -7, torch.device("cpu")), whole[256:768])
    assert not torch.equal(random_bits(0, 1000, 8, torch.device("cpu")), whole)


@pytest.mark.parametrize("x", [1.0 + 2**-9, -3.3, 1e-39, 7e30])
def test_stochastic_rounding_has_the_number_as_its_mean(x):
    """Every one of the 65536 draws once: the mean is the number to FP64's last bits."""
    bits = torch.arange(2**16, dtype=torch.int32)
    rounded = round_stochastic_bf16(torch.full((2**16,), x), bits)
    assert rounded.dtype is torch.bfloat16
    assert rounded.unique().numel() <= 2
    exact = float(torch.tensor(x))
    assert rounded.double().mean().item() == pytest.approx(exact, rel=1e-12, abs=1e-50)


def test_stochastic_rounding_keeps_what_is_exact_and_what_is_not_finite():
    x = torch.tensor([0.0, -0.0, 1.5, math.inf, -math.inf, math.nan])
    rounded = round_stochastic_bf16(x, torch.full((6,), 0xFFFF, dtype=torch.int32)).float()
    assert torch.equal(rounded[:5], x[:5])
    assert rounded[5].isnan()


def test_bf16_and_remainder_are_every_fp32_number():
    x = any_bits(1_000_000)
    x[:8] = torch.tensor([0.0, -0.0, math.inf, -math.inf, 3.4028235e38, 1e-45, 1.00390625, 1.01171875])
    high, low = split_bf16(x)
    assert (high.dtype, low.dtype) == (torch.bfloat16, torch.int16)
    back, is_nan = join_bf16(high, low), x.isnan()
    assert torch.equal(back.view(torch.int32)[~is_nan], x.view(torch.int32)[~is_nan])
    assert back[is_nan].isnan().all()
    assert high[is_nan].isnan().all()  # the parameter shows it, too


def test_the_bf16_half_is_rounded_to_nearest():
    x = any_bits(100_000, seed=1)
    x = x[x.isfinite() & ((x.view(torch.int32) & 0xFFFF) != 0x8000)]  # all but ties
    assert torch.equal(split_bf16(x)[0], x.to(torch.bfloat16))
    tie = torch.tensor([1.00390625, -1.00390625])  # half way between 1 and 1.0078125
    assert split_bf16(tie)[0].tolist() == [1.0078125, -1.0078125]  # away from zero
