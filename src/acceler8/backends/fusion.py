"""What a plan says of layers that share work, and a backend carries out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from acceler8.nn import NormKind

# "shared input": one cast; "merged linears": one operation; "gated MLP", "MLP": one operation, with its
# activation; "norm": hands codes of its result on to the layers that read it, and has one kernel for backward
Kind = Literal["shared input", "merged linears", "gated MLP", "MLP", "norm"]
KINDS: tuple[str, ...] = get_args(Kind)


@dataclass(frozen=True, kw_only=True)
class Fusion:
    """FP8 layers of one module that share work, or a norm in front of some."""

    kind: Kind
    name: str
    """Of the module."""
    layers: tuple[str, ...] = ()
    """Full names; of a gated MLP gate, up and down, or gate and up as one layer, and down; of an MLP the first and the
    second; of a norm none."""
    activation: str = ""
    norm: NormKind | None = None
    """What a norm computes."""

    @property
    def is_mlp(self) -> bool:
        """True for one operation with an activation inside."""
        return self.kind in ("gated MLP", "MLP")

    @property
    def readers(self) -> tuple[str, ...]:
        """The layers that read the module's input, full names: of an MLP all but the last."""
        return self.layers[:-1] if self.is_mlp else self.layers

    @property
    def parts(self) -> tuple[str, ...]:
        """The layers' names in their module, and the activation; what a norm computes."""
        if self.norm is not None:
            return ("RMSNorm" if self.norm.kind == "rms" else "LayerNorm",)
        names = tuple(name.rpartition(".")[2] for name in self.layers)
        return (*names, self.activation) if self.activation else names
