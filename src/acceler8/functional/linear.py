"""FP8 linear layer: ``y = x @ w.T + bias`` with fprop, dgrad and wgrad in the formats of a recipe.

What is saved for backward is what wgrad will read of ``x`` (FP8 codes, laid out along the tokens; or ``x``
itself if wgrad runs in high precision) and, for dgrad, a reference to the weight. A GEMM whose result nobody
needs is skipped, with its casts. Tokens are filled to the GEMM's multiple inside, after quantisation: no amax, no
neighbour, no loss sees filler.

The quantised function is a staircase: its true derivative is zero almost everywhere. Gradients here are the
straight-through estimate, once; asking for a second derivative raises (elsewhere it is silently wrong).

The gradient of the bias is the FP32 sum of dy itself over tokens, added up on the way of dy's cast in a fixed order
(``kernels/cast_and_sum.py``); where dy is not cast, it is PyTorch's sum.

Source: Micikevicius et al. 2022, arXiv:2209.05433; NVIDIA TransformerEngine for which operand is saved.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from acceler8.errors import DtypeError, RecipeError, ShapeError
from acceler8.functional.call import PLAIN, Call, LinearSlots, Observer, once_only
from acceler8.functional.kept_input import Kept, KeptInput, Tensors
from acceler8.functional.shared_input import shared_input
from acceler8.functional.weight_codes import WeightCodes
from acceler8.kernels import Quantized
from acceler8.recipes import Recipe

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _fprop(x: Tensor, w: Tensor, bias: Tensor | None, call: Call) -> tuple[Tensor, Kept | None]:
    """``(y, kept)``: the result [M, N], and what is kept of ``x`` for a wgrad that reads codes."""
    fprop = call.recipe.fprop
    x_rows, kept = call.keep_input(x)
    w_rows = call.weight(w, "rows", fprop.b)
    if fprop.is_fp8:
        return call.multiply(fprop, x_rows, w_rows, bias), kept
    flat = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
    return _matmul(_values(flat, x_rows), _values(w, w_rows), call.out_dtype, bias), kept


def _backward(
    dy: Tensor, kept: Kept | None, tensors: Tensors, w: Tensor | None, in_features: int, call: Call, needs_dbias: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """``(dx, dw, dbias)``, None where nobody needs it. ``kept`` is what wgrad reads, ``w`` what dgrad reads."""
    dgrad, wgrad = call.recipe.dgrad, call.recipe.wgrad
    operands = dgrad.a if call.needs_dx else PLAIN, wgrad.a if call.needs_dw else PLAIN
    dbias = None
    if needs_dbias:
        dy_rows, dy_kept, dbias = call.cast_and_sum(dy, *operands)
    else:
        dy_rows, dy_kept = call.cast("dy", dy, *operands)
    dx = dw = None
    if w is not None:
        if dgrad.is_fp8:
            dx = call.multiply(dgrad, dy_rows, call.weight(w, "cols", dgrad.b))
        else:
            w_rows = call.weight(w, "rows", dgrad.b)
            dx = _matmul(_values(dy, dy_rows), _values(w, w_rows).t(), call.out_dtype)
    if call.needs_dw:
        assert kept is not None
        if wgrad.is_fp8:
            dw = call.multiply(wgrad, dy_kept, kept.codes(tensors, call))
        else:
            (x,) = tensors if isinstance(kept, KeptInput) else (kept.codes(tensors, call).dequantize(in_features),)
            assert x is not None
            dw = _matmul(_values(dy, dy_kept).t(), x.reshape(-1, in_features).t(), call.out_dtype)
    return dx, dw, dbias


def _values(t: Tensor, codes: Quantized | None) -> Tensor:
    """What a GEMM in high precision reads: the values of the codes, or ``t`` itself where there are none."""
    return t if codes is None else codes.dequantize(t.shape[1])


def _matmul(a: Tensor, b: Tensor, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """``a @ b.T (+ bias)`` in ``dtype``: a GEMM that the recipe keeps in high precision."""
    with torch.autocast(a.device.type, enabled=False):
        return F.linear(a.to(dtype), b.to(dtype), None if bias is None else bias.to(dtype))


class _Linear(torch.autograd.Function):
    """Any number of leading dimensions: flattening them outside would cost two autograd nodes more."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, call: Call) -> Tensor:
        y, kept = _fprop(x, w, bias, call)
        if call.needs_dw and kept is None:
            kept = KeptInput(x)
        ctx.save_for_backward(w if call.needs_dx else None, *(() if kept is None else kept.tensors()))
        ctx.kept = None if kept is None else kept.without_tensors()
        # not what is shared: fprop's codes of x are the last reader's to free, not backward's
        ctx.call = call if call.shared is None else call._replace(shared=None)
        ctx.x_dtype, ctx.x_shape = x.dtype, x.shape
        ctx.bias_dtype = None if bias is None else bias.dtype
        # as F.linear does: not a view to autograd, so that it may be changed in place
        return y if x.ndim == 2 else torch.ops.aten._unsafe_view.default(y, (*x.shape[:-1], y.shape[1]))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        w, *tensors = ctx.saved_tensors
        call: Call = ctx.call
        with torch.no_grad():
            if dy.ndim != 2:
                dy = dy.reshape(-1, dy.shape[-1])
            needs_dbias = ctx.needs_input_grad[2]
            dx, dw, dbias = _backward(dy, ctx.kept, tuple(tensors), w, ctx.x_shape[-1], call, needs_dbias)
            if dx is not None:
                dx = (dx if dx.dtype is ctx.x_dtype else dx.to(ctx.x_dtype)).view(ctx.x_shape)
            if dw is not None and dw.dtype is not call.w_dtype:
                dw = dw.to(call.w_dtype)
            if dbias is not None:
                dbias = dbias.to(ctx.bias_dtype)
        return *once_only(dx, dw, dbias), None


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    recipe: Recipe,
    slots: LinearSlots | None = None,
    codes: WeightCodes | None = None,
    observer: Observer | None = None,
    readers: int = 1,
) -> Tensor:
    """``x @ weight.T + bias`` in the formats of ``recipe``.

    Shape: x [..., K], weight [N, K], bias [N] -> [..., N]; K and N multiples of 16 where a GEMM runs in FP8;
        any number of tokens, also 0. dtypes bf16, fp16, fp32, the same for x and weight unless autocast is
        on; the result has autocast's dtype if it is on, else x's. Gradients come in the dtypes of their tensors.
    ``slots`` is needed by a delayed recipe. ``codes`` keeps weight codes while its window is open.
    ``observer`` gets the packed statistics of every cast. ``readers`` layers are expected to read this very ``x``, the
    same tensor object: they share its codes (``shared_input.py``), unless someone observes.
    Raises: ShapeError, DtypeError; RecipeError for delayed scaling without slots; DoubleBackwardError if a second
        derivative is asked for. The transforms of ``torch.func`` (grad, vmap, jvp) are refused by PyTorch;
        ``functional_call`` works.
    """
    w_dtype = weight.dtype if codes is None else codes.dtype_of(weight)
    device = x.device.type
    autocast = torch.is_autocast_enabled(device)
    _check(x, weight, bias, w_dtype, recipe, slots, autocast)
    out_dtype = torch.get_autocast_dtype(device) if autocast else x.dtype
    grad = torch.is_grad_enabled()
    needs_dx, needs_dw = grad and x.requires_grad, grad and weight.requires_grad
    if needs_dw and w_dtype is not weight.dtype:
        weight.grad_dtype = w_dtype  # codes stand in the weight's place; autograd would cast dw to their dtype
    shared = shared_input(x, make=readers > 1) if observer is None else None
    call = Call(recipe, slots, codes, observer, out_dtype, needs_dx, needs_dw, w_dtype, shared)
    y: Tensor = _Linear.apply(x, weight, bias, call)  # type: ignore[no-untyped-call]
    if shared is not None:
        shared.read(x, readers)
    return y


