"""MS-AMP's levels O1, O2 and O3 on today's PyTorch: FP8 gradients, FP8 optimizer states, kept FP8 weight codes."""

from __future__ import annotations

from acceler8.levels.clip import clip_grad_norm_, clip_grad_value_
from acceler8.levels.initialize import initialize
from acceler8.levels.memory import StoredBytes, stored_bytes
from acceler8.levels.model import apply_level, level_weights
from acceler8.levels.optimizer import level_optimizer
from acceler8.levels.registry import LEVELS, Level, level, table
from acceler8.nn.gradients import gradient_of, set_gradient

__all__ = [
    "LEVELS",
    "Level",
    "StoredBytes",
    "apply_level",
    "clip_grad_norm_",
    "clip_grad_value_",
    "gradient_of",
    "initialize",
    "level",
    "level_optimizer",
    "level_weights",
    "set_gradient",
    "stored_bytes",
    "table",
]
