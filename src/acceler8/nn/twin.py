"""Twins of modules: run to see what a forward does, without a trace on the module itself."""

from __future__ import annotations

import copy
import threading
from typing import Any

from torch import nn

ONE_AT_A_TIME = threading.RLock()  # whether a forward draws random numbers shows in generators that all threads share


def twin_of(module: nn.Module, *, training: bool) -> nn.Module:
    """A shallow copy: what its forward notes on itself is noted there. Parameters and children are the module's."""
    twin = copy.copy(module)
    for name, value in twin.__dict__.items():
        twin.__dict__[name] = copy.copy(value) if isinstance(value, (dict, list, set)) else value
    twin.__dict__["training"] = training
    return twin


def contents(module: nn.Module) -> dict[str, Any]:
    """What lies on a module, by identity; of a container also what lies in it."""
    return {
        name: [*map(id, value), *map(id, value.values() if isinstance(value, dict) else ())]
        if isinstance(value, (dict, list, set))
        else id(value)
        for name, value in module.__dict__.items()
    }
