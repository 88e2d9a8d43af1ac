"""Codes of one activation for all the layers that read it: q, k and v of an attention, gate and up of an MLP.

Each would cast the same tensor to the same codes and keep its own copy of them for backward. Here the first reader
leaves them on the tensor object itself, the others find them there, and the last one takes them away. The codes are
right for whoever finds them, not by trust in the model's structure: they lie on that tensor, are dropped once PyTorch
counts a change of it, and are found by everything on which a cast depends.

The operation that made the tensor may leave codes too: a norm, which has the values in registers. It learns from the
readers which they want (``Producer``) and finds out from their silence that nobody does.

Only results of an operation that autograd recorded carry codes: a leaf or a buffer may live for ever and be edited
where nothing counts.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from acceler8.functional.kept_input import Kept
from acceler8.kernels import Quantized
from acceler8.recipes import Operand, Recipe
from acceler8.scaling import AmaxSlot

_ATTRIBUTE = "_acceler8_codes"


class Cast(NamedTuple):
    """Everything on which codes of a tensor depend."""

    orientation: str
    """``rows``: as the tensor lies; ``cols``: transposed."""
    format: str
    granularity: str
    pow2: bool
    margin: int
    slot: AmaxSlot | None
    records: bool

    @classmethod
    def of(
        cls, orientation: str, recipe: Recipe, operand: Operand, slot: AmaxSlot | None, records: bool = True
    ) -> Cast | None:
        """The cast of one operand of a GEMM; None if the operand is in high precision."""
        if operand.format is None:
            return None
        scales = operand.granularity.name  # names: comparing granularities field by field is slow
        return cls(orientation, operand.format.name, scales, recipe.pow2_scales, recipe.margin, slot, records)


class Producer(Protocol):
    """What made a tensor and can make codes of it on the way."""

    def note_reader(self, recipe: Recipe, slot: AmaxSlot | None, needs_dw: bool) -> None:
        """A layer of this recipe read the result, with this amax state of it; ``needs_dw``: for wgrad too."""


class SharedInput:
    """The codes that lie on one tensor, and how many layers have yet to read them."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.producer: Producer | None = None
        self.column_amax: Tensor | None = None
        """Bits of the FP32 amax of each column, which row scales of a transposed cast need; None: not known."""
        self.source: Kept | None = None
        """What the producer keeps anyway and from which the tensor can be made again; None: nothing."""
        self.results: dict[int, Tensor] = {}
        """What layers that run as one left for the others, by ``id`` of the layer."""
        self._codes: dict[Cast, Quantized] = {}
        self._left: int | None = None

    def get(self, cast: Cast) -> Quantized | None:
        """The codes of this cast, if there are any."""
        return self._codes.get(cast)

    def put(self, cast: Cast, codes: Quantized) -> None:
        """Leave codes for the other readers."""
        self._codes[cast] = codes

    def read(self, x: Tensor, readers: int) -> None:
        """One of ``readers`` layers has read; behind the last one no codes lie on ``x`` any more."""
        self._left = (readers if self._left is None else self._left) - 1
        if self._left <= 0:
            self.leave(x)

    def leave(self, x: Tensor) -> None:
        """Take all from ``x`` but its source: who reads ``x`` again, as checkpointing does, keeps the same of it."""
        if x.__dict__.get(_ATTRIBUTE) is not self:
            return
        if self.source is None:
            del x.__dict__[_ATTRIBUTE]
        else:
            x.__dict__[_ATTRIBUTE] = left = SharedInput(self.version)
            left.source = self.source


def can_carry(x: Tensor) -> bool:
    """True if codes may lie on ``x``: a plain intermediate result in eager mode."""
    return not torch.compiler.is_compiling() and type(x) is Tensor and x.grad_fn is not None


def shared_input(x: Tensor, *, make: bool = True) -> SharedInput | None:
    """What lies on ``x``, valid for it as it now is; a new one if nothing does and ``make``. None if nothing may."""
    if not can_carry(x):
        return None
    known: SharedInput | None = x.__dict__.get(_ATTRIBUTE)
    if known is not None and known.version == x._version:
        return known
    if not make:
        return None
    known = SharedInput(x._version)
    x.__dict__[_ATTRIBUTE] = known
    return known
