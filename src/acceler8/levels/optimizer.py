"""The optimizer of a level: Adam or AdamW whose moments and masters are in the level's formats."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch.optim import Optimizer

from acceler8.errors import ConfigError
from acceler8.levels.registry import Level
from acceler8.optim import Adam, AdamW

_log = logging.getLogger("acceler8")
_SHARED = (
    *("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks", "_optimizer_state_dict_pre_hooks"),
    *("_optimizer_state_dict_post_hooks", "_optimizer_load_state_dict_pre_hooks"),
    "_optimizer_load_state_dict_post_hooks",
)


def level_formats(level: Level) -> dict[str, str]:
    """Options of a parameter group for ``level``: few bits for its weights, FP32 for everything else."""
    return {
        "exp_avg_format": level.exp_avg,
        "exp_avg_sq_format": level.exp_avg_sq,
        "master": level.master,
        "quantize": "level",
    }


def level_optimizer(optimizer: Optimizer, level: Level) -> Adam:
    """``acceler8.optim``'s Adam or AdamW in the place of torch's, in the formats of ``level``.

    The groups are the same dictionaries, so a scheduler of ``optimizer`` goes on working; hooks and state come along,
    moments as their formats hold them. ``optimizer`` itself is empty then, and its step raises. One of
    ``acceler8.optim`` stays the same object: formats that its groups leave at their defaults become the level's.
    Raises: ConfigError for any other class, and for amsgrad and differentiable.
    """
    if isinstance(optimizer, Adam):
        return _complete(optimizer, level)
    kind = AdamW if check_optimizer(optimizer, level) else Adam
    groups = [{**group, "params": list(group["params"]), **level_formats(level)} for group in optimizer.param_groups]
    options: dict[str, Any] = {
        key: value for key, value in optimizer.defaults.items() if key != "decoupled_weight_decay"
    }
    made = kind(groups, **(options | _constructor(level)))
    if optimizer.state:
        made.load_state_dict(optimizer.state_dict())
    for number, (before, now) in enumerate(zip(optimizer.param_groups, made.param_groups, strict=True)):
        before.update(now)
        made.param_groups[number] = before
    for name in _SHARED:
        setattr(made, name, getattr(optimizer, name))
    optimizer.state.clear()
    made.register_step_post_hook(_Stepped(optimizer))
    _log.info("%s is replaced by acceler8.optim.%s, for level %s", type(optimizer).__name__, kind.__name__, level.name)
    return made


def check_optimizer(optimizer: Optimizer, level: Level) -> bool:
    """Whether its weight decay is decoupled. Raises: ConfigError as ``level_optimizer``."""
    if not isinstance(optimizer, Adam) and type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        raise ConfigError(
            f"level {level.name} got a {type(optimizer).__module__}.{type(optimizer).__name__}; allowed: Adam and AdamW"
            " of torch.optim or acceler8.optim, which have moments for a level to store; use one of them"
        )
    for name in ("amsgrad", "differentiable"):
        if any(group.get(name) for group in optimizer.param_groups):
            raise ConfigError(f"level {level.name} got an optimizer with {name}=True; allowed: False; leave it out")
    decoupled = {bool(group.get("decoupled_weight_decay", False)) for group in optimizer.param_groups}
    if len(decoupled) > 1:
        raise ConfigError(
            "an optimizer has groups with and without decoupled_weight_decay; allowed: one kind; build two optimizers"
        )
    return decoupled == {True}


def _constructor(level: Level) -> dict[str, str]:
    formats = level_formats(level)
    return {
        "exp_avg": formats["exp_avg_format"],
        "exp_avg_sq": formats["exp_avg_sq_format"],
        "master": formats["master"],
        "quantize": formats["quantize"],
    }


def _complete(optimizer: Adam, level: Level) -> Adam:
    defaults = {"exp_avg_format": "fp32", "exp_avg_sq_format": "fp32", "master": "none", "quantize": "matrices"}
    formats = level_formats(level)
    for group in optimizer.param_groups:
        for key, usual in defaults.items():
            if group[key] == usual:
                group[key] = formats[key]
            elif group[key] != formats[key]:
                _log.info("level %s: a group keeps its own %s=%r", level.name, key, group[key])
    if optimizer.state:
        optimizer.load_state_dict(optimizer.state_dict())  # what is stored, in the formats of now
    optimizer._formats.clear()
    return optimizer


class _Stepped:
    """Tells the optimizer that was replaced of each step: schedulers made for it ask it whether it stepped."""

    def __init__(self, before: Optimizer) -> None:
        self.before = before

    def __call__(self, *_: Any) -> None:
        self.before._opt_called = True  # type: ignore[attr-defined]
