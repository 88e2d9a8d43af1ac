"""Who does the FP8 work: one protocol, one backend a file or folder, a registry open to other packages."""

from __future__ import annotations

from acceler8.backends.capability import STRATEGIES, Capability, Cell, cells, kind_of, needs
from acceler8.backends.fusion import KINDS, Fusion
from acceler8.backends.options import BackendOptions
from acceler8.backends.protocol import AlsoConverted, Backend, Conversion, PlannedLayer, Window
from acceler8.backends.registry import find, full_name, get, names, registered

__all__ = [
    "KINDS",
    "STRATEGIES",
    "AlsoConverted",
    "Backend",
    "BackendOptions",
    "Capability",
    "Cell",
    "Conversion",
    "Fusion",
    "PlannedLayer",
    "Window",
    "cells",
    "find",
    "full_name",
    "get",
    "kind_of",
    "names",
    "needs",
    "registered",
]
