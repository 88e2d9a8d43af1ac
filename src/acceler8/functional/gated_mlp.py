"""Gated MLP in FP8, as one operation: ``y = (f(x @ gate.T) * (x @ up.T)) @ down.T``.

Against three linear layers with the activation between them: ``x`` is cast once, gate and up are one GEMM over their
concatenated codes (and one dgrad in place of two and a sum), the activation goes into FP8 without having been stored in
high precision, and its gradient does too. Kept for backward are the codes of ``x`` that wgrad reads and the results of
gate and up; the activation is computed again from those, in the kernel that casts its gradient.

Gate and up may also be one layer, gate left (Phi-3 has it so): then that layer's GEMMs are those of the layer itself.

With scales for each row the GEMM of gate and up gives, bit for bit, what two give. Where a scale spans the tensor, gate
and up share one. The activation is FP32 until it is cast, where separate layers round it to 16 bit twice.

Source: Shazeer 2020, arXiv:2002.05202 (gated MLPs); Micikevicius et al. 2022, arXiv:2209.05433; NVIDIA
TransformerEngine's LayerNormMLP for what is worth fusing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from acceler8.functional.call import PLAIN, Call, LinearSlots, once_only
from acceler8.functional.kept_input import compress, saves_bytes
from acceler8.functional.linears import rows_of
from acceler8.functional.shared_input import shared_input
from acceler8.functional.weight_codes import WeightCodes
from acceler8.kernels import ACTIVATIONS, Quantized, dequantize, gated, gated_backward
from acceler8.recipes import Operand, Recipe
from acceler8.scaling import BLOCK_1x128, MX_1x32


def cannot_fuse(recipe: Recipe, features: int) -> str | None:
    """Why a gated MLP with ``features`` between gate and down cannot run as one operation; None if it can."""
    if not (recipe.fprop.is_fp8 and recipe.dgrad.is_fp8 and recipe.wgrad.is_fp8):
        return "a GEMM in high precision"
    group = {BLOCK_1x128.name: 128, MX_1x32.name: 32}.get(recipe.granularity.name, 16)
    if features % group:
        return f"{features} features are not a multiple of {group}: a block would span gate and up"
    return None


class _GatedMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gate: Tensor, up: Tensor | None, down: Tensor, activation: str, wide: Call, narrow: Call
    ) -> Tensor:
        recipe, fprop = wide.recipe, wide.recipe.fprop
        rows, kept = wide.keep_input(x)
        gate_up = wide.multiply(fprop, rows, wide.weight(_both(gate, up), "rows", fprop.b))
        del rows
        act, _, _ = _activate(gate_up, activation, fprop.a, PLAIN, narrow)
        y = narrow.multiply(fprop, act, narrow.weight(down, "rows", fprop.b))
        needs_d_act = wide.needs_dx or wide.needs_dw
        saved: tuple[Tensor | None, Tensor | None] = None, None
        if needs_d_act or narrow.needs_dw:
            saved = gate_up, None
            if recipe.save_for_backward == "fp8_compressed" and saves_bytes(gate_up.shape[1], gate_up.dtype):
                saved = compress(gate_up)[:2]
        ctx.save_for_backward(
            *saved, gate if wide.needs_dx else None, up if wide.needs_dx else None, down if needs_d_act else None,
            *(() if kept is None else kept.tensors()),
        )  # fmt: skip
        ctx.kept = None if kept is None else kept.without_tensors()
        ctx.of_gate_up = gate_up.shape[1], gate_up.dtype
        ctx.is_one = up is None
        ctx.activation = activation
        ctx.wide, ctx.narrow = wide._replace(shared=None), narrow
        ctx.x_dtype, ctx.x_shape = x.dtype, x.shape
        return y if x.ndim == 2 else torch.ops.aten._unsafe_view.default(y, (*x.shape[:-1], y.shape[1]))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        gate_up, of_codes, gate, up, down, *tensors = ctx.saved_tensors
        wide: Call = ctx.wide
        narrow: Call = ctx.narrow
        dgrad, wgrad = wide.recipe.dgrad, wide.recipe.wgrad
        dx = dgate = dup = ddown = None
        with torch.no_grad():
            width, kept_dtype = ctx.of_gate_up
            if of_codes is not None:
                gate_up = Quantized(gate_up, of_codes, BLOCK_1x128)
            # the activation of what was in FP8 is another one, whose amax is not that of forward
            of_act = narrow if of_codes is None else narrow.again()
            dy = dy if dy.ndim == 2 else dy.reshape(-1, dy.shape[-1])
            dy_rows, dy_kept = narrow.cast(
                "dy", dy, dgrad.a if down is not None else PLAIN, wgrad.a if narrow.needs_dw else PLAIN
            )
            act_kept = d_rows = d_kept = None
            if down is not None:
                d_act = narrow.multiply(dgrad, dy_rows, narrow.weight(down, "cols", dgrad.b))
                del dy_rows
                d_rows, d_kept, act_kept = _differentiate(d_act, gate_up, kept_dtype, ctx.activation, wide, of_act)
                del d_act
            elif narrow.needs_dw:
                gate_up = dequantize(gate_up, width, kept_dtype) if of_codes is not None else gate_up
                _, act_kept, _ = _activate(gate_up, ctx.activation, PLAIN, wgrad.b, of_act)
            if narrow.needs_dw:
                ddown = _as(narrow.multiply(wgrad, dy_kept, act_kept), narrow.w_dtype)
            del dy_kept, act_kept
            if wide.needs_dx:
                dx = _as(wide.multiply(dgrad, d_rows, wide.weight(_both(gate, up), "cols", dgrad.b)), ctx.x_dtype)
                dx = dx.view(ctx.x_shape)
            if wide.needs_dw:
                assert d_kept is not None
                x_kept = ctx.kept.codes(tuple(tensors), wide)
                parts = (d_kept,) if ctx.is_one else rows_of(d_kept, [width // 2] * 2)
                dgate, dup, *_ = *(_as(wide.multiply(wgrad, part, x_kept), wide.w_dtype) for part in parts), None
        return *once_only(dx, dgate, dup, ddown), None, None, None


def _both(gate: Tensor, up: Tensor | None) -> Tensor | tuple[Tensor, Tensor]:
    return gate if up is None else (gate, up)


def _as(t: Tensor, dtype: torch.dtype) -> Tensor:
    return t if t.dtype is dtype else t.to(dtype)


def _activate(
    gate_up: Tensor, activation: str, rows: Operand, cols: Operand, call: Call
) -> tuple[Quantized | None, Quantized | None, Tensor | None]:
    """The activation in FP8, as the layer behind it casts its input."""
    amax, staging = call.scales_of("x")
    return gated(
        gate_up,
        activation,
        rows.format,
        cols.format,
        (rows if rows.is_fp8 else cols).granularity,
        pow2=call.recipe.pow2_scales,
        margin=call.recipe.margin,
        amax=amax,
        staging=staging,
    )


def _differentiate(
    d_act: Tensor, gate_up: Tensor | Quantized, kept_dtype: torch.dtype, activation: str, wide: Call, narrow: Call
) -> tuple[Quantized | None, Quantized | None, Quantized | None]:
    """Gradient of gate and up in FP8, for dgrad and for wgrad, and the activation for the wgrad of down."""
    dgrad, wgrad = wide.recipe.dgrad, wide.recipe.wgrad
    amax, staging = wide.scales_of("dy")
    act_amax, act_staging = narrow.scales_of("x")
    rows, cols, act, _ = gated_backward(
        d_act,
        gate_up,
        activation,
        dgrad.a.format if wide.needs_dx else None,
        wgrad.a.format if wide.needs_dw else None,
        wgrad.b.format if narrow.needs_dw else None,
        dgrad.a.granularity,
        pow2=wide.recipe.pow2_scales,
        margin=wide.recipe.margin,
        amax=amax,
        staging=staging,
        act_amax=act_amax,
        act_staging=act_staging,
        kept_dtype=kept_dtype,
    )
    return rows, cols, act


def gated_mlp(
    x: Tensor,
    gate: Tensor,
    up: Tensor | None,
    down: Tensor,
    *,
    activation: str,
    recipe: Recipe,
    slots: tuple[LinearSlots, LinearSlots] | None = None,
    codes: tuple[WeightCodes, WeightCodes] | None = None,
) -> Tensor:
    """``(f(x @ gate.T) * (x @ up.T)) @ down.T`` in the formats of ``recipe``, which computes all its GEMMs in FP8.

    Shape: x [..., K], gate and up [F, K], down [N, F] -> [..., N]; all widths multiples of 16 (of 128 and 32 for F with
        blocks and MX); any number of tokens, also 0. dtypes bf16, fp16, fp32, the same for x and the weights unless
        autocast is on; the result has autocast's dtype if it is on, else x's.
    ``up`` None: ``gate`` holds both, [2F, K], gate above up.
    ``activation`` f is one of ``ACTIVATIONS``. ``slots``, of gate and up together and of down, are needed by a delayed
        recipe. ``codes``, of gate and up together and of down, keep weight codes while their window is open.
    Gate and up either both want a gradient or neither. Second derivatives raise DoubleBackwardError. Shapes and dtypes
    are the callers' to check: this is what converted modules run.
    """
    device = x.device.type
    autocast = torch.is_autocast_enabled(device)
    out_dtype = torch.get_autocast_dtype(device) if autocast else x.dtype
    grad = torch.is_grad_enabled()
    first, second = slots or (None, None)
    of_wide, of_narrow = codes or (None, None)
    needs_dx, needs_dw = grad and x.requires_grad, grad and gate.requires_grad
    shared = shared_input(x, make=False)
    wide = Call(recipe, first, of_wide, None, out_dtype, needs_dx, needs_dw, gate.dtype, shared)
    narrow = Call(
        recipe, second, of_narrow, None, out_dtype, needs_dx or needs_dw, grad and down.requires_grad, down.dtype
    )
    y: Tensor = _GatedMLP.apply(x, gate, up, down, activation, wide, narrow)  # type: ignore[no-untyped-call]
    if shared is not None:
        shared.read(x, 1)
    return y


__all__ = ["ACTIVATIONS", "cannot_fuse", "gated_mlp"]
