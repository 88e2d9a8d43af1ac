"""MLP in FP8, as one operation: ``y = f(x @ first.T + bias) @ second.T + bias``; the gated one runs here too.

Against two linear layers with the activation between them: the activation goes into FP8 without having been stored in
high precision, and its gradient does too, in both orientations that GEMMs read. Kept for backward are the codes of
``x`` that wgrad reads and the result of the first layer; the activation is computed again from that, in the kernel that
casts its gradient and, for the first layer's bias, sums it.

With a gate (``gated_mlp.py``) the first layer is two, gate and up, whose results lie side by side.

The activation is FP32 until it is cast, where separate layers round it to 16 bit first.

Source: Micikevicius et al. 2022, arXiv:2209.05433; NVIDIA TransformerEngine's LayerNormMLP for what is worth fusing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from acceler8.functional.call import PLAIN, Call, LinearSlots, once_only
from acceler8.functional.kept_input import compress, saves_bytes
from acceler8.functional.linears import rows_of
from acceler8.functional.shared_input import shared_input
from acceler8.functional.weight_codes import WeightCodes
from acceler8.kernels import (
    ACTIVATIONS,
    Quantized,
    activation_backward,
    activation_forward,
    dequantize,
    gated,
    gated_backward,
)
from acceler8.recipes import Operand, Recipe
from acceler8.scaling import BLOCK_1x128


def cannot_fuse(recipe: Recipe) -> str | None:
    """Why an MLP in the formats of ``recipe`` cannot run as one operation; None if it can."""
    if recipe.fprop.is_fp8 and recipe.dgrad.is_fp8 and recipe.wgrad.is_fp8:
        return None
    return "a GEMM in high precision"


class _Kind(NamedTuple):
    """What is between the layers, and whether the first one's bias wants a gradient."""

    activation: str
    is_gated: bool
    needs_sums: bool