def _check(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    w_dtype: torch.dtype,
    recipe: Recipe,
    slots: LinearSlots | None,
    autocast: bool,
) -> None:
    if x.ndim == 0 or w.ndim != 2 or x.shape[-1] != w.shape[1]:
        raise ShapeError(
            f"linear got x {tuple(x.shape)} and weight {tuple(w.shape)}; allowed: x [..., K], weight [N, K]"
        )
    if bias is not None and bias.shape != w.shape[:1]:
        raise ShapeError(f"linear got bias {tuple(bias.shape)}; allowed: ({w.shape[0]},), one for each output")
    for name, dtype in (("x", x.dtype), ("weight", w_dtype)):
        if dtype not in _DTYPES:
            raise DtypeError(f"linear got {name} in {dtype}; allowed: bfloat16, float16, float32; cast it first")
    if x.dtype != w_dtype and not autocast:
        raise DtypeError(
            f"linear got x in {x.dtype} and weight in {w_dtype}; allowed: the same dtype, or any pair under"
            " torch.autocast; cast the input with x.to(weight.dtype)"
        )
    if (w.shape[0] % 16 or w.shape[1] % 16) and recipe.fp8_gemms:
        raise ShapeError(
            f"linear got out_features={w.shape[0]}, in_features={w.shape[1]}; allowed: multiples of 16, which FP8"
            " GEMM needs; pad the layer or skip it in the plan"
        )
    if slots is None and recipe.is_delayed:
        raise RecipeError(
            f"recipe {recipe.name!r} needs amax slots; convert the model, or use a current-scaling recipe"
        )


__all__ = ["LinearSlots", "Observer", "linear"]
