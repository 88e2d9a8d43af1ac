"""A backend's hook at step boundaries, which does not tie the model to the clock that calls it.

Every layer reaches the clock. If the clock reached the model, a copy of one layer, or a file of it, would hold all of
them, and a clock that several models share would keep each alive. So the hook knows its model weakly. A copy of the
model finds its own again: what the model itself keeps, and no layer reaches, ties the copied hook to the copied model.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from acceler8 import backends

_ATTRIBUTE = "_acceler8_on_step"


class OnStep:
    """Calls the hook of ``backend`` on the model that it is tied to. A copy without the model is tied to none."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self._model: weakref.ref[nn.Module] | None = None

    @property
    def model(self) -> nn.Module | None:
        """None once it is gone."""
        return None if self._model is None else self._model()

    def tie(self, model: nn.Module) -> None:
        """Call the hook on ``model`` from now on, and in a copy on the copied model."""
        model.__dict__[_ATTRIBUTE] = _Tie(self, model)

    def tick(self) -> None:
        """Called by the clock. A bound method of it in the clock belongs to the copy in a deep copy."""
        if (model := self.model) is not None:
            backends.find(self.backend).on_step(model)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_model": None}


class _Tie:
    """Kept by the model. A deep copy of it, or a pickled one, is made of the copied hook and the copied model."""

    def __init__(self, on_step: OnStep, model: nn.Module | None) -> None:
        self.on_step = on_step
        on_step._model = None if model is None else weakref.ref(model)

    def __reduce__(self) -> tuple[type[_Tie], tuple[OnStep, nn.Module | None]]:
        return _Tie, (self.on_step, self.on_step.model)


def untie(module: nn.Module) -> None:
    """Undo ``tie``."""
    module.__dict__.pop(_ATTRIBUTE, None)
