"""Gradients as E4M3 codes with one FP32 scale for each 128 elements: written in one pass, also on top of older codes.

    total = grad                         or   decode(codes) * scale_inv + grad
    codes, scale_inv = encode_blocks(total)

The format is ``formats.E4M3_BLOCK``; a block's scale is its own amax, so a gradient needs no loss scale and no history.
Adding rounds the sum again, 2.6 % of it (RMS of Gaussian numbers) each time: sums of many micro-batches belong into the
dtype that PyTorch adds them in, and into codes once.
Source: FP8 weight gradients, Peng et al. 2023, "FP8-LM", arXiv:2310.18313, who scale a tensor, not a block.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from acceler8.formats import BLOCK, BLOCK_AMAX_FLOOR, E4M3, E4M3_BLOCK, block_count, decode_blocks, encode_blocks
from acceler8.kernels import _triton
from acceler8.kernels._launch import Launch, Plans, address, alignment, stream_of
from acceler8.kernels._triton import as_fp32, constexpr, decode_e4m3, encode, hidden, jit, magnitude_bits, tl

_BLOCKS, _WARPS = 16, 4
_SLICE = 2**11 * BLOCK  # elements that the reference holds in FP32 at a time
_FLOOR, _MAX = constexpr(BLOCK_AMAX_FLOOR), constexpr(E4M3.max)
_plans: Plans[Launch] = Plans()


def write_gradient(grad: Tensor, codes: Tensor, scale_inv: Tensor, *, adds: bool = False) -> None:
    """Store ``grad`` in ``codes`` and ``scale_inv``, in place; ``adds``: on top of what they hold.

    Shape: grad any, bf16, fp16 or fp32, contiguous; codes of as many elements, float8_e4m3fn; scale_inv
        [ceil(n / 128)] FP32. Numerics: FP32, round to nearest even; the same codes on every device. NaN and inf become
        NaN, and the rest of their block loses precision. No FP32 copy of the whole is made.
    """
    if _triton.runs_on(grad) and grad.numel():
        _launch(grad, codes, scale_inv, adds)
    else:
        write_gradient_ref(grad, codes, scale_inv, adds=adds)


def write_gradient_ref(grad: Tensor, codes: Tensor, scale_inv: Tensor, *, adds: bool = False) -> None:
    """Reference: plain PyTorch, in slices of 2**18 elements."""
    flat, into = grad.reshape(-1), codes.view(-1)
    for start in range(0, flat.numel(), _SLICE):
        part, of = into[start : start + _SLICE], scale_inv[start // BLOCK :][: _SLICE // BLOCK]
        total = flat[start : start + _SLICE].float()
        if adds:
            total = decode_blocks(part, of, E4M3_BLOCK) + total
        made, scales = encode_blocks(total, E4M3_BLOCK)
        part.copy_(made)
        of.copy_(scales)


def _launch(grad: Tensor, codes: Tensor, scale_inv: Tensor, adds: bool) -> None:
    device = grad.device.index if grad.is_cuda else -1
    count = grad.numel()
    tensors = (grad, codes.view(torch.uint8), scale_inv)
    key = (grad.dtype, grad.device, count, adds, *map(alignment, tensors))
    with torch.cuda.device(grad.device) if grad.is_cuda else torch.no_grad():
        plan = _plans.get(key, partial(_plan, tensors, count, adds, grad.device))
        plan(stream_of(device), *map(address, tensors))


def _plan(tensors: tuple[Tensor, ...], count: int, adds: bool, device: torch.device) -> Launch:
    programs = -(-block_count(count) // _BLOCKS)
    arguments = (count, adds, _triton.has_fp8_conversion(device), _BLOCKS, BLOCK)
    return Launch(write_kernel, programs, tensors, arguments, _WARPS)


@jit
def write_kernel(  # type: ignore[no-untyped-def]
    grad_ptr, codes_ptr, scale_ptr, count,
    ADDS: tl.constexpr, HARDWARE: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCKS blocks a program, which hold all that their scales need."""
    count = hidden(count, BLOCKS)
    blocks = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    at = (blocks * BLOCK)[:, None] + tl.arange(0, BLOCK)[None, :]
    inside, block_inside = at < count, blocks * BLOCK < count
    total = as_fp32(tl.load(grad_ptr + at, mask=inside, other=0.0))
    if ADDS:
        before = decode_e4m3(tl.load(codes_ptr + at, mask=inside, other=0), HARDWARE)
        total = before * tl.load(scale_ptr + blocks, mask=block_inside, other=0.0)[:, None] + total
    amax_bits = tl.max(magnitude_bits(total), 1)
    is_finite = amax_bits < 0x7F800000
    amax = amax_bits.to(tl.float32, bitcast=True)
    amax = tl.where(is_finite & (amax > _FLOOR), amax, _FLOOR)
    most = tl.zeros_like(amax) + _MAX
    scale = tl.where(is_finite, tl.div_rn(most, amax), 1.0)
    codes = encode(total, scale[:, None], _MAX, False, HARDWARE)
    tl.store(codes_ptr + at, codes, mask=inside)
    tl.store(scale_ptr + blocks, tl.where(is_finite, tl.div_rn(amax, most), 1.0), mask=block_inside)
