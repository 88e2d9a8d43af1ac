"""Several FP8 linear layers that read one activation, as one operation: q, k and v of an attention.

``x`` is cast once, the weights are one operand row after row, and so are the gradients: one dgrad takes the place of
several and of the sums behind them. Each result is a tensor of its own, from a GEMM of its own, as those who called
separate layers expect. With scales for each row the results are bit-equal to those of separate layers; scales that span
a tensor span all the weights, or all the gradients.

Source: the functions of ``linear.py``; Megatron-LM and TransformerEngine for merging q, k and v.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from acceler8.formats import Format
from acceler8.functional.call import Call, LinearSlots, once_only
from acceler8.functional.shared_input import shared_input
from acceler8.functional.weight_codes import WeightCodes
from acceler8.kernels import Quantized, column_sums_ref, quantize_concatenated, quantize_concatenated_and_sum
from acceler8.recipes import Recipe
from acceler8.scaling import BLOCK_1x128, BLOCK_128x128, MX_1x32


def cannot_merge(recipe: Recipe, widths: Sequence[int]) -> str | None:
    """Why layers of these widths (out_features) cannot run as one operation; None if they can."""
    if not (recipe.fprop.is_fp8 and recipe.dgrad.is_fp8 and recipe.wgrad.is_fp8):
        return "a GEMM in high precision"
    group = {BLOCK_1x128.name: 128, BLOCK_128x128.name: 128, MX_1x32.name: 32}.get(recipe.granularity.name, 16)
    if any(width % group for width in widths):
        return f"a width is not a multiple of {group}: a block would span two layers"
    return None


def rows_of(codes: Quantized, widths: Sequence[int]) -> list[Quantized]:
    """An operand's parts, row after row. The scales have as many rows as the codes, or are one."""
    scale = codes.scale_inv
    if scale.ndim == 0:
        scales: Sequence[Tensor] = [scale] * len(widths)
    else:
        each = codes.granularity.rows
        scales = scale.split([width // each for width in widths])
    parts = zip(codes.codes.split(list(widths)), scales, strict=True)
    return [Quantized(part, its, codes.granularity) for part, its in parts]


def _cast_gradients(
    dys: list[Tensor], rows: Format | None, cols: Format | None, call: Call, with_sums: bool
) -> tuple[Quantized | None, Quantized | None, list[Tensor]]:
    """Codes of the transposed gradients, one below the other: rows are what wgrad reads, columns what dgrad does. And
    the FP32 sums of each over tokens; none if they are not asked.
    """
    amax, staging = call.scales_of("dy")
    granularity, pow2, margin = call.recipe.dgrad.a.granularity, call.recipe.pow2_scales, call.recipe.margin
    transposed = [dy.t() for dy in dys]
    if not with_sums:
        made = quantize_concatenated(
            transposed, rows, cols, granularity, pow2=pow2, margin=margin, amax=amax, staging=staging
        )
        return *made, []
    as_rows, as_cols, sums = quantize_concatenated_and_sum(
        transposed, rows, cols, granularity, pow2=pow2, margin=margin, amax=amax, staging=staging
    )
    return as_rows, as_cols, list(sums.split([dy.shape[1] for dy in dys]))


class _Linears(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Call, needs_dw: tuple[bool, ...], *parameters: Tensor | None) -> Any:
        count = len(needs_dw)
        weights: tuple[Any, ...] = parameters[:count]
        biases = parameters[count:]
        fprop = call.recipe.fprop
        rows, kept = call.keep_input(x)
        widths = [w.shape[0] for w in weights]
        w_rows = call.weight(weights, "rows", fprop.b)
        assert w_rows is not None
        ys = [
            call.multiply(fprop, rows, part, bias) for part, bias in zip(rows_of(w_rows, widths), biases, strict=True)
        ]
        ctx.save_for_backward(
            *(weights if call.needs_dx else [None] * count), *(() if kept is None else kept.tensors())
        )
        ctx.kept = None if kept is None else kept.without_tensors()
        ctx.set_materialize_grads(False)
        ctx.call, ctx.needs_dw, ctx.widths = call._replace(shared=None), needs_dw, widths
        ctx.x_dtype, ctx.x_shape = x.dtype, x.shape
        ctx.dtypes = [None if p is None else p.dtype for p in parameters]
        if x.ndim == 2:
            return tuple(ys)
        shape = x.shape[:-1]
        return tuple(torch.ops.aten._unsafe_view.default(y, (*shape, y.shape[1])) for y in ys)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        call: Call = ctx.call
        count = len(ctx.widths)
        saved = ctx.saved_tensors
        weights, tensors = saved[:count], saved[count:]
        dgrad, wgrad = call.recipe.dgrad, call.recipe.wgrad
        dx = None
        dws: list[Tensor | None] = [None] * count
        dbiases: list[Tensor | None] = [None] * count
        called = [i for i, dy in enumerate(grads) if dy is not None]
        with torch.no_grad():
            dys = [grads[i].reshape(-1, ctx.widths[i]) for i in called]  # type: ignore[union-attr]
            wants = call.needs_dx, any(ctx.needs_dw[i] for i in called)
            sums: list[Tensor] = []
            biased = [ctx.needs_input_grad[3 + count + i] for i in called]
            if called and any(wants):
                formats = wgrad.a.format if wants[1] else None, dgrad.a.format if wants[0] else None
                d_kept, d_rows, sums = _cast_gradients(dys, *formats, call, any(biased))
                if wants[0]:
                    w_cols = call.weight(tuple(weights[i] for i in called), "cols", dgrad.b)
                    dx = call.multiply(dgrad, d_rows, w_cols)
                    dx = (dx if dx.dtype is ctx.x_dtype else dx.to(ctx.x_dtype)).view(ctx.x_shape)
                if d_kept is not None:
                    x_kept = ctx.kept.codes(tensors, call)
                    for i, part in zip(called, rows_of(d_kept, [ctx.widths[i] for i in called]), strict=True):
                        if ctx.needs_dw[i]:
                            dw, dtype = call.multiply(wgrad, part, x_kept), ctx.dtypes[i]
                            dws[i] = dw if dw.dtype is dtype else dw.to(dtype)
            elif any(biased):
                sums = [column_sums_ref(dy) for dy in dys]
            for i, is_biased, its in zip(called, biased, sums, strict=False):
                if is_biased:
                    dbiases[i] = its.to(ctx.dtypes[count + i], copy=True)  # not a part of what all lie in
        first, *rest = once_only(dx, *dws, *dbiases)
        return first, None, None, *rest


def linears(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    *,
    recipe: Recipe,
    slots: LinearSlots | None = None,
    codes: WeightCodes | None = None,
) -> tuple[Tensor, ...]:
    """``x @ weight.T + bias`` for each weight, in the formats of ``recipe``, which computes all its GEMMs in FP8.

    Shape: x [..., K], weights [N_i, K], biases [N_i] or None -> [..., N_i] each. dtypes as ``linear``, weights alike.
    ``slots`` are those of all the layers together, needed by a delayed recipe; ``codes`` keep the codes of all the
    weights together while a window is open. Results that nobody uses cost their GEMM and get no gradient. Shapes and
    dtypes are the callers' to check: this is what converted modules run.
    """
    device = x.device.type
    autocast = torch.is_autocast_enabled(device)
    out_dtype = torch.get_autocast_dtype(device) if autocast else x.dtype
    grad = torch.is_grad_enabled()
    needs_dw = tuple(grad and w.requires_grad for w in weights)
    shared = shared_input(x, make=False)
    call = Call(
        recipe, slots, codes, None, out_dtype, grad and x.requires_grad, any(needs_dw), weights[0].dtype, shared
    )
    ys: tuple[Tensor, ...] = _Linears.apply(x, call, needs_dw, *weights, *biases)  # type: ignore[no-untyped-call]
    if shared is not None:
        shared.read(x, 1)
    return ys


__all__ = ["cannot_merge", "linears", "rows_of"]
