"""Transposed codes: against numpy's exact shift of exponents, bit for bit; filler, odd extents, one scale for a GEMM.

The same tests run the reference on a CPU, the kernel on a GPU and, started by ``test_interpreter.py`` under
``TRITON_INTERPRET=1``, in Triton's interpreter.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from acceler8.errors import ShapeError
from acceler8.formats import E4M3, E5M2, Format
from acceler8.kernels import Quantized, quantize, transpose_bytes, transpose_codes, transpose_ref
from acceler8.kernels._triton import INTERPRETED
from acceler8.scaling import ROWWISE, TENSORWISE, BLOCK_1x128
from tests.kernels.support import make
from tests.kernels.test_library_ops import TRACED, opcheck

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.requires(sm=90))]
on_each_device = pytest.mark.parametrize("device", DEVICES)
in_pytorch = pytest.mark.skipif(INTERPRETED, reason="nothing that the interpreter runs")
each_format = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
# numpy, which the interpreter computes with, reports what the hardware does in silence
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]
# one element, odd extents, whole tiles, more than one tile each way
SHAPES = [(1, 1), (7, 48), (16, 64), (33, 129), (130, 272), (257, 65)]
NUMPY = {"E4M3": ml_dtypes.float8_e4m3fn, "E5M2": ml_dtypes.float8_e5m2}


def operand(rows: int, cols: int, fmt: Format, seed: int = 0, spread: int = 9) -> Quantized:
    """Any codes, scales that are powers of two; filler that would be seen."""
    g = torch.Generator().manual_seed(seed)
    width = cols + -cols % 16
    codes = torch.randint(0, 256, (rows, width), generator=g, dtype=torch.uint8)
    codes[:, cols:] = 0x7F
    scale_inv = 2.0 ** torch.randint(-spread, spread + 1, (rows, 1), generator=g)
    return Quantized(codes.view(fmt.torch_dtype), scale_inv, ROWWISE)


def expected(q: Quantized, cols: int, fmt: Format) -> Tensor:
    """Codes by numpy and ml_dtypes: products in float64, rounded once. NaN and infinity give the canonical NaN."""
    values = q.codes.view(torch.uint8).numpy().view(NUMPY[fmt.name]).astype(np.float64)[:, :cols]
    values[np.isinf(values)] = np.nan
    product = values * (q.scale_inv.numpy() / q.scale_inv.numpy().max())
    codes = product.astype(np.float32).astype(NUMPY[fmt.name]).view(np.uint8)
    codes[np.isnan(product)] = 0x7F
    out = np.zeros((cols, q.codes.shape[0] + -q.codes.shape[0] % 16), np.uint8)
    out[:, : q.codes.shape[0]] = codes.T
    return torch.from_numpy(out)


def on(q: Quantized, device: str) -> Quantized:
    return Quantized(q.codes.to(device), q.scale_inv.to(device), q.granularity)


@on_each_device
@each_format
@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_every_code_keeps_its_place_and_its_number(rows, cols, fmt, device):
    q = operand(rows, cols, fmt, seed=rows + cols)
    got = transpose_codes(on(q, device), cols)
    assert got.granularity is TENSORWISE
    assert (got.codes.dtype, got.codes.is_contiguous()) == (fmt.torch_dtype, True)
    assert torch.equal(got.scale_inv.cpu(), q.scale_inv.max().view(1, 1))
    assert torch.equal(got.codes.view(torch.uint8).cpu(), expected(q, cols, fmt))
    largest = q.scale_inv.max().view(1, 1)
    reference = transpose_ref(q.codes, q.scale_inv, largest, cols)
    assert torch.equal(reference.view(torch.uint8), expected(q, cols, fmt))


@on_each_device
@each_format
def test_all_codes_under_each_shift(fmt, device):
    codes = torch.arange(256, dtype=torch.uint8).expand(24, 256).contiguous()
    q = Quantized(codes.view(fmt.torch_dtype), 2.0 ** -torch.arange(24.0).view(24, 1), ROWWISE)
    got = transpose_codes(on(q, device), 256).codes.view(torch.uint8).cpu()
    assert torch.equal(got, expected(q, 256, fmt))
    is_number = ~q.codes.float().isnan() & ~q.codes.float().isinf()
    assert torch.equal(got[:, :1].t()[is_number[:1]], codes[:1][is_number[:1]])  # no shift changes nothing


@on_each_device
@each_format
@pytest.mark.parametrize(("rows", "cols"), [*SHAPES, (0, 32), (5, 0)])
def test_codes_of_one_scale_are_turned_as_they_are(rows, cols, fmt, device):
    q = operand(rows, cols, fmt, seed=rows + cols)
    codes = q.codes[:, :cols].contiguous()
    is_number = codes.float().isfinite()
    got = transpose_bytes(codes.to(device))
    assert (got.dtype, got.is_contiguous()) == (fmt.torch_dtype, True)
    assert got.shape == (cols, rows + -rows % 16)
    turned, filler = got.cpu().view(torch.uint8).split([rows, -rows % 16], dim=1)
    assert torch.equal(turned.t()[is_number], codes.view(torch.uint8)[is_number])
    assert not got[:, :rows].cpu().float().t()[~is_number].isfinite().any()
    assert not filler.any()


@on_each_device
@pytest.mark.parametrize("data", ["gaussian", "outliers", "zero_rows"])
def test_it_stands_for_the_transposed_tensor(data, device):
    """Exactly what the codes of rows stand for, where no number became subnormal; else off by half of the least."""
    x = make(data, 45, 200, torch.bfloat16).to(device)
    q, _, _ = quantize(x, E4M3, None, ROWWISE, pow2=True)
    assert q is not None
    got = transpose_codes(q, 200)
    plain, turned = q.dequantize(200).double().t(), got.dequantize(45).double()
    normal = plain.abs() >= 2.0**-6 * got.scale_inv.double()
    assert bool(normal.any())
    assert torch.equal(turned[normal], plain[normal])
    assert bool(((turned - plain).abs() <= 2.0**-10 * got.scale_inv.double()).all())


@on_each_device
def test_a_nan_stays_where_it_is(device):
    x = torch.ones(16, 32)
    x[3, 5] = float("nan")
    q, _, _ = quantize(x.to(device), E4M3, None, ROWWISE, pow2=True)
    assert q is not None
    got = transpose_codes(q, 32).dequantize(16)
    assert got.isnan().nonzero().tolist() == q.dequantize(32).t().isnan().nonzero().tolist()
    assert bool(got[5, 3].isnan())


@on_each_device
@each_format
@pytest.mark.parametrize(("rows", "cols"), [(0, 32), (5, 0), (0, 0)])
def test_nothing(rows, cols, fmt, device):
    got = transpose_codes(on(operand(rows, 32 if not rows else 16, fmt), device), cols)
    assert (got.codes.shape, got.scale_inv.shape) == ((cols, rows + -rows % 16), (1, 1))
    assert not got.codes.view(torch.uint8).any()


def test_what_cannot_be_turned_is_said():
    q = operand(4, 128, E4M3)
    with pytest.raises(ShapeError, match="allowed: rowwise"):
        transpose_codes(Quantized(q.codes, torch.ones(4, 1), BLOCK_1x128), 128)
    for cols in (-1, 129):
        with pytest.raises(ShapeError, match=f"cols={cols}; allowed: 0 to 128"):
            transpose_codes(q, cols)


@in_pytorch
@on_each_device
@each_format
def test_opcheck(fmt, device):
    for rows, cols in ((5, 48), (0, 128), (3, 256)):
        q = on(operand(rows, cols, fmt), device)
        q.codes.view(torch.uint8).clamp_(max=0x7B)  # opcheck compares NaN as unlike itself
        largest = torch.full((1, 1), 2.0**9, device=device)
        # the schema check compares inputs with allclose, which torch 2.13 lacks for FP8 on a CPU
        opcheck(torch.ops.acceler8.transpose_codes.default, (q.codes, q.scale_inv, largest, cols), TRACED)


@in_pytorch
@on_each_device
def test_compiles_whole(device):
    def call(codes: Tensor, scale_inv: Tensor) -> Tensor:
        return transpose_codes(Quantized(codes, scale_inv, ROWWISE), 48).codes.view(torch.uint8) + 0

    torch._dynamo.reset()
    q = on(operand(5, 48, E4M3), device)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q.codes, q.scale_inv), call(q.codes, q.scale_inv))