class _MLP(torch.autograd.Function):
    """``wide`` is the call of the layer in front of the activation, or of gate and up; ``narrow`` that behind it."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gate: Tensor, up: Tensor | None, down: Tensor, wide_bias: Tensor | None,
        narrow_bias: Tensor | None, kind: _Kind, wide: Call, narrow: Call,
    ) -> Tensor:  # fmt: skip
        recipe, fprop = wide.recipe, wide.recipe.fprop
        rows, kept = wide.keep_input(x)
        gate_up = wide.multiply(fprop, rows, wide.weight(_both(gate, up), "rows", fprop.b), wide_bias)
        del rows
        act, _, _ = _activate(gate_up, kind, fprop.a, PLAIN, narrow)
        y = narrow.multiply(fprop, act, narrow.weight(down, "rows", fprop.b), narrow_bias)
        needs_d_act = wide.needs_dx or wide.needs_dw or kind.needs_sums
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
        ctx.kind = kind
        ctx.bias_dtypes = [None if bias is None else bias.dtype for bias in (wide_bias, narrow_bias)]
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
        kind: _Kind = ctx.kind
        dx = dgate = dup = ddown = sums = dnarrow_bias = None
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
                d_rows, d_kept, act_kept, sums = _differentiate(d_act, gate_up, kept_dtype, kind, wide, of_act)
                del d_act
            elif narrow.needs_dw:
                gate_up = dequantize(gate_up, width, kept_dtype) if of_codes is not None else gate_up
                _, act_kept, _ = _activate(gate_up, kind, PLAIN, wgrad.b, of_act)
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
            of_wide, of_narrow = ctx.bias_dtypes
            dwide_bias = None if sums is None else _as(sums, of_wide)
            if ctx.needs_input_grad[5]:
                dnarrow_bias = dy.sum(0, dtype=torch.float32).to(of_narrow)
        return *once_only(dx, dgate, dup, ddown, dwide_bias, dnarrow_bias), None, None, None


def _both(gate: Tensor, up: Tensor | None) -> Tensor | tuple[Tensor, Tensor]:
    return gate if up is None else (gate, up)


def _as(t: Tensor, dtype: torch.dtype) -> Tensor:
    return t if t.dtype is dtype else t.to(dtype)


def _activate(
    gate_up: Tensor, kind: _Kind, rows: Operand, cols: Operand, call: Call
) -> tuple[Quantized | None, Quantized | None, Tensor | None]:
    """The activation in FP8, as the layer behind it casts its input."""
    amax, staging = call.scales_of("x")
    forward = gated if kind.is_gated else activation_forward
    return forward(
        gate_up,
        kind.activation,
        rows.format,
        cols.format,
        (rows if rows.is_fp8 else cols).granularity,
        pow2=call.recipe.pow2_scales,
        margin=call.recipe.margin,
        amax=amax,
        staging=staging,
    )


def _differentiate(
    d_act: Tensor, gate_up: Tensor | Quantized, kept_dtype: torch.dtype, kind: _Kind, wide: Call, narrow: Call
) -> tuple[Quantized | None, Quantized | None, Quantized | None, Tensor | None]:
    """Gradient of gate and up in FP8, for dgrad and for wgrad, the activation for the wgrad of down, and sums."""
    dgrad, wgrad = wide.recipe.dgrad, wide.recipe.wgrad
    amax, staging = wide.scales_of("dy")
    act_amax, act_staging = narrow.scales_of("x")
    operands = (
        d_act,
        gate_up,
        kind.activation,
        dgrad.a.format if wide.needs_dx else None,
        wgrad.a.format if wide.needs_dw else None,
        wgrad.b.format if narrow.needs_dw else None,
        dgrad.a.granularity,
    )
    options: dict[str, Any] = {
        "pow2": wide.recipe.pow2_scales,
        "margin": wide.recipe.margin,
        "amax": amax,
        "staging": staging,
        "act_amax": act_amax,
        "act_staging": act_staging,
        "kept_dtype": kept_dtype,
    }
    if kind.is_gated:
        return *gated_backward(*operands, **options)[:3], None
    rows, cols, act, _, sums = activation_backward(*operands, sums=kind.needs_sums, **options)
    return rows, cols, act, sums


def run(
    x: Tensor,
    gate: Tensor,
    up: Tensor | None,
    down: Tensor,
    wide_bias: Tensor | None,
    narrow_bias: Tensor | None,
    *,
    activation: str,
    is_gated: bool,
    recipe: Recipe,
    slots: tuple[LinearSlots, LinearSlots] | None,
    codes: tuple[WeightCodes, WeightCodes] | None,
) -> Tensor:
    """What ``mlp`` and ``gated_mlp`` do; ``wide`` is the layer in front of the activation, ``narrow`` that behind it.
    With a gate ``wide_bias`` must be None.
    """
    device = x.device.type
    autocast = torch.is_autocast_enabled(device)
    out_dtype = torch.get_autocast_dtype(device) if autocast else x.dtype
    grad = torch.is_grad_enabled()
    first, second = slots or (None, None)
    of_wide, of_narrow = codes or (None, None)
    needs_dx, needs_dw = grad and x.requires_grad, grad and gate.requires_grad
    kind = _Kind(activation, is_gated, grad and wide_bias is not None and wide_bias.requires_grad)
    shared = shared_input(x, make=False)
    wide = Call(recipe, first, of_wide, None, out_dtype, needs_dx, needs_dw, gate.dtype, shared)
    needs_d_act = needs_dx or needs_dw or kind.needs_sums
    narrow = Call(recipe, second, of_narrow, None, out_dtype, needs_d_act, grad and down.requires_grad, down.dtype)
    y: Tensor = _MLP.apply(  # type: ignore[no-untyped-call]
        x, gate, up, down, wide_bias, narrow_bias, kind, wide, narrow
    )
    if shared is not None:
        shared.read(x, 1)
    return y


def mlp(
    x: Tensor,
    first: Tensor,
    first_bias: Tensor | None,
    second: Tensor,
    second_bias: Tensor | None,
    *,
    activation: str,
    recipe: Recipe,
    slots: tuple[LinearSlots, LinearSlots] | None = None,
    codes: tuple[WeightCodes, WeightCodes] | None = None,
) -> Tensor:
    """``f(x @ first.T + first_bias) @ second.T + second_bias`` in the formats of ``recipe``, with all GEMMs in FP8.

    Shape: x [..., K], first [F, K], second [N, F], biases [F] and [N] or None -> [..., N]; all widths multiples of 16;
        any number of tokens, also 0. dtypes bf16, fp16, fp32, the same for x and the weights unless autocast is on; the
        result has autocast's dtype if it is on, else x's. Gradients come in the dtypes of their tensors.
    ``activation`` f is one of ``ACTIVATIONS``. ``slots``, of both layers, are needed by a delayed recipe. ``codes``, of
    both, keep weight codes while their window is open.
    Numerics: each bias is added as ``linear`` does, and its gradient is a sum in FP32: of the first, of the values that
        are cast, before they are; of the second, of dy. Deterministic.
    Any of the five may be frozen. Second derivatives raise DoubleBackwardError. Shapes and dtypes are the callers' to
    check: this is what converted modules run.
    """
    return run(
        x,
        first,
        None,
        second,
        first_bias,
        second_bias,
        activation=activation,
        is_gated=False,
        recipe=recipe,
        slots=slots,
        codes=codes,
    )


__all__ = ["ACTIVATIONS", "cannot_fuse", "mlp", "run"]
