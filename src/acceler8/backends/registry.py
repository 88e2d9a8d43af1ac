"""The backends by name."""

from __future__ import annotations

from acceler8.backends.native import NativeBackend
from acceler8.backends.protocol import Backend
from acceler8.errors import PlanError, unknown_name

_BACKENDS: dict[str, Backend] = {"native": NativeBackend()}


def names() -> tuple[str, ...]:
    """Names that ``get`` takes."""
    return tuple(_BACKENDS)


def get(name: str) -> Backend:
    """The backend of this name. Raises PlanError if it is unknown or cannot be used here, with the reason."""
    if name not in _BACKENDS:
        raise PlanError(unknown_name("backend", name, _BACKENDS))
    backend = _BACKENDS[name]
    reason = backend.unavailable()
    if reason is not None:
        raise PlanError(f"backend {name!r} cannot be used: {reason}")
    return backend
