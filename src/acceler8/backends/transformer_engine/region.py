"""TransformerEngine's FP8 context, bound to a recipe and entered by each layer for its own forward.

``te.autocast`` around the model's forward is where FP8 is lost silently: FSDP2 that calls children, ``generate()``, a
call of a sub-module and the recomputation of activation checkpointing all happen outside of it. Here nothing depends on
who calls. Entering costs about a microsecond: what ``te.autocast`` sets is taken down once, as it sets it, and put back
for each forward. At its end ``te.autocast`` also updates the scales of delayed scaling, which here is the step clock's
to do (see ``histories``); that update is global, also of modules that are none of acceler8's, and gradients are off at
each leaving so that there is none.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch

from acceler8.backends.transformer_engine import library


def autocast(recipe: Any, *, enabled: bool = True) -> Any:
    """TransformerEngine's own context: ``te.autocast``, before 2.9 ``te.fp8_autocast``."""
    te = library.load()
    if hasattr(te, "autocast"):
        return te.autocast(enabled=enabled, recipe=recipe)
    return te.fp8_autocast(enabled=enabled, fp8_recipe=recipe)


def state_manager() -> Any:
    """The class that holds TransformerEngine's global state."""
    library.load()
    try:
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager
    except ImportError:  # before 2.9
        from transformer_engine.pytorch.fp8 import FP8GlobalStateManager
    return FP8GlobalStateManager


class Region:
    """A context that can be entered again and again, also inside itself. Inside, TransformerEngine computes in FP8."""

    def __init__(self, recipe: Any) -> None:
        self.recipe = recipe
        self._manager = state_manager()
        self._inside = self._take_down()
        self._before: list[Any] = []

    def _take_down(self) -> Any:
        """The state inside of ``te.autocast``; None if this version gives it to nobody (before 2.13 or so)."""
        if not hasattr(self._manager, "set_autocast_state"):
            return None
        with torch.no_grad(), autocast(self.recipe):
            self._manager.is_first_fp8_module()  # takes the mark that makes a backward update the scales of all
            return self._manager.get_autocast_state()

    def __enter__(self) -> None:
        if self._inside is None:
            context = autocast(self.recipe)
            context.__enter__()
            self._manager.is_first_fp8_module()
            self._before.append(context)
            return
        self._before.append(self._manager.get_autocast_state())
        self._manager.set_autocast_state(self._inside)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        before = self._before.pop()
        if self._inside is None:
            with torch.no_grad():
                before.__exit__(kind, error, at)
        else:
            self._manager.set_autocast_state(before)

    def __reduce__(self) -> tuple[type[Region], tuple[Any]]:
        """A copy is made anew, of a copied recipe."""
        return Region, (self.recipe,)
