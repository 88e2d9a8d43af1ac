"""Codes of an activation that ride along with it, from the operation that made it to the layers that multiply it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from acceler8.functional.kept_input import Kept
from acceler8.kernels import Quantized


class InputCodes(NamedTuple):
    """What a linear layer need not find out about its input x [M, K] again.

    rows: codes of x as it lies, bit for bit those of ``quantize``; None: the layer casts x itself. column_amax [K]
    int32: bits of the FP32 amax of each column of x, which row scales of its transposed cast need; None: not known.
    source: what is kept of the operation that made x, and makes x again; None: nothing.
    """

    rows: Quantized | None
    column_amax: Tensor | None
    source: Kept | None = None
