"""RMSNorm and LayerNorm that hand on the FP8 codes of their result beside it.

y is what the plain module gives, and every reader may take it; the codes are those of y, for the FP8 linear layers that
follow. The codes carry no gradient: a layer that multiplies them returns the gradient of y, the straight-through
estimate, as if it had cast y itself.

Backward saves x and a number or two a row. It is written for first derivatives; asking for a second one raises.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from acceler8.errors import ShapeError
from acceler8.formats import Format
from acceler8.functional.call import Call, once_only
from acceler8.functional.input_codes import InputCodes
from acceler8.functional.kept_input import Tensors, cast_for_wgrad, compress, expand, saves_bytes
from acceler8.kernels import Quantized, norm_backward, norm_forward
from acceler8.kernels.norm import DEFAULT_EPS, Kind, result_dtype
from acceler8.recipes import Recipe
from acceler8.scaling import ROWWISE, AmaxSlot, Granularity

_OPS = {"rms": "aten::rms_norm", "layer": "aten::layer_norm"}
# Operations that autocast runs in FP32: on CUDA layer_norm, and rms_norm in newer versions of PyTorch
_AUTOCAST = {
    (kind, device): torch._C._dispatch_has_kernel_for_dispatch_key(op, key)
    for kind, op in _OPS.items()
    for device, key in (("cuda", "AutocastCUDA"), ("cpu", "AutocastCPU"))
}


class _Call(NamedTuple):
    """What one call carries beside its tensors."""

    eps: float
    kind: Kind
    weight_offset: float
    cast_before_weight: bool
    dtype: torch.dtype
    rows: Format | None
    granularity: Granularity
    pow2: bool
    margin: int
    column_amax: bool
    compressed: bool


class NormInput(NamedTuple):
    """The input of a norm in FP8, as what a layer keeps that reads the result."""

    saved: Tensors
    """Codes and scales of the input, weight, bias."""
    call: _Call
    width: int
    dtype: torch.dtype

    def tensors(self) -> Tensors:
        """Codes and scales, which the norm saves as well, and its parameters."""
        return self.saved

    def codes(self, tensors: Tensors, call: Call) -> Quantized:
        """The result made again, and cast."""
        codes, scale_inv, weight, bias = tensors
        assert codes is not None
        assert scale_inv is not None
        c, wgrad = self.call, call.recipe.wgrad.b
        made = norm_forward(
            expand(codes, scale_inv, self.width, self.dtype), weight, bias, c.eps, kind=c.kind,
            weight_offset=c.weight_offset, cast_before_weight=c.cast_before_weight, dtype=c.dtype,
            column_amax=wgrad.granularity is ROWWISE,
        )  # fmt: skip
        return cast_for_wgrad(made.y, call, made.column_amax)

    def without_tensors(self) -> NormInput:
        """What is no tensor."""
        return self._replace(saved=())


class _Norm(torch.autograd.Function):
    """Any number of leading dimensions: flattening them outside would cost two autograd nodes more."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        amax: Tensor | None,
        staging: Tensor | None,
        call: _Call,
    ) -> tuple[Tensor | None, ...]:
        flat = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
        eps, kind, weight_offset, cast_before_weight, dtype, rows, granularity, pow2, margin, column_amax, _ = call
        made = norm_forward(
            flat, weight, bias, eps, kind=kind, weight_offset=weight_offset, cast_before_weight=cast_before_weight,
            dtype=dtype, rows=rows, granularity=granularity, pow2=pow2, margin=margin, column_amax=column_amax,
            amax=amax, staging=staging,
        )  # fmt: skip
        ctx.set_materialize_grads(False)  # codes get no gradient, nor zeros in its place
        small = compress(flat) if call.compressed else None
        x_codes, x_inv = (None, None) if small is None else (small.codes, small.scale_inv)
        ctx.save_for_backward(x if small is None else None, x_codes, x_inv, weight, made.inverse_std, made.mean)
        ctx.x_shape, ctx.x_dtype = x.shape, x.dtype
        ctx.call, ctx.bias_dtype = call, None if bias is None else bias.dtype
        # as F.linear does: not a view to autograd, so that it may be changed in place
        y = made.y if x.ndim == 2 else torch.ops.aten._unsafe_view.default(made.y, x.shape)
        codes, scale_inv = (None, None) if made.rows is None else (made.rows.codes, made.rows.scale_inv)
        beside = codes, scale_inv, made.column_amax, x_codes, x_inv
        ctx.mark_non_differentiable(*(t for t in beside if t is not None))
        return y, *beside

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        dy = grads[0]
        if dy is None:
            return None, None, None, None, None, None
        x, x_codes, x_inv, weight, inverse_std, mean = ctx.saved_tensors
        call: _Call = ctx.call
        with torch.no_grad():
            shape = ctx.x_shape
            if x is None:
                x = expand(x_codes, x_inv, shape[-1], ctx.x_dtype)
            x, dy = x.reshape(-1, shape[-1]), dy.reshape(-1, shape[-1])
            dx: Tensor | None
            dx, dweight, dbias = norm_backward(
                dy, x, weight, inverse_std, mean, weight_offset=call.weight_offset,
                cast_before_weight=call.cast_before_weight,
                weight_grad=ctx.needs_input_grad[1], bias_grad=ctx.needs_input_grad[2],
            )  # fmt: skip
            dx = dx.view(shape) if ctx.needs_input_grad[0] else None
            if dweight is not None:
                dweight = dweight.to(weight.dtype)
            if dbias is not None:
                dbias = dbias.to(ctx.bias_dtype)
        return *once_only(dx, dweight, dbias), None, None, None


