"""What a plan says of layers that share work, and a backend carries out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

# "shared input": one cast; "merged linears": one operation; "gated MLP": one operation, with its activation
Kind = Literal["shared input", "merged linears", "gated MLP"]
KINDS: tuple[str, ...] = get_args(Kind)


@dataclass(frozen=True, kw_only=True)
class Fusion:
    """Some FP8 layers of one module that share work."""

    kind: Kind
    name: str
    """Of the module."""
    layers: tuple[str, ...]
    """Full names; of a gated MLP gate, up and down, or gate and up as one layer, and down."""
    activation: str = ""

    @property
    def parts(self) -> tuple[str, ...]:
        """The layers' names in their module, and the activation."""
        names = tuple(name.rpartition(".")[2] for name in self.layers)
        return (*names, self.activation) if self.activation else names
