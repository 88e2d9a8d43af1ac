"""amax of a tensor, of rows, of columns."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from acceler8.errors import ShapeError
from acceler8.kernels import amax_ref, compute_amax
from tests.kernels.support import DATA, DTYPES, LAYOUTS, SHAPES, lay_out, make


@pytest.mark.parametrize("data", DATA)
def test_like_numpy(data):
    """numpy's maximum propagates NaN, as ours must."""
    for i, (rows, cols) in enumerate(SHAPES):
        x = make(data, rows, cols, DTYPES[i % 3], seed=i)
        magnitude = np.abs(x.float().numpy())
        for dim, expected in ((None, magnitude.max()), (0, magnitude.max(0)), (1, magnitude.max(1))):
            got = compute_amax(x, dim)
            assert got.dtype == torch.float32
            assert got.shape == np.shape(expected)
            assert np.array_equal(got.numpy(), expected, equal_nan=True), (rows, cols, dim)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("nan", [math.nan, -math.nan])
def test_a_nan_is_never_lost(dtype, nan):
    """Wherever it stands, whatever stands beside it: infinity, and the largest finite number."""
    for at in ((0, 0), (16, 30), (5, 7), (16, 0), (0, 30)):
        x = make("gaussian", 17, 31, dtype)
        x[3, 3], x[at[0], 5], x[at[0], 6] = math.inf, torch.finfo(dtype).max, -math.inf
        x[at] = nan
        assert compute_amax(x).isnan()
        assert compute_amax(x, 1).isnan().nonzero().flatten().tolist() == [at[0]]
        assert compute_amax(x, 0).isnan().nonzero().flatten().tolist() == [at[1]]


@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (5, 0)])
def test_nothing_has_amax_zero(shape):
    x = torch.empty(shape)
    assert compute_amax(x).tolist() == 0.0
    assert compute_amax(x, 0).tolist() == [0.0] * shape[1]
    assert compute_amax(x, 1).tolist() == [0.0] * shape[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_does_not_matter(layout):
    x = lay_out(make("outliers", 33, 130, torch.bfloat16), layout)
    for dim in (None, 0, 1):
        assert torch.equal(compute_amax(x, dim), compute_amax(x.clone(), dim))


def test_reference_takes_float64():
    x = torch.tensor([[1.0, -2.5], [0.0, 0.5]], dtype=torch.float64)
    assert (amax_ref(x).item(), amax_ref(x, 0).tolist(), amax_ref(x, 1).tolist()) == (2.5, [1.0, 2.5], [2.5, 0.5])


def test_rejected_with_what_is_allowed():
    with pytest.raises(ShapeError, match=r"compute_amax got 3 dimensions; allowed: 2; flatten batch dimensions first"):
        compute_amax(torch.ones(2, 3, 4))
    with pytest.raises(ShapeError, match=r"compute_amax got dim=2; allowed: None, 0, 1"):
        compute_amax(torch.ones(2, 3), 2)
