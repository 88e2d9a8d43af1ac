"""The reference cast against an independent one; what it promises about NaN, filler, statistics and error."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from acceler8.errors import DtypeError, ShapeError
from acceler8.formats import E4M3, E5M2, Format
from acceler8.kernels import Quantized, quantize, quantize_ref, read_statistics
from acceler8.scaling import (
    GRANULARITIES,
    ROWWISE,
    TENSORWISE,
    BLOCK_1x128,
    BLOCK_128x128,
    Granularity,
    MX_1x32,
    compute_scale,
)
from tests.kernels.support import (
    DATA,
    DTYPES,
    LAYOUTS,
    SHAPES,
    assert_same,
    lay_out,
    make,
    quantize_independently,
    spread,
)

ALL = list(GRANULARITIES.values())
every = pytest.mark.parametrize("granularity", ALL, ids=str)
both = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)


def cast(x: Tensor, fmt: Format, granularity: Granularity, **options: object) -> Quantized:
    rows, cols, _ = quantize(x, fmt, None, granularity, **options)  # type: ignore[arg-type]
    assert cols is None
    assert rows is not None
    return rows


@every
@pytest.mark.parametrize("data", DATA)
def test_reference_gives_the_independent_codes(granularity, data):
    for i, (rows, cols) in enumerate(SHAPES):
        dtype = DTYPES[(i + DATA.index(data) + ALL.index(granularity)) % 3]
        x = make(data, rows, cols, dtype, seed=i)
        fmt, other = (E4M3, E5M2) if i % 2 else (E5M2, E4M3)
        options = {"pow2": i % 3 == 0, "margin": i % 4 - 1}
        case = (data, rows, cols, dtype, str(fmt), options)
        as_rows, as_cols, packed = quantize(x, fmt, other, granularity, **options)
        assert packed is None
        assert_same(as_rows, *quantize_independently(x, fmt, granularity, **options), case)
        assert_same(as_cols, *quantize_independently(x.t(), other, granularity, **options), (case, "cols"))


@every
@both
def test_either_orientation_alone_gives_what_both_give(granularity, fmt):
    for rows, cols in [(130, 272), (256, 384), (7, 48)]:  # (256, 384): square groups are cast once
        x = make("gaussian", rows, cols, torch.bfloat16)
        as_rows, as_cols, _ = quantize(x, fmt, fmt, granularity)
        only_rows, none, _ = quantize(x, fmt, None, granularity)
        also_none, only_cols, _ = quantize(x, None, fmt, granularity)
        assert none is None
        assert also_none is None
        assert_same(only_rows, as_rows.codes, as_rows.scale_inv, (rows, cols))
        assert_same(only_cols, as_cols.codes, as_cols.scale_inv, (rows, cols))
        assert_same(as_cols, *quantize_independently(x.t(), fmt, granularity), (rows, cols))
        of_transposed, _, _ = quantize(x.t(), fmt, None, granularity)
        assert_same(of_transposed, as_cols.codes, as_cols.scale_inv, (rows, cols))


@every
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_does_not_matter_and_the_input_is_left_alone(granularity, layout):
    for i, (rows, cols) in enumerate([(33, 130), (64, 128)]):
        x = lay_out(make("outliers", rows, cols, DTYPES[i]), layout)
        before = x.clone()
        as_rows, as_cols, _ = quantize(x, E4M3, E4M3, granularity)
        assert_same(as_rows, *quantize_independently(before, E4M3, granularity), layout)
        assert_same(as_cols, *quantize_independently(before.t(), E4M3, granularity), layout)
        assert torch.equal(x, before)


@every
@pytest.mark.parametrize("shape", [(0, 0), (0, 48), (0, 256), (3, 0), (256, 0)])
def test_empty(granularity, shape):
    rows, cols = shape
    x = torch.empty(shape, dtype=torch.bfloat16)
    as_rows, as_cols, packed = quantize(x, E4M3, E5M2, granularity, statistics=True)
    multiple = granularity.contraction_multiple
    assert as_rows.codes.shape == (rows, -(-cols // multiple) * multiple)
    assert as_cols.codes.shape == (cols, -(-rows // multiple) * multiple)
    for q, extent in ((as_rows, shape), (as_cols, shape[::-1])):
        assert q.scale_inv.shape == granularity.scale_shape(*extent)
        assert q.scale_inv.isfinite().all()
    assert packed.tolist() == [0.0] * 6


# ------------------------------------------------------------------------------------------ delayed scaling


@pytest.mark.parametrize("data", ["gaussian", "one_nan", "infinities", "tiny"])
@pytest.mark.parametrize("known", [0.0, 3.0, 1e-20, 1e30, math.inf, math.nan])
def test_delayed_scaling_uses_a_known_amax_and_stages_its_own(data, known):
    for dtype in DTYPES:
        x = make(data, 33, 48, dtype)
        own = quantize_independently(x, E4M3, TENSORWISE)[1]
        for staged in (0.0, 1e6, math.nan):
            amax, staging = torch.tensor([known]), torch.tensor([staged])
            as_rows, as_cols, _ = quantize(x, E4M3, E5M2, TENSORWISE, margin=1, amax=amax, staging=staging)
            assert_same(as_rows, *quantize_independently(x, E4M3, TENSORWISE, margin=1, amax=known), known)
            assert_same(as_cols, *quantize_independently(x.t(), E5M2, TENSORWISE, margin=1, amax=known), known)
            largest = np.abs(x.float().numpy()).max()
            assert np.array_equal(staging.numpy(), np.maximum(np.float32([staged]), largest), equal_nan=True)
            assert np.array_equal(amax.numpy(), np.float32([known]), equal_nan=True)
        assert own.shape == ()


def test_a_known_amax_that_is_too_small_saturates():
    x = torch.tensor([[1.0, 100.0, -100.0] + [0.5] * 13])
    amax, staging = torch.tensor([1.0]), torch.zeros(1)
    q, _, packed = quantize(x, E4M3, None, TENSORWISE, amax=amax, staging=staging, statistics=True)
    assert q.dequantize()[0, :4].tolist() == pytest.approx([1.0, 1.0, -1.0, 0.5])
    assert read_statistics(packed, 16).saturated == 2
    assert staging.item() == 100.0


def test_an_empty_tensor_stages_nothing():
    staging = torch.tensor([2.0])
    quantize(torch.empty(0, 16), E4M3, E4M3, TENSORWISE, amax=torch.zeros(1), staging=staging)
    assert staging.item() == 2.0


# ---------------------------------------------------------------------------------------- what is promised


@every
@both
def test_sqnr_is_what_the_format_gives(granularity, fmt):
    """Gaussian data, round to nearest: 31.5 dB for E4M3, 25.6 for E5M2 (style guide). Truncation loses 6 dB of it.

    The worst row too: a lost row would leave the mean above 20 dB.
    """
    x = make("gaussian", 512, 512, torch.float32, seed=1)
    expected = 31.5 if fmt is E4M3 else 25.6
    for source, q in zip((x, x.t()), quantize(x, fmt, fmt, granularity)[:2], strict=True):
        error = (source - q.dequantize()).double().square()
        power = source.double().square()
        assert 10 * math.log10(power.sum() / error.sum()) == pytest.approx(expected, abs=0.4)
        worst = (10 * (power.sum(1) / error.sum(1)).log10()).min().item()
        assert worst > expected - 2.0


@every
@both
@pytest.mark.parametrize("pow2", [False, True])
def test_error_of_each_element_is_half_a_step(granularity, fmt, pow2):
    """|x - q| <= half an ulp of the format, or half its smallest number where x is that small.

    ``1 + 2**-20`` covers the FP32 roundings of scale, scale_inv and the two products, each 2**-24.
    """
    x = make("outliers", 130, 272, torch.float32, seed=2)
    q = cast(x, fmt, granularity, pow2=pow2)
    step = spread(q, 130, 272) * fmt.min_subnormal
    bound = torch.maximum(x.abs() * 2.0 ** -(fmt.mantissa_bits + 1), step / 2)
    assert ((x - q.dequantize(272)).abs() <= bound * (1 + 2.0**-20) + x.abs() * 2.0**-22).all()


@every
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_element_is_visible_and_confined_to_its_group(granularity, bad):
    rows, cols, at = 256, 256, (130, 140)
    x = make("gaussian", rows, cols, torch.bfloat16)
    clean, _, _ = quantize(x, E4M3, None, granularity)
    x[at] = bad
    q, _, packed = quantize(x, E4M3, None, granularity, statistics=True)
    values = q.dequantize()
    assert values.isnan().nonzero().tolist() == [list(at)]
    assert q.codes.view(torch.uint8)[at] == 0x7F
    height, width = granularity.rows or rows, granularity.cols or cols
    inside = torch.zeros(rows, cols, dtype=torch.bool)
    top, left = at[0] // height * height, at[1] // width * width
    inside[top : top + height, left : left + width] = True
    changed = values != clean.dequantize()
    assert not changed[~inside].any()
    # its neighbours have scale 1
    neighbours = inside.clone()
    neighbours[at] = False
    assert torch.equal(values[neighbours], x[neighbours].to(torch.float8_e4m3fn).float())
    assert read_statistics(packed, x.numel()).nonfinite == 1


@every
def test_all_zero_groups_give_zeros(granularity):
    x = torch.zeros(64, 256)
    x[1::2] = -0.0
    for q in quantize(x, E4M3, E5M2, granularity)[:2]:
        assert (q.dequantize() == 0).all()
        assert q.scale_inv.isfinite().all()
    signs = cast(x, E4M3, granularity).codes.view(torch.uint8)
    assert (signs[::2] == 0).all()
    assert (signs[1::2] == 0x80).all()


@every
def test_filler_is_zero_and_invisible(granularity):
    """Codes, scales and statistics of the real elements are those of a tensor that needs no filler there."""
    x = make("gaussian", 17, 100, torch.bfloat16)
    as_rows, as_cols, packed = quantize(x, E4M3, E4M3, granularity, statistics=True)
    for q, extent in ((as_rows, 100), (as_cols, 17)):
        assert q.codes.shape[1] % granularity.contraction_multiple == 0
        assert (q.codes.view(torch.uint8)[:, extent:] == 0).all()
        assert q.dequantize(extent).shape == (q.codes.shape[0], extent)
    wider = torch.nn.functional.pad(x, (0, as_rows.codes.shape[1] - 100))
    filled, _, packed_filled = quantize(wider, E4M3, None, granularity, statistics=True)
    assert_same(as_rows, filled.codes, filled.scale_inv, "filler")
    assert torch.equal(packed, packed_filled)


@every
def test_dequantize_multiplies_by_the_scale_of_each_group(granularity):
    x = make("outliers", 33, 130, torch.float32)
    q = cast(x, E4M3, granularity)
    codes = q.codes.float()
    expected = codes[:, :130] * spread(q, 33, 130)
    assert torch.equal(q.dequantize(130), expected)


def test_square_groups_share_one_cast(monkeypatch):
    """Tensorwise and 128x128: the second orientation is a transpose of bytes, not a second cast."""
    from acceler8.kernels import quantize as module

    casts = []

    def counted(x: Tensor, fmt: Format, granularity: Granularity, **options: object) -> object:
        casts.append(granularity)
        return quantize_ref(x, fmt, granularity, **options)  # type: ignore[arg-type]

    monkeypatch.setitem(module.__globals__, "quantize_ref", counted)
    x = make("gaussian", 256, 128, torch.bfloat16)
    for granularity in ALL:
        quantize(x, E4M3, E4M3, granularity)
    assert casts == [TENSORWISE, ROWWISE, ROWWISE, BLOCK_1x128, BLOCK_1x128, BLOCK_128x128, MX_1x32, MX_1x32]


# ----------------------------------------------------------------------------------------------- statistics


def independent_statistics(x: Tensor, q: Quantized, scale: Tensor) -> dict[str, float]:
    """By their definitions, in float64, from decoded values."""
    values = x.double()
    finite = values.isfinite()
    seen = q.dequantize(x.shape[1]).double()
    scaled = (x.float() * scale).abs()
    above = 464.0 if q.codes.dtype == torch.float8_e4m3fn else 61439.996  # what rounding alone would not bring to max
    return {
        "saturated": int((finite & (scaled > above)).sum()),
        "underflowed": int((finite & (values != 0) & (seen == 0)).sum()),
        "nonfinite": int((~finite).sum()),
        "squared_error": float((values - seen)[finite].square().sum()),
        "squared_sum": float(values[finite].square().sum()),
    }


@every
@pytest.mark.parametrize("data", ["gaussian", "outliers", "zero_rows", "one_nan", "infinities", "any_bits"])
def test_statistics(granularity, data):
    for dtype, fmt, margin in zip(DTYPES, (E4M3, E5M2, E4M3), (0, 0, -4), strict=True):
        x = make(data, 67, 272, dtype, seed=3)
        if data == "any_bits" and dtype is not torch.float16:
            x = torch.where(x.abs() < 1e15, x, torch.nan)  # within what float64 sums of squares hold beside 1e-38
        q, _, packed = quantize(x, fmt, None, granularity, margin=margin, statistics=True)
        _, of_cols, packed_cols = quantize(x, None, fmt, granularity, margin=margin, statistics=True)
        for source, operand, values in ((x, q, packed), (x.t(), of_cols, packed_cols)):
            assert values.dtype == torch.float64
            assert values.shape == (6,)
            got = read_statistics(values, source.numel())
            scale = 1 / spread(operand, *source.shape)
            expected = independent_statistics(source, operand, scale)
            assert got.elements == source.numel()
            assert np.array_equal(got.amax, source.abs().max().item(), equal_nan=True)
            assert (got.nonfinite, got.underflowed) == (expected["nonfinite"], expected["underflowed"])
            assert got.saturated == expected["saturated"]
            # errors are taken in FP32: each within an ulp of x, squares summed without rounding to speak of
            assert got.squared_error == pytest.approx(expected["squared_error"], rel=1e-5)
            assert got.squared_sum == pytest.approx(expected["squared_sum"], rel=1e-12)


def test_statistics_are_those_of_rows_if_both_are_asked():
    x = make("outliers", 64, 64, torch.bfloat16)
    for rows, cols in ((E4M3, E5M2), (E5M2, E4M3)):
        _, _, both_packed = quantize(x, rows, cols, ROWWISE, statistics=True)
        _, _, rows_packed = quantize(x, rows, None, ROWWISE, statistics=True)
        assert torch.equal(both_packed, rows_packed)


def test_counts_on_a_tensor_done_by_hand():
    # scale 448: 1.0 -> 448. 2**-19 * 448 = 2**-10.2 rounds to zero, 2**-18 * 448 does not
    x = torch.tensor([[1.0, 2.0**-19, 2.0**-18, 0.0, -0.0, math.nan, 0.5] + [0.0] * 9])
    amax, staging = torch.tensor([1.0]), torch.zeros(1)
    _, _, packed = quantize(x, E4M3, None, TENSORWISE, amax=amax, staging=staging, statistics=True)
    got = read_statistics(packed, 16)
    assert (got.saturated, got.underflowed, got.nonfinite) == (0, 1, 1)
    assert math.isnan(got.amax)
    scale, _ = compute_scale(torch.tensor(1.0), E4M3)
    for value, saturated in ((464 / 448, 0), (465 / 448, 1), (-2.0, 1)):
        x = torch.tensor([[value] * 16])
        _, _, packed = quantize(x, E4M3, None, TENSORWISE, amax=amax, staging=staging, statistics=True)
        assert read_statistics(packed, 16).saturated == 16 * saturated, (value, scale)


def test_asking_for_statistics_changes_no_code():
    for granularity in ALL:
        for data in ("gaussian", "one_nan", "huge"):
            x = make(data, 65, 130, torch.bfloat16)
            plain, _, _ = quantize(x, E4M3, None, granularity, margin=-2)
            watched, _, _ = quantize(x, E4M3, None, granularity, margin=-2, statistics=True)
            assert_same(watched, plain.codes, plain.scale_inv, (granularity, data))


# ------------------------------------------------------------------------------------------------- rejected


DELAYED = {"amax": torch.ones(1), "staging": torch.ones(1)}
REJECTED = [
    (torch.ones(2, 3, 4), ROWWISE, {}, ShapeError, r"quantize got 3 dimensions \(2, 3, 4\); allowed: 2; flatten"),
    (torch.ones(4), ROWWISE, {}, ShapeError, r"quantize got 1 dimensions \(4,\); allowed: 2; flatten"),
    (
        torch.ones(2, 3).double(),
        ROWWISE,
        {},
        DtypeError,
        r"got torch.float64; allowed: bfloat16, float16, float32; cast",
    ),
    (torch.ones(2, 3).int(), ROWWISE, {}, DtypeError, r"quantize got torch.int32; allowed: bfloat16"),
    (torch.ones(2, 3), ROWWISE, DELAYED, ShapeError, r"amax of earlier steps with rowwise scales; allowed: tensorwise"),
    (torch.ones(2, 3), TENSORWISE, {"amax": torch.ones(1)}, ShapeError, r"got amax but no staging; allowed: both"),
    (torch.ones(2, 3), TENSORWISE, {"staging": torch.ones(1)}, ShapeError, r"got staging but no amax; allowed: both"),
]


@pytest.mark.parametrize(("x", "granularity", "options", "error", "message"), REJECTED)
def test_rejected_with_what_is_allowed(x, granularity, options, error, message):
    with pytest.raises(error, match=message):
        quantize(x, E4M3, None, granularity, **options)


def test_no_orientation_is_rejected():
    with pytest.raises(DtypeError, match=r"asked for no orientation; give rows=, cols= or both a Format"):
        quantize(torch.ones(2, 3), None, None, ROWWISE)
