"""Weights quantised together: the codes and scales of their concatenation, bit for bit.

Runs the reference on a CPU, the kernels on a GPU and, started by ``test_interpreter.py``, in Triton's interpreter.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from acceler8.errors import DtypeError, ShapeError
from acceler8.formats import E4M3, E5M2
from acceler8.kernels import quantize_concatenated, quantize_ref
from acceler8.kernels._triton import INTERPRETED
from acceler8.scaling import GRANULARITIES, ROWWISE, TENSORWISE, BLOCK_1x128, BLOCK_128x128, Granularity
from tests.kernels.support import DATA, DTYPES, assert_same, make
from tests.kernels.test_library_ops import TRACED, opcheck

ALL = list(GRANULARITIES.values())
every = pytest.mark.parametrize("granularity", ALL, ids=str)
on_each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.requires(sm=90))])
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{what} encountered:RuntimeWarning") for what in ("invalid value", "overflow")
]
# filler behind the last tile of the last weight; one row; one weight; more than a tile of each
HEIGHTS = {
    0: [(63, 63), (1, 7), (5,), (130, 48, 33)],
    128: [(128, 128, 7), (256, 63), (5,)],
    32: [(32, 160, 33), (96,)],
}


def compare(weights: list[Tensor], granularity: Granularity, device: str, case: object, **options: object) -> None:
    whole = torch.cat(weights)
    there = [w.to(device) for w in weights]
    first, second = (E4M3, E5M2) if len(weights) % 2 else (E5M2, E4M3)
    for rows, cols in ((first, second), (first, None), (None, second)):
        got = quantize_concatenated(there, rows, cols, granularity, **options)
        for q, fmt, source in zip(got, (rows, cols), (whole, whole.t()), strict=True):
            assert (q is None) == (fmt is None)
            if fmt is not None:
                codes, scale_inv, _ = quantize_ref(source, fmt, granularity, **options)
                assert_same(q, codes, scale_inv, (case, rows, cols))


@on_each_device
@every
@pytest.mark.parametrize("data", ["gaussian", "one_nan", "zero_rows"] if INTERPRETED else DATA)
def test_codes_are_those_of_the_concatenation(granularity, data, device):
    index = ALL.index(granularity) + DATA.index(data)
    heights = HEIGHTS[granularity.cols]
    for i, rows in enumerate([heights[index % len(heights)]] if INTERPRETED else heights):
        weights = [make(data, n, 48 + 24 * (i % 2), DTYPES[(i + index) % 3], seed=j) for j, n in enumerate(rows)]
        weights[0] = weights[0].t().contiguous().t() if i % 2 else weights[0]
        compare(weights, granularity, device, (rows, data), pow2=index % 2 == 0, margin=i % 2)


@on_each_device
@pytest.mark.parametrize("heights", [(6, 9, 3), (4, 68, 12), (66, 65)], ids=str)
@pytest.mark.parametrize("lies", ["rows", "columns", "both"])
@pytest.mark.parametrize("cols", [E4M3, E5M2], ids=lambda fmt: fmt.name)
def test_with_one_scale_any_weight_may_start_anywhere(heights, lies, cols, device):
    """Codes of one cast serve both orientations if formats agree; where a weight starts decides how columns leave."""
    weights = [make("gaussian", n, 72, torch.bfloat16, seed=n) for n in heights]
    for i in range(len(weights)):
        if lies == "columns" or (lies == "both" and i % 2):
            weights[i] = weights[i].t().contiguous().t()
    whole = torch.cat(weights)
    there = [w.to(device) for w in weights]
    as_rows, as_cols = quantize_concatenated(there, E4M3, cols, TENSORWISE)
    assert_same(as_rows, *quantize_ref(whole, E4M3, TENSORWISE)[:2], "rows")
    assert_same(as_cols, *quantize_ref(whole.t(), cols, TENSORWISE)[:2], "columns")


@on_each_device
def test_rows_in_blocks_need_no_alignment_of_their_own(device):
    weights = [make("gaussian", n, 256, torch.bfloat16, seed=n) for n in (5, 33, 7)]
    got, _ = quantize_concatenated([w.to(device) for w in weights], E4M3, None, BLOCK_1x128)
    assert_same(got, *quantize_ref(torch.cat(weights), E4M3, BLOCK_1x128)[:2], "rows")


@on_each_device
@pytest.mark.parametrize("known", [0.0, 3.0, math.inf])
def test_delayed_scaling_stages_the_amax_of_all(known, device):
    weights = [make("gaussian", n, 48, torch.bfloat16, seed=n) for n in (33, 16)]
    weights[1] *= 4
    amax, staging = torch.tensor([known]), torch.zeros(1, device=device)
    rows, cols = quantize_concatenated(
        [w.to(device) for w in weights], E4M3, E5M2, TENSORWISE, amax=amax.to(device), staging=staging
    )
    whole = torch.cat(weights)
    assert_same(rows, *quantize_ref(whole, E4M3, TENSORWISE, amax=amax)[:2], known)
    assert_same(cols, *quantize_ref(whole.t(), E5M2, TENSORWISE, amax=amax)[:2], known)
    assert staging.item() == whole.abs().max()


@on_each_device
def test_compiles_whole_and_checks_as_an_operation(device):
    def work(a: Tensor, b: Tensor, state: Tensor) -> tuple[Tensor, ...]:
        rows, cols = quantize_concatenated([a, b], E4M3, E4M3, ROWWISE)
        _, late = quantize_concatenated([a, b], None, E4M3, TENSORWISE, amax=state[:1], staging=state[1:])
        return rows.dequantize(), cols.dequantize(), late.dequantize()

    a, b = (make("gaussian", n, 48, torch.bfloat16, seed=n).to(device) for n in (33, 16))
    states = [torch.zeros(2, device=device) for _ in range(2)]
    torch._dynamo.reset()
    got = torch.compile(work, fullgraph=True, backend="aot_eager")(a, b, states[0])
    assert all(torch.equal(x, y) for x, y in zip(got, work(a, b, states[1]), strict=True))
    assert torch.equal(*states)
    assert states[0][1] > 0
    opcheck(torch.ops.acceler8.quantize_concatenated.default, ([a, b], "E4M3", "E5M2", "rowwise", False, 0), TRACED)


@on_each_device
def test_empty(device):
    weights = [torch.empty(n, 48, device=device) for n in (0, 16)]
    rows, cols = quantize_concatenated(weights, E4M3, E4M3, ROWWISE)
    assert (rows.codes.shape, cols.codes.shape) == ((16, 48), (48, 16))


def test_rejected_with_what_is_allowed():
    a, b = torch.ones(33, 48), torch.ones(16, 48)
    for granularity, cols in ((BLOCK_128x128, None), (BLOCK_1x128, E4M3)):
        with pytest.raises(ShapeError, match=r"N_i=\[33, 16\] with .* scales; allowed: every N_i but the last"):
            quantize_concatenated([a, b], E4M3, cols, granularity)
    with pytest.raises(ShapeError, match="no weights"):
        quantize_concatenated([], E4M3, None, ROWWISE)
    with pytest.raises(ShapeError, match="with the same K"):
        quantize_concatenated([a, torch.ones(16, 32)], E4M3, None, ROWWISE)
    with pytest.raises(DtypeError, match="one dtype and device"):
        quantize_concatenated([a, b.bfloat16()], E4M3, None, ROWWISE)
    with pytest.raises(DtypeError, match="no orientation"):
        quantize_concatenated([a, b], None, None, ROWWISE)
    with pytest.raises(ShapeError, match="got amax but no staging"):
        quantize_concatenated([a, b], E4M3, None, TENSORWISE, amax=torch.ones(1))
