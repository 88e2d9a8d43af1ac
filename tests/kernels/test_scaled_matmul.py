"""The scaled product against float64 on the already quantised operands, and every rule that a GPU would enforce."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from acceler8.errors import Acceler8Error, DtypeError, ShapeError
from acceler8.formats import E4M3, E5M2, Format
from acceler8.kernels import Quantized, has_hardware_matmul, quantize, scaled_matmul, scaled_matmul_ref
from acceler8.scaling import (
    GRANULARITIES,
    ROWWISE,
    TENSORWISE,
    BLOCK_1x128,
    BLOCK_128x128,
    Granularity,
    MX_1x32,
)
from tests.kernels.support import make, spread

PAIRS = [
    (TENSORWISE, TENSORWISE),
    (ROWWISE, ROWWISE),
    (BLOCK_1x128, BLOCK_1x128),
    (BLOCK_1x128, BLOCK_128x128),
    (MX_1x32, MX_1x32),
]
pairs = pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0]}-{pair[1]}")
OUT_DTYPES = [torch.bfloat16, torch.float16, torch.float32]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.requires(sm=90))]
on_each_device = pytest.mark.parametrize("device", DEVICES)


def operand(rows: int, cols: int, granularity: Granularity, fmt: Format = E4M3, *, seed: int, device: str) -> Quantized:
    x = make("gaussian", rows, cols, torch.float32, seed=seed)
    if rows and cols:
        x *= torch.logspace(-1, 1, rows)[:, None]  # rows of different size: a scale that is lost or swapped shows
    q = quantize(x.to(device), fmt, None, granularity)[0]
    assert q is not None
    return q


def exact(q: Quantized) -> Tensor:
    """The operand's values in float64, from its codes and the scale that each element meets."""
    codes, scale_inv = q.codes.cpu().float().double(), q.scale_inv.cpu()
    return codes * spread(Quantized(q.codes, scale_inv, q.granularity), *codes.shape).double()


def assert_close_to_exact(y: Tensor, a: Quantized, b: Quantized, bias: Tensor | None = None) -> None:
    """Twice the error of plain PyTorch's product of the same values in the same dtype, overall and in the worst row.

    One rounding of the exact result to the output's dtype is allowed in any case: plain PyTorch can be luckier.
    """
    left, right = exact(a), exact(b)
    truth = left @ right.t()
    plain = left.float() @ right.float().t()
    if bias is not None:
        truth, plain = truth + bias.double(), plain + bias.float()
    plain = plain.to(y.dtype)
    error, usual = (y.cpu().double() - truth).abs(), (plain.double() - truth).abs()
    rounding = truth.abs() * torch.finfo(y.dtype).eps / 2
    # sums of K terms are rounded relative to their partial sums, not to the result: FP32 on a CPU; Hopper keeps 14 bits
    # of a sum until it is promoted to FP32
    partial = (left.abs() @ right.abs().t()) * 2.0 ** (-13 if y.is_cuda else -24)
    assert (error.norm() <= 2 * usual.norm() + (rounding + partial).norm()).item()
    worst = (error.norm(dim=1) - 2 * usual.norm(dim=1) - (rounding + partial).norm(dim=1)).max() if len(y) else 0
    assert worst <= 0


