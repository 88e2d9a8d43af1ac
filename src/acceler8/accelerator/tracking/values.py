"""Numbers as trackers and JSON take them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor


def plain(value: Any) -> Any:
    """A value without tensors and NumPy: one element becomes a number, more a nested list. Waits for the GPU."""
    if isinstance(value, Tensor):
        value = value.detach()
        return value.item() if value.numel() == 1 else value.tolist()
    if isinstance(value, np.ndarray):
        return value.item() if value.size == 1 else value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {str(key): plain(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return value


def json_ready(value: Any) -> Any:
    """What ``plain`` gives, as strict JSON has it: NaN and infinities by name, other objects as text."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): json_ready(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [json_ready(v) for v in value]
    return str(value)
