from __future__ import annotations
import torch
from acceler8.kernels.quantize import quantize


def quantize_concatenated(weights, rows, cols, granularity, *, pow2=False, margin=0, amax=None, staging=None):
    a, b, _ = quantize(
        torch.cat([w.detach() for w in weights]),
        rows,
        cols,
        granularity,
        pow2=pow2,
        margin=margin,
        amax=amax,
        staging=staging,
    )
    return a, b
