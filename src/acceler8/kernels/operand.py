"""An FP8 operand: codes, and the scales that lead out of them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from acceler8.formats import decode
from acceler8.scaling import Granularity, multiply_groups


class Quantized(NamedTuple):
    """An FP8 operand: ``x ~ codes * scale_inv``.

    codes [R, C'] float8, contiguous, C' = C filled to the contraction multiple. scale_inv FP32, shape
    ``granularity.scale_shape(R, C)``.
    """

    codes: Tensor
    scale_inv: Tensor
    granularity: Granularity

    def dequantize(self, cols: int | None = None) -> Tensor:
        """FP32 [R, cols]; ``cols`` is the extent without filler (default: all)."""
        values = decode(self.codes)
        return multiply_groups(values, self.scale_inv, self.granularity, in_place=True)[:, :cols]
