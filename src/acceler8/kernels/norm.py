"""RMSNorm and LayerNorm whose forward also writes the FP8 codes of its result, and their backward.

    rms     n = x / sqrt(mean(x**2) + eps)                              y = n * (offset + weight) + bias
    layer   n = (x - mean(x)) / sqrt(mean((x - mean(x))**2) + eps)      y = n * (offset + weight) + bias

    g = dy * (offset + weight)       dx = (g - n * mean(g * n) [- mean(g), layer]) / sqrt(...)
    dweight = sum over rows of dy * n                                   dbias = sum over rows of dy

With a residual r, x is h = x + r, rounded to its dtype as if it were added apart, and h is a result too; its other
readers' gradient dh is added to dx before that is rounded.

An FP8 linear layer behind a norm reads y only to cast it. Here a program holds whole rows in registers, so the cast
costs the codes' write and not another read: scales of rows and of groups inside them come from the same registers,
as do those of delayed scaling, whose amax is known. One current scale for the whole tensor needs all of y first: its
amax is found on the way and a second kernel casts. Codes are those of y as stored, rounded to its dtype, so that every
other reader of y and the FP8 GEMM see one tensor: they equal ``quantize(y, ...)`` bit for bit.

Inside, everything is FP32 (FP64 for an FP64 reference), with square roots and divisions rounded correctly; the sums of
a row run in another order than PyTorch's. Sums over rows are FP32 partial sums of fixed sets of rows, added in a fixed
order: no float atomics. (The kernels are in ``_norm_kernel.py``.)

Source: Zhang and Sennrich 2019, arXiv:1910.07467 (RMSNorm); Ba et al. 2016, arXiv:1607.06450 (LayerNorm).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from acceler8.errors import DtypeError, ShapeError
from acceler8.formats import FORMATS, Format
from acceler8.kernels import _triton
from acceler8.kernels._library import library, may_go_direct
from acceler8.kernels._norm_launch import (
    WIDEST_ROW,
    Options,
    Outputs,
    filled_width,
    norm_backward_triton,
    norm_triton,
    normed_dtype,
)
from acceler8.kernels.amax import compute_amax
from acceler8.kernels.operand import Quantized
from acceler8.kernels.quantize import quantize
from acceler8.scaling import GRANULARITIES, ROWWISE, TENSORWISE, BLOCK_128x128, Granularity

Kind = Literal["rms", "layer"]
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
DEFAULT_EPS = torch.finfo(torch.float32).eps
"""What ``torch.nn.RMSNorm(eps=None)`` adds, for BF16, FP16 and FP32 alike: the eps of the dtype in which it computes,
not that of x, which its documentation names. Source: ``torch._decomp.decompositions._fused_rms_norm``."""
_LEAST_EPS = 2.0**-126  # below it is no normal FP32 number, which a kernel's constants must be


class Normed(NamedTuple):
    """Result of ``norm_forward``: y [M, D] and what was asked for; None for the rest.

    rows: its codes. inverse_std [M] FP32 and, for layer, mean [M] FP32: what backward needs. column_amax [D] int32:
    bits of the FP32 amax of each column of y. amax [1] FP32: of y, with one current scale for all of it. h [M, D]:
    x + residual, if there is one.
    """

    y: Tensor
    rows: Quantized | None
    inverse_std: Tensor
    mean: Tensor | None
    column_amax: Tensor | None
    amax: Tensor | None
    h: Tensor | None


def result_dtype(x: torch.dtype, weight: Tensor | None, cast_before_weight: bool) -> torch.dtype:
    """The dtype that the plain module gives: that of what is normalised, promoted by the weight if it meets the rounded
    value.
    """
    return torch.promote_types(x, weight.dtype) if cast_before_weight and weight is not None else x


def norm_ref(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    kind: Kind,
    weight_offset: float = 0.0,
    cast_before_weight: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Reference: ``(y [M, D], inverse_std [M], mean [M] or None)`` in plain PyTorch; takes FP64 too."""
    dtype = dtype or result_dtype(x.dtype, weight, cast_before_weight)
    wide = x.to(torch.promote_types(x.dtype, torch.float32)).contiguous()  # sums must not follow the strides
    mean = None
    if kind == "layer":
        mean = wide.mean(1, keepdim=True)
        wide = wide - mean
    square = wide.square().mean(1, keepdim=True).add_(eps)
    inverse_std = torch.ones_like(square).div_(square.sqrt_())
    y = wide * inverse_std
    if cast_before_weight:
        y = y.to(x.dtype).to(wide.dtype)
    if weight is not None:
        y = y.mul_(_factor(weight, weight_offset, wide.dtype))
    if bias is not None:
        y = y.add_(bias.to(wide.dtype))
    return y.to(dtype), inverse_std.squeeze(1), None if mean is None else mean.squeeze(1)


