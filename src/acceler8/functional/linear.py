"""FP8 linear layer: ``y = x @ w.T + bias`` with fprop, dgrad and wgrad in the formats of a recipe.

What is saved for backward is what wgrad will read of ``x`` (FP8 codes, laid out along the tokens; or ``x`` itself if
wgrad runs in high precision) and a reference to the weight. A GEMM whose result nobody needs is skipped, with its
casts. Tokens are filled to the GEMM's multiple inside, after quantisation: no amax, no neighbour, no loss sees filler.

The quantised function is a staircase: its true derivative is zero almost everywhere. Gradients here are the
straight-through estimate, once; asking for a second derivative raises (elsewhere it is silently wrong).

Source: Micikevicius et al. 2022, arXiv:2209.05433; NVIDIA TransformerEngine for which operand is saved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from acceler8.errors import DoubleBackwardError, DtypeError, ShapeError
from acceler8.formats import Format
from acceler8.functional.weight_codes import WeightCodes
from acceler8.kernels import Quantized, quantize, scaled_matmul
from acceler8.recipes import Recipe
from acceler8.scaling import AmaxSlot, Granularity

Observer = Callable[[str, Tensor, int], None]  # role (x, w, dy), packed statistics, number of elements
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class LinearSlots(NamedTuple):
    """Delayed-scaling state of one layer's operands."""

    x: AmaxSlot
    w: AmaxSlot
    dy: AmaxSlot


class _Call(NamedTuple):
    """What one call of the layer carries beside its tensors."""

    recipe: Recipe
    slots: LinearSlots | None
    codes: WeightCodes | None
    observer: Observer | None
    out_dtype: torch.dtype
    needs_dx: bool
    needs_dw: bool

    def cast(
        self, role: str, t: Tensor, rows: Format | None, cols: Format | None, granularity: Granularity
    ) -> tuple[Quantized | None, Quantized | None]:
        """Quantise ``t`` in the orientations asked for; ``(None, None)`` if none is."""
        if rows is None and cols is None:
            return None, None
        slot: AmaxSlot | None = getattr(self.slots, role) if self.slots is not None else None
        as_rows, as_cols, packed = quantize(
            t,
            rows,
            cols,
            granularity,
            pow2=self.recipe.pow2_scales,
            margin=self.recipe.margin,
            amax=slot.in_use if slot is not None else None,
            staging=slot.staging if slot is not None else None,
            statistics=self.observer is not None,
        )
        if self.observer is not None and packed is not None:
            self.observer(role, packed, t.numel())
        return as_rows, as_cols

    def weight(self, w: Tensor, orientation: str, fmt: Format, granularity: Granularity) -> Quantized:
        """The weight's codes: kept ones inside a window, else fresh."""
        kept = self.codes.get(orientation) if self.codes is not None else None
        if kept is not None:
            return kept
        rows, cols = (fmt, None) if orientation == "rows" else (None, fmt)
        made = self.cast("w", w, rows, cols, granularity)[0 if orientation == "rows" else 1]
        assert made is not None
        if self.codes is not None:
            self.codes.put(orientation, made)
        return made


