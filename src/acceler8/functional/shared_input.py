"""Codes of one activation for all the layers that read it: q, k and v of an attention, gate and up of an MLP.

Each would cast the same tensor to the same codes and keep its own copy of them for backward. Here the first reader
leaves them on the tensor object itself, the others find them there, and the last one takes them away. The codes are
right for whoever finds them, not by trust in the model's structure: they lie on that tensor, are dropped once PyTorch
counts a change of it, and are found by everything on which a cast depends.

The operation that made the tensor may leave codes too: a norm, which has the values in registers. It learns from the
readers which they want (``Producer``) and finds out from their silence that nobody does. It also learns how many groups
of layers come for the same codes, as attention and MLP do that stand side by side behind one norm; the codes stay for
so many. A wrong number costs a cast or holds codes for longer, and never gives others.

Only results of an operation that autograd recorded carry codes: a leaf or a buffer may live for ever and be edited
where nothing counts.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from acceler8.functional.input_codes import InputCodes
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

    def note_reader(self, recipe: Recipe, slot: AmaxSlot | None, needs_dw: bool, is_first: bool) -> None:
        """A layer of this recipe read the result, with this amax state of it; ``needs_dw``: for wgrad too;
        ``is_first``: before any other.
        """

    def note_groups(self, count: int) -> None:
        """So many groups of layers by now read one result, each after the other, and wanted the same codes."""


class SharedInput:
    """The codes that lie on one tensor, and how many layers have yet to read them."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.producer: Producer | None = None
        self.groups = 1
        """Groups of layers that are expected to come for the same codes."""
        self.column_amax: Tensor | None = None
        """Bits of the FP32 amax of each column, which row scales of a transposed cast need; None: not known."""
        self.source: Kept | None = None
        """What the producer keeps anyway and from which the tensor can be made again; None: nothing."""
        self.results: dict[int, Tensor] = {}
        """What layers that run as one left for the others, by ``id`` of the layer."""
        self._codes: dict[Cast, Quantized] = {}
        self._left: int | None = None
        self._was_noted = False
        self._came = 0
        self._wanted: set[Cast] = set()
        self._wanted_before: set[Cast] = set()

    def get(self, cast: Cast) -> Quantized | None:
        """The codes of this cast, if there are any."""
        return self._codes.get(cast)

    def put(self, cast: Cast, codes: Quantized) -> None:
        """Leave codes for the other readers."""
        self._codes[cast] = codes

    def note(self, recipe: Recipe, slot: AmaxSlot | None, needs_dw: bool) -> None:
        """Tell the producer of a reader."""
        if self.producer is not None:
            self.producer.note_reader(recipe, slot, needs_dw, not self._was_noted)
            self._was_noted = True

    def want(self, *casts: Cast | None) -> None:
        """The reader takes codes of these casts, its own or those of others."""
        self._wanted.update(cast for cast in casts if cast is not None)

    def read(self, x: Tensor, readers: int) -> None:
        """One of a group of ``readers`` layers has read; behind the last group no codes lie on ``x`` any more."""
        self._left = (readers if self._left is None else self._left) - 1
        if self._left > 0:
            return
        if not self._wanted_before or self._wanted & self._wanted_before:  # for others it has nothing to stay for
            self._came += 1
            if self.producer is not None:
                self.producer.note_groups(self._came)
        self._wanted_before |= self._wanted
        self._wanted, self._left = set(), None
        if self._came >= self.groups:
            self.leave(x)

    def take_result(self, x: Tensor, layer: int) -> Tensor | None:
        """What was left for the layer with this ``id``; behind the last one nothing lies there for its sake."""
        result = self.results.pop(layer, None)
        if result is not None and not self.results and not self._codes:
            self.leave(x)
        return result

    def leave(self, x: Tensor) -> None:
        """Take all from ``x`` but results that wait for their layers, its source (who reads ``x`` again, as
        checkpointing does, keeps the same of it) and its producer, who is to know of each group that still comes.
        """
        self._codes.clear()
        self.column_amax = None
        is_needed = self.results or self.source is not None or self.producer is not None
        if not is_needed and x.__dict__.get(_ATTRIBUTE) is self:
            del x.__dict__[_ATTRIBUTE]


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


def hand_on(y: Tensor, codes: InputCodes | None, recipe: Recipe, slot: AmaxSlot | None = None) -> None:
    """Leave ``codes`` of ``y`` on it, for the ``linear`` layers of ``recipe`` that read this very object.

    ``slot`` is the amax state of their input, which made the codes of a delayed recipe; the norm was then called with
    ``records=False``, as the first layer that casts for wgrad records. None, or a ``y`` that can carry none (a leaf,
    compiled code), changes nothing: the layers cast it themselves.
    """
    shared = None if codes is None else shared_input(y)
    if shared is None or codes is None:
        return
    shared.source, shared.column_amax = codes.source, codes.column_amax
    cast = Cast.of("rows", recipe, recipe.fprop.a, slot, records=slot is None)
    if codes.rows is not None and cast is not None:
        shared.put(cast, codes.rows)
