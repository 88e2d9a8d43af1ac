"""What a cast did to a tensor: how much saturated, underflowed, was not finite, and the error it left.

Every quantising operation can return this beside its codes, at the cost of a few reductions in registers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

PACKED = (
    "amax",
    "saturated",
    "underflowed",
    "nonfinite",
    "squared_error",
    "squared_sum",
)  # FP64, in this order


@dataclass(frozen=True)
class CastStatistics:
    """Counts over the ``elements`` of one cast; ``amax`` in the units of the tensor, errors in its units
    squared.

    saturated: magnitude that clamping, not rounding, brought to the format's maximum. underflowed: not zero
    before, zero after. nonfinite: NaN or inf, left out of the error.
    """

    elements: int
    amax: float
    saturated: int
    underflowed: int
    nonfinite: int
    squared_error: float
    squared_sum: float

    @property
    def sqnr_db(self) -> float:
        """Signal to quantisation noise, dB; inf if the cast was exact, nan if there was no signal."""
        if self.squared_error == 0.0:
            return math.inf if self.squared_sum > 0.0 else math.nan
        return 10.0 * math.log10(self.squared_sum / self.squared_error) if self.squared_sum > 0.0 else -math.inf

    def __add__(self, other: CastStatistics) -> CastStatistics:
        """Statistics of both casts together (for SQNR: energy-weighted)."""
        amax = math.nan if math.isnan(self.amax + other.amax) else max(self.amax, other.amax)
        return CastStatistics(
            self.elements + other.elements,
            amax,
            self.saturated + other.saturated,
            self.underflowed + other.underflowed,
            self.nonfinite + other.nonfinite,
            self.squared_error + other.squared_error,
            self.squared_sum + other.squared_sum,
        )


def read_statistics(packed: Tensor, elements: int) -> CastStatistics:
    """Bring the packed statistics of one cast (FP64 [6], in the order of ``PACKED``) to the host.
    Synchronises.
    """
    amax, saturated, underflowed, nonfinite, error, total = packed.tolist()
    return CastStatistics(elements, amax, int(saturated), int(underflowed), int(nonfinite), error, total)


def pack_ref(x: Tensor, y: Tensor, code_values: Tensor, scale_inv: Tensor, saturates_above: float) -> Tensor:
    """Packed statistics in plain PyTorch.

    ``x`` the FP32 input, ``y = x * scale`` before clamping, ``code_values`` the decoded codes, ``scale_inv``
    broadcastable to ``x``. Returns FP64 [6]. The error is taken in FP32, summed in FP64.
    """
    magnitude = x.abs()
    finite = magnitude < math.inf
    saturated = (finite & (y.abs() > saturates_above)).sum()
    underflowed = (finite & (x != 0) & (code_values == 0)).sum()
    error = torch.where(finite, x - code_values * scale_inv, 0.0).double().square_().sum()
    total = torch.where(finite, x, 0.0).double().square_().sum()
    amax = magnitude.amax() if x.numel() else magnitude.sum()
    nonfinite = x.numel() - finite.sum()
    return torch.stack([n.double() for n in (amax, saturated, underflowed, nonfinite, error, total)])