def _fprop(x: Tensor, w: Tensor, bias: Tensor | None, call: _Call) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """``(y, codes, scale_inv)``: the result, and what wgrad will read of ``x`` if it reads codes."""
    fprop, wgrad = call.recipe.fprop, call.recipe.wgrad
    fmt = fprop.a.format
    kept_format = wgrad.b.format if call.needs_dw else None
    # a wgrad in FP8 contracts tokens, so it reads x transposed; one in high precision reads dequantised rows
    cols = kept_format if wgrad.is_fp8 else None
    rows_kept = kept_format if not wgrad.is_fp8 else None
    rows = fmt if fmt is not None else rows_kept
    granularity = fprop.a.granularity if fmt is not None else wgrad.b.granularity
    as_rows, as_cols = call.cast("x", x, rows, cols, granularity)
    if rows_kept is not None and rows_kept is not rows:
        kept, _ = call.cast("x", x, rows_kept, None, wgrad.b.granularity)
    else:
        kept = as_cols if cols is not None else as_rows if rows_kept is not None else None

    if fprop.is_fp8:
        assert as_rows is not None and fprop.b.format is not None
        w_rows = call.weight(w, "rows", fprop.b.format, fprop.b.granularity)
        y = scaled_matmul(as_rows, w_rows, out_dtype=call.out_dtype, bias=bias, fast_accum=fprop.fast_accum)
    else:
        x_hp = x if fmt is None or as_rows is None else as_rows.dequantize(x.shape[1])
        w_hp = w if fprop.b.format is None else call.weight(w, "rows", fprop.b.format, fprop.b.granularity).dequantize(x.shape[1])
        y = _matmul(x_hp, w_hp, call.out_dtype, bias)
    return y, None if kept is None else kept.codes, None if kept is None else kept.scale_inv


def _backward(
    dy: Tensor, x: Tensor | None, x_codes: Tensor | None, x_inv: Tensor | None, w: Tensor, in_features: int, call: _Call
) -> tuple[Tensor | None, Tensor | None]:
    """``(dx, dw)``, None where nobody needs it."""
    dgrad, wgrad = call.recipe.dgrad, call.recipe.wgrad
    rows = dgrad.a.format if call.needs_dx else None
    cols = wgrad.a.format if call.needs_dw else None
    granularity = (dgrad if rows is not None else wgrad).a.granularity
    # operands that meet a high-precision partner are read as dequantised rows
    rows = rows if rows is not None or wgrad.is_fp8 else cols
    dy_rows, dy_cols = call.cast("dy", dy, rows, cols if wgrad.is_fp8 else None, granularity)

    dx = dw = None
    if call.needs_dx:
        if dgrad.is_fp8:
            assert dy_rows is not None and dgrad.b.format is not None
            w_cols = call.weight(w, "cols", dgrad.b.format, dgrad.b.granularity)
            dx = scaled_matmul(dy_rows, w_cols, out_dtype=call.out_dtype, fast_accum=dgrad.fast_accum)
        else:
            a = dy if dgrad.a.format is None or dy_rows is None else dy_rows.dequantize(dy.shape[1])
            b = w
            if dgrad.b.format is not None:
                b = call.weight(w, "rows", dgrad.b.format, dgrad.b.granularity).dequantize(in_features)
            dx = _matmul(a, b.t(), call.out_dtype)
    if call.needs_dw:
        if wgrad.is_fp8:
            assert dy_cols is not None and x_codes is not None and x_inv is not None
            x_cols = Quantized(x_codes, x_inv, wgrad.b.granularity)
            dw = scaled_matmul(dy_cols, x_cols, out_dtype=call.out_dtype, fast_accum=wgrad.fast_accum)
        else:
            a = dy if wgrad.a.format is None or dy_rows is None else dy_rows.dequantize(dy.shape[1])
            if x is None:
                assert x_codes is not None and x_inv is not None
                x = Quantized(x_codes, x_inv, wgrad.b.granularity).dequantize(in_features)
            dw = _matmul(a.t(), x.t(), call.out_dtype)
    return dx, dw


def _matmul(a: Tensor, b: Tensor, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """``a @ b.T (+ bias)`` in ``dtype``: a GEMM that the recipe keeps in high precision."""
    with torch.autocast(a.device.type, enabled=False):
        return F.linear(a.to(dtype), b.to(dtype), None if bias is None else bias.to(dtype))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, call: _Call) -> Tensor:
        y, codes, scale_inv = _fprop(x, w, bias, call)
        keeps_x = call.needs_dw and codes is None
        ctx.save_for_backward(x if keeps_x else None, codes, scale_inv, w)
        ctx.call, ctx.x_dtype, ctx.in_features = call, x.dtype, x.shape[1]
        ctx.bias_dtype = None if bias is None else bias.dtype
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (dy,) = grads
        x, codes, scale_inv, w = ctx.saved_tensors
        with torch.no_grad():
            dx, dw = _backward(dy, x, codes, scale_inv, w, ctx.in_features, ctx.call)
            dx = None if dx is None else dx.to(ctx.x_dtype)
            dw = None if dw is None else dw.to(w.dtype)
            dbias = dy.sum(0, dtype=torch.float32).to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # backward(create_graph=True)
            dx, dw, dbias = (g if g is None else _NoSecondDerivative.apply(g, dy) for g in (dx, dw, dbias))
        return dx, dw, dbias, None


