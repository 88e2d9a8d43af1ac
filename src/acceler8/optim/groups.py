"""Parameter groups of a model that tell its embeddings and output heads from its other matrices."""

from __future__ import annotations

from typing import Any

from torch import nn

from acceler8.conversion.filters import output_heads
from acceler8.nn import check_is_module


def parameter_groups(model: nn.Module, **options: Any) -> list[dict[str, Any]]:
    """Two groups with names: all parameters, and embeddings and output heads, which keep FP32 state.

    ``options`` (``lr``, ``weight_decay``, ...) go into both; ``quantize`` into neither: it is "matrices" in the first,
    which keeps vectors in FP32, and "none" in the second. Heads are found as plans find them
    (``get_output_embeddings``, names, the vocabulary's width), embeddings by their class, and what is tied to either
    counts as it. Parameters that do not require gradients are left out, and so is a group that would be empty.
    Raises: PlanError for what is no module, such as ``model.parameters()``.
    """
    check_is_module(model)
    heads = output_heads(model)
    kept = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) or (id(module) in heads and hasattr(module, "weight"))
    }
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = (
        {"params": [(n, p) for n, p in named if id(p) not in kept], "quantize": "matrices", **options},
        {"params": [(n, p) for n, p in named if id(p) in kept], **options, "quantize": "none"},
    )
    return [group for group in groups if group["params"]]
