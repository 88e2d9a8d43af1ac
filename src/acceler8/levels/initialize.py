"""``initialize``: a model and an optimizer to a level, as ``msamp.initialize`` has it."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from acceler8 import backends
from acceler8.conversion import Attachment, attach, convert, plan
from acceler8.errors import ConfigError
from acceler8.levels.model import apply_level
from acceler8.levels.optimizer import check_optimizer, level_optimizer
from acceler8.levels.registry import Level, level
from acceler8.nn import find_states
from acceler8.nn.prepared_forward import wrap_forward
from acceler8.optim import Adam

_log = logging.getLogger("acceler8")
_TE = "transformer_engine"


def initialize(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    opt_level: str | Level = "O1",
    use_te: bool = False,
    *,
    optimization_level: str | None = None,
    **choices: Any,
) -> tuple[nn.Module, Adam | None]:
    """Bring a model and its optimizer to level O1, O2 or O3, for a plain training loop in one process.

        model, optimizer = acceler8.levels.initialize(model, torch.optim.AdamW(model.parameters()), opt_level="O2")

    model: the same object comes back. It is converted (recipe ``rowwise``, backend native; ``use_te``:
        TransformerEngine with its default) unless it is already. If parts of it stay FP32 its forward runs under BF16
        autocast from now on and returns FP32, so the loop needs none.
    optimizer: torch's Adam or AdamW, whose groups and state go into the one that is returned; step and save that one.
        None: given later, by ``level_optimizer(optimizer, level)``.
    opt_level (``optimization_level`` is the same): a name or a ``Level``. choices: of ``Level``, one by one, such as
        ``exp_avg_sq="fp8"``, ``master="bf16_remainder"``, ``gradient="weight"``.
    ``p.grad`` of FP8 layers' weights is None behind a backward; ``gradient_of(p)`` reads it, and ``clip_grad_norm_`` of
    this package clips. Micro-batches of a step go into ``with acceler8.window(model):``.
    Raises: ConfigError for unknown names and choices, and for another class of optimizer; PlanError as ``convert`` and
        ``apply_level``; nothing is changed for the first.
    """
    if optimization_level is not None:
        opt_level = optimization_level
    chosen = level(opt_level, **choices)
    if isinstance(optimizer, Optimizer):
        check_optimizer(optimizer, chosen)
    elif optimizer is not None:
        raise ConfigError(f"initialize got an optimizer of {type(optimizer).__name__}; allowed: Adam, AdamW, None")
    if not find_states(model):
        engine = backends.get(_TE) if use_te else None
        made = plan(model, engine.default_recipe, backend=_TE) if engine else plan(model)
        convert(model, made)
    apply_level(model, chosen)
    _log.info("level %s is acceler8's own: no package msamp is used", chosen.name)
    if any(p.dtype is torch.float32 for p in model.parameters()) and chosen.weight != "fp32":
        device = next(model.parameters()).device.type
        wrap_forward(model, device, torch.bfloat16)
    if optimizer is None:
        return model, None
    stepped = level_optimizer(optimizer, chosen)
    _attach(model, optimizer, stepped)
    return model, stepped


def _attach(model: nn.Module, before: Optimizer, now: Optimizer) -> None:
    """Let the optimizer mark the steps of every converted part of the model, once."""
    for state in find_states(model):
        for known in [a for a in state.attached if isinstance(a, Attachment)]:
            if known.optimizer() is before or known.optimizer() is now:
                known.remove()
    attach(model, now)
