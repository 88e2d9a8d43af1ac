"""What acceler8 asks of a backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from acceler8.backends.fusion import Fusion
from acceler8.nn import ModelState
from acceler8.recipes import Recipe


class Backend(Protocol):
    """Turns chosen layers of a model into FP8 layers, and back."""

    name: str
    fuses: bool
    """True if it runs layers that share work together, where a plan says so."""

    def unavailable(self) -> str | None:
        """Why this backend cannot be used here, such as a missing library, and what to do; None if it can."""
        ...

    def notes(self, recipe: Recipe, device: torch.device) -> list[str]:
        """What a plan should say about this recipe on this device, such as emulation."""
        ...

    def refuses(self, module: nn.Module, recipe: Recipe) -> str | None:
        """Why this layer stays in high precision; None if the backend takes it."""
        ...

    def convert_layers(
        self,
        layers: list[tuple[str, nn.Module, Recipe]],
        state: ModelState,
        fusions: Sequence[tuple[Fusion, nn.Module]] = (),
    ) -> None:
        """Make these layers FP8, in place, each by its own recipe. All or none: raise before changing the first.

        ``fusions`` come with the modules that they are in.
        """
        ...

    def restore_layers(self, model: nn.Module) -> None:
        """Undo ``convert_layers`` for every layer inside ``model``."""
        ...