@on_each_device
@pairs
@pytest.mark.parametrize("out_dtype", OUT_DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
def test_against_float64(pair, out_dtype, with_bias, device):
    if device == "cuda" and not has_hardware_matmul(torch.device(device, 0), pair[0]) and pair[0] is not MX_1x32:
        pytest.skip(f"this GPU does not multiply {pair[0]} operands itself")
    for rows in (1, 7, 17, 64):
        for fmt in (E4M3, E5M2) if pair[0] in (TENSORWISE, ROWWISE) else (E4M3,):
            a = operand(rows, 384, pair[0], fmt, seed=rows, device=device)
            b = operand(48, 384, pair[1], seed=99, device=device)
            bias = torch.linspace(-3, 3, 48) if with_bias else None
            y = scaled_matmul(a, b, out_dtype=out_dtype, bias=None if bias is None else bias.to(device))
            assert y.shape == (rows, 48)
            assert y.dtype == out_dtype
            # on a GPU a bias is rounded to a 16-bit output's dtype first
            seen = bias if bias is None or device == "cpu" else bias.to(out_dtype).float()
            assert_close_to_exact(y, a, b, seen)


@on_each_device
@pairs
def test_a_large_contraction(pair, device):
    a = operand(16, 4096, pair[0], seed=1, device=device)
    b = operand(32, 4096, pair[1], seed=2, device=device)
    assert_close_to_exact(scaled_matmul(a, b, out_dtype=torch.float32), a, b)


@on_each_device
@pairs
@pytest.mark.parametrize("out_dtype", OUT_DTYPES, ids=lambda d: str(d)[6:])
def test_empty_dimensions_give_zeros_and_bias(pair, out_dtype, device):
    bias = torch.linspace(-1, 1, 32, device=device)
    for m, n, k in ((0, 32, 128), (3, 0, 128), (3, 32, 0), (0, 0, 0)):
        a = operand(m, k, pair[0], seed=0, device=device)
        b = operand(n, k, pair[1], seed=1, device=device)
        y = scaled_matmul(a, b, out_dtype=out_dtype)
        assert y.shape == (m, n)
        assert y.dtype == out_dtype
        assert not y.any()
        if n:
            y = scaled_matmul(a, b, out_dtype=out_dtype, bias=bias)
            assert torch.equal(y, bias.to(out_dtype).expand(m, n))


@on_each_device
@pairs
def test_filler_adds_exactly_nothing(pair, device):
    """100 of 128 (or 112) contracted elements are real: the product is that of the real ones."""
    a = operand(7, 100, pair[0], seed=3, device=device)
    b = operand(32, 100, pair[1], seed=4, device=device)
    y = scaled_matmul(a, b, out_dtype=torch.float32)
    assert_close_to_exact(y, a, b)
    assert not exact(a)[:, 100:].any()
    poisoned = Quantized(a.codes.clone(), a.scale_inv, a.granularity)
    poisoned.codes[:, 100:] = 1.0  # whatever lies against filler is multiplied by its zeros
    assert torch.equal(scaled_matmul(poisoned, b, out_dtype=torch.float32), y)


@on_each_device
@pairs
def test_a_nan_stays_in_its_row_or_column(pair, device):
    x = make("gaussian", 33, 128, torch.float32, seed=5)
    w = make("gaussian", 64, 128, torch.float32, seed=6)
    x[7, 9] = math.nan
    w[11, 13] = math.inf
    a, b = quantize(x.to(device), E4M3, None, pair[0])[0], quantize(w.to(device), E4M3, None, pair[1])[0]
    bad = scaled_matmul(a, b, out_dtype=torch.bfloat16).isnan().cpu()
    expected = torch.zeros(33, 64, dtype=torch.bool)
    expected[7], expected[:, 11] = True, True
    assert torch.equal(bad, expected)


@pairs
def test_the_cpu_accumulates_in_fp32_inside_autocast(pair):
    """Autocast would turn the product of decoded codes into a bfloat16 one: 3 digits instead of 7."""
    a = operand(17, 512, pair[0], seed=7, device="cpu")
    b = operand(32, 512, pair[1], seed=8, device="cpu")
    outside = scaled_matmul(a, b, out_dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = scaled_matmul(a, b, out_dtype=torch.float32)
        reference = scaled_matmul_ref(a, b, None, torch.float32)
        assert (a.dequantize() @ b.dequantize().t()).dtype == torch.bfloat16  # autocast is on
    assert inside.dtype == torch.float32
    assert torch.equal(inside, outside)
    assert torch.equal(reference, outside)
    assert_close_to_exact(inside, a, b)


def test_tensorwise_and_rowwise_products_of_codes_are_exact():
    """Scales multiply once, after the sum: with 16 terms of E4M3 nothing is rounded before that."""
    a = operand(5, 16, ROWWISE, seed=9, device="cpu")
    b = operand(16, 16, ROWWISE, seed=10, device="cpu")
    sums = (a.codes.float().double() @ b.codes.float().double().t()).float()
    assert torch.equal(scaled_matmul(a, b, out_dtype=torch.float32), sums * a.scale_inv * b.scale_inv.t())


def test_operands_are_left_alone():
    a = operand(4, 32, ROWWISE, seed=1, device="cpu")
    b = operand(16, 32, ROWWISE, seed=2, device="cpu")
    bias = torch.ones(16)
    before = [t.clone() for t in (a.codes.view(torch.uint8), a.scale_inv, b.codes.view(torch.uint8), b.scale_inv, bias)]
    scaled_matmul(a, b, out_dtype=torch.float32, bias=bias)
    after = (a.codes.view(torch.uint8), a.scale_inv, b.codes.view(torch.uint8), b.scale_inv, bias)
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))


# ------------------------------------------------------------------------------------------------- rejected


def fp8(rows: int, cols: int, granularity: Granularity = ROWWISE, fmt: Format = E4M3) -> Quantized:
    """An operand put together by hand, so that it can break the rules."""
    codes = torch.zeros(rows, cols).to(fmt.torch_dtype)
    return Quantized(codes, torch.ones(granularity.scale_shape(rows, cols)), granularity)


def transposed(q: Quantized) -> Quantized:
    return Quantized(q.codes.t(), q.scale_inv, q.granularity)


def scaled(q: Quantized, scale_inv: Tensor) -> Quantized:
    return Quantized(q.codes, scale_inv, q.granularity)


