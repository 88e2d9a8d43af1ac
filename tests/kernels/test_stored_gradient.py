"""The kernel that stores gradients in FP8 against its reference, and that against the format."""

from __future__ import annotations

import pytest
import torch

from acceler8.formats import E4M3_BLOCK, block_count, decode_blocks, encode_blocks
from acceler8.kernels._triton import INTERPRETED
from acceler8.kernels.stored_gradient import write_gradient, write_gradient_ref

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(1,), (127,), (3, 128), (5, 77), (17, 130), (0, 4)]


def empty(shape: tuple[int, ...], device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Memory full of NaN codes and of scales that are wrong."""
    count = torch.Size(shape).numel()
    codes = torch.full(shape, 0x7F, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    return codes, torch.full((block_count(count),), 7.0, device=device)


@pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="needs a CUDA GPU or TRITON_INTERPRET=1")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_kernel_gives_the_codes_of_the_reference(make_generator, shape, dtype):
    """First written, then added to, with a NaN, an infinity, zeros and tiny numbers among them."""
    generator = make_generator(0)
    got, expected = empty(shape, DEVICE), empty(shape)
    for step in range(2):
        grad = torch.randn(shape, generator=generator)
        flat = grad.view(-1)
        for place, value in ((5, float("nan")), (300, float("inf")), (600, 1e-39)):
            if step and flat.numel() > place:
                flat[place] = value
        flat[128:256] = 0.0
        grad = grad.to(dtype)
        write_gradient(grad.to(DEVICE), *got, adds=step > 0)
        write_gradient_ref(grad, *expected, adds=step > 0)
        assert torch.equal(got[0].cpu().view(torch.uint8), expected[0].view(torch.uint8))
        assert torch.equal(got[1].cpu(), expected[1])


def test_what_is_written_is_the_format_and_adding_rounds_the_sum(make_generator):
    """In more than one slice of the reference."""
    first, second = (torch.randn(2**11 + 1, 131, generator=make_generator(i)) for i in (1, 2))
    codes, scales = empty((2**11 + 1, 131))
    write_gradient(first, codes, scales)
    expected = encode_blocks(first, E4M3_BLOCK)
    assert torch.equal(codes.view(torch.uint8), expected[0].view(torch.uint8))
    assert torch.equal(scales, expected[1])
    write_gradient(second, codes, scales, adds=True)
    expected = encode_blocks(decode_blocks(*expected, E4M3_BLOCK) + second, E4M3_BLOCK)
    assert torch.equal(codes.view(torch.uint8), expected[0].view(torch.uint8))
    assert torch.equal(scales, expected[1])


def test_a_number_that_is_not_finite_stays_in_its_block():
    grad = torch.ones(3, 128)
    grad[1, 7], grad[1, 9] = float("inf"), float("nan")
    codes, scales = empty((3, 128))
    write_gradient(grad, codes, scales)
    value = decode_blocks(codes, scales, E4M3_BLOCK)
    assert value[1].isnan().nonzero().flatten().tolist() == [7, 9]
    assert torch.equal(value[[0, 2]], grad[[0, 2]])
