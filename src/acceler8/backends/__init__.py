"""Who does the FP8 work: one protocol, one backend a file, a registry."""

from __future__ import annotations

from acceler8.backends.fusion import KINDS, Fusion
from acceler8.backends.protocol import Backend
from acceler8.backends.registry import get, names

__all__ = ["KINDS", "Backend", "Fusion", "get", "names"]
