"""Changing a module's class in place, also behind the mixin that FSDP2 puts in front of it, and whether a module must
be called as it is.
"""

from __future__ import annotations

from torch import nn
from torch.nn.modules import module as torch_module

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)


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


def is_to_be_called(module: nn.Module) -> str | None:
    """Why the result is not that of the module's class alone; None if it is."""
    attributes = module.__dict__
    if any(getattr(torch_module, hooks) for hooks in _GLOBAL_HOOKS):
        return "has a hook, as all modules"
    if any(attributes[hooks] for hooks in _HOOKS):
        return "has a hook"
    if "forward" in attributes:
        return "has a forward of its own"
    return next(
        (why for child in module._modules.values() if child is not None and (why := is_to_be_called(child))), None
    )
