"""RMSNorm and LayerNorm that hand on the FP8 codes of their result beside it.

y is what the plain module gives, and every reader may take it; the codes are those of y, for the FP8 linear layers that
follow. The codes carry no gradient: a layer that multiplies them returns the gradient of y, the straight-through
estimate, as if it had cast y itself.

``add_norm`` adds a residual on the way; conversion never uses it, since other people's models add theirs themselves.

Backward saves x (or the sum) and a number or two a row. It is written for first derivatives; asking for a second one
raises.
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
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        amax: Tensor | None,
        staging: Tensor | None,
        call: _Call,
    ) -> tuple[Tensor | None, ...]:
        flat, other = _flat(x), None if residual is None else _flat(residual)
        eps, kind, weight_offset, cast_before_weight, dtype, rows, granularity, pow2, margin, column_amax, _ = call
        made = norm_forward(
            flat, weight, bias, eps, kind=kind, weight_offset=weight_offset, cast_before_weight=cast_before_weight,
            dtype=dtype, rows=rows, granularity=granularity, pow2=pow2, margin=margin, column_amax=column_amax,
            amax=amax, staging=staging, residual=other,
        )  # fmt: skip
        # as F.linear does: not views to autograd, so that they may be changed in place
        y, h = made.y, made.h
        if x.ndim != 2:
            y = torch.ops.aten._unsafe_view.default(y, x.shape)
            h = None if h is None else torch.ops.aten._unsafe_view.default(h, x.shape)
        kept = x if h is None else h
        ctx.set_materialize_grads(False)  # codes get no gradient, nor zeros in its place
        small = compress(_flat(kept)) if call.compressed else None
        x_codes, x_inv = (None, None) if small is None else (small.codes, small.scale_inv)
        ctx.save_for_backward(kept if small is None else None, x_codes, x_inv, weight, made.inverse_std, made.mean)
        ctx.shape, ctx.kept_dtype = x.shape, kept.dtype
        ctx.dtypes = x.dtype, None if residual is None else residual.dtype
        ctx.call, ctx.bias_dtype = call, None if bias is None else bias.dtype
        codes, scale_inv = (None, None) if made.rows is None else (made.rows.codes, made.rows.scale_inv)
        beside = codes, scale_inv, made.column_amax, x_codes, x_inv
        no_gradient = beside if any(ctx.needs_input_grad[:2]) else (*beside, h)
        ctx.mark_non_differentiable(*(t for t in no_gradient if t is not None))
        return y, h, *beside

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        dy, dh = grads[:2]
        if dy is None and dh is None:
            return (None,) * 7
        x, x_codes, x_inv, weight, inverse_std, mean = ctx.saved_tensors
        call: _Call = ctx.call
        of_x, of_residual, of_weight, of_bias = ctx.needs_input_grad[:4]
        with torch.no_grad():
            shape, d, dweight, dbias = ctx.shape, dh, None, None
            if dy is not None:
                if x is None:
                    x = expand(x_codes, x_inv, shape[-1], ctx.kept_dtype)
                d, dweight, dbias = norm_backward(
                    _flat(dy), _flat(x), weight, inverse_std, mean, weight_offset=call.weight_offset,
                    cast_before_weight=call.cast_before_weight, weight_grad=of_weight, bias_grad=of_bias,
                    dh=None if dh is None else _flat(dh),
                )  # fmt: skip
                d = d.view(shape)
            assert d is not None
            dx, dresidual = (
                d.to(t) if wants else None for t, wants in zip(ctx.dtypes, (of_x, of_residual), strict=True)
            )
            if dweight is not None:
                dweight = dweight.to(weight.dtype)
            if dbias is not None:
                dbias = dbias.to(ctx.bias_dtype)
        return *once_only(dx, dresidual, dweight, dbias), None, None, None


def _flat(t: Tensor) -> Tensor:
    return t if t.ndim == 2 else t.reshape(-1, t.shape[-1])


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
    y, _, codes = norm_and_sum(
        x, None, weight, bias, eps, kind, weight_offset, cast_before_weight, recipe, slot, records, column_amax,
        autocasts, compressed,
    )  # fmt: skip
    return y, codes


def norm_and_sum(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float | None, kind: Kind,
    weight_offset: float, cast_before_weight: bool, recipe: Recipe | None, slot: AmaxSlot | None, records: bool,
    column_amax: bool, autocasts: bool | None, compressed: bool,
) -> tuple[Tensor, Tensor | None, InputCodes | None]:  # fmt: skip
    """``(y, h, codes)``: what ``norm`` and ``add_norm`` give; ``h`` None without a residual."""
    if x.ndim == 0:
        raise ShapeError("norm got a number; allowed: x [..., D]")
    if residual is not None and residual.shape != x.shape:
        raise ShapeError(f"add_norm got x {tuple(x.shape)}, residual {tuple(residual.shape)}; allowed: one shape")
    if autocasts is None:
        autocasts = not (cast_before_weight or weight_offset)
    in_fp32 = runs_in_fp32(kind, x.device.type, autocasts)
    own = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    dtype = torch.float32 if in_fp32 else result_dtype(own, weight, cast_before_weight)
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
    given = (x, residual, weight, bias)
    saves_x = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given)
    compressed = compressed and saves_x and saves_bytes(x.shape[-1], own)
    call = _Call(
        DEFAULT_EPS if eps is None else float(eps), kind, weight_offset, cast_before_weight, dtype, rows, granularity,
        pow2, margin, wants_columns, compressed,
    )  # fmt: skip
    made = _Norm.apply(*given, amax, staging, call)  # type: ignore[no-untyped-call]
    y, h, codes, scale_inv, columns, x_codes, x_inv = made
    if codes is None and columns is None and x_codes is None:
        return y, h, None
    as_rows = None if codes is None else Quantized(codes, scale_inv, granularity)
    source = None
    if x_codes is not None:
        source = NormInput((x_codes, x_inv, weight, bias), call, x.shape[-1], own)
    return y, h, InputCodes(as_rows, columns, source)


__all__ = ["norm"]