def _factor(weight: Tensor, offset: float, dtype: torch.dtype) -> Tensor:
    return weight.to(dtype) + offset if offset else weight.to(dtype)


def norm_backward_ref(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    inverse_std: Tensor,
    mean: Tensor | None,
    *,
    weight_offset: float = 0.0,
    cast_before_weight: bool = False,
    weight_grad: bool = True,
    bias_grad: bool = True,
    dh: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Reference: ``(dx, dweight, dbias)`` in plain PyTorch; takes FP64 too."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32)).contiguous()  # sums must not follow the strides
    g = dy.to(wide.dtype).contiguous()
    inverse_std = inverse_std[:, None]
    normal = (wide if mean is None else wide - mean[:, None]) * inverse_std
    dweight = dbias = None
    if bias_grad:
        dbias = g.sum(0)
    if weight_grad:
        dweight = (g * (normal.to(x.dtype).to(wide.dtype) if cast_before_weight else normal)).sum(0)
    if weight is not None:
        g = g * _factor(weight, weight_offset, wide.dtype)
    along = (g * normal).mean(1, keepdim=True)
    if mean is not None:
        g = g - g.mean(1, keepdim=True)
    dx = (g - normal * along).mul_(inverse_std)
    if dh is not None:
        dx.add_(dh)
    return dx.to(x.dtype), dweight, dbias


def _fits(x: Tensor, options: Options) -> bool:
    """True if the kernels take it; else the reference and ``quantize`` do the same."""
    return (
        _triton.runs_on(x)
        and x.numel() > 0
        and filled_width(x.shape[1], options) <= WIDEST_ROW
        and not (options.rows and options.granularity == BLOCK_128x128.name)  # a block holds many rows
        and (options.eps == 0 or options.eps >= _LEAST_EPS)
    )


def _norm_by_parts(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, options: Options,
    amax: Tensor | None, staging: Tensor | None,
) -> Outputs:  # fmt: skip
    """The addition, the reference, then the cast and the amax as operations of their own."""
    h = None
    if residual is not None:
        x = h = (x + residual).contiguous()  # the dtype to which they promote: see ``normed_dtype``
    y, inverse_std, mean = norm_ref(
        x, weight, bias, options.eps, kind="layer" if options.is_layer else "rms", dtype=options.dtype,
        weight_offset=options.weight_offset, cast_before_weight=options.cast_before_weight,
    )  # fmt: skip
    codes = scale_inv = found = None
    if options.rows:
        granularity = GRANULARITIES[options.granularity]
        cast = {"pow2": options.pow2, "margin": options.margin}
        rows, _, _ = quantize(y, FORMATS[options.rows], None, granularity, amax=amax, staging=staging, **cast)  # type: ignore[arg-type]
        assert rows is not None
        codes, scale_inv, _ = rows
        if granularity is TENSORWISE and amax is None:
            found = compute_amax(y).view(torch.int32).reshape(1)
    column = compute_amax(y, 0).view(torch.int32) if options.column_amax else None
    return Outputs(y, inverse_std, mean, codes, scale_inv, column, found, h)


# The library ops: a dtype is itself, a format its name or "", and what was not asked an empty tensor in its place.

_Eight = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
_Input = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]  # x, residual, weight, bias