def runs_in_fp32(kind: Kind, device: str, autocasts: bool) -> bool:
    """True if autocast now has PyTorch's own norm of this kind give FP32, and the plain module calls that."""
    return autocasts and _AUTOCAST.get((kind, device), False) and torch.is_autocast_enabled(device)


def norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None = None,
    eps: float | None = 1e-6,
    *,
    kind: Kind = "rms",
    weight_offset: float = 0.0,
    cast_before_weight: bool = False,
    recipe: Recipe | None = None,
    slot: AmaxSlot | None = None,
    records: bool = True,
    column_amax: bool = True,
    autocasts: bool | None = None,
    compressed: bool = False,
) -> tuple[Tensor, InputCodes | None]:
    """``(y, codes)``: x normalised along its last dimension, and the codes that ``recipe`` wants of it.

    Shape: x [..., D], weight, bias [D] or None, each bf16, fp16 or fp32 -> y [..., D], and codes of it flattened to
        [M, D]; None without a recipe or where it keeps fprop's input in high precision.
    ``eps`` None: FP32's, whatever dtype x has, as ``torch.nn.RMSNorm(eps=None)`` takes it.
    ``kind, weight_offset, cast_before_weight``: which plain module this stands for, as in ``norm_forward``. ``slot`` is
        the amax state of the input of the layer that follows, which a delayed recipe needs; ``records`` False leaves
        no trace in it. ``column_amax`` False leaves out the amax of columns, else found where gradients are on and
        the recipe's wgrad takes row scales.
    ``autocasts``: the plain module calls PyTorch's own rms_norm or layer_norm, which autocast on CUDA runs in FP32;
        None: it does unless it rounds before the weight or adds an offset. Elsewhere y has the dtype of x, or that to
        which x and weight promote if it rounds before the weight.
    ``compressed``: what is kept of x for backward is FP8 with a scale for 128 elements, if that is less, and
        ``codes.source`` makes y again from it.
    Gradients come in the dtypes of their tensors; weight and bias sum in FP32.
    Raises: ShapeError, DtypeError; DoubleBackwardError if a second derivative is asked for.
    """
    if x.ndim == 0:
        raise ShapeError("norm got a number; allowed: x [..., D]")
    if autocasts is None:
        autocasts = not (cast_before_weight or weight_offset)
    in_fp32 = runs_in_fp32(kind, x.device.type, autocasts)
    dtype = torch.float32 if in_fp32 else result_dtype(x, weight, cast_before_weight)
    rows, granularity, pow2, margin, amax, staging = None, ROWWISE, False, 0, None, None
    wants_columns = False
    if recipe is not None:
        rows, granularity = recipe.fprop.a.format, recipe.fprop.a.granularity
        pow2, margin = recipe.pow2_scales, recipe.margin
        wgrad = recipe.wgrad
        wants_columns = column_amax and wgrad.is_fp8 and wgrad.b.granularity is ROWWISE and torch.is_grad_enabled()
        if recipe.is_delayed and rows is not None:
            if slot is None:
                raise ShapeError(
                    f"recipe {recipe.name!r} needs an amax slot; convert the model, or use current scaling"
                )
            amax, staging = slot.in_use, slot.staging_for(records=records)
    saves_x = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias))
    compressed = compressed and saves_x and saves_bytes(x.shape[-1], x.dtype)
    call = _Call(
        DEFAULT_EPS if eps is None else float(eps), kind, weight_offset, cast_before_weight, dtype, rows, granularity,
        pow2, margin, wants_columns, compressed,
    )  # fmt: skip
    made = _Norm.apply(x, weight, bias, amax, staging, call)  # type: ignore[no-untyped-call]
    y, codes, scale_inv, columns, x_codes, x_inv = made
    if codes is None and columns is None and x_codes is None:
        return y, None
    as_rows = None if codes is None else Quantized(codes, scale_inv, granularity)
    source = None
    if x_codes is not None:
        source = NormInput((x_codes, x_inv, weight, bias), call, x.shape[-1], x.dtype)
    return y, InputCodes(as_rows, columns, source)


__all__ = ["norm"]
