"""The backends by name: those of this package, and those that other packages register.

A package registers one by an entry point of the group ``acceler8.backends``, whose name is the backend's and whose
object is a subclass of ``Backend``:

    [project.entry-points."acceler8.backends"]
    toy = "toy_backend:ToyBackend"

Nothing is imported before it is asked for by name.
"""

from __future__ import annotations

from importlib import import_module, metadata

from acceler8.backends.protocol import Backend
from acceler8.errors import PlanError, unknown_name

GROUP = "acceler8.backends"
_OWN = {
    "native": "acceler8.backends.native:NativeBackend",
    "torchao": "acceler8.backends.torchao:TorchaoBackend",
    "transformer_engine": "acceler8.backends.transformer_engine:TransformerEngineBackend",
}
_SHORT = {"ao": "torchao", "te": "transformer_engine"}
_made: dict[str, Backend] = {}


def names() -> tuple[str, ...]:
    """Names that ``get`` takes: this package's, then those of other packages."""
    return (*_OWN, *(name for name in registered() if name not in _OWN))


def registered() -> tuple[str, ...]:
    """Names of the backends that other packages register."""
    return tuple(sorted({point.name for point in metadata.entry_points(group=GROUP)}))


def full_name(name: str) -> str:
    """``torchao`` for ``AO``: a backend's name from the word that settings use for it, in any case."""
    lower = name.lower()
    return _SHORT.get(lower, lower if lower in _OWN else name)


def find(name: str) -> Backend:
    """The backend of this name, whether its library is there or not.

    Raises: PlanError if it is unknown, or a package's that cannot be imported or is no ``Backend``.
    """
    if not isinstance(name, str):
        raise PlanError(unknown_name("backend", name, names()))
    name = full_name(name)
    if name not in _made:
        _made[name] = _make(name)
    return _made[name]


def get(name: str) -> Backend:
    """The backend of this name. Raises PlanError if it is unknown or cannot be used here, with the reason."""
    backend = find(name)
    reason = backend.unavailable()
    if reason is not None:
        raise PlanError(f"backend {backend.name!r} cannot be used: {reason}")
    return backend


def _make(name: str) -> Backend:
    if name in _OWN:
        module, _, attribute = _OWN[name].partition(":")
        made = getattr(import_module(module), attribute)
    else:
        point = next((point for point in metadata.entry_points(group=GROUP) if point.name == name), None)
        if point is None:
            raise PlanError(unknown_name("backend", name, names()))
        try:
            made = point.load()
        except Exception as error:  # whatever a foreign package raises while it is imported
            raise PlanError(
                f"backend {name!r} ({point.value}) cannot be loaded: {type(error).__name__}: {error}; repair or remove"
                " the package that registers it"
            ) from error
    if not (isinstance(made, type) and issubclass(made, Backend)):
        raise PlanError(
            f"backend {name!r} is registered as {made!r}; allowed: a subclass of acceler8.backends.Backend; correct its"
            " entry point"
        )
    backend = made()
    if backend.name != name:
        raise PlanError(
            f"the backend registered as {name!r} is named {backend.name!r}; give the entry point and the class one name"
        )
    return backend
