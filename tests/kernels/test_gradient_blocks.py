"""Blocks of gradients in messages: kernels against the reference, bit for bit.

The same tests run the reference on a CPU, the kernels on a GPU and, started by ``test_interpreter.py`` under
``TRITON_INTERPRET=1``, in Triton's interpreter.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from acceler8.formats import E4M3_BLOCK, encode_blocks
from acceler8.kernels import gradient_blocks as blocks

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.requires(sm=80))]
on_each_device = pytest.mark.parametrize("device", DEVICES)
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]
# (elements, elements of each block): one block, one short, many with gaps and absent ones
CASES = [(128, [128]), (40, [40]), (4000, [128, 128, 5, 0, 77, 128, 1, 128, 128, 128, 128, 64, 128, 0, 128, 3, 128, 9])]


def case(elements: int, counts: list[int], dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    flat = torch.randn(elements, generator=generator) * 10.0 ** torch.randint(-9, 9, (elements,), generator=generator)
    flat = flat.to(dtype)
    starts, at = [], 0
    for count in counts:
        starts.append(at)
        at += count + 2
    return flat, torch.tensor(starts), torch.tensor(counts, dtype=torch.int32)


def messages_of(shape: blocks.MessageShape, count: int, device: str) -> Tensor:
    return torch.full((count, shape.size), 0xEE, dtype=torch.uint8, device=device)


@on_each_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("residual", [None, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("number", range(len(CASES)))
def test_pack(number, residual, dtype, device):
    elements, counts = CASES[number]
    flat, starts, per = case(elements, counts, dtype)
    several = 2 if len(counts) % 2 == 0 else 1
    shape = blocks.MessageShape(len(counts) // several, 3)
    left = None if residual is None else (torch.randn(elements) * 1e-3).to(residual)
    expected, expected_left = messages_of(shape, several, "cpu"), None if left is None else left.clone()
    blocks.pack_ref(flat, starts, per, expected, shape, expected_left)
    got, got_left = messages_of(shape, several, device), None if left is None else left.clone().to(device)
    blocks.pack(flat.to(device), starts.to(device), per.to(device), got, shape, got_left)
    assert torch.equal(got.cpu(), expected)
    if got_left is not None:
        assert torch.equal(got_left.cpu().view(torch.uint8), expected_left.view(torch.uint8))
    for i, (start, count) in enumerate(zip(starts.tolist(), counts, strict=True)):
        x = torch.zeros(128)
        x[:count] = flat[start : start + count].float()
        if left is not None:
            x[:count] += left[start : start + count].float()
        codes, scale_inv = encode_blocks(x, E4M3_BLOCK)
        message, block = expected[i // shape.blocks], i % shape.blocks
        assert torch.equal(shape.codes(message)[block], codes.view(torch.uint8))
        assert shape.scale_inv(message)[block] == scale_inv[0]
    assert (shape.plain_of(got.cpu()).view(torch.uint8) == 0xEE).all()  # the caller's


@on_each_device
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_in_its_block(bad, device):
    flat = torch.randn(300)
    flat[130] = bad
    starts, counts = torch.tensor([0, 128, 256]), torch.tensor([128, 128, 44], dtype=torch.int32)
    shape = blocks.MessageShape(3, 0)
    messages = messages_of(shape, 1, device)
    blocks.pack(flat.to(device), starts.to(device), counts.to(device), messages, shape)
    out = torch.zeros(300, device=device)
    blocks.unpack(messages, shape, starts.to(device), counts.to(device), out)
    assert out[130].isnan()
    assert torch.cat([out[:128], out[256:]]).isfinite().all()


@on_each_device
@pytest.mark.parametrize("senders", [1, 2, 7])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums(dtype, senders, device):
    counts = CASES[2][1]
    flat, starts, per = case(4000, counts, torch.float32)
    shape = blocks.MessageShape(len(counts), 2)
    messages = torch.cat([messages_of(shape, 1, "cpu") for _ in range(senders)])
    for sender in range(senders):
        own = flat.roll(sender) * (sender + 1)
        blocks.pack_ref(own, starts, per, messages[sender : sender + 1], shape)
    factor = torch.tensor([1 / 3])
    total = blocks.sum_ref(messages, shape, float(factor))
    there = messages.to(device)
    message = messages_of(shape, 1, device)[0]
    blocks.combine(there, shape, factor.to(device), message)
    codes, scale_inv = encode_blocks(total, E4M3_BLOCK)
    assert torch.equal(shape.codes(message.cpu()), codes.view(torch.uint8))
    assert torch.equal(shape.scale_inv(message.cpu()), scale_inv)
    out = torch.full((4000,), -7.0, dtype=dtype, device=device)
    blocks.combine_into(there, shape, factor.to(device), starts.to(device), per.to(device), out)
    expected = torch.full((4000,), -7.0, dtype=dtype)
    for row, start, count in zip(total, starts.tolist(), counts, strict=True):
        expected[start : start + count] = row[:count].to(dtype)
    assert torch.equal(out.cpu(), expected)


@on_each_device
def test_the_sum_is_float64s_within_its_bound(device):
    """Codes are exact numbers: what rounds is FP32 addition, (senders - 1) times, and the factor."""
    senders, shape = 16, blocks.MessageShape(8, 0)
    flat = [torch.randn(1024, generator=torch.Generator().manual_seed(i)) for i in range(senders)]
    starts, counts = torch.arange(8) * 128, torch.full((8,), 128, dtype=torch.int32)
    messages = torch.cat([messages_of(shape, 1, "cpu") for _ in flat])
    values = torch.zeros(senders, 1024)
    for i, own in enumerate(flat):
        blocks.pack_ref(own, starts, counts, messages[i : i + 1], shape)
        blocks.unpack(messages[i : i + 1], shape, starts, counts, values[i])
    out = torch.zeros(1024, device=device)
    factor = torch.tensor([1.0], device=device)
    blocks.combine_into(messages.to(device), shape, factor, starts.to(device), counts.to(device), out)
    bound = senders * 2**-24 * values.double().abs().sum(0)
    assert ((out.cpu().double() - values.double().sum(0)).abs() <= bound).all()


@on_each_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_unpack_puts_each_block_in_its_place(dtype, device):
    counts = CASES[2][1]
    flat, starts, per = case(4000, counts, torch.float32)
    shape = blocks.MessageShape(len(counts) // 2, 1)
    messages = messages_of(shape, 2, "cpu")
    blocks.pack_ref(flat.clamp(-1e4, 1e4), starts, per, messages, shape)
    out = torch.full((4000,), -7.0, dtype=dtype, device=device)
    blocks.unpack(messages.to(device), shape, starts.to(device), per.to(device), out)
    expected = torch.full((4000,), -7.0, dtype=dtype)
    codes = shape.codes(messages).reshape(-1, 128).view(torch.float8_e4m3fn).float()
    values = codes * shape.scale_inv(messages).reshape(-1, 1)
    for row, start, count in zip(values, starts.tolist(), counts, strict=True):
        expected[start : start + count] = row[:count].to(dtype)
    assert torch.equal(out.cpu(), expected)


@on_each_device
def test_no_blocks_are_fine(device):
    shape, nothing = blocks.MessageShape(0, 5), torch.zeros(0, dtype=torch.int64, device=device)
    flat, messages = torch.ones(5, device=device), messages_of(shape, 2, device)
    blocks.pack(flat, nothing, nothing.int(), messages, shape)
    blocks.combine(messages, shape, torch.ones(1, device=device), messages[0])
    blocks.combine_into(messages, shape, torch.ones(1, device=device), nothing, nothing.int(), flat)
    blocks.unpack(messages, shape, nothing, nothing.int(), flat)
    assert (messages == 0xEE).all()
    assert (flat == 1).all()