HIGH = Quantized(torch.zeros(16, 32), torch.ones(16, 1), ROWWISE)
REJECTED = [
    (fp8(4, 24), fp8(16, 24), ShapeError, r"got K=24, N=16; allowed: K a multiple of 16 and N of 16.*pad the layer"),
    (fp8(4, 32), fp8(17, 32), ShapeError, r"got K=32, N=17; allowed: .* N of 16, which FP8 GEMM needs"),
    (fp8(4, 64, BLOCK_1x128), fp8(16, 64, BLOCK_1x128), ShapeError, r"got K=64, N=16; allowed: K a multiple of 128"),
    (fp8(4, 16, MX_1x32), fp8(16, 16, MX_1x32), ShapeError, r"got K=16, N=16; allowed: K a multiple of 32"),
    (fp8(4, 32), fp8(16, 48), ShapeError, r"a contracts 32 elements and b 48; allowed: the same number in both"),
    (fp8(4, 32, fmt=E5M2), fp8(16, 32, fmt=E5M2), DtypeError, r"E5M2 x E5M2, which no GPU multiplies; allowed: at"),
    (transposed(fp8(32, 4)), fp8(16, 32), ShapeError, r"operand a has shape \(4, 32\), strides \(1, 4\); allowed: 2-D"),
    (fp8(4, 32), transposed(fp8(32, 16)), ShapeError, r"operand b has .*; quantise it in the other orientation"),
    (HIGH, fp8(16, 32), DtypeError, r"operand a is torch.float32; allowed: float8_e4m3fn, float8_e5m2"),
    (fp8(4, 32), HIGH, DtypeError, r"operand b is torch.float32"),
    (fp8(4, 32, TENSORWISE), fp8(16, 32), ShapeError, r"tensorwise x rowwise; allowed: the same in both"),
    (fp8(4, 128), fp8(16, 128, BLOCK_1x128), ShapeError, r"granularities rowwise x 1x128; allowed"),
    (fp8(4, 128, BLOCK_128x128), fp8(16, 128, BLOCK_128x128), ShapeError, r"granularities 128x128 x 128x128"),
    (fp8(4, 128, BLOCK_128x128), fp8(16, 128, BLOCK_1x128), ShapeError, r"128x128 x 1x128; allowed: .* in this order"),
    (fp8(4, 128, BLOCK_1x128, E5M2), fp8(16, 128, BLOCK_1x128), DtypeError, r"got E5M2 with 1x128 scales; allowed"),
    (
        scaled(fp8(4, 32), torch.ones(4)),
        fp8(16, 32),
        ShapeError,
        r"a has scale_inv \(4,\) torch.float32; allowed: \(4, 1\)",
    ),
    (fp8(4, 32), scaled(fp8(16, 32), torch.ones(1, 16)), ShapeError, r"b has scale_inv \(1, 16\) .*allowed: \(16, 1\)"),
    (
        scaled(fp8(4, 32), torch.ones(4, 1).double()),
        fp8(16, 32),
        ShapeError,
        r"scale_inv \(4, 1\) torch.float64; allowed",
    ),
]


@pytest.mark.parametrize(
    ("a", "b", "error", "message"), REJECTED, ids=lambda v: v.split(";")[0] if isinstance(v, str) else ""
)
def test_what_a_gpu_refuses_is_refused_everywhere(a, b, error, message):
    with pytest.raises(error, match=message):
        scaled_matmul(a, b, out_dtype=torch.bfloat16)
    assert issubclass(error, Acceler8Error)
    assert issubclass(error, ValueError)


@pytest.mark.parametrize("out_dtype", [torch.float64, torch.float8_e4m3fn, torch.int32])
def test_output_dtypes(out_dtype):
    with pytest.raises(DtypeError, match=rf"out_dtype={out_dtype}; allowed: bfloat16, float16, float32"):
        scaled_matmul(fp8(4, 32), fp8(16, 32), out_dtype=out_dtype)


def test_the_bias_must_fit():
    with pytest.raises(ShapeError, match=r"bias has shape \(1,\); allowed: \(16,\), one for each row of b"):
        scaled_matmul(fp8(4, 32), fp8(16, 32), out_dtype=torch.bfloat16, bias=torch.ones(1))


def test_no_hardware_matmul_without_a_gpu():
    assert not any(has_hardware_matmul(torch.device("cpu"), g) for g in GRANULARITIES.values())


@pytest.mark.requires(sm=90)
@pytest.mark.parametrize("granularity", [TENSORWISE, ROWWISE, BLOCK_1x128], ids=str)
def test_fast_accumulation_is_close_to_the_exact_one(granularity):
    """Hopper keeps about 14 bits of a partial sum: relative to the largest sums, 2**-13 for each of K/32 additions."""
    a = operand(64, 1024, granularity, seed=11, device="cuda")
    b = operand(64, 1024, granularity, seed=12, device="cuda")
    fast = scaled_matmul(a, b, out_dtype=torch.float32, fast_accum=True).cpu().double()
    left, right = exact(a), exact(b)
    assert ((fast - left @ right.t()).abs() <= (left.abs() @ right.abs().t()) * 2.0**-13 * (1024 / 32)).all()
