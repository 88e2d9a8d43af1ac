"""The model behind what was put around it."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel


def plain_model(model: nn.Module, *, keep_torch_compile: bool = False) -> nn.Module:
    """What stands behind DistributedDataParallel, whoever wrapped it, and ``torch.compile`` unless it is kept."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif not keep_torch_compile and isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model
