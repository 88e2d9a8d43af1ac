"""Scaled matrix product of two FP8 operands.

    y[M, N] = sum_k (a[m, k] * scale_inv_a) * (b[n, k] * scale_inv_b)  (+ bias[n])

Both operands lie contiguous along the contraction ("TN", the only layout of FP8 tensor cores before
Blackwell). On a GPU that has it this is ``torch._scaled_mm`` or ``F.scaled_mm``; elsewhere codes are decoded
and multiplied with FP32 accumulation: the same numbers up to accumulation order. The GPU's rules on shapes,
dtypes and layouts hold on every device, because the CPU's own ``_scaled_mm`` takes anything and would let
code pass that fails on a GPU.

``fast_accum`` lets Hopper accumulate in its tensor cores' ~14-bit registers; without it partial sums are
promoted.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn.functional import pad

from acceler8.errors import DtypeError, ShapeError
from acceler8.formats import decode
from acceler8.kernels._library import library, may_go_direct
from acceler8.kernels.operand import Quantized
from acceler8.scaling import (
    GRANULARITIES,
    ROWWISE,
    TENSORWISE,
    BLOCK_1x128,
    BLOCK_128x128,
    Granularity,
)

_OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_BLOCKS = (BLOCK_1x128, BLOCK_128x128)


def check_operands(a: Quantized, b: Quantized, out_dtype: torch.dtype) -> None:
    """Raise unless a GPU could multiply these: the rules of cuBLASLt and CUTLASS FP8 on sm_89 and sm_90.

    Raises: ShapeError (codes not contiguous, scales of another shape than the granularity's or not FP32,
        contraction differs or is no multiple of the granularity's filler, N not a multiple of 16, granularities
        that cannot be paired), DtypeError (not FP8, E5M2 x E5M2 or with block scales, output dtype).
    """
    for name, q in (("a", a), ("b", b)):
        if q.codes.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
            raise DtypeError(f"operand {name} is {q.codes.dtype}; allowed: float8_e4m3fn, float8_e5m2")
        if q.codes.ndim != 2 or not q.codes.is_contiguous():
            raise ShapeError(
                f"operand {name} has shape {tuple(q.codes.shape)}, strides {q.codes.stride()}; allowed: 2-D, contiguous"
                " along the contraction; quantise it in the other orientation instead of transposing codes"
            )
        expected = q.granularity.scale_shape(*q.codes.shape)
        if q.scale_inv.shape != expected or q.scale_inv.dtype != torch.float32:
            raise ShapeError(
                f"operand {name} has scale_inv {tuple(q.scale_inv.shape)} {q.scale_inv.dtype}; allowed: {expected}"
                f" torch.float32 for {q.granularity} scales; take codes and scales from one cast"
            )
    if a.codes.dtype == b.codes.dtype == torch.float8_e5m2:
        raise DtypeError("got E5M2 x E5M2, which no GPU multiplies; allowed: at least one operand in E4M3")
    if out_dtype not in _OUT_DTYPES:
        raise DtypeError(f"out_dtype={out_dtype}; allowed: bfloat16, float16, float32")
    (_, k), (n, k_b) = a.codes.shape, b.codes.shape
    if k != k_b:
        raise ShapeError(f"a contracts {k} elements and b {k_b}; allowed: the same number in both")
    multiple = a.granularity.contraction_multiple
    if k % multiple or n % 16:
        raise ShapeError(
            f"got K={k}, N={n}; allowed: K a multiple of {multiple} and N of 16, which FP8 GEMM needs; pad the layer or"
            " skip it in the plan"
        )
    if not _can_pair(a.granularity, b.granularity):
        raise ShapeError(
            f"got granularities {a.granularity} x {b.granularity}; allowed: the same in both operands (not 128x128), or"
            " 1x128 with 128x128 in this order"
        )
    if a.granularity in _BLOCKS and torch.float8_e5m2 in (a.codes.dtype, b.codes.dtype):
        raise DtypeError(f"got E5M2 with {a.granularity} scales; allowed: E4M3 in both, all that GPUs multiply so")


def _can_pair(a: Granularity, b: Granularity) -> bool:
    if a in _BLOCKS:
        return a is BLOCK_1x128 and b in _BLOCKS
    return a is b


def scaled_matmul_ref(a: Quantized, b: Quantized, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """Reference: decode, multiply and accumulate in FP32, scale, add bias, round once to ``out_dtype``."""
    with torch.autocast(a.codes.device.type, enabled=False):
        if a.granularity.is_blockwise:
            y = a.dequantize() @ b.dequantize().t()
        else:
            y = decode(a.codes) @ decode(b.codes).t()
            y = y.mul_(a.scale_inv).mul_(b.scale_inv.t() if b.scale_inv.ndim else b.scale_inv)
        if bias is not None:
            y += bias.float()
        return y.to(out_dtype)


# keyed by name: granularities compare and hash field by field
@functools.cache
def _has_hardware_matmul(device: torch.device, granularity: str) -> bool:
    return has_hardware_matmul(device, GRANULARITIES[granularity])


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _has_outer_scales(device: torch.device) -> bool:
    """True if cuBLASLt itself takes row and block scales: Hopper with CUDA 12.9 on. Elsewhere torch has a CUTLASS
    kernel for rows, which gives BF16 only, and nothing for blocks.
    """
    cuda = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
    return _capability(device)[0] == 9 and cuda >= (12, 9)


def has_hardware_matmul(device: torch.device, granularity: Granularity) -> bool:
    """True if ``device`` multiplies FP8 operands of this granularity itself; else the product is emulated."""
    if device.type != "cuda" or torch.version.cuda is None:  # a ROCm device calls itself cuda too: not tried yet
        return False
    if granularity in (TENSORWISE, ROWWISE):
        return _capability(device) >= (8, 9)
    return granularity in _BLOCKS and _has_outer_scales(device)


def _scaled_matmul_cuda(a: Quantized, b: Quantized, bias: Tensor | None, out_dtype: torch.dtype, fast: bool) -> Tensor:
    if a.granularity.is_blockwise:
        y = _blockwise(a, b, out_dtype)
        return y if bias is None else y + bias.to(out_dtype)
    if a.granularity is ROWWISE and out_dtype is not torch.bfloat16 and not _has_outer_scales(a.codes.device):
        one = torch.ones((), device=a.codes.device)
        y = torch._scaled_mm(a.codes, b.codes.t(), one, one, out_dtype=torch.float32, use_fast_accum=fast)
        y = y.mul_(a.scale_inv).mul_(b.scale_inv.t())
        return (y if bias is None else y.add_(bias.float())).to(out_dtype)
    if bias is None:  # the common case, without what it does not need: 56 layers multiply 168 times a step
        scale_inv_b = b.scale_inv.t() if b.scale_inv.ndim else b.scale_inv
        return torch._scaled_mm(
            a.codes, b.codes.t(), a.scale_inv, scale_inv_b, out_dtype=out_dtype, use_fast_accum=fast
        )  # fmt: skip
    # a bias rides along unless the result is FP32, which the GEMM itself refuses
    inside = bias is not None and out_dtype is not torch.float32
    y = torch._scaled_mm(
        a.codes,
        b.codes.t(),
        a.scale_inv,
        b.scale_inv.t() if b.scale_inv.ndim else b.scale_inv,
        bias=bias.to(out_dtype) if inside and bias is not None else None,
        out_dtype=out_dtype,
        use_fast_accum=fast,
    )
    return y if bias is None or inside else y.add_(bias.float())


def _blockwise(a: Quantized, b: Quantized, out_dtype: torch.dtype) -> Tensor:
    """1x128 x (1x128 or 128x128). cuBLASLt takes rows of ``a`` in multiples of 16 here: filled and cut off again."""
    from torch.nn.functional import ScalingType, scaled_mm

    rows = a.codes.shape[0]
    codes, scale_inv = a.codes, a.scale_inv
    if filler := -rows % 16:
        codes = pad(codes.view(torch.uint8), (0, 0, 0, filler)).view(codes.dtype)
        scale_inv = pad(scale_inv, (0, 0, 0, filler))
    if b.granularity is BLOCK_1x128:
        recipe_b, scale_inv_b = ScalingType.BlockWise1x128, _outer_contiguous(b.scale_inv)
    else:  # K-blocks filled to a multiple of 4
        recipe_b = ScalingType.BlockWise128x128
        scale_inv_b = pad(b.scale_inv, (0, -b.scale_inv.shape[1] % 4)).t()
    recipe_a = ScalingType.BlockWise1x128
    y: Tensor = scaled_mm(
        codes,
        b.codes.t(),
        _outer_contiguous(scale_inv),
        recipe_a,
        scale_inv_b,
        recipe_b,
        output_dtype=out_dtype,
    )
    return y[:rows]


def _outer_contiguous(scale_inv: Tensor) -> Tensor:
    """1x128 scales as cuBLASLt reads them: shape [rows, blocks], the rows contiguous."""
    return scale_inv.t().contiguous().t()


def _scaled_matmul(
    a: Tensor, scale_inv_a: Tensor, b: Tensor, scale_inv_b: Tensor, bias: Tensor | None,
    granularity_a: str, granularity_b: str, out_dtype: torch.dtype, fast_accum: bool,
) -> Tensor:  # fmt: skip
    qa = Quantized(a, scale_inv_a, GRANULARITIES[granularity_a])
    qb = Quantized(b, scale_inv_b, GRANULARITIES[granularity_b])
    if 0 in (*a.shape, b.shape[0]):
        y = torch.zeros(a.shape[0], b.shape[0], dtype=out_dtype, device=a.device)
        return y if bias is None else y + bias.to(out_dtype)
    if has_hardware_matmul(a.device, qa.granularity):
        return _scaled_matmul_cuda(qa, qb, bias, out_dtype, fast_accum)
    return scaled_matmul_ref(qa, qb, bias, out_dtype)


def _scaled_matmul_fake(
    a: Tensor, scale_inv_a: Tensor, b: Tensor, scale_inv_b: Tensor, bias: Tensor | None,
    granularity_a: str, granularity_b: str, out_dtype: torch.dtype, fast_accum: bool,
) -> Tensor:  # fmt: skip
    return a.new_empty(a.shape[0], b.shape[0], dtype=out_dtype)


library.define(
    "scaled_matmul(Tensor a, Tensor scale_inv_a, Tensor b, Tensor scale_inv_b, Tensor? bias, str granularity_a,"
    " str granularity_b, ScalarType out_dtype, bool fast_accum) -> Tensor"
)
library.impl("scaled_matmul", _scaled_matmul, "CompositeExplicitAutograd")
torch.library.register_fake("acceler8::scaled_matmul", _scaled_matmul_fake, lib=library)


def multiply(
    a: Quantized, b: Quantized, *, out_dtype: torch.dtype, bias: Tensor | None = None, fast_accum: bool = False
) -> Tensor:
    """``scaled_matmul`` of operands that one checked recipe cast for each other, straight into the GPU's GEMM.

    Neither looks at the operands again nor goes through the dispatcher, which cost as much as the GEMM's own launch.
    """
    codes = a.codes
    if (
        may_go_direct(codes)
        and _has_hardware_matmul(codes.device, a.granularity.name)
        and codes.numel()
        and b.codes.numel()
    ):
        return _scaled_matmul_cuda(a, b, bias, out_dtype, fast_accum)
    return scaled_matmul(a, b, out_dtype=out_dtype, bias=bias, fast_accum=fast_accum)


def scaled_matmul(
    a: Quantized,
    b: Quantized,
    *,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    fast_accum: bool = False,
) -> Tensor:
    """Multiply two FP8 operands.

    Shape: a [M, K], b [N, K] -> [M, N] in ``out_dtype`` (bf16, fp16, fp32). bias [N]. M is free, K and N are
        multiples of 16. Any dimension may be 0: the result is zeros (plus bias).
    Numerics: products are exact, accumulation FP32 (``fast_accum``: what Hopper's tensor cores keep), one
        rounding to ``out_dtype``. NaN codes make NaN in the rows and columns that they meet.
    Raises: ShapeError, DtypeError as ``check_operands``; ShapeError for a bias of another shape.
    """
    check_operands(a, b, out_dtype)
    if bias is not None and bias.shape != b.codes.shape[:1]:
        raise ShapeError(
            f"bias has shape {tuple(bias.shape)}; allowed: {tuple(b.codes.shape[:1])}, one for each row of b"
        )
    y: Tensor = torch.ops.acceler8.scaled_matmul(
        a.codes,
        a.scale_inv,
        b.codes,
        b.scale_inv,
        bias,
        a.granularity.name,
        b.granularity.name,
        out_dtype,
        fast_accum,
    )
    return y


__all__ = [
    "check_operands",
    "has_hardware_matmul",
    "multiply",
    "scaled_matmul",
    "scaled_matmul_ref",
]