class _NoSecondDerivative(torch.autograd.Function):
    """Identity on a first derivative whose own backward raises."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, dy: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        raise DoubleBackwardError(
            "a second derivative was asked of an FP8 linear layer, whose rounding has none; allowed: first derivatives;"
            " keep the layer in high precision (skip=[...] in the plan) or compute the penalty in model.eval()"
        )


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    recipe: Recipe,
    slots: LinearSlots | None = None,
    codes: WeightCodes | None = None,
    observer: Observer | None = None,
) -> Tensor:
    """``x @ weight.T + bias`` in the formats of ``recipe``.

    Shape: x [..., K], weight [N, K], bias [N] -> [..., N]; K and N multiples of 16 where a GEMM runs in FP8; any
        number of tokens, also 0. dtypes bf16, fp16, fp32, the same for x and weight unless autocast is on; the result
        has autocast's dtype if it is on, else x's. Gradients come in the dtypes of their tensors.
    ``slots`` is needed by a delayed recipe. ``codes`` keeps weight codes while its window is open. ``observer`` gets
    the packed statistics of every cast.
    Raises: ShapeError, DtypeError; DoubleBackwardError if a second derivative is asked for.
    """
    _check(x, weight, bias, recipe, slots)
    device = x.device.type
    autocast = torch.is_autocast_enabled(device)
    out_dtype = torch.get_autocast_dtype(device) if autocast else x.dtype
    grad = torch.is_grad_enabled()
    call = _Call(recipe, slots, codes, observer, out_dtype, grad and x.requires_grad, grad and weight.requires_grad)
    y: Tensor = _Linear.apply(x.reshape(-1, x.shape[-1]), weight, bias, call)  # type: ignore[no-untyped-call]
    return y.reshape(*x.shape[:-1], weight.shape[0])


def _check(x: Tensor, w: Tensor, bias: Tensor | None, recipe: Recipe, slots: LinearSlots | None) -> None:
    if x.ndim == 0 or w.ndim != 2 or x.shape[-1] != w.shape[1]:
        raise ShapeError(f"linear got x {tuple(x.shape)} and weight {tuple(w.shape)}; allowed: x [..., K], weight [N, K]")
    autocast = torch.is_autocast_enabled(x.device.type)
    for name, t in (("x", x), ("weight", w)):
        if t.dtype not in _DTYPES:
            raise DtypeError(f"linear got {name} in {t.dtype}; allowed: bfloat16, float16, float32; cast it first")
    if x.dtype != w.dtype and not autocast:
        raise DtypeError(
            f"linear got x in {x.dtype} and weight in {w.dtype}; allowed: the same dtype, or any pair under"
            " torch.autocast; cast the input with x.to(weight.dtype)"
        )
    if recipe.fp8_gemms and (w.shape[0] % 16 or w.shape[1] % 16):
        raise ShapeError(
            f"linear got out_features={w.shape[0]}, in_features={w.shape[1]}; allowed: multiples of 16, which FP8 GEMM"
            " needs; pad the layer or skip it in the plan"
        )
    if recipe.is_delayed and slots is None:
        raise ShapeError(f"recipe {recipe.name!r} needs amax slots; convert the model, or use a current-scaling recipe")


__all__ = ["LinearSlots", "Observer", "linear"]
