"""What statistics say, and how they add up."""

from __future__ import annotations

import math

import pytest
import torch

from acceler8.formats import E4M3
from acceler8.kernels import CastStatistics, quantize, read_statistics
from acceler8.scaling import ROWWISE, TENSORWISE
from tests.kernels.support import make


def stats(**values: float) -> CastStatistics:
    zero = {"elements": 0, "amax": 0.0, "saturated": 0, "underflowed": 0, "nonfinite": 0}
    return CastStatistics(**{**zero, "squared_error": 0.0, "squared_sum": 0.0, **values})


def test_read_brings_counts_and_sums_to_the_host():
    packed = torch.tensor([3.0, 1.0, 2.0, 4.0, 0.5, 50.0], dtype=torch.float64)
    got = read_statistics(packed, 100)
    assert got == CastStatistics(100, 3.0, 1, 2, 4, 0.5, 50.0)
    assert all(isinstance(n, int) for n in (got.saturated, got.underflowed, got.nonfinite))
    assert got.sqnr_db == pytest.approx(20.0)


def test_sqnr_at_the_edges():
    assert stats(squared_sum=1.0).sqnr_db == math.inf  # exact
    assert math.isnan(stats().sqnr_db)  # no signal
    assert stats(squared_error=1.0).sqnr_db == -math.inf


def test_adding_is_the_statistics_of_both_together():
    """Rowwise scales make two halves independent, so their sum is the whole's."""
    x = make("outliers", 64, 96, torch.bfloat16)
    x[3, 4] = math.inf
    parts = [read_statistics(quantize(p, E4M3, None, ROWWISE, statistics=True)[2], p.numel()) for p in (x[:20], x[20:])]
    whole = read_statistics(quantize(x, E4M3, None, ROWWISE, statistics=True)[2], x.numel())
    together = parts[0] + parts[1]
    for name in ("elements", "amax", "saturated", "underflowed", "nonfinite"):
        assert getattr(together, name) == getattr(whole, name)
    assert together.squared_error == pytest.approx(whole.squared_error, rel=1e-12)
    assert together.squared_sum == pytest.approx(whole.squared_sum, rel=1e-12)


def test_adding_never_loses_a_nan():
    for a, b in ((math.nan, 1.0), (1.0, math.nan), (math.inf, math.nan)):
        assert math.isnan((stats(amax=a) + stats(amax=b)).amax)
    assert (stats(amax=math.inf) + stats(amax=1.0)).amax == math.inf


def test_a_tensor_that_fits_exactly_has_infinite_sqnr():
    x = torch.tensor([[448.0, 0.5, -2.0, 0.0] * 4])
    got = read_statistics(quantize(x, E4M3, None, TENSORWISE, statistics=True)[2], 16)
    assert got.sqnr_db == math.inf
    assert (got.saturated, got.underflowed, got.nonfinite) == (0, 0, 0)
