"""From amax to scale.

``scale = fmt.max / amax`` maps the largest element of a group onto the largest number of the format;
``scale_inv`` is its reciprocal, which GEMMs multiply back in. Rules at the edges:

- amax has a floor of 1e-12, so an all-zero group gives zeros and not 0 * inf;
- a group whose amax is NaN or inf gets scale 1: its bad elements become NaN codes, in sight. The group is lost for this
  step (values far from 1 saturate or vanish beside the NaN), its neighbours are not, and no history remembers it;
- divisions are correctly rounded FP32 on every device. ``number / tensor`` is not: torch turns it into
  ``reciprocal * number``, which rounds twice.

Source: Micikevicius et al. 2022, arXiv:2209.05433, section 3; OCP MX 1.0 for E8M0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from acceler8.formats import Format, decode_e8m0, encode_e8m0

AMAX_FLOOR = 1e-12
# A scale outside these has no normal, finite reciprocal. Only a large margin beside an extreme amax gets
# there, and then loses some of its headroom, not everything. Each is the other's reciprocal.
SCALE_MIN, SCALE_MAX = 2.0**-126, 2.0**126
_EXPONENT_MASK = -0x800000  # 0xFF800000 as int32: sign and exponent, no mantissa


def compute_scale(amax: Tensor, fmt: Format, *, pow2: bool = False, margin: int = 0) -> tuple[Tensor, Tensor]:
    """``(scale, scale_inv)`` for groups with these ``amax``.

    Shape: any FP32 -> two tensors of the same shape, FP32, dimensionless.
    ``pow2`` rounds the scale down to a power of two, which makes ``x * scale`` exact. ``margin`` leaves that
    many powers of two of headroom: ``scale = fmt.max * 2**-margin / amax``.
    Numerics: both are finite and positive, whatever ``amax`` is; the rules for its edges are above.
    """
    floor = amax.clamp(min=AMAX_FLOOR)
    scale = torch.full_like(floor, fmt.max * 2.0**-margin).div_(floor).clamp_(SCALE_MIN, SCALE_MAX)
    if pow2:
        scale = (scale.view(torch.int32) & _EXPONENT_MASK).view(torch.float32)
    scale = torch.where(amax.isfinite(), scale, 1.0)
    return scale, torch.ones_like(scale).div_(scale)


def compute_scale_e8m0(amax: Tensor, fmt: Format, *, margin: int = 0) -> tuple[Tensor, Tensor]:
    """``(scale, scale_inv)`` with ``scale_inv`` the power of two at or above ``amax / fmt.max``.

    Shape: any FP32 -> two FP32 tensors of the same shape. Rounded up, so that nothing saturates. A group with
        non-finite amax gets scale 1, as elsewhere.
    ``margin`` leaves that many powers of two of headroom, as in ``compute_scale``.
    """
    floor = amax.clamp(min=AMAX_FLOOR)
    ratio = floor.div_(torch.full_like(floor, fmt.max * 2.0**-margin)).clamp_(SCALE_MIN, SCALE_MAX)
    scale_inv = torch.where(amax.isfinite(), decode_e8m0(encode_e8m0(ratio)), 1.0)
    return torch.ones_like(scale_inv).div_(scale_inv), scale_inv