def _in_eight_places(x: Tensor, out: Outputs) -> _Eight:
    return tuple(x.new_empty(0) if t is None else t for t in out)  # type: ignore[return-value]


def _run(x: Tensor, given: _Input, amax: Tensor | None, staging: Tensor | None, options: Options) -> _Eight:
    _, residual, weight, bias = given
    if _fits(x, options):
        out = norm_triton(x, weight, bias, options, amax, staging, shares_memory=False, residual=residual)
    else:
        out = _norm_by_parts(*given, options, amax, staging)
    return _in_eight_places(x, out)


def _norm(x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, *options: object) -> _Eight:
    return _run(x, (x, residual, weight, bias), None, None, Options(*options))  # type: ignore[arg-type]


def _norm_delayed(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, amax: Tensor, staging: Tensor,
    *options: object,
) -> _Eight:  # fmt: skip
    return _run(x, (x, residual, weight, bias), amax, staging, Options(*options))  # type: ignore[arg-type]


def _run_fake(x: Tensor, residual: Tensor | None, options: Options, is_delayed: bool) -> _Eight:
    rows, cols = x.shape
    granularity = GRANULARITIES[options.granularity]
    codes = scale_inv = column = found = None
    if options.rows:
        multiple = granularity.contraction_multiple
        width = (cols + multiple - 1) // multiple * multiple
        codes = x.new_empty(rows, width, dtype=FORMATS[options.rows].torch_dtype)
        scale_inv = x.new_empty(granularity.scale_shape(rows, cols), dtype=torch.float32)
        if granularity is TENSORWISE and not is_delayed:
            found = x.new_empty(1, dtype=torch.int32)
    if options.column_amax:
        column = x.new_empty(cols, dtype=torch.int32)
    of_rows = [x.new_empty(rows, dtype=torch.float32) for _ in range(1 + options.is_layer)]
    y = x.new_empty(rows, cols, dtype=options.dtype)
    mean = of_rows[1] if options.is_layer else None
    h = None if residual is None else x.new_empty(rows, cols, dtype=normed_dtype(x, residual))
    return _in_eight_places(x, Outputs(y, of_rows[0], mean, codes, scale_inv, column, found, h))


def _norm_fake(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, *options: object
) -> _Eight:
    return _run_fake(x, residual, Options(*options), False)  # type: ignore[arg-type]


def _norm_delayed_fake(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, amax: Tensor, staging: Tensor,
    *options: object,
) -> _Eight:  # fmt: skip
    return _run_fake(x, residual, Options(*options), True)  # type: ignore[arg-type]


_GIVEN = "Tensor x, Tensor? residual, Tensor? weight, Tensor? bias"
_OPTIONS = (
    "float eps, bool is_layer, float weight_offset, bool cast_before_weight, ScalarType dtype, str rows_fmt,"
    " str granularity, bool pow2, int margin, bool column_amax"
)
_RESULTS = "(" + ", ".join(["Tensor"] * 8) + ")"
library.define(f"norm({_GIVEN}, {_OPTIONS}) -> {_RESULTS}")
library.impl("norm", _norm, "CompositeExplicitAutograd")
torch.library.register_fake("acceler8::norm", _norm_fake, lib=library)
library.define(f"norm_delayed({_GIVEN}, Tensor amax, Tensor staging, {_OPTIONS}) -> {_RESULTS}")
library.impl("norm_delayed", _norm_delayed, "CompositeExplicitAutograd")
torch.library.register_fake("acceler8::norm_delayed", _norm_delayed_fake, lib=library)


