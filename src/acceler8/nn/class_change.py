"""Changing a module's class in place, also behind the mixin that FSDP2 puts in front of it."""

from __future__ import annotations

from torch import nn


def plain_type(module: nn.Module) -> type[nn.Module]:
    """The class that the model's author gave a module, without the mixin that FSDP2 puts in front of it."""
    cls = type(module)
    if cls.__name__.startswith("FSDP") and any(b.__name__ == "FSDPModule" for b in cls.__mro__):
        return next(b for b in cls.__mro__[1:] if b.__name__ not in ("FSDPModule",) and issubclass(b, nn.Module))
    return cls


def swap_class(module: nn.Module, old: type[nn.Module], new: type[nn.Module]) -> None:
    """Set a module's class from ``old`` to ``new``, behind FSDP2's mixin too if it is there."""
    cls = type(module)
    if cls is old:
        module.__class__ = new
        return
    bases = tuple(new if base is old else base for base in cls.__bases__)
    module.__class__ = type(cls.__name__.replace(old.__name__, new.__name__), bases, dict(cls.__dict__))
