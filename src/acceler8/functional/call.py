"""What a call of an FP8 operation carries beside its tensors: formats and scales of its casts, kept codes, observers.

Each operand of a GEMM is cast here, once for all the GEMMs that read it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from acceler8.errors import DoubleBackwardError
from acceler8.formats import Format
from acceler8.functional.kept_input import Kept, KeptCodes, KeptInput, is_kept_by_its_maker
from acceler8.functional.shared_input import Cast, SharedInput
from acceler8.functional.weight_codes import WeightCodes
from acceler8.kernels import (
    Quantized,
    column_sums_ref,
    multiply,
    quantize,
    quantize_and_sum,
    quantize_concatenated,
)
from acceler8.recipes import Gemm, Operand, Recipe
from acceler8.scaling import AmaxSlot, Granularity

Observer = Callable[[str, Tensor, int], None]  # role (x, w, dy), packed statistics, number of elements


class LinearSlots(NamedTuple):
    """Delayed-scaling state of one layer's operands; ``records`` False reads it and leaves no trace."""

    x: AmaxSlot
    w: AmaxSlot
    dy: AmaxSlot
    records: bool = True


class Call(NamedTuple):
    """What one call of the layer carries beside its tensors."""

    recipe: Recipe
    slots: LinearSlots | None
    codes: WeightCodes | None
    observer: Observer | None
    out_dtype: torch.dtype
    needs_dx: bool
    needs_dw: bool
    w_dtype: torch.dtype
    shared: SharedInput | None = None

    def keep_input(self, x: Tensor) -> tuple[Quantized | None, Kept | None]:
        """``(rows, kept)``: codes of ``x`` for fprop, and what stays of it for a wgrad that reads codes.

        Where the recipe has ``x`` itself saved, or made again from what a norm saved, no codes for wgrad are made yet.
        """
        recipe, shared = self.recipe, self.shared
        flat = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
        if self.needs_dw and recipe.wgrad.is_fp8:
            kept: Kept | None = None
            if recipe.save_for_backward == "bf16":
                kept = KeptInput(x)
            elif recipe.save_for_backward == "fp8_compressed" and shared is not None:
                kept = shared.source
            if kept is None and shared is None and is_kept_by_its_maker(x):
                kept = KeptInput(x)
            if kept is not None:
                return self._replace(needs_dw=False).cast_input(flat)[0], kept
        rows, codes = self.cast_input(flat)
        return rows, None if codes is None else KeptCodes(codes, recipe.wgrad.b.granularity)

    def again(self) -> Call:
        """For what forward has cast already: amax histories and observers have seen it."""
        slots = None if self.slots is None else self.slots._replace(records=False)
        return self._replace(slots=slots, observer=None)

    def cast_input(self, x: Tensor) -> tuple[Quantized | None, Quantized | None]:
        """Codes of ``x`` for fprop and for wgrad; those that another reader of ``x`` made, if there are any."""
        first, second = self.recipe.fprop.a, self.recipe.wgrad.b if self.needs_dw else PLAIN
        shared = self.shared
        if shared is None:
            return self.cast("x", x, first, second)
        casts = self._cast_of("rows", first), self._cast_of("cols" if self.recipe.wgrad.is_fp8 else "rows", second)
        shared.want(*casts)
        codes = [None if cast is None else shared.get(cast) for cast in casts]
        rows, cols = casts
        if rows is not None and rows.slot is not None and codes[0] is codes[1] is None:
            # codes of a norm, which leaves no trace in the amax state: the cast for wgrad that is still to come does
            if cols is not None and cols.orientation == "cols":
                codes[0] = shared.get(rows._replace(records=False))
            if codes[0] is not None:
                shared.put(rows, codes[0])
        lacks = [cast is not None and found is None for cast, found in zip(casts, codes, strict=True)]
        if self.slots is None or self.slots.records:
            shared.note(self.recipe, None if self.slots is None else self.slots.x, self.needs_dw)
        if any(lacks):
            made = self.cast(
                "x", x, first if lacks[0] else PLAIN, second if lacks[1] else PLAIN, column_amax=shared.column_amax
            )
            for i, (cast, new) in enumerate(zip(casts, made, strict=True)):
                if lacks[i] and cast is not None and new is not None:
                    codes[i] = new
                    shared.put(cast, new)
        return codes[0], codes[1]

    def _cast_of(self, orientation: str, operand: Operand) -> Cast | None:
        slot, records = (None, True) if self.slots is None else (self.slots.x, self.slots.records)
        return Cast.of(orientation, self.recipe, operand, slot, records)

    def cast(
        self, role: str, t: Tensor, first: Operand, second: Operand, *, column_amax: Tensor | None = None
    ) -> tuple[Quantized | None, Quantized | None]:
        """Codes of ``t`` (x or dy) for the GEMM that contracts its rows, and for wgrad, which contracts tokens.

        A wgrad in FP8 reads ``t`` transposed; one in high precision reads dequantised rows.
        """
        if self.recipe.wgrad.is_fp8:
            granularity = (first if first.is_fp8 else second).granularity
            return self.quantize(role, t, first.format, second.format, granularity, column_amax)
        rows, _ = self.quantize(role, t, first.format, None, first.granularity)
        if first.format is second.format:
            return rows, rows
        return rows, self.quantize(role, t, second.format, None, second.granularity)[0]

    def cast_and_sum(
        self, dy: Tensor, first: Operand, second: Operand
    ) -> tuple[Quantized | None, Quantized | None, Tensor]:
        """``cast`` of dy, and the FP32 sums of its columns: from the same read, or PyTorch's where nothing is cast."""
        wgrad_is_fp8 = self.recipe.wgrad.is_fp8
        lead = first if first.is_fp8 else second
        if not lead.is_fp8:
            return None, None, column_sums_ref(dy)
        rows, cols = (first.format, second.format) if wgrad_is_fp8 else (lead.format, None)
        amax, staging = self.scales_of("dy")
        as_rows, as_cols, packed, sums = quantize_and_sum(
            dy, rows, cols, lead.granularity, pow2=self.recipe.pow2_scales, margin=self.recipe.margin,
            amax=amax, staging=staging, statistics=self.observer is not None,
        )  # fmt: skip
        if self.observer is not None and packed is not None:
            self.observer("dy", packed, dy.numel())
        if wgrad_is_fp8:
            return as_rows, as_cols, sums
        of_first = as_rows if first.is_fp8 else None
        if lead.format is second.format:
            return of_first, as_rows, sums
        return of_first, self.quantize("dy", dy, second.format, None, second.granularity)[0], sums

    def weight(self, w: Tensor | tuple[Tensor, ...], orientation: str, operand: Operand) -> Quantized | None:
        """The weight's codes, kept ones inside a window, else fresh; None if the operand is in high precision.

        Several weights that read one activation are one operand, row after row.
        """
        if operand.format is None:
            return None
        kept = None
        if self.codes is not None:
            self.codes.follow(*(w if isinstance(w, tuple) else (w,)))
            kept = self.codes.get(orientation)
        if kept is not None and kept.codes.dtype is operand.format.torch_dtype:
            return kept
        rows, cols = (operand.format, None) if orientation == "rows" else (None, operand.format)
        made = self.quantize("w", w, rows, cols, operand.granularity)[0 if orientation == "rows" else 1]
        assert made is not None
        if self.codes is not None:
            self.codes.put(orientation, made)
        return made

    def quantize(
        self,
        role: str,
        t: Tensor | tuple[Tensor, ...],
        rows: Format | None,
        cols: Format | None,
        granularity: Granularity,
        column_amax: Tensor | None = None,
    ) -> tuple[Quantized | None, Quantized | None]:
        """Quantise ``t`` in the orientations asked for; ``(None, None)`` if none is."""
        if rows is None and cols is None:
            return None, None
        amax, staging = self.scales_of(role)
        if isinstance(t, tuple):  # nobody observes them: conversion runs such layers one by one then
            return quantize_concatenated(
                t,
                rows,
                cols,
                granularity,
                pow2=self.recipe.pow2_scales,
                margin=self.recipe.margin,
                amax=amax,
                staging=staging,
            )
        as_rows, as_cols, packed = quantize(
            t,
            rows,
            cols,
            granularity,
            pow2=self.recipe.pow2_scales,
            margin=self.recipe.margin,
            amax=amax,
            staging=staging,
            statistics=self.observer is not None,
            column_amax=column_amax,
        )
        if self.observer is not None and packed is not None:
            self.observer(role, packed, t.numel())
        return as_rows, as_cols

    def scales_of(self, role: str) -> tuple[Tensor | None, Tensor | None]:
        """``(amax, staging)`` of an operand under delayed scaling, as ``quantize`` takes them; else None twice."""
        if self.slots is None:
            return None, None
        slot: AmaxSlot = getattr(self.slots, role)
        return slot.in_use, slot.staging_for(records=self.slots.records)

    def multiply(self, gemm: Gemm, a: Quantized | None, b: Quantized | None, bias: Tensor | None = None) -> Tensor:
        """``a @ b.T (+ bias)`` of a GEMM in FP8."""
        assert a is not None
        assert b is not None
        return multiply(a, b, out_dtype=self.out_dtype, bias=bias, fast_accum=gemm.fast_accum)


PLAIN = Operand()


def once_only(*grads: Tensor | None) -> tuple[Tensor | None, ...]:
    """First derivatives that raise DoubleBackwardError when they are differentiated in their turn."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():  # not backward(create_graph=True)
        return grads
    device = next((g.device for g in grads if g is not None), None)
    # a leaf that wants a gradient: whoever differentiates again gets here, whatever dy and the inputs want
    leaf = torch.empty(0, device=device, requires_grad=True)
    return tuple(None if g is None else _NoSecondDerivative.apply(g, leaf) for g in grads)  # type: ignore[no-untyped-call]


class _NoSecondDerivative(torch.autograd.Function):
    """Identity on a first derivative whose own backward raises."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, leaf: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        raise DoubleBackwardError(
            "a second derivative was asked of an FP8 layer or a fused operation, which have none; allowed: first"
            " derivatives; keep the layer in high precision (skip=[...] in the plan) or compute the penalty in"
            " model.eval()"
        )
