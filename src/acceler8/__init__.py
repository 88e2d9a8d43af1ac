"""acceler8: FP8 training for PyTorch, behind one switch, with proof.

Names are loaded on first use, so ``import acceler8`` is quick, imports no vendor package and touches no GPU.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_EXPORTS: dict[str, str] = {
    "Accelerator": "acceler8.accelerator",
    "AutocastKwargs": "acceler8.utils",
    "DataLoaderConfiguration": "acceler8.utils",
    "DeepSpeedPlugin": "acceler8.utils",
    "DistributedDataParallelKwargs": "acceler8.utils",
    "DistributedType": "acceler8.utils",
    "FullyShardedDataParallelPlugin": "acceler8.utils",
    "GradScalerKwargs": "acceler8.utils",
    "GradientAccumulationPlugin": "acceler8.utils",
    "GraphedStep": "acceler8.conversion",
    "InitProcessGroupKwargs": "acceler8.utils",
    "NativeRecipeKwargs": "acceler8.utils",
    "Plan": "acceler8.conversion",
    "ProfileKwargs": "acceler8.utils",
    "Recipe": "acceler8.recipes",
    "StepClock": "acceler8.scaling",
    "attach": "acceler8.conversion",
    "convert": "acceler8.conversion",
    "evaluate_in_fp8": "acceler8.conversion",
    "fp8_state_dict": "acceler8.nn",
    "fused_head_loss": "acceler8.conversion",
    "head_loss": "acceler8.functional",
    "levels": "acceler8.levels",
    "load_fp8_state_dict": "acceler8.nn",
    "optim": "acceler8.optim",
    "plan": "acceler8.conversion",
    "record_statistics": "acceler8.health",
    "restore": "acceler8.conversion",
    "selftest": "acceler8.health",
    "step": "acceler8.conversion",
    "verify": "acceler8.conversion",
    "window": "acceler8.conversion",
}

# Offered as they are: `acceler8.optim.AdamW` beside `torch.optim.AdamW`.
_SUBMODULES = frozenset({"levels", "optim"})

if TYPE_CHECKING:
    from acceler8 import levels, optim
    from acceler8.accelerator import Accelerator
    from acceler8.conversion.convert import attach, convert, evaluate_in_fp8, restore, step, window
    from acceler8.conversion.graphed_step import GraphedStep
    from acceler8.conversion.head_loss import fused_head_loss
    from acceler8.conversion.plan import Plan, plan
    from acceler8.conversion.verify import verify
    from acceler8.functional.head_loss import head_loss
    from acceler8.health import record_statistics
    from acceler8.health.selftest import selftest
    from acceler8.nn import fp8_state_dict, load_fp8_state_dict
    from acceler8.recipes import Recipe
    from acceler8.scaling import StepClock
    from acceler8.utils import (
        AutocastKwargs,
        DataLoaderConfiguration,
        DeepSpeedPlugin,
        DistributedDataParallelKwargs,
        DistributedType,
        FullyShardedDataParallelPlugin,
        GradientAccumulationPlugin,
        GradScalerKwargs,
        InitProcessGroupKwargs,
        NativeRecipeKwargs,
        ProfileKwargs,
    )

__all__ = [
    "Accelerator",
    "AutocastKwargs",
    "DataLoaderConfiguration",
    "DeepSpeedPlugin",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "FullyShardedDataParallelPlugin",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "GraphedStep",
    "InitProcessGroupKwargs",
    "NativeRecipeKwargs",
    "Plan",
    "ProfileKwargs",
    "Recipe",
    "StepClock",
    "attach",
    "convert",
    "evaluate_in_fp8",
    "fp8_state_dict",
    "fused_head_loss",
    "head_loss",
    "levels",
    "load_fp8_state_dict",
    "optim",
    "plan",
    "record_statistics",
    "restore",
    "selftest",
    "step",
    "verify",
    "window",
]


def __getattr__(name: str) -> Any:
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module 'acceler8' has no attribute {name!r}; it offers: {', '.join(__all__)}")
    value = importlib.import_module(module)
    if name not in _SUBMODULES:
        value = getattr(value, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
