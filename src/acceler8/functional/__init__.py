"""Operations with gradients, over kernels."""

from __future__ import annotations

from acceler8.functional.add_norm import add_norm
from acceler8.functional.head_loss import head_loss
from acceler8.functional.input_codes import InputCodes
from acceler8.functional.linear import LinearSlots, linear
from acceler8.functional.norm import norm
from acceler8.functional.shared_input import hand_on
from acceler8.functional.weight_codes import WeightCodes

__all__ = ["InputCodes", "LinearSlots", "WeightCodes", "add_norm", "hand_on", "head_loss", "linear", "norm"]
