"""The state of a learning-rate scheduler, read as foreign input: numbers where it has numbers, as many as it has."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

_RATES = frozenset({"base_lrs", "_last_lr", "min_lrs"})
_COUNTS = frozenset({"last_epoch", "_step_count"})
_LARGEST = 2**53


def wrong_state(saved: Mapping[str, Any], own: Mapping[str, Any], *, is_torchs: bool) -> str | None:
    """What of ``saved`` is none that the scheduler whose state is ``own`` takes, in words; None if all is fine.

    A subclass of the user's may keep more, and other kinds at other times; of it only torch's part is looked at.
    """
    for key, value in saved.items():
        if key not in own or own[key] is None:
            continue
        if allowed := _allowed(key, value, own[key], is_torchs):
            return f"{key} is {_short(value)}; allowed: {allowed}"
        if key == "_schedulers" and is_torchs:
            for i, (inner, its) in enumerate(zip(value, own[key], strict=True)):
                if not isinstance(inner, dict):
                    return f"{key}[{i}] is {_short(inner)}; allowed: a dict"
                if wrong := wrong_state(inner, its, is_torchs=True):
                    return f"{key}[{i}].{wrong}"
    return None


def _allowed(key: str, value: Any, own: Any, is_torchs: bool) -> str | None:
    """What is allowed in the place of ``value``; None if it is fine."""
    if key in _COUNTS:
        is_fine = type(value) is int and -1 <= value <= _LARGEST
        return None if is_fine else "an integer from -1"
    if key in _RATES or (key == "_schedulers" and is_torchs):
        is_fine = isinstance(value, list | tuple) and len(value) == len(own)
        if key in _RATES:
            is_fine = is_fine and all(_is_number(rate) and math.isfinite(rate) for rate in value)
        return None if is_fine else f"a list of {len(own)}" + (" finite numbers" if key in _RATES else "")
    if not is_torchs:
        return None
    if isinstance(own, bool):
        return None if isinstance(value, bool) else "True or False"
    if _is_number(own):
        return None if _is_number(value) and not math.isnan(value) else "a number, not NaN"
    if isinstance(own, list | tuple | dict):
        return None if type(value) is type(own) else f"a {type(own).__name__}"
    return None


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, int | float) and not isinstance(value, bool)


def _short(value: Any) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)[:80]
