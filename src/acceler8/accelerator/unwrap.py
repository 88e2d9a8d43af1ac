"""The model behind what was put around it."""

from __future__ import annotations

import sys

from torch import nn
from torch.nn.parallel import DistributedDataParallel


def plain_model(model: nn.Module, *, keep_torch_compile: bool = False) -> nn.Module:
    """What stands behind DistributedDataParallel, whoever wrapped it, DeepSpeed's engine, and ``torch.compile`` unless
    it is kept.
    """
    engine = getattr(sys.modules.get("deepspeed"), "DeepSpeedEngine", DistributedDataParallel)
    while True:
        if isinstance(model, (DistributedDataParallel, engine)):
            model = model.module
        elif not keep_torch_compile and isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model
