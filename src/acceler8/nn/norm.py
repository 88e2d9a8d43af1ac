"""``FusedNorm``: a norm of the model's author whose class was changed, so that it hands on FP8 codes of its result.

Which codes, it learns from the FP8 layers that read the result: the first time they cast it, from then on they find
the codes on it. It makes those of the first layer that reads; where others come for the same ones behind it, an MLP
beside an attention, they stay for these too. A result that nobody cast a few times in a row carries none. Backward is
one kernel. The author's own forward runs in evaluation, under ``torch.compile``, in steps that a schedule keeps in high
precision, and wherever the norm is not what it was at conversion.

Nothing that is learned changes a number: codes are those that ``quantize`` makes of the result as stored, and that is
the same with and without them. So a resumed model, which has yet to learn, goes on as the other would have.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from acceler8.functional.norm import norm, runs_in_fp32
from acceler8.functional.shared_input import Cast, shared_input
from acceler8.nn.class_change import OF_EVERY_MODULE, AuthorsClass, swap_class, what_changed
from acceler8.recipes import Recipe
from acceler8.scaling import AmaxSlot, Schedule

_STATE = "_acceler8_norm"
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_TRIALS = 4  # results whose codes nobody read before the norm stops making them


@dataclass(frozen=True)
class NormKind:
    """Which formula a norm computes, as ``functional.norm`` takes it."""

    kind: Literal["rms", "layer"]
    weight_offset: float
    cast_before_weight: bool
    autocasts: bool
    eps: str
    """Name of the attribute; where that is None the norm takes FP32's eps."""


class Reader(NamedTuple):
    """What a norm knows of the layers that read its result."""

    recipe: Recipe
    slot: AmaxSlot | None
    needs_dw: bool


@dataclass
class NormState:
    """What a converted norm knows. Plain data."""

    name: str
    kind: NormKind
    author: type[nn.Module]
    """The class that the module had."""
    schedules: list[Schedule] = field(default_factory=list)
    """Of the FP8 layers beside it; none: FP8 in every step. If all of them are off, the author's forward runs."""
    compressed: bool = False
    """What is kept of the input for backward is FP8: the layers beside it want that."""
    others: dict[str, Any] = field(default_factory=dict)
    """The attributes at conversion: with others it is another norm."""
    why_not: str | None = None
    """Why the last forward in training mode was the author's; None if it was not, or there was none."""
    reader: Reader | None = None
    """The last one; None: nobody read yet, or nobody does any longer."""
    unread: int = 0
    """Results in a row whose codes nobody read."""
    groups: int = 1
    """Groups of layers that come for the same codes of one result."""
    came: int = 0
    """How many did for the last result, so far."""
    fewer: int = 0
    """Results in a row for which fewer came than ``groups``."""

    def note_reader(self, recipe: Recipe, slot: AmaxSlot | None, needs_dw: bool, is_first: bool = True) -> None:
        """A layer cast the result, or found its codes. It is the first one's that the norm makes."""
        self.unread = 0
        if is_first or self.reader is None:
            self.reader = Reader(recipe, slot, needs_dw)
        elif needs_dw and self.reader.recipe is recipe and self.reader.slot is slot:
            self.reader = self.reader._replace(needs_dw=True)

    def note_groups(self, count: int) -> None:
        """So many groups of layers came for the same codes of one result."""
        self.came, self.groups = count, max(self.groups, count)

    def expect_groups(self) -> int:
        """How many will come for the next result: as many as ever, until fewer come a few times in a row."""
        if self.came:  # an unread result says nothing of them
            self.fewer = self.fewer + 1 if self.came < self.groups else 0
            if self.fewer > _TRIALS:
                self.groups, self.fewer = self.came, 0
        self.came = 0
        return self.groups

    def __getstate__(self) -> dict[str, Any]:
        """A copy learns anew who reads it: its layers have amax state of their own."""
        return {**self.__dict__, "reader": None, "unread": 0, "groups": 1, "came": 0, "fewer": 0}


