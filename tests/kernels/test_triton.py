"""The Triton kernels against their references: the same codes, the same scales, bit for bit.

The same tests run on a GPU and, started by ``test_interpreter.py`` under ``TRITON_INTERPRET=1``, on CPU tensors, where
a tile takes a tenth of a second: there each combination sees one shape instead of all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from acceler8.formats import E4M3, E5M2, Format, encode
from acceler8.kernels import Quantized, amax, amax_ref, compute_amax, quantize, quantize_ref, scaled_matmul
from acceler8.kernels._triton import INTERPRETED
from acceler8.scaling import GRANULARITIES, ROWWISE, TENSORWISE, Granularity
from tests.kernels.support import DATA, DTYPES, LAYOUTS, SHAPES, assert_same, lay_out, make

DEVICE = "cpu" if INTERPRETED else "cuda"
# numpy, which the interpreter computes with, reports what the hardware does in silence
NUMPY = [
    pytest.mark.filterwarnings(f"ignore:{what} encountered:RuntimeWarning") for what in ("invalid value", "overflow")
]
pytestmark = NUMPY if INTERPRETED else [pytest.mark.requires(sm=89)]
on_gpu_only = pytest.mark.skipif(INTERPRETED, reason="runs on a GPU, not in Triton's interpreter")


def large(n: int) -> object:
    return pytest.param(n, marks=on_gpu_only)


ALL = list(GRANULARITIES.values())
every = pytest.mark.parametrize("granularity", ALL, ids=str)
SMALL, LARGE = SHAPES[:-1], [SHAPES[-1], (1000, 1500)]  # one tile or two; several in each direction


def assert_same_codes(
    x: Tensor, rows: Format | None, cols: Format | None, granularity: Granularity, case: object, **options: object
) -> None:
    """Cast ``x`` where it is asked, without statistics (the kernel) and with (the reference on that device); compare
    both with the reference of its copy on the CPU."""
    on_device = lay_out_again(x)
    for with_statistics in (False, True):
        got = quantize(on_device, rows, cols, granularity, statistics=with_statistics, **options)
        assert (got[0] is None, got[1] is None) == (rows is None, cols is None)
        packed = None
        for source, fmt, q in ((x, rows, got[0]), (x.t(), cols, got[1])):
            if fmt is not None:
                codes, scale_inv, statistics = quantize_ref(source, fmt, granularity, statistics=True, **options)
                assert_same(q, codes, scale_inv, (case, "rows" if source is x else "cols", with_statistics))
                packed = statistics if packed is None else packed
        if with_statistics:
            assert_same_statistics(got[2], packed, x.numel(), case)


def lay_out_again(x: Tensor) -> Tensor:
    """``x`` on the device with the strides (and the odd start) that it has on the CPU."""
    storage = torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage())  # type: ignore[call-overload]
    return storage.to(DEVICE).as_strided(x.shape, x.stride(), x.storage_offset())


def assert_same_statistics(got: Tensor | None, expected: Tensor | None, elements: int, case: object) -> None:
    """amax and counts equal. Sums are FP64 over the same non-negative terms in another order: each of the two is within
    ``elements * 2**-53`` of the exact one, relatively.
    """
    assert got is not None
    assert expected is not None
    got = got.cpu()
    assert torch.equal(got[:4].nan_to_num(-1.0), expected[:4].nan_to_num(-1.0)), (case, got, expected)
    same = got[4:] == expected[4:]  # an error beyond FP32 is inf in both
    near = (got[4:] - expected[4:]).abs() <= expected[4:] * elements * 2.0**-52
    assert (same | near).all(), (case, got, expected)


def pick(shapes: Sequence[tuple[int, int]], index: int) -> list[tuple[int, int]]:
    return [shapes[index % len(shapes)]] if INTERPRETED else list(shapes)


@every
@pytest.mark.parametrize("data", DATA)
def test_codes_scales_and_statistics(granularity, data):
    index = ALL.index(granularity) + DATA.index(data)
    for i, (rows, cols) in enumerate(pick(SMALL, index)):
        x = make(data, rows, cols, DTYPES[(i + index) % 3], seed=i)
        fmt, other = (E4M3, E5M2) if (i + index) % 2 else (E5M2, E4M3)
        options = {"pow2": (i + index) % 4 == 0, "margin": (i + index) % 4 - 1}
        assert_same_codes(x, fmt, other, granularity, (data, rows, cols, x.dtype, str(fmt), options), **options)


@every
def test_many_tiles(granularity):
    for i, (rows, cols) in enumerate(LARGE[:1] if INTERPRETED else LARGE):
        for data in ["one_nan"] if INTERPRETED else DATA:
            x = make(data, rows, cols, torch.bfloat16, seed=i)
            assert_same_codes(x, E4M3, E4M3, granularity, (data, rows, cols))


@every
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
def test_one_orientation_alone(granularity, fmt):
    x = make("outliers", 33, 48, torch.float32)
    assert_same_codes(x, fmt, None, granularity, "rows")
    assert_same_codes(x, None, fmt, granularity, "cols")


@pytest.mark.parametrize("cols", [15, 16, 200, 1025, large(5632), large(16384), large(16400)])
@pytest.mark.parametrize("pow2", [False, True])
def test_rows_that_a_program_holds_whole(cols, pow2):
    """Row scales of rows alone need one pass, up to a width."""
    for i, rows in enumerate((1, 5) if INTERPRETED else (1, 5, 130, 300)):
        x = make(DATA[(i + cols) % len(DATA)], rows, cols, DTYPES[(i + cols) % 3], seed=i)
        for fmt in (E4M3, E5M2):
            assert_same_codes(x, fmt, None, ROWWISE, (rows, cols), pow2=pow2, margin=1)
        assert_same_codes(lay_out(x, "transposed"), E4M3, None, ROWWISE, (rows, cols, "strided"))


@every
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout(granularity, layout):
    index = ALL.index(granularity) + LAYOUTS.index(layout)
    for rows, cols in pick([(33, 48), (1, 48), (33, 1), (64, 112)], index):
        x = lay_out(make("gaussian", rows, cols, DTYPES[index % 3]), layout)
        assert_same_codes(x, E4M3, E5M2, granularity, (layout, rows, cols))


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_number_rounds_like_the_format(fmt, dtype):
    """A tensor with a NaN has scale 1, so these are plain casts of all 2**16 numbers."""
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype).reshape(256, 256)
    as_rows, as_cols, _ = quantize(x.to(DEVICE), fmt, fmt, TENSORWISE)
    expected = encode(x, fmt)
    assert_same(as_rows, expected, torch.ones(()), dtype)
    assert_same(as_cols, expected.t().contiguous(), torch.ones(()), dtype)


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
def test_ties_and_their_fp32_neighbours_round_like_the_format(fmt):
    """Each code, and 8 steps of a sixteenth of its ulp to both sides: ties, and their neighbours by one FP32 ulp."""
    numbers = torch.arange(256, dtype=torch.uint8).view(fmt.torch_dtype).float().view(torch.int32)
    sixteenth = 1 << (23 - fmt.mantissa_bits - 4)
    steps = torch.cat([torch.arange(-8, 9) * sixteenth + ulp for ulp in (-1, 0, 1)]).int()
    x = (numbers[:, None] + steps).view(torch.float32)
    q, _, _ = quantize(x.to(DEVICE), fmt, None, TENSORWISE)
    assert_same(q, torch.nn.functional.pad(encode(x, fmt).view(torch.uint8), (0, 13)), torch.ones(()), str(fmt))


@pytest.mark.parametrize("known", [0.0, 3.0, 1e-20, 1e30, math.inf, math.nan])
@pytest.mark.parametrize("data", ["outliers", "one_nan"])
def test_delayed_scaling(data, known):
    x = make(data, 33, 48, torch.bfloat16)
    for staged in (0.0, math.nan) if INTERPRETED else (0.0, 7.0, 1e6, math.inf, math.nan):
        amax, staging = torch.tensor([known]), torch.tensor([staged])
        expected = torch.maximum(staging, amax_ref(x))
        codes, scale_inv, statistics = quantize_ref(x, E4M3, TENSORWISE, margin=1, amax=amax, statistics=True)
        of_cols = quantize_ref(x.t(), E5M2, TENSORWISE, margin=1, amax=amax)[:2]
        for with_statistics in (False, True):
            on_device = staging.to(DEVICE)
            as_rows, as_cols, packed = quantize(
                x.to(DEVICE), E4M3, E5M2, TENSORWISE, margin=1, amax=amax.to(DEVICE), staging=on_device,
                statistics=with_statistics,
            )  # fmt: skip
            assert_same(as_rows, codes, scale_inv, (known, with_statistics))
            assert_same(as_cols, *of_cols, (known, with_statistics))
            if with_statistics:
                assert_same_statistics(packed, statistics, x.numel(), known)
            assert torch.equal(on_device.cpu().nan_to_num(-1.0), expected.nan_to_num(-1.0))


def test_a_pass_for_an_amax_goes_round_few_programs(monkeypatch):
    monkeypatch.setattr(amax, "FEW", 2)
    x = make("gaussian", 200, 300, torch.bfloat16)  # six tiles
    x[199, 299] = -40.0  # in the last
    for known in (0.0, 3.0):
        in_use, staging = torch.tensor([known]), torch.zeros(1, device=DEVICE)
        as_rows, _, _ = quantize(x.to(DEVICE), E4M3, None, TENSORWISE, amax=in_use.to(DEVICE), staging=staging)
        assert_same(as_rows, *quantize_ref(x, E4M3, TENSORWISE, amax=in_use)[:2], str(known))


@every
@pytest.mark.parametrize("shape", [(0, 0), (0, 48), (3, 0)])
def test_empty(granularity, shape):
    x = torch.empty(shape, dtype=torch.bfloat16)
    assert_same_codes(x, E4M3, E4M3, granularity, shape)


@pytest.mark.parametrize("data", DATA)
def test_amax(data):
    index = DATA.index(data)
    for i, (rows, cols) in enumerate(pick(SHAPES, index)):
        for layout in pick(LAYOUTS, index):  # type: ignore[arg-type]
            x = lay_out(make(data, rows, cols, DTYPES[(i + index) % 3]), str(layout))
            for dim in (None, 0, 1):
                got, expected = compute_amax(lay_out_again(x), dim).cpu(), amax_ref(x, dim)
                assert got.shape == expected.shape
                assert torch.equal(got.nan_to_num(-1.0), expected.nan_to_num(-1.0)), (data, rows, cols, layout, dim)


def test_amax_of_nothing():
    for shape in ((0, 0), (0, 5), (5, 0)):
        for dim in (None, 0, 1):
            assert torch.equal(
                compute_amax(torch.empty(shape, device=DEVICE), dim).cpu(), amax_ref(torch.empty(shape), dim)
            )


@on_gpu_only
def test_two_runs_are_equal():
    x = make("outliers", 1000, 1500, torch.bfloat16).cuda()
    first = quantize(x, E4M3, E5M2, ROWWISE)
    for _ in range(5):
        again = quantize(x, E4M3, E5M2, ROWWISE)
        for q, p in zip(first[:2], again[:2], strict=True):
            assert_same(q, p.codes.cpu(), p.scale_inv.cpu(), "again")


def rows_and_columns_of(q: Quantized, expected_of: Tensor, where: Tensor, fmt: Format, case: str) -> None:
    """Some rows of a large operand against the reference of those rows alone."""
    codes, scale_inv, _ = quantize_ref(expected_of.cpu(), fmt, q.granularity)
    assert_same(Quantized(q.codes[where], q.scale_inv[where], q.granularity), codes, scale_inv, case)


@on_gpu_only
@pytest.mark.parametrize("granularity", [g for g in ALL if g.rows == 1], ids=str)
def test_offsets_beyond_2_to_the_31(granularity):
    """40000 x 65536 elements, 5 GiB in bfloat16: first, last, and rows around element 2**31 in both orientations."""
    rows, cols = 40_000, 65_536
    x = torch.empty(rows, cols, dtype=torch.bfloat16, device="cuda")
    g = torch.Generator("cuda").manual_seed(0)
    for part in x.split(4096):
        part.normal_(generator=g)
    as_rows, as_cols, _ = quantize(x, E4M3, E4M3, granularity)
    some_rows = torch.tensor([0, 1, 2**31 // cols - 1, 2**31 // cols, rows - 129, rows - 1], device="cuda")
    rows_and_columns_of(as_rows, x[some_rows], some_rows, E4M3, "rows")
    some_cols = torch.tensor([0, 1, 2**31 // rows, 2**31 // rows + 1, cols - 129, cols - 1], device="cuda")
    rows_and_columns_of(as_cols, x[:, some_cols].t(), some_cols, E4M3, "cols")
    for dim in (0, 1):
        assert torch.equal(compute_amax(x, dim), torch.stack([p.abs().amax(dim) for p in x.split(4096)]).amax(0).float()
                           if dim == 0 else torch.cat([p.abs().amax(1) for p in x.split(4096)]).float())  # fmt: skip


@on_gpu_only
def test_strides_beyond_2_to_the_31():
    base = torch.zeros(2**31 + 4096, dtype=torch.bfloat16, device="cuda")
    x = base.as_strided((2, 64), (2**31 + 16, 1))
    values = make("gaussian", 2, 64, torch.bfloat16)
    x.copy_(values)
    for granularity in ALL:
        as_rows, as_cols, _ = quantize(x, E4M3, E5M2, granularity)
        assert_same(as_rows, *quantize_ref(values, E4M3, granularity)[:2], str(granularity))
        assert_same(as_cols, *quantize_ref(values.t(), E5M2, granularity)[:2], str(granularity))


@on_gpu_only
@pytest.mark.requires(sm=89, gpus=2)
def test_a_tensor_on_the_second_gpu_is_worked_on_there():
    assert torch.cuda.current_device() == 0
    x = make("outliers", 130, 272, torch.bfloat16)
    second = torch.device("cuda", 1)
    for granularity in ALL:
        as_rows, as_cols, packed = quantize(x.to(second), E4M3, E4M3, granularity, statistics=True)
        assert {t.device for t in (as_rows.codes, as_rows.scale_inv, as_cols.codes, packed)} == {second}
        assert_same(as_rows, *quantize_ref(x, E4M3, granularity)[:2], str(granularity))
        assert_same(as_cols, *quantize_ref(x.t(), E4M3, granularity)[:2], str(granularity))
    a, _, _ = quantize(x.to(second), E4M3, None, ROWWISE)
    y = scaled_matmul(a, Quantized(a.codes[:128], a.scale_inv[:128], ROWWISE), out_dtype=torch.bfloat16)
    assert y.device == second
    assert compute_amax(x.to(second)).item() == amax_ref(x).item()
    assert torch.cuda.current_device() == 0
