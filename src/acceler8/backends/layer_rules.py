"""Which linear layers FP8 GEMMs can take, whoever runs them."""

from __future__ import annotations

import torch
from torch import nn

from acceler8.nn.class_change import plain_type
from acceler8.recipes import Recipe

_WEIGHT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def refuse_linear(module: nn.Module, recipe: Recipe) -> str | None:
    """Why a layer stays in high precision: its weight is no dense 16- or 32-bit matrix with dimensions that are
    multiples of 16, or the layer computes something else than ``nn.Linear``; None if FP8 GEMMs take it.
    """
    if hasattr(module, "parametrizations"):
        return "parametrised (its weight is computed, not stored)"
    weight = module._parameters.get("weight")
    if weight is None:
        return "its weight is computed, not stored" if hasattr(module, "weight") else "no weight"
    if not _is_dense(weight):
        return f"weight is a {type(weight).__name__} of layout {weight.layout}, not a dense tensor"
    if weight.ndim != 2:
        return f"weight has {weight.ndim} dimensions, not 2"
    if weight.dtype not in _WEIGHT_DTYPES:
        return f"weight is {str(weight.dtype).removeprefix('torch.')}, not bf16, fp16 or fp32"
    odd = [n for n in (weight.shape[1], weight.shape[0]) if n % 16]
    if odd and recipe.fp8_gemms:
        return f"{' and '.join(map(str, odd))} not a multiple of 16, which FP8 GEMM needs"
    if plain_type(module) is not nn.Linear:
        return f"{plain_type(module).__name__} is a subclass of nn.Linear: its own forward would be lost"
    if "forward" in module.__dict__:
        return "its forward was replaced on the instance (a library's hook, say), so FP8 would not run"
    return None


def _is_dense(weight: torch.Tensor) -> bool:
    """False for sparse weights and for tensor subclasses that quantisation libraries put in a weight's place.

    FSDP2's DTensor is sharded, not encoded; a FakeTensor stands for a plain one.
    """
    kind = type(weight)
    plain = kind in (nn.Parameter, torch.Tensor) or kind.__name__ in ("DTensor", "FakeTensor")
    return plain and weight.layout is torch.strided