def norm_forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    kind: Kind = "rms",
    weight_offset: float = 0.0,
    cast_before_weight: bool = False,
    dtype: torch.dtype | None = None,
    rows: Format | None = None,
    granularity: Granularity = ROWWISE,
    pow2: bool = False,
    margin: int = 0,
    column_amax: bool = False,
    amax: Tensor | None = None,
    staging: Tensor | None = None,
    residual: Tensor | None = None,
) -> Normed:
    """Normalise each row of ``x``; with ``rows`` also quantise the result as it lies.

    Shape: x [M, D] bf16, fp16 or fp32, any strides (a copy is made unless each row is contiguous); weight, bias [D] of
        any of these or None -> see ``Normed``. M may be 0. More than 16384 columns run by parts: the reference, then
        ``quantize``; the same numbers up to the order of sums.
    ``cast_before_weight`` rounds n to x's dtype before the weight, as Hugging Face's LlamaRMSNorm does and
        torch.nn.RMSNorm does not; y then has the dtype to which x and weight promote, else that of x. ``dtype`` gives
        another. ``weight_offset`` 1.0 is Gemma's.
    ``residual`` [M, D] of any of the dtypes: h = x + residual is normalised in the place of x, and given. h has the
        dtype to which the two promote, and the bits of PyTorch's addition; "x's dtype" is then that of h. All else is
        that of ``norm_forward(h, ...)``, bit for bit, on one kind of device.
    ``rows, granularity, pow2, margin, amax, staging`` as in ``quantize``; ``column_amax`` finds the amax of each column
        of y, which row scales of the transposed cast need.
    Numerics: FP32 inside; y of rms before its rounding is within 40 * 2**-24 of float64, relatively (a sum of squares
        of at most 64 additions in a row, half of whose error reaches y, and a few roundings). Codes equal
        ``quantize(y, rows, None, ...)``. NaN or inf makes its own row NaN, no other. A row whose squares overflow FP32
        gives zeros (rms), as in PyTorch; eps 0 makes a row of zeros NaN. Deterministic.
    Raises: ShapeError if x is not 2-D, residual not of its shape, weight or bias not [D], or amax comes without staging
        or with groups smaller than the tensor; DtypeError for another dtype.
    """
    _check(x, weight, bias)
    if residual is not None:
        _check_like(x, residual, "norm_forward got residual")
    if (amax is None) != (staging is None) or (amax is not None and (rows is None or granularity is not TENSORWISE)):
        raise ShapeError(
            f"norm_forward got amax {'and' if staging is not None else 'without'} staging, rows={rows},"
            f" {granularity} scales; allowed: both amax and staging with rows and tensorwise scales, or neither"
        )
    dtype = dtype or result_dtype(normed_dtype(x, residual), weight, cast_before_weight)
    options = Options(
        eps, kind == "layer", weight_offset, cast_before_weight, dtype, "" if rows is None else rows.name,
        granularity.name, pow2, margin, column_amax,
    )  # fmt: skip
    if may_go_direct(x) and _fits(x, options):
        out = norm_triton(x, weight, bias, options, amax, staging, residual=residual)
    else:
        if amax is None or staging is None:
            eight: _Eight = torch.ops.acceler8.norm.default(x, residual, weight, bias, *options)
        else:
            eight = torch.ops.acceler8.norm_delayed.default(x, residual, weight, bias, amax, staging, *options)
        asked = (
            True, True, options.is_layer, rows is not None, rows is not None, column_amax,
            rows is not None and granularity is TENSORWISE and amax is None, residual is not None,
        )  # fmt: skip
        out = Outputs(*(t if is_asked else None for t, is_asked in zip(eight, asked, strict=True)))  # type: ignore[arg-type]
    as_rows = None
    if out.codes is not None and out.scale_inv is not None:
        as_rows = Quantized(out.codes, out.scale_inv, granularity)
    found = None if out.amax is None else out.amax.view(torch.float32)
    return Normed(out.y, as_rows, out.inverse_std, out.mean, out.column_amax, found, out.h)


