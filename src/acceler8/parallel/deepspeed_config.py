"""DeepSpeed's own JSON: reading it, and filling what it leaves to the caller.

The file is honoured as it stands. ``"auto"`` leaves a value to the training: the ones that are known get their value,
another one raises, for DeepSpeed itself would take the word for a value. The words are those of Hugging Face's
integration, so a file that works there works here.

Source: DeepSpeed's configuration JSON, https://www.deepspeed.ai/docs/config-json/; Accelerate's ``DeepSpeedPlugin``.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from acceler8.errors import ConfigError

AUTO = "auto"
ZERO = "zero_optimization"
CLIPPING = "gradient_clipping"
MICRO_BATCH = "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"


def read_config(source: str | Mapping[str, Any], where: str) -> dict[str, Any]:
    """A copy of what a file or a mapping says. Raises: ConfigError, naming ``where``, for what is no such JSON."""
    if isinstance(source, Mapping):
        config = copy.deepcopy(dict(source))
    else:
        try:
            config = json.loads(Path(source).expanduser().read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{where}: got {source!r:.200}, which cannot be read ({error}); allowed: the path of DeepSpeed's JSON"
            ) from None
    if not isinstance(config, dict) or not isinstance(config.get(ZERO), dict):
        raise ConfigError(
            f"{where}: DeepSpeed's configuration has no {ZERO}; allowed: an object with {ZERO} in it; write"
            f' {{"{ZERO}": {{"stage": 2}}}} for ZeRO-2, "stage": 0 for none'
        )
    return config


def value_at(config: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path; None if it is not there."""
    found: Any = config
    for key in path.split("."):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def is_on(config: Mapping[str, Any], section: str) -> bool:
    """True if a section such as ``bf16`` is enabled."""
    return str(value_at(config, f"{section}.enabled")).lower() == "true"


def stage_of(config: Mapping[str, Any]) -> int:
    """The ZeRO stage; DeepSpeed's default is 0."""
    return int(config[ZERO].get("stage", 0))


def sizes_of(model: nn.Module) -> dict[str, Any]:
    """What transformers' configurations leave to the model's width."""
    config = getattr(model, "config", None)
    width = getattr(config, "hidden_size", None) or max(getattr(config, "hidden_sizes", None) or (0,))
    if not width:
        return {}
    return {
        f"{ZERO}.reduce_bucket_size": width * width,
        f"{ZERO}.stage3_prefetch_bucket_size": int(0.9 * width * width),
        f"{ZERO}.stage3_param_persistence_threshold": 10 * width,
    }


def fill(config: Mapping[str, Any], values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A copy with each ``"auto"`` replaced by its value, by dotted path; a value of None leaves the key out.

    Raises: ConfigError naming every path whose value nobody knows.
    """
    filled = copy.deepcopy(dict(config))
    unknown = []
    for section, key, path in list(_autos(filled)):
        if path not in values:
            unknown.append(path)
        elif values[path] is None:
            del section[key]
        else:
            section[key] = values[path]
    if unknown:
        raise ConfigError(
            f"{where}: got auto for {', '.join(unknown)}, which nothing here decides; allowed: a value; write it into"
            " DeepSpeed's configuration"
        )
    return filled


def without_autos(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy without what is still ``"auto"``, for one process and one micro-batch: before there is a training."""
    left = copy.deepcopy(dict(config))
    for section, key, _ in list(_autos(left)):
        del section[key]
    left.pop("train_batch_size", None)
    return {MICRO_BATCH: 1, **left, STEPS: 1}


def _autos(section: dict[str, Any], prefix: str = "") -> Iterator[tuple[dict[str, Any], str, str]]:
    for key, value in section.items():
        if isinstance(value, dict):
            yield from _autos(value, f"{prefix}{key}.")
        elif value == AUTO:
            yield section, key, prefix + key
