"""Dequantise: codes and scales of rows in blocks of 128 back to the dtype of the tensor that they stand for.

    x = codes * scale_inv

What is kept for backward in FP8 is read by kernels that take high precision; this is the one pass between them. FP32
until the last rounding, so the values are those of ``Quantized.dequantize``, rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from acceler8.formats import E4M3
from acceler8.kernels import _triton
from acceler8.kernels._launch import Launch, Plans, address, alignment, stream_of
from acceler8.kernels._library import library, may_go_direct
from acceler8.kernels._triton import decode_e4m3, hidden, jit, rounded_to, tl
from acceler8.kernels.operand import Quantized
from acceler8.scaling import BLOCK_1x128

_ROWS, _BLOCK, _WARPS = 32, 128, 4


@jit
def dequantize_kernel(  # type: ignore[no-untyped-def]
    codes_ptr, inv_ptr, out_ptr, row_count, col_count, width,
    HARDWARE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Some rows of one block of columns a program."""
    blocks = width // BLOCK
    block = tl.program_id(0) % blocks
    rows = (tl.program_id(0) // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = block * BLOCK + tl.arange(0, BLOCK)
    row_count, col_count = hidden(row_count, ROWS), hidden(col_count, BLOCK)
    inside = (rows < row_count)[:, None] & (cols < col_count)[None, :]
    codes = tl.load(codes_ptr + rows[:, None] * width + cols[None, :], mask=inside, other=0)
    inv = tl.load(inv_ptr + rows * blocks + block, mask=rows < row_count, other=0.0)
    x = decode_e4m3(codes, HARDWARE) * inv[:, None]
    tl.store(out_ptr + rows[:, None] * col_count + cols[None, :], rounded_to(x, out_ptr.dtype.element_ty), mask=inside)


_plans: Plans[Launch] = Plans()


def _dequantize_triton(codes: Tensor, scale_inv: Tensor, cols: int, dtype: torch.dtype) -> Tensor:
    device = codes.get_device()
    if device >= 0 and device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return _dequantize_triton(codes, scale_inv, cols, dtype)
    rows, width = codes.shape
    out = torch.empty(rows, cols, dtype=dtype, device=codes.device)
    key = (rows, width, cols, dtype, device, alignment(codes), alignment(scale_inv))
    launch = _plans.get(
        key,
        lambda: Launch(
            dequantize_kernel,
            -(-rows // _ROWS) * (width // _BLOCK),
            (torch.uint8, scale_inv, dtype),
            (rows, cols, width, _triton.has_fp8_conversion(codes.device), _ROWS, _BLOCK),
            _WARPS,
        ),
    )
    launch(stream_of(device), address(codes), address(scale_inv), address(out))
    return out


def dequantize_ref(codes: Tensor, scale_inv: Tensor, cols: int, dtype: torch.dtype) -> Tensor:
    """Reference in plain PyTorch."""
    return Quantized(codes, scale_inv, BLOCK_1x128).dequantize(cols).to(dtype).contiguous()


def _dequantize(codes: Tensor, scale_inv: Tensor, cols: int, dtype: torch.dtype) -> Tensor:
    if _triton.runs_on(codes) and codes.numel():
        return _dequantize_triton(codes, scale_inv, cols, dtype)
    return dequantize_ref(codes, scale_inv, cols, dtype)


def _dequantize_fake(codes: Tensor, scale_inv: Tensor, cols: int, dtype: torch.dtype) -> Tensor:
    return codes.new_empty(codes.shape[0], cols, dtype=dtype)


library.define("dequantize(Tensor codes, Tensor scale_inv, int cols, ScalarType dtype) -> Tensor")
library.impl("dequantize", _dequantize, "CompositeExplicitAutograd")
torch.library.register_fake("acceler8::dequantize", _dequantize_fake, lib=library)


def dequantize(q: Quantized, cols: int, dtype: torch.dtype) -> Tensor:
    """``codes * scale_inv`` in ``dtype``, without the filler behind ``cols``.

    Shape: ``q`` E4M3 codes [R, C'] with scales of 1x128 -> [R, cols] bf16, fp16 or fp32. R may be 0.
    Numerics: FP32 inside, rounded once to ``dtype``; NaN codes give NaN. Deterministic.
    """
    assert q.granularity is BLOCK_1x128
    assert q.codes.dtype is E4M3.torch_dtype
    if may_go_direct(q.codes) and _triton.runs_on(q.codes) and q.codes.numel():
        return _dequantize_triton(q.codes, q.scale_inv, cols, dtype)
    made: Tensor = torch.ops.acceler8.dequantize.default(q.codes, q.scale_inv, cols, dtype)
    return made
