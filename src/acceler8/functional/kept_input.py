"""What a linear layer keeps of its input for wgrad, by the recipe's ``save_for_backward``.

    fp8             the codes that wgrad multiplies; or the input itself, cast in backward, where the operation that
                    made it keeps it anyway, as attention does, and this layer alone reads it
    fp8_compressed  behind a norm, what the norm keeps itself: its input in FP8, from which its result is made again and
                    cast; elsewhere the codes
    bf16            the input as it is, cast in backward

Each is a few tensors for ``save_for_backward`` and a way from them to the codes.

Source: Xi et al. 2024, arXiv:2410.19313 (COAT), for keeping the input of a norm in FP8 and recomputing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from acceler8.formats import E4M3
from acceler8.kernels import Quantized, dequantize, quantize
from acceler8.scaling import BLOCK_1x128, Granularity

if TYPE_CHECKING:
    from acceler8.functional.call import Call

Tensors = tuple[Tensor | None, ...]


class Kept(Protocol):
    """What stands for an input until backward."""

    def tensors(self) -> Tensors:
        """What autograd saves."""

    def codes(self, tensors: Tensors, call: Call) -> Quantized:
        """The codes for wgrad, from what autograd saved; holds no tensor by itself."""

    def without_tensors(self) -> Kept:
        """What may stay on the context: a tensor there would live until the graph does."""


class KeptCodes(NamedTuple):
    """The codes themselves."""

    quantized: Quantized | None
    granularity: Granularity

    def tensors(self) -> Tensors:
        """Codes and scales."""
        return (None, None) if self.quantized is None else (self.quantized.codes, self.quantized.scale_inv)

    def codes(self, tensors: Tensors, call: Call) -> Quantized:
        """As they were saved."""
        codes, scale_inv = tensors
        assert codes is not None
        assert scale_inv is not None
        return Quantized(codes, scale_inv, self.granularity)

    def without_tensors(self) -> KeptCodes:
        """Their granularity."""
        return KeptCodes(None, self.granularity)


class KeptInput(NamedTuple):
    """The input as it is."""

    x: Tensor | None

    def tensors(self) -> Tensors:
        """The input."""
        return (self.x,)

    def codes(self, tensors: Tensors, call: Call) -> Quantized:
        """Cast now, as forward would have."""
        (x,) = tensors
        assert x is not None
        return cast_for_wgrad(x if x.ndim == 2 else x.reshape(-1, x.shape[-1]), call)

    def without_tensors(self) -> KeptInput:
        """Nothing."""
        return KeptInput(None)


_RESULTS = ("_saved_result", "_saved_output", "_saved_out")
_VIEWS = ("ViewBackward", "UnsafeViewBackward", "ReshapeAliasBackward", "TransposeBackward", "PermuteBackward")
_MOST_VIEWS = 4


def is_kept_by_its_maker(x: Tensor) -> bool:
    """True if the operation that made ``x``, or of which it is a view, saved that very memory for its own backward.

    False where this cannot be told cheaply: in compiled code, and under hooks that pack what is saved.
    """
    if (
        torch.compiler.is_compiling()
        or type(x) is not Tensor
        or torch._C._autograd._top_saved_tensors_default_hooks(True)
    ):
        return False
    node = x.grad_fn
    for _ in range(_MOST_VIEWS):
        if node is None:
            return False
        for name in _RESULTS:
            if hasattr(node, name):
                result = getattr(node, name)
                return isinstance(result, Tensor) and result.data_ptr() == x.data_ptr() and result.numel() == x.numel()
        if not node.name().startswith(_VIEWS):
            return False
        node = node.next_functions[0][0]
    return False


def cast_for_wgrad(x: Tensor, call: Call, column_amax: Tensor | None = None) -> Quantized:
    """Codes of ``x`` [M, K] as wgrad reads them; without a trace if forward cast ``x`` too."""
    if call.recipe.fprop.a.is_fp8:
        call = call.again()
    wgrad = call.recipe.wgrad.b
    _, made = call.quantize("x", x, None, wgrad.format, wgrad.granularity, column_amax)
    assert made is not None
    return made


def saves_bytes(cols: int, dtype: torch.dtype) -> bool:
    """True if ``compress`` makes a tensor of so many columns smaller: codes are filled up to whole blocks."""
    filled = BLOCK_1x128.contraction_multiple * (BLOCK_1x128.scale_shape(1, cols)[1])
    return filled + 4 * filled // BLOCK_1x128.cols < cols * dtype.itemsize


def compress(x: Tensor) -> Quantized:
    """``x`` [R, C] in E4M3 with a scale for 128 elements of a row: one byte an element and 1/32 more."""
    made, _, _ = quantize(x, E4M3, None, BLOCK_1x128)
    assert made is not None
    return made


def expand(codes: Tensor, scale_inv: Tensor, cols: int, dtype: torch.dtype) -> Tensor:
    """What ``compress`` made, back in ``dtype`` [R, cols]."""
    return dequantize(Quantized(codes, scale_inv, BLOCK_1x128), cols, dtype)
