"""Sums of columns beside a cast: against float64, equal at each call, and the cast that it would be without them.

Runs the reference on a CPU, the kernels on a GPU and, started by ``test_interpreter.py``, in Triton's interpreter.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from acceler8.errors import DtypeError, ShapeError
from acceler8.formats import E4M3, E5M2
from acceler8.kernels import (
    column_sums_ref,
    quantize,
    quantize_and_sum,
    quantize_concatenated,
    quantize_concatenated_and_sum,
    quantize_ref,
)
from acceler8.kernels._triton import HAVE_TRITON, INTERPRETED
from acceler8.scaling import GRANULARITIES, ROWWISE, TENSORWISE, BLOCK_1x128
from tests.kernels.support import DTYPES, LAYOUTS, assert_same, lay_out, make
from tests.kernels.test_library_ops import TRACED, opcheck

ALL = list(GRANULARITIES.values())
every = pytest.mark.parametrize("granularity", ALL, ids=str)
on_each_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.requires(sm=90))])
ORIENTATIONS = [(E4M3, E5M2), (E4M3, None), (None, E5M2)]
orientations = pytest.mark.parametrize(("rows", "cols"), ORIENTATIONS, ids=["both", "rows", "cols"])
# one row; one column; filler in both; a tile of 128 and of 64 to the element; several tiles, the last of them cut
SHAPES = [(1, 48), (33, 1), (17, 100), (128, 64), (300, 200)]
LARGE = [] if INTERPRETED else [(5000, 272)]
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{what} encountered:RuntimeWarning") for what in ("invalid value", "overflow")
]


def bound(x: Tensor, dim: int, device: str) -> Tensor:
    """How far FP32 sums may lie from exact ones: u = 2**-24 for each of the additions in a row. A kernel's run 64 or
    128 in a tile, one for 32 tiles of 64, and 32 between the places; PyTorch's are at most all of them.
    """
    n = x.shape[dim]
    additions = min(n, 128) + n // 2048 + 33 if device == "cuda" or INTERPRETED else n
    return x.double().abs().sum(dim) * additions * 2.0**-24


def on(x: Tensor, device: str) -> Tensor:
    """``x`` on the device as it lies on the CPU."""
    if x.device.type == device:
        return x
    storage = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())  # type: ignore[call-overload]
    return storage.to(device).as_strided(x.shape, x.stride(), x.storage_offset())


def some(cases: list[tuple[int, int]], index: int) -> list[tuple[int, int]]:
    return [cases[index % len(cases)]] if INTERPRETED else cases


@on_each_device
@every
@orientations
def test_sums_against_float64_beside_the_same_codes(granularity, rows, cols, device):
    index = ALL.index(granularity) + 5 * ORIENTATIONS.index((rows, cols))
    for i, (m, n) in enumerate(some(SHAPES + LARGE, index)):
        x = make("gaussian", m, n, DTYPES[(i + index) % 3], seed=i) + 0.25
        x[m // 2] = -3.0
        options = {"pow2": i % 2 == 0, "margin": i % 2}
        got = quantize_and_sum(x.to(device), rows, cols, granularity, **options)
        for q, fmt, source in ((got[0], rows, x), (got[1], cols, x.t())):
            assert (q is None) == (fmt is None)
            if fmt is not None:
                assert_same(q, *quantize_ref(source, fmt, granularity, **options)[:2], (m, n, fmt))
        assert got[2] is None
        assert (got[3].shape, got[3].dtype) == ((n,), torch.float32)
        assert ((got[3].cpu().double() - x.double().sum(0)).abs() <= bound(x, 0, device)).all(), (m, n)


@on_each_device
@every
@orientations
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sums_that_are_exact_have_no_order(granularity, rows, cols, layout, device):
    """Whole numbers below 2**24: one element lost or counted twice, and the sum is another."""
    index = ALL.index(granularity) + LAYOUTS.index(layout) + 5 * ORIENTATIONS.index((rows, cols))
    for m, n in some([(130, 272), (200, 33), (64, 300)], index):
        whole = torch.randint(-100, 101, (m, n), generator=torch.Generator().manual_seed(m + index))
        x = lay_out(whole.to(DTYPES[index % 3]), layout)
        _, _, _, sums = quantize_and_sum(on(x, device), rows, cols, granularity)
        assert torch.equal(sums.cpu(), x.long().sum(0).float()), (m, n)


@on_each_device
@pytest.mark.parametrize("granularity", [TENSORWISE, ROWWISE, BLOCK_1x128], ids=str)
def test_sums_of_many_tiles(granularity, device):
    """More than the 32 places that add them up have room for."""
    x = torch.randint(-100, 101, (4200, 16), generator=torch.Generator().manual_seed(0)).bfloat16()
    want = x.long().sum(0).float()
    assert torch.equal(quantize_and_sum(x.to(device), E4M3, None, granularity)[3].cpu(), want)
    dys = [x.to(device).t()] if INTERPRETED else [x.to(device).t()[:8].repeat(16, 1), x.to(device).t()]
    assert torch.equal(quantize_concatenated_and_sum(dys, E4M3, None, granularity)[2][-16:].cpu(), want)


@on_each_device
@every
@orientations
@pytest.mark.parametrize("lies", ["transposed", "as it is", "in turn"])
def test_sums_of_rows_of_several(granularity, rows, cols, lies, device):
    """Gradients come transposed: their columns are the rows of what is cast. Exact sums, each in its place."""
    index = ALL.index(granularity) + ORIENTATIONS.index((rows, cols))
    g = torch.Generator().manual_seed(index)
    for tokens in (17, 130) if not INTERPRETED else ((17, 130)[index % 2],):
        dys = [
            torch.randint(-100, 101, (n, tokens), generator=g).to(DTYPES[(index + tokens) % 3]) for n in (128, 256, 33)
        ]
        for i in range(3):
            if lies == "transposed" or (lies == "in turn" and i % 2):
                dys[i] = dys[i].t().contiguous().t()
        there = [on(dy, device) for dy in dys]
        as_rows, as_cols, sums = quantize_concatenated_and_sum(there, rows, cols, granularity, pow2=True)
        assert torch.equal(sums.cpu(), torch.cat(dys).long().sum(1).float())
        for q, fmt, source in ((as_rows, rows, torch.cat(dys)), (as_cols, cols, torch.cat(dys).t())):
            assert (q is None) == (fmt is None)
            if fmt is not None:
                assert_same(q, *quantize_ref(source, fmt, granularity, pow2=True)[:2], tokens)


@on_each_device
@pytest.mark.parametrize("granularity", [TENSORWISE, ROWWISE, BLOCK_1x128], ids=str)
def test_several_against_float64(granularity, device):
    for tokens in (200,) if INTERPRETED else (200, 5000):
        dys = [make("gaussian", n, tokens, torch.bfloat16, seed=n) + 0.25 for n in (128, 128)]
        there = [dy.t().contiguous().to(device).t() for dy in dys]
        sums = quantize_concatenated_and_sum(there, E5M2, E5M2, granularity)[2]
        whole = torch.cat(dys)
        assert ((sums.cpu().double() - whole.double().sum(1)).abs() <= bound(whole, 1, device)).all()


@on_each_device
@every
def test_repeated_calls_give_the_same_bits_and_leave_the_cast_alone(granularity, device):
    m, n = (130, 100) if INTERPRETED else (3001, 1000)
    x = make("outliers", m, n, torch.bfloat16).to(device)
    parts = list(x.t().split(-(-n // 2 // 128) * 128))
    cast, several = quantize(x, E4M3, E5M2, granularity), quantize_concatenated(parts, E4M3, E5M2, granularity)
    first = quantize_and_sum(x, E4M3, E5M2, granularity)[3]
    first_of_several = quantize_concatenated_and_sum(parts, E4M3, E5M2, granularity)[2]
    for _ in range(2 if INTERPRETED else 20):
        *operands, _, sums = quantize_and_sum(x, E4M3, E5M2, granularity)
        *of_several, sums_of_several = quantize_concatenated_and_sum(parts, E4M3, E5M2, granularity)
        assert torch.equal(sums, first)
        assert torch.equal(sums_of_several, first_of_several)
        for got, want in zip([*operands, *of_several], [*cast[:2], *several], strict=True):
            assert_same(got, want.codes.cpu(), want.scale_inv.cpu(), str(granularity))


@on_each_device
@every
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_element_reaches_its_own_sum_alone(granularity, bad, device):
    x = torch.ones(130, 72)
    x[70, 5] = bad
    sums = quantize_and_sum(x.to(device), E4M3, E4M3, granularity)[3].cpu()
    of_rows = quantize_concatenated_and_sum([x.t().to(device)], E4M3, E4M3, granularity)[2].cpu()
    for got in (sums, of_rows):
        assert not got[5].isfinite()
        got[5] = 130
        assert (got == 130).all()


@on_each_device
@pytest.mark.parametrize("known", [0.0, 3.0, math.inf])
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_delayed_scaling(known, layout, device):
    x = lay_out(make("gaussian", 100, 80, torch.bfloat16), layout)
    wants = [quantize_ref(t, fmt, TENSORWISE, amax=torch.tensor([known]))[:2] for t, fmt in ((x, E4M3), (x.t(), E5M2))]
    for several in (False, True):
        amax, staging = torch.tensor([known], device=device), torch.zeros(1, device=device)
        if several:
            got = quantize_concatenated_and_sum([on(x, device)], E4M3, E5M2, TENSORWISE, amax=amax, staging=staging)
        else:
            got = quantize_and_sum(on(x, device), E4M3, E5M2, TENSORWISE, amax=amax, staging=staging)
        for q, want in zip(got[:2], wants, strict=True):
            assert_same(q, *want, (known, layout, several))
        assert staging.item() == x.abs().max().item()
        dim = int(several)
        assert ((got[-1].cpu().double() - x.double().sum(dim)).abs() <= bound(x, dim, device)).all()


@on_each_device
def test_statistics_come_too(device):
    x = make("outliers", 67, 48, torch.bfloat16).to(device)
    for options in ({}, {"amax": torch.ones(1, device=device), "staging": torch.zeros(1, device=device)}):
        _, _, packed, sums = quantize_and_sum(x, E4M3, None, TENSORWISE, statistics=True, **options)
        assert torch.equal(packed, quantize(x, E4M3, None, TENSORWISE, statistics=True, **options)[2])
        assert torch.equal(sums, column_sums_ref(x))


@on_each_device
@every
@pytest.mark.parametrize("shape", [(0, 0), (0, 48), (3, 0)])
def test_nothing_adds_up_to_zero(granularity, shape, device):
    x = torch.empty(shape, dtype=torch.bfloat16, device=device)
    _, _, _, sums = quantize_and_sum(x, E4M3, E4M3, granularity)
    assert (sums.shape, sums.dtype) == (shape[1:], torch.float32)
    assert not sums.any()
    _, _, sums = quantize_concatenated_and_sum([x.t()], E4M3, E4M3, granularity)
    assert (sums.shape, sums.dtype) == (shape[1:], torch.float32)
    assert not sums.any()


def test_the_reference_takes_float64():
    x = torch.rand(5, 3, dtype=torch.float64)
    assert column_sums_ref(x).dtype == torch.float64
    assert torch.equal(column_sums_ref(x), x.sum(0))
    assert torch.equal(column_sums_ref(torch.full((3000, 1), 1.0, dtype=torch.bfloat16)), torch.tensor([3000.0]))


def test_what_is_refused():
    x = torch.ones(4, 16)
    with pytest.raises(ShapeError, match="1 dimensions"):
        quantize_and_sum(x[0], E4M3, None, ROWWISE)
    with pytest.raises(DtypeError, match="no orientation"):
        quantize_and_sum(x, None, None, ROWWISE)
    with pytest.raises(ShapeError, match="got amax but no staging"):
        quantize_and_sum(x, E4M3, None, TENSORWISE, amax=torch.ones(1))
    with pytest.raises(DtypeError, match=r"quantize_concatenated got torch\.float64"):
        quantize_concatenated_and_sum([x.double()], E4M3, None, ROWWISE)
    with pytest.raises(DtypeError, match="no orientation"):
        quantize_concatenated_and_sum([x], None, None, ROWWISE)


@on_each_device
@every
def test_opcheck(granularity, device):
    x = make("gaussian", 128, 48, torch.bfloat16).to(device)
    ops, options = torch.ops.acceler8, (granularity.name, False, 0)
    for rows, cols, statistics in (("E4M3", "E5M2", True), ("E4M3", "", False), ("", "E4M3", False)):
        opcheck(ops.quantize_and_sum.default, (x, rows, cols, *options, statistics))
        opcheck(ops.quantize_concatenated_and_sum.default, ([x, x], rows, cols, *options))
    if granularity is TENSORWISE:
        amax, staging = torch.tensor([2.0], device=device), torch.tensor([1.0], device=device)
        args = (amax, staging, "E4M3", "", False, 1)  # that it maxes into staging is on purpose not declared
        opcheck(ops.quantize_and_sum_delayed.default, (x, *args, True), TRACED)
        opcheck(ops.quantize_concatenated_and_sum_delayed.default, ([x, x], *args), TRACED)


@on_each_device
@pytest.mark.parametrize("granularity", [TENSORWISE, ROWWISE], ids=str)
def test_compiles_whole(granularity, device):
    delayed = {"amax": torch.full((1,), 2.0, device=device)} if granularity is TENSORWISE else {}

    def step(x: Tensor, staging: Tensor) -> tuple[Tensor, ...]:
        how = {**delayed, "staging": staging} if delayed else {}
        rows, _, _, sums = quantize_and_sum(x, E4M3, E5M2, granularity, **how)
        _, cols, of_rows = quantize_concatenated_and_sum([x, x], E4M3, E5M2, granularity, **how)
        again = quantize_and_sum(x, None, E4M3, granularity)[3]
        return rows.dequantize(), sums, cols.dequantize(), of_rows, again

    x = make("gaussian", 48, 64, torch.bfloat16).to(device)
    stagings = [torch.zeros(1, device=device) for _ in range(2)]
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(x, stagings[0]), step(x, stagings[1]), strict=True):
        assert torch.equal(got, want)
    assert torch.equal(*stagings)


@pytest.mark.requires(sm=90)
def test_a_captured_graph_adds_up_anew_at_each_replay():
    x = make("gaussian", 130, 272, torch.bfloat16).cuda()
    still = x.clone()
    quantize_and_sum(still, E4M3, E4M3, ROWWISE)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sums = quantize_and_sum(still, E4M3, E4M3, ROWWISE)[3]
    for factor in (8.0, 1.0, 0.25):
        still.copy_(x * factor)
        graph.replay()
        assert torch.equal(sums, quantize_and_sum(still, E4M3, E4M3, ROWWISE)[3])
        assert sums.abs().max() > 0


@pytest.mark.requires(sm=90)
def test_offsets_beyond_2_to_the_31():
    rows, cols = 140_000, 16_384
    x = torch.ones(rows, cols, dtype=torch.bfloat16, device="cuda")
    x[-1, -1], x[0, 0] = 5.0, 3.0
    for granularity in (TENSORWISE, ROWWISE):
        sums = quantize_and_sum(x, E4M3, None, granularity)[3].cpu()
        assert (sums[0], sums[-1], sums[1:-1].min(), sums[1:-1].max()) == (rows + 2, rows + 4, rows, rows)


@pytest.mark.requires(sm=90, gpus=2)
def test_a_tensor_on_the_second_gpu_is_worked_on_there():
    x = torch.ones(130, 272, device="cuda:1")
    for sums in (
        quantize_and_sum(x, E4M3, E4M3, ROWWISE)[3],
        quantize_concatenated_and_sum([x.t()], E4M3, None, ROWWISE)[2],
    ):
        assert sums.device.index == 1
        assert (sums == 130).all()
    assert torch.cuda.current_device() == 0


@pytest.mark.skipif(not HAVE_TRITON or INTERPRETED, reason="needs the triton package, and not its interpreter")
@pytest.mark.parametrize("dim", [None, 0, 1])
def test_kernels_compile_for_a_gpu(dim):
    """And a cast without sums adds nothing up."""
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from acceler8.kernels._quantize_kernel import quantize_tiles_kernel
    from acceler8.kernels._triton import LAUNCH_OPTIONS
    from acceler8.kernels._words_kernel import quantize_words_kernel

    casts = {
        "ROW": True, "COL": True, "ROW_E5M2": False, "COL_E5M2": True, "ROW_MAX": 448.0, "COL_MAX": 57344.0,
        "POW2": False, "MARGIN": 1.0, "HARDWARE": True, "SUM_OF_COLS": dim == 0, "SUM_OF_ROWS": dim == 1,
    }  # fmt: skip
    of_tiles = {"GROUP_ROWS": 1, "GROUP_COLS": 0, "TILE": 64}
    of_words = {"DELAYED": True, "WORDS": True, "ROWS": 64, "COLS": 64, "GROUP": 4}
    for kernel, own in ((quantize_tiles_kernel, of_tiles), (quantize_words_kernel, of_words)):
        constants, signature = {**casts, **own}, {}
        for name in kernel.arg_names:
            of_pointers = {"x_ptr": "*bf16", "row_codes_ptr": "*u8", "col_codes_ptr": "*u8"}
            words = ("amax_ptr", "known_ptr", "staging_ptr")
            kind = "*i32" if name in words else of_pointers.get(name, "*fp32" if name.endswith("_ptr") else "i32")
            signature[name] = "constexpr" if name in constants else kind
        at = {(i,): constants[name] for i, name in enumerate(kernel.arg_names) if name in constants}
        source = ASTSource(kernel, signature, at)
        code = compile(source, target=GPUTarget("cuda", 90, 32), options={**LAUNCH_OPTIONS, "num_warps": 4})
        assert ("arith.addf" in code.asm["ttgir"]) == (dim is not None)
