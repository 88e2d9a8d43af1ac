"""Changing a module's class in place, also behind FSDP2's mixin in front of it, whether that would overwrite
what is the module's own, and whether a module must be called as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MethodType
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

_CLASSES = "_acceler8_classes"
OF_EVERY_MODULE = frozenset(nn.Module().__dict__)
_PLAIN = (int, float, str, bool, type(None))

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


def clash(module: nn.Module, attributes: Mapping[str, Any], owner: str) -> str | None:
    """Why ``module`` cannot get the ``attributes`` that ``owner``, a library's class, keeps: it has one of them with
    another value, which would be lost. None if none would be.
    """
    for name, value in attributes.items():
        is_taken = name in module._parameters or name in module._modules or name in module._buffers
        if is_taken or (name in module.__dict__ and not _is_same(module.__dict__[name], value)):
            return f"its attribute {name!r} is one that {owner} needs for itself; rename yours"
    return None


def _is_same(before: Any, now: Any) -> bool:
    return before is now or (type(before) is type(now) and isinstance(now, (int, float, str, bool)) and before == now)


class AuthorsClass:
    """Classes with a mixin in front of an author's, the same one for the same author's each time."""

    def __init__(self, mixin: type[nn.Module], prefix: str = "Fp8") -> None:
        self._mixin, self._prefix = mixin, prefix
        self._made: dict[type[nn.Module], type[nn.Module]] = {}
        setattr(mixin, _CLASSES, self)

    def of(self, author: type[nn.Module]) -> type[nn.Module]:
        """The class for modules of the author's class."""
        made = self._made.get(author)
        if made is None:
            bases = (self._mixin, author)
            made = self._made[author] = type(
                f"{self._prefix}{author.__name__}", bases, {"__module__": author.__module__}
            )
        return made

    def rebuild(self, author: type[nn.Module]) -> nn.Module:
        """A module without state, for copying and unpickling."""
        made = self.of(author)
        return made.__new__(made)

    def __reduce__(self) -> tuple[Any, ...]:
        """What is pickled is a reference to the one that the mixin holds."""
        return _classes_of, (self._mixin,)


def _classes_of(mixin: type[nn.Module]) -> AuthorsClass:
    found: AuthorsClass = getattr(mixin, _CLASSES)
    return found


def what_changed(module: nn.Module, was: dict[str, Any]) -> str | None:
    """The first of the attributes and children in ``was`` that is another object now, or another number or word."""
    for name, before in was.items():
        now = module._modules[name] if name in module._modules else module.__dict__.get(name)
        if now is not before and (type(before) not in _PLAIN or now != before):
            return name
    return None


def _only_gathers(hooks: Mapping[int, Any]) -> bool:
    """True for hooks of DeepSpeed's ZeRO-3, which have weights there while a module runs and do nothing else."""
    return all(str(getattr(hook, "__module__", "")).startswith("deepspeed.") for hook in hooks.values())


def is_to_be_called(module: nn.Module, *, gathers: bool = False) -> str | None:
    """Why the result is not that of the module's class alone; None if it is.

    gathers: who asks reads the weights inside the forward of a module around it, where DeepSpeed's ZeRO-3 gathers
        whatever is read, so its hooks on ``module`` are no matter.
    """
    attributes = module.__dict__
    if any(getattr(torch_module, hooks) for hooks in _GLOBAL_HOOKS):
        return "has a hook, as all modules"
    if any(attributes[hooks] and not (gathers and _only_gathers(attributes[hooks])) for hooks in _HOOKS):
        return "has a hook"
    # compilers guard what an attribute is, and not that a dictionary lacks a key
    if "forward" in attributes or not isinstance(module.forward, MethodType):
        return "has a forward of its own"
    return next(
        (
            why
            for child in module._modules.values()
            if child is not None and (why := is_to_be_called(child, gathers=gathers))
        ),
        None,
    )
