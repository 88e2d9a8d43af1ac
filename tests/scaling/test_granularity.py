"""Which elements share a scale."""

from __future__ import annotations

import copy
import itertools
import math
import pickle

import pytest
import torch
from torch import Tensor

from acceler8.errors import ShapeError
from acceler8.scaling import (
    GRANULARITIES,
    ROWWISE,
    TENSORWISE,
    BLOCK_1x128,
    BLOCK_128x128,
    Granularity,
    MX_1x32,
    expand_groups,
    group_amax,
    multiply_groups,
)

ALL = list(GRANULARITIES.values())
every = pytest.mark.parametrize("granularity", ALL, ids=str)
SHAPES = [(1, 1), (7, 48), (17, 31), (128, 128), (129, 257), (3, 640), (300, 5)]


def groups(granularity: Granularity, rows: int, cols: int) -> list[tuple[tuple[int, int], tuple[slice, slice]]]:
    """``(index of the scale, slices of its elements)``, by definition."""
    height, width = granularity.rows or rows, granularity.cols or cols
    return [
        ((i // height, j // width), (slice(i, i + height), slice(j, j + width)))
        for i, j in itertools.product(range(0, rows, height), range(0, cols, width))
    ]


@every
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_amax_of_each_group(granularity, dtype, make_generator):
    for rows, cols in SHAPES:
        x = torch.randn(rows, cols, generator=make_generator(rows), dtype=torch.float64).to(dtype)
        got = group_amax(x, granularity)
        assert got.dtype == torch.float32
        assert got.shape == granularity.scale_shape(rows, cols)
        table = got.reshape(1, 1) if got.ndim == 0 else got
        for index, where in groups(granularity, rows, cols):
            assert table[index].item() == max(abs(v) for v in x[where].float().flatten().tolist())


@every
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
def test_one_bad_element_marks_its_group_and_no_other(granularity, dtype, bad, make_generator):
    rows, cols, at = 130, 260, (129, 130)
    x = torch.randn(rows, cols, generator=make_generator(3)).to(dtype)
    clean = group_amax(x, granularity)
    x[at] = bad
    got = group_amax(x, granularity)
    hit = torch.zeros_like(got, dtype=torch.bool)
    index = (at[0] // (granularity.rows or rows), at[1] // (granularity.cols or cols))
    hit[index if got.ndim else ()] = True
    assert torch.equal(got.isnan() if math.isnan(bad) else got.isinf(), hit)
    assert torch.equal(got[~hit], clean[~hit]) or granularity.rows == 0


@every
def test_nan_wins_over_infinity(granularity):
    x = torch.tensor([[math.inf, math.nan, -math.inf, 1.0]])
    assert group_amax(x, granularity).isnan().all()
    assert group_amax(x.bfloat16(), granularity).isnan().all()


@every
@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (5, 0), (0, 256), (256, 0)])
def test_nothing_has_amax_zero(granularity, shape):
    got = group_amax(torch.empty(shape), granularity)
    assert got.shape == granularity.scale_shape(*shape)
    assert (got == 0).all()


@every
def test_strides_do_not_matter(granularity, make_generator):
    base = torch.randn(70, 300, generator=make_generator(4))
    for x in (base.t(), base[::3, 1::2], base[:1].expand(40, 300), base[:, :1].expand(70, 50)):
        assert torch.equal(
            group_amax(x, granularity), group_amax(x.clone(memory_format=torch.contiguous_format), granularity)
        )


@every
def test_each_element_meets_the_scale_of_its_group(granularity):
    for rows, cols in SHAPES:
        count = math.prod(granularity.scale_shape(rows, cols))
        scale = torch.arange(count, dtype=torch.float32).reshape(granularity.scale_shape(rows, cols))
        full = expand_groups(scale, granularity, rows, cols).broadcast_to(rows, cols)
        table: Tensor = scale.reshape(1, 1) if scale.ndim == 0 else scale
        for index, where in groups(granularity, rows, cols):
            assert (full[where] == table[index]).all()


@every
@pytest.mark.parametrize("transposed", [False, True])
def test_products_keep_strides_and_round_once(granularity, transposed, make_generator):
    for rows, cols in [*SHAPES, (256, 384), (0, 128), (128, 0)]:
        base = torch.randn((cols, rows) if transposed else (rows, cols), generator=make_generator(5))
        base = base.t() if transposed else base
        scale = torch.rand(granularity.scale_shape(rows, cols), generator=make_generator(6)) + 0.5
        expected = base * expand_groups(scale, granularity, rows, cols)
        got = multiply_groups(base, scale, granularity)
        assert torch.equal(got, expected)
        assert got.stride() == base.stride() or min(rows, cols) <= 1
        into = base.clone()
        assert torch.equal(multiply_groups(into, scale, granularity, in_place=True), expected)
        assert torch.equal(into, expected)


def test_scale_shapes_are_those_of_the_gemms():
    assert TENSORWISE.scale_shape(300, 500) == ()
    assert ROWWISE.scale_shape(300, 500) == (300, 1)
    assert BLOCK_1x128.scale_shape(300, 500) == (300, 4)
    assert BLOCK_128x128.scale_shape(300, 500) == (3, 4)
    assert MX_1x32.scale_shape(300, 500) == (300, 16)


def test_filler_is_a_multiple_of_the_block_and_of_the_gemm():
    assert {g.name: g.contraction_multiple for g in ALL} == {
        "tensorwise": 16, "rowwise": 16, "1x128": 128, "128x128": 128, "mx1x32": 32,
    }  # fmt: skip
    for g in ALL:  # a filled extent starts no new group
        for cols in range(1, 300):
            filled = cols + -cols % g.contraction_multiple
            assert g.scale_shape(8, cols) == g.scale_shape(8, filled)


def test_square_groups_and_local_blocks():
    assert [g.is_square for g in ALL] == [True, False, False, True, False]
    assert [g.is_blockwise for g in ALL] == [False, False, True, True, True]
    assert [g.e8m0 for g in ALL] == [False, False, False, False, True]


def test_copies_are_the_same_object():
    for granularity in ALL:
        assert copy.deepcopy(granularity) is granularity
        assert pickle.loads(pickle.dumps(granularity)) is granularity
        assert str(granularity) == granularity.name


@pytest.mark.parametrize("shape", [(3,), (2, 3, 4)])
def test_only_two_dimensions(shape):
    with pytest.raises(ShapeError, match=rf"group_amax got {len(shape)} dimensions; allowed: 2; flatten"):
        group_amax(torch.ones(shape), ROWWISE)