class FusedNorm(nn.Module):
    """Mixin in front of the author's class. Made by conversion, not constructed."""

    _acceler8_norm: NormState

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """What the author's forward computes."""
        if torch.compiler.is_compiling() or not self.training:
            return cast(Tensor, super().forward(*args, **kwargs))
        state = self._acceler8_norm
        state.why_not = "its arguments are not one tensor" if len(args) != 1 or kwargs else self._why_not(args[0])
        if state.why_not is not None:
            return cast(Tensor, super().forward(*args, **kwargs))
        return run_norm(self, args[0])

    def _why_not(self, x: Any) -> str | None:
        """Why the author's forward is to run on ``x`` now; None if ours may."""
        state, weight = self._acceler8_norm, self._parameters.get("weight")
        if state.schedules and not any(schedule.is_on for schedule in state.schedules):
            return "high precision"
        if type(x) is not Tensor and type(x) is not nn.Parameter:
            return f"its input is a {type(x).__name__}"
        if any(type(p) is not nn.Parameter for p in self._parameters.values() if p is not None) or weight is None:
            return "a weight is no plain Parameter"
        if changed := what_changed(self, state.others):
            return f"{changed} is not what it was at conversion"
        if x.ndim == 0 or x.shape[-1:] != weight.shape or x.device != weight.device:
            return "its input has another width or device"
        for t in (x, *self._parameters.values()):
            if t is not None and t.dtype not in _DTYPES:
                return f"its input or a weight is in {t.dtype}"
        kind = state.kind
        by_weight = kind.cast_before_weight or kind.weight_offset
        if x.dtype is not weight.dtype and not by_weight and not runs_in_fp32(kind.kind, x.device.type, kind.autocasts):
            return "dtypes differ"
        return None

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _classes.rebuild, (self._acceler8_norm.author,), self.__getstate__()  # type: ignore[no-untyped-call]


_classes = AuthorsClass(FusedNorm)


def run_norm(module: FusedNorm, x: Tensor) -> Tensor:
    """The norm of ``x``, which must be possible, with the codes that its readers want on the result."""
    state = module._acceler8_norm
    kind, reader = state.kind, state.reader if torch.is_grad_enabled() else None
    if reader is not None:
        state.unread += 1
        if state.unread > _TRIALS:
            reader = state.reader = None
    if reader is not None and reader.slot is not None and not (reader.needs_dw and reader.recipe.wgrad.is_fp8):
        reader = None  # the reader's cast for wgrad records the amax; without it the reader is to cast the rows too
    recipe, slot, needs_dw = reader or (None, None, False)
    y, codes = norm(
        x,
        cast(Tensor, module._parameters["weight"]),
        module._parameters.get("bias"),
        getattr(module, kind.eps),
        kind=kind.kind,
        weight_offset=kind.weight_offset,
        cast_before_weight=kind.cast_before_weight,
        autocasts=kind.autocasts,
        recipe=recipe,
        slot=slot,
        records=False,  # whether this result is what the layer reads, only the layer knows
        column_amax=needs_dw,
        compressed=state.compressed,
    )
    shared = shared_input(y)
    if shared is not None:
        shared.producer, shared.groups = state, state.expect_groups()
        if codes is not None:
            shared.source = codes.source
        if recipe is not None and codes is not None:
            shared.column_amax = codes.column_amax
            cast_of_y = Cast.of("rows", recipe, recipe.fprop.a, slot, records=slot is None)
            if codes.rows is not None and cast_of_y is not None:
                shared.put(cast_of_y, codes.rows)
    return y


def neighbourhood(norm: str, holders: Collection[str]) -> str:
    """The innermost module around a norm that is one of ``holders``: of linear layers, say; else the root."""
    around = norm.rpartition(".")[0]
    while around and around not in holders:
        around = around.rpartition(".")[0]
    return around


def fused_norms(model: nn.Module) -> Iterator[tuple[str, FusedNorm]]:
    """``(name, module)`` of every norm that can hand on codes, names as in ``model.named_modules()``."""
    for name, module in model.named_modules():
        if isinstance(module, FusedNorm):
            yield name, module


def fuse_norm(module: nn.Module, state: NormState) -> None:
    """Change the class of a norm."""
    state.others = {name: value for name, value in module.__dict__.items() if name not in OF_EVERY_MODULE}
    module.__dict__[_STATE] = state
    swap_class(module, state.author, _classes.of(state.author))


def unfuse_norm(module: nn.Module) -> None:
    """Give a norm its author's class back."""
    state: NormState = module.__dict__.pop(_STATE)
    swap_class(module, _classes.of(state.author), state.author)