def _norm_backward(
    dy: Tensor, dh: Tensor | None, x: Tensor, weight: Tensor | None, inverse_std: Tensor, mean: Tensor | None,
    weight_offset: float, cast_before_weight: bool, weight_grad: bool, bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    options = (weight_offset, cast_before_weight, weight_grad, bias_grad)
    if _backward_fits(x):
        three = norm_backward_triton(dy, x, weight, inverse_std, mean, *options, dh)
    else:
        three = norm_backward_ref(
            dy, x, weight, inverse_std, mean, weight_offset=weight_offset, cast_before_weight=cast_before_weight,
            weight_grad=weight_grad, bias_grad=bias_grad, dh=dh,
        )  # fmt: skip
    return tuple(x.new_empty(0) if t is None else t for t in three)  # type: ignore[return-value]


def _norm_backward_fake(
    dy: Tensor, dh: Tensor | None, x: Tensor, weight: Tensor | None, inverse_std: Tensor, mean: Tensor | None,
    weight_offset: float, cast_before_weight: bool, weight_grad: bool, bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dweight, dbias = (
        x.new_empty(x.shape[1], dtype=torch.float32) if asked else x.new_empty(0) for asked in (weight_grad, bias_grad)
    )
    return x.new_empty(x.shape), dweight, dbias


def _backward_fits(x: Tensor) -> bool:
    return _triton.runs_on(x) and x.numel() > 0 and x.shape[1] <= WIDEST_ROW


library.define(
    "norm_backward(Tensor dy, Tensor? dh, Tensor x, Tensor? weight, Tensor inverse_std, Tensor? mean,"
    " float weight_offset, bool cast_before_weight, bool weight_grad, bool bias_grad) -> (Tensor, Tensor, Tensor)"
)
library.impl("norm_backward", _norm_backward, "CompositeExplicitAutograd")
torch.library.register_fake("acceler8::norm_backward", _norm_backward_fake, lib=library)


def norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    inverse_std: Tensor,
    mean: Tensor | None,
    *,
    weight_offset: float = 0.0,
    cast_before_weight: bool = False,
    weight_grad: bool = True,
    bias_grad: bool = True,
    dh: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of ``norm_forward``'s y, whose ``inverse_std`` and ``mean`` (None: rms) these are.

    Shape: dy, x [M, D] bf16, fp16 or fp32, any strides, weight [D] or None -> dx [M, D] in x's dtype, dweight and dbias
        [D] FP32, None if not asked. ``dh`` [M, D], of any of the dtypes: what others than the norm want of x, which is
        added to dx.
    Numerics: FP32, dx rounded once. Roundings of the forward pass count as identities, except that dweight sums the n
        that the weight met. Deterministic on one kind of device: rows are summed in fixed sets. NaN or inf in a row
        reaches that row of dx, and dweight and dbias.
    Raises: ShapeError, DtypeError.
    """
    _check(x, weight, None)
    for name, t in (("dy", dy), ("dh", dh)):
        if t is not None:
            _check_like(x, t, f"norm_backward got {name}")
    options = (weight_offset, cast_before_weight, weight_grad, bias_grad)
    if may_go_direct(x) and _backward_fits(x):
        return norm_backward_triton(dy, x, weight, inverse_std, mean, *options, dh)
    three: tuple[Tensor, Tensor, Tensor]
    three = torch.ops.acceler8.norm_backward.default(dy, dh, x, weight, inverse_std, mean, *options)
    return three[0], three[1] if weight_grad else None, three[2] if bias_grad else None


def _check_like(x: Tensor, t: Tensor, what: str) -> None:
    if t.shape != x.shape or t.dtype not in _DTYPES:
        raise ShapeError(
            f"{what} {tuple(t.shape)} {t.dtype}, x {tuple(x.shape)}; allowed: bfloat16, float16 or float32 of one shape"
        )


def _check(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
    if x.ndim != 2:
        raise ShapeError(f"norm got {x.ndim} dimensions {tuple(x.shape)}; allowed: 2; flatten batch dimensions first")
    for name, t in (("x", x), ("weight", weight), ("bias", bias)):
        if t is None:
            continue
        if t.dtype not in _DTYPES:
            raise DtypeError(f"norm got {name} in {t.dtype}; allowed: bfloat16, float16, float32; cast it first")
        if t is not x and t.shape != x.shape[1:]:
            raise ShapeError(f"norm got {name} {tuple(t.shape)}; allowed: ({x.shape[1]},), one for each column")


__all__ = ["Kind", "Normed", "norm_backward", "norm_backward_ref", "norm_forward", "norm_ref", "result_dtype"]
