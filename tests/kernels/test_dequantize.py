"""Dequantise: against an independent decoder, bit for bit; filler, odd extents, the way there and back.

The same tests run the reference on a CPU, the kernel on a GPU and, started by ``test_interpreter.py`` under
``TRITON_INTERPRET=1``, in Triton's interpreter.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from acceler8.formats import E4M3
from acceler8.kernels import Quantized, dequantize, quantize
from acceler8.kernels._triton import INTERPRETED
from acceler8.kernels.dequantize import dequantize_ref
from acceler8.scaling import BLOCK_1x128
from tests.kernels.support import DTYPES, make
from tests.kernels.test_library_ops import TRACED, opcheck

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.requires(sm=90))]
on_each_device = pytest.mark.parametrize("device", DEVICES)
in_pytorch = pytest.mark.skipif(INTERPRETED, reason="nothing that the interpreter runs")
# numpy, which the interpreter computes with, reports what the hardware does in silence
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
# one row, odd extents, whole blocks, more than one block and more than one tile of rows
SHAPES = [(1, 1), (7, 48), (33, 128), (31, 129), (130, 272), (2, 640)]


def operand(rows: int, cols: int, seed: int = 0) -> Quantized:
    """Any codes with any scales, those of the filler too."""
    g = torch.Generator().manual_seed(seed)
    blocks = -(-cols // 128)
    codes = torch.randint(0, 256, (rows, 128 * blocks), generator=g, dtype=torch.uint8)
    scale_inv = torch.randn(rows, blocks, generator=g).abs() * 2.0 ** torch.randint(-9, 9, (rows, blocks), generator=g)
    return Quantized(codes.view(torch.float8_e4m3fn), scale_inv, BLOCK_1x128)


def expected(q: Quantized, cols: int, dtype: torch.dtype) -> Tensor:
    """numpy and ml_dtypes: FP32 products, rounded once."""
    values = q.codes.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    product = values * np.repeat(q.scale_inv.numpy(), 128, axis=1)
    return torch.from_numpy(product[:, :cols]).to(dtype)


def on(q: Quantized, device: str) -> Quantized:
    return Quantized(q.codes.to(device), q.scale_inv.to(device), q.granularity)


def same_bits(got: Tensor, want: Tensor) -> bool:
    """NaN is NaN, whichever; zeros have their sign."""
    got = got.cpu()
    is_nan = want.isnan()
    bits = torch.int32 if want.dtype is torch.float32 else torch.int16
    return (
        (got.shape, got.dtype) == (want.shape, want.dtype)
        and torch.equal(got.isnan(), is_nan)
        and torch.equal(got.contiguous().view(bits)[~is_nan], want.contiguous().view(bits)[~is_nan])
    )


@on_each_device
@each_dtype
def test_every_code(dtype, device):
    codes = torch.arange(256, dtype=torch.uint8).view(2, 128).repeat(3, 1)
    scale_inv = torch.tensor([1.0, 1.0, 2.0**-7, 2.0**-7, 0.1, 0.1]).view(6, 1)
    q = Quantized(codes.view(torch.float8_e4m3fn), scale_inv, BLOCK_1x128)
    got = dequantize(on(q, device), 128, dtype)
    assert same_bits(got, expected(q, 128, dtype))
    assert got.isnan().sum().item() == 6  # 0x7F and 0xFF, three times
    plain = got[:2].double().cpu()
    assert plain.nan_to_num(0).abs().max().item() == E4M3.max
    assert plain[plain > 0].min().item() == 2.0**-9  # subnormal numbers too


@on_each_device
@each_dtype
@pytest.mark.parametrize(("rows", "cols"), SHAPES)
def test_each_block_has_its_scale_and_filler_is_left_out(rows, cols, dtype, device):
    q = operand(rows, cols, seed=rows + cols)
    q.codes.view(torch.uint8)[:, cols:] = 0x7F  # NaN: would be seen
    got = dequantize(on(q, device), cols, dtype)
    assert same_bits(got, expected(q, cols, dtype))
    assert same_bits(dequantize_ref(q.codes, q.scale_inv, cols, dtype), expected(q, cols, dtype))
    assert got.is_contiguous()


@on_each_device
@each_dtype
@pytest.mark.parametrize("data", ["gaussian", "outliers", "zero_rows", "one_nan", "tiny"])
def test_there_and_back(data, dtype, device):
    """Half a step of the topmost binade is 16 codes' units of 448: no element is further off than amax / 28."""
    x = make(data, 37, 300, dtype).to(device)
    q, _, _ = quantize(x, E4M3, None, BLOCK_1x128)
    assert q is not None
    back = dequantize(q, 300, dtype)
    assert (back.shape, back.dtype, back.device) == (x.shape, x.dtype, x.device)
    assert same_bits(back, expected(on(q, "cpu"), 300, dtype))
    for start in (0, 128, 256):
        block, its = x[:, start : start + 128].double(), back[:, start : start + 128].double()
        rows = ~block.isnan().any(1)
        amax = block[rows].abs().amax(1, keepdim=True)
        slack = amax * 2**-8 + 1e-12  # the result's own rounding, and amaxes below the least that a scale is made for
        assert bool(((its[rows] - block[rows]).abs() <= amax / 28 + slack).all())
        assert bool(its[~rows].isnan().any(1).all())


@on_each_device
@each_dtype
def test_no_rows(dtype, device):
    got = dequantize(on(operand(0, 200), device), 200, dtype)
    assert (got.shape, got.dtype) == ((0, 200), dtype)


@in_pytorch
@on_each_device
@each_dtype
def test_opcheck(dtype, device):
    for rows, cols in ((5, 48), (0, 128), (3, 256)):
        q = on(operand(rows, cols), device)
        q.codes.view(torch.uint8).clamp_(max=0x7E)  # opcheck compares NaN as unlike itself
        # the schema check compares inputs with allclose, which torch 2.13 lacks for FP8 on a CPU
        opcheck(torch.ops.acceler8.dequantize.default, (q.codes, q.scale_inv, cols, dtype), TRACED)


@in_pytorch
@on_each_device
def test_compiles_whole(device):
    def double(codes: Tensor, scale_inv: Tensor) -> Tensor:
        return dequantize(Quantized(codes, scale_inv, BLOCK_1x128), 48, torch.bfloat16) * 2

    torch._dynamo.reset()
    q = on(operand(5, 48), device)
    compiled = torch.compile(double, fullgraph=True, backend="aot_eager")
    assert same_bits(compiled(q.codes, q.scale_inv), double(q.codes, q.scale_inv).cpu())


@in_pytorch
def test_the_meta_device_knows_shapes():
    q = Quantized(*(t.to("meta") for t in operand(3, 200)[:2]), BLOCK_1x128)
    got = dequantize(q, 200, torch.float16)
    assert (got.shape, got.dtype, got.device.type) == ((3, 200), torch.float16, "meta")


@pytest.mark.requires(sm=90)
def test_more_elements_than_32_bits_count():
    rows, cols = 2**17 + 3, 2**14 + 128
    codes = torch.zeros(rows, cols, dtype=torch.uint8, device="cuda")
    codes[-1, -1], codes[-40, 5] = 0x38, 0xB8  # 1 and -1
    scale_inv = torch.full((rows, cols // 128), 3.0, device="cuda")
    got = dequantize(Quantized(codes.view(torch.float8_e4m3fn), scale_inv, BLOCK_1x128), cols, torch.bfloat16)
    assert (got[-1, -1].item(), got[-40, 5].item(), got.count_nonzero().item()) == (3.0, -3.0, 2)
