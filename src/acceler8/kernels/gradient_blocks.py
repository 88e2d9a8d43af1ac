"""Gradients on the wire: blocks of a flat buffer as FP8 codes in a message, the sum of several, and back.

    pack      message[p] = codes and scales of the blocks that process p will sum, and its plain elements as they are
    combine   sum over senders of decode(codes) * scale_inv, in FP32 and in the senders' order, times a factor
    unpack    decode(codes) * scale_inv into the buffer, in its dtype

A value is rounded once on its way to the sum and once more behind it, however many processes there are; a sum that is
itself FP8 (a ring of FP8 additions) is rounded once a hop. A block never crosses from one parameter to the next: of two
whose gradients differ by orders of magnitude the smaller would be left with subnormal codes.

A message is ``[codes of its blocks][scale_inv, FP32][plain elements, FP32]``, bytes. Block codes are those of
``formats.encode_blocks`` (E4M3, continuous FP32 scale, amax floor 2**-100).
Source: quantise once, exchange bytes, sum in FP32: FP8-LM (arXiv 2310.18313) has the opposite, an FP8 ring; ZeRO++
(arXiv 2306.10209) the all-to-all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from acceler8.formats import BLOCK, BLOCK_AMAX_FLOOR, E4M3, E4M3_BLOCK, decode_blocks, encode_blocks
from acceler8.kernels import _triton
from acceler8.kernels._launch import Launch, Plans, address, alignment, stream_of
from acceler8.kernels._triton import (
    as_fp32,
    constexpr,
    decode_e4m3,
    encode,
    hidden,
    jit,
    magnitude_bits,
    rounded_to,
    tl,
)

_WARPS, _BLOCKS = 4, 16  # blocks of 128 a program
_FLOOR, _MAX = constexpr(BLOCK_AMAX_FLOOR), constexpr(E4M3.max)


@dataclass(frozen=True)
class MessageShape:
    """Sizes of one message: blocks of 128 codes, then a scale for each, then plain FP32 elements."""

    blocks: int
    plain: int

    @property
    def size(self) -> int:
        """Bytes, a multiple of 16."""
        used = self.blocks * (BLOCK + 4) + 4 * self.plain
        return used + -used % 16

    def codes(self, messages: Tensor) -> Tensor:
        """Of messages ``[..., size]``: the codes, ``[..., blocks, 128]``."""
        return messages[..., : self.blocks * BLOCK].view(*messages.shape[:-1], self.blocks, BLOCK)

    def scale_inv(self, messages: Tensor) -> Tensor:
        """``[..., blocks]`` FP32."""
        start = self.blocks * BLOCK
        return messages[..., start : start + 4 * self.blocks].view(torch.float32)

    def plain_of(self, messages: Tensor) -> Tensor:
        """``[..., plain]`` FP32."""
        start = self.blocks * (BLOCK + 4)
        return messages[..., start : start + 4 * self.plain].view(torch.float32)


@jit
def _block_scale(amax_bits):  # type: ignore[no-untyped-def]
    """``(scale, scale_inv)`` of blocks, as ``encode_blocks`` has them."""
    is_finite = amax_bits < 0x7F800000
    amax = amax_bits.to(tl.float32, bitcast=True)
    one = tl.zeros_like(amax) + 1.0
    amax = tl.where(amax > _FLOOR, amax, _FLOOR)
    amax = tl.where(is_finite, amax, 1.0)
    scale = tl.where(is_finite, tl.div_rn(one * _MAX, amax), 1.0)
    return scale, tl.where(is_finite, tl.div_rn(amax, one * _MAX), 1.0)


@jit
def _place(message_ptr, number, per_message, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where block ``number`` has its codes, as a pointer to the first, and its scale."""
    message, block = (number // per_message).to(tl.int64), number % per_message
    codes = message_ptr + message * size + block * BLOCK
    words = message_ptr.to(tl.pointer_type(tl.float32), bitcast=True)
    return codes, words + (message * size + per_message * BLOCK) // 4 + block


@jit
def pack_kernel(  # type: ignore[no-untyped-def]
    flat_ptr, starts_ptr, counts_ptr, message_ptr, residual_ptr, total, per_message, size,
    RESIDUAL: tl.constexpr, HARDWARE: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Some blocks a program."""
    total = hidden(total, BLOCKS)
    number, lane = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS), tl.arange(0, BLOCK)
    inside = number < total
    count = tl.load(counts_ptr + number, mask=inside, other=0)
    at = tl.load(starts_ptr + number, mask=inside, other=0)[:, None] + lane[None, :]
    is_element = lane[None, :] < count[:, None]
    x = as_fp32(tl.load(flat_ptr + at, mask=is_element, other=0.0))
    if RESIDUAL:
        x += as_fp32(tl.load(residual_ptr + at, mask=is_element, other=0.0))
    amax_bits = tl.max(magnitude_bits(x), axis=1)
    scale, scale_inv = _block_scale(amax_bits)
    codes = encode(x, scale[:, None], _MAX, False, HARDWARE)
    if RESIDUAL:
        left = x - decode_e4m3(codes, HARDWARE) * scale_inv[:, None]
        left = tl.where((amax_bits < 0x7F800000)[:, None], left, 0.0)
        tl.store(residual_ptr + at, rounded_to(left, residual_ptr.dtype.element_ty), mask=is_element)
    codes_at, scale_at = _place(message_ptr, number, per_message, size, BLOCK)
    tl.store(codes_at[:, None] + lane[None, :], codes, mask=inside[:, None])
    tl.store(scale_at, scale_inv, mask=inside)


@jit
def combine_kernel(  # type: ignore[no-untyped-def]
    message_ptr, starts_ptr, counts_ptr, out_ptr, factor_ptr, senders, blocks, size,
    ENCODES: tl.constexpr, HARDWARE: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Some blocks of the sum a program; ``ENCODES``: as a message of their own, else into a flat buffer."""
    blocks = hidden(blocks, BLOCKS)
    number, lane = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS), tl.arange(0, BLOCK)
    inside = number < blocks
    total = tl.zeros((BLOCKS, BLOCK), dtype=tl.float32)
    for sender in range(0, senders):
        codes_at, scale_at = _place(message_ptr, number + sender * blocks, blocks, size, BLOCK)
        codes = tl.load(codes_at[:, None] + lane[None, :], mask=inside[:, None], other=0)
        total += decode_e4m3(codes, HARDWARE) * tl.load(scale_at, mask=inside, other=0.0)[:, None]
    total = total * tl.load(factor_ptr)
    if ENCODES:
        scale, scale_inv = _block_scale(tl.max(magnitude_bits(total), axis=1))
        codes_at, scale_at = _place(out_ptr, number, blocks, size, BLOCK)
        encoded = encode(total, scale[:, None], _MAX, False, HARDWARE)
        tl.store(codes_at[:, None] + lane[None, :], encoded, mask=inside[:, None])
        tl.store(scale_at, scale_inv, mask=inside)
    else:
        count = tl.load(counts_ptr + number, mask=inside, other=0)
        at = tl.load(starts_ptr + number, mask=inside, other=0)[:, None] + lane[None, :]
        is_element = lane[None, :] < count[:, None]
        tl.store(out_ptr + at, rounded_to(total, out_ptr.dtype.element_ty), mask=is_element)


@jit
def unpack_kernel(  # type: ignore[no-untyped-def]
    message_ptr, starts_ptr, counts_ptr, out_ptr, total, per_message, size,
    HARDWARE: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Some blocks a program, from any message to its place in the buffer."""
    total = hidden(total, BLOCKS)
    number, lane = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS), tl.arange(0, BLOCK)
    inside = number < total
    codes_at, scale_at = _place(message_ptr, number, per_message, size, BLOCK)
    codes = tl.load(codes_at[:, None] + lane[None, :], mask=inside[:, None], other=0)
    x = decode_e4m3(codes, HARDWARE) * tl.load(scale_at, mask=inside, other=0.0)[:, None]
    count = tl.load(counts_ptr + number, mask=inside, other=0)
    at = tl.load(starts_ptr + number, mask=inside, other=0)[:, None] + lane[None, :]
    is_element = lane[None, :] < count[:, None]
    tl.store(out_ptr + at, rounded_to(x, out_ptr.dtype.element_ty), mask=is_element)


_plans: Plans[Launch] = Plans()


def _launch(kernel: object, tensors: tuple[Tensor, ...], blocks: int, arguments: tuple[object, ...]) -> None:
    """Launch ``kernel`` on ``tensors``, which stand in front of its other arguments."""
    device = tensors[0].get_device()
    if device >= 0 and device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return _launch(kernel, tensors, blocks, arguments)
    has_fp8 = _triton.has_fp8_conversion(tensors[0].device)
    key = (id(kernel), device, blocks, arguments, tuple((t.dtype, alignment(t)) for t in tensors))
    launch = _plans.get(
        key,
        lambda: Launch(kernel, -(-blocks // _BLOCKS), tensors, (*arguments, has_fp8, _BLOCKS, BLOCK), _WARPS),
    )
    launch(stream_of(device), *map(address, tensors))


def _gather(flat: Tensor, starts: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """``(places, is_element)`` of each block's elements, ``[blocks, 128]``; the first place stands for absent ones."""
    lane = torch.arange(BLOCK, device=flat.device)
    is_element = lane < counts[:, None]
    return torch.where(is_element, starts[:, None] + lane, 0), is_element


def pack_ref(
    flat: Tensor, starts: Tensor, counts: Tensor, messages: Tensor, shape: MessageShape, residual: Tensor | None = None
) -> None:
    """Reference in plain PyTorch."""
    places, is_element = _gather(flat, starts, counts)
    x = torch.where(is_element, flat[places].float(), 0.0)
    if residual is not None:
        x = x + torch.where(is_element, residual[places].float(), 0.0)
    codes, scale_inv = encode_blocks(x, E4M3_BLOCK)
    if residual is not None:
        left = x - decode_blocks(codes, scale_inv, E4M3_BLOCK)
        left = torch.where(x.isfinite().all(1, keepdim=True), left, 0.0)
        residual[places[is_element]] = left[is_element].to(residual.dtype)
    per = shape.blocks
    shape.codes(messages).copy_(codes.view(torch.uint8).view(-1, per, BLOCK))
    shape.scale_inv(messages).copy_(scale_inv.view(-1, per))


def pack(
    flat: Tensor, starts: Tensor, counts: Tensor, messages: Tensor, shape: MessageShape, residual: Tensor | None = None
) -> None:
    """Write the codes and scales of blocks of ``flat`` into ``messages``; plain elements are left to the caller.

    Shape: flat [N] bf16, fp16 or fp32; starts int64 and counts int32 [messages * shape.blocks], the first element of
        each block and how many of 128 it has; messages [M, shape.size] uint8. residual [N]: what earlier casts left
        over is added, and what this one leaves stays there (error feedback); a block that is not finite leaves none.
    Numerics: codes of ``formats.encode_blocks`` for each block, filled up with zeros. Deterministic.
    """
    total = starts.numel()
    if not total:
        return
    if not _triton.runs_on(flat):
        return pack_ref(flat, starts, counts, messages, shape, residual)
    tensors = (flat, starts, counts, messages, flat if residual is None else residual)
    _launch(pack_kernel, tensors, total, (total, shape.blocks, shape.size, residual is not None))


def sum_ref(messages: Tensor, shape: MessageShape, factor: float) -> Tensor:
    """Reference in plain PyTorch of the FP32 sum of all senders' blocks, ``[shape.blocks, 128]``, times ``factor``."""
    total = messages.new_zeros(shape.blocks, BLOCK, dtype=torch.float32)
    codes, scale_inv = shape.codes(messages).view(torch.float8_e4m3fn), shape.scale_inv(messages)
    for sender in range(messages.shape[0]):
        total = total + decode_blocks(codes[sender].contiguous(), scale_inv[sender].contiguous(), E4M3_BLOCK)
    return total * torch.tensor(factor, dtype=torch.float32, device=total.device)


def combine(messages: Tensor, shape: MessageShape, factor: Tensor, out: Tensor) -> None:
    """Sum the senders' blocks in FP32, one after another, times ``factor``, and encode the sums into ``out``.

    Shape: messages [senders, shape.size] uint8, factor FP32 with one element, out [shape.size] uint8; its plain
        elements are left to the caller.
    """
    if not shape.blocks:
        return
    if _triton.runs_on(messages):
        arguments = (messages.shape[0], shape.blocks, shape.size, True)
        _launch(combine_kernel, (messages, messages, messages, out, factor), shape.blocks, arguments)
        return
    codes, scale_inv = encode_blocks(sum_ref(messages, shape, float(factor)), E4M3_BLOCK)
    shape.codes(out).copy_(codes.view(torch.uint8))
    shape.scale_inv(out).copy_(scale_inv)


def combine_into(
    messages: Tensor, shape: MessageShape, factor: Tensor, starts: Tensor, counts: Tensor, out: Tensor
) -> None:
    """The same sums, FP32, rounded to the dtype of ``out`` at their places there.

    Shape: starts int64 and counts int32 [shape.blocks]; out [N] bf16, fp16 or fp32.
    """
    if not shape.blocks:
        return
    if _triton.runs_on(messages):
        arguments = (messages.shape[0], shape.blocks, shape.size, False)
        _launch(combine_kernel, (messages, starts, counts, out, factor), shape.blocks, arguments)
        return
    places, is_element = _gather(out, starts, counts)
    out[places[is_element]] = sum_ref(messages, shape, float(factor))[is_element].to(out.dtype)


def unpack(messages: Tensor, shape: MessageShape, starts: Tensor, counts: Tensor, out: Tensor) -> None:
    """Blocks of all ``messages`` back to their places in ``out``, rounded to its dtype.

    Shape: messages [M, shape.size] uint8; starts int64, counts int32 [M * shape.blocks]; out [N].
    """
    total = starts.numel()
    if not total:
        return
    if _triton.runs_on(messages):
        _launch(unpack_kernel, (messages, starts, counts, out), total, (total, shape.blocks, shape.size))
        return
    codes, scale_inv = shape.codes(messages).contiguous().view(torch.float8_e4m3fn), shape.scale_inv(messages)
    x = decode_blocks(codes.view(-1, BLOCK), scale_inv.reshape(-1), E4M3_BLOCK)
    places, is_element = _gather(out, starts, counts)
    out[places[is_element]] = x[is_element].to(out.dtype)
