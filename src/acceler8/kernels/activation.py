"""Activation without a gate, forward and backward, straight into FP8: the middle of the MLP of a GPT or a ViT.

    act = f(x)        dx = d_act * f'(x)        sums[f] = sum over tokens of dx[m, f]

As ``gated.py`` with an ``up`` of one, on the same kernels: ``act`` is read by one GEMM of the forward and one of the
backward, ``dx`` by two of the backward, so neither meets memory in high precision, and ``act`` is not kept but computed
again, bit for bit. The layer in front of an MLP's activation often has a bias, whose gradient is the sum of ``dx`` over
the tokens; where ``dx`` exists in FP8 only, its FP32 values are summed while they are cast.

The sum is one of sums: of a tile's 64 or 128 tokens, then of tiles, in an order that depends on the shape alone.

Source: Hendrycks and Gimpel 2016, arXiv:1606.08415; NVIDIA TransformerEngine's ``cast_transpose_dbias_dgelu`` for
summing where the gradient is cast.
"""

from __future__ import annotations

import torch
from torch import Tensor

from acceler8.errors import DtypeError, ShapeError
from acceler8.formats import Format
from acceler8.kernels import _triton
from acceler8.kernels._activations import (
    INPUT_DTYPES,
    activate_ref,
    asked,
    check_activation,
    check_values,
    codes_ref,
    in_places,
    name_of,
    operands,
    pair,
    pairs,
)
from acceler8.kernels._gated_launch import Delayed, gated_backward_triton, gated_triton
from acceler8.kernels._library import library, may_go_direct
from acceler8.kernels.dequantize import dequantize
from acceler8.kernels.operand import Quantized
from acceler8.kernels.quantize import cast_fake
from acceler8.scaling import TENSORWISE, Granularity


def activation_ref(x: Tensor, activation: str) -> Tensor:
    """Reference: ``f(x)``, FP32 (FP64 if that is what comes), plain PyTorch."""
    return activate_ref(_wide(x), activation)[0]


def activation_backward_ref(d_act: Tensor, x: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Reference: ``(dx, act)``, FP32 (FP64 if that is what comes), plain PyTorch."""
    x = _wide(x)
    value, slope = activate_ref(x, activation)
    return d_act.to(x.dtype) * slope, value


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype is torch.float64 else x.float()


# The library ops. A format is its name, or "" where that orientation is not wanted.


def _activation(
    x: Tensor, activation: str, rows: str, cols: str, granularity: str, pow2: bool, margin: int,
    high_precision: bool, delayed: Delayed | None = None,
) -> list[Tensor]:  # fmt: skip
    if _triton.runs_on(x) and x.numel():
        return gated_triton(x, activation, rows, cols, granularity, pow2, margin, high_precision, delayed, False)
    act = activation_ref(x, activation)
    out = codes_ref(act, rows, cols, granularity, pow2, margin, delayed)
    return [*out, act.to(x.dtype)] if high_precision else out


def _activation_fake(
    x: Tensor, activation: str, rows: str, cols: str, granularity: str, pow2: bool, margin: int, high_precision: bool
) -> list[Tensor]:
    out = cast_fake(x, rows, cols, granularity, pow2, margin, False)
    return [*out, x.new_empty(x.shape)] if high_precision else out


def _activation_backward(
    d_act: Tensor, x: Tensor, activation: str, rows: str, cols: str, act_cols: str, granularity: str, pow2: bool,
    margin: int, high_precision: bool, sums: bool, delayed: Delayed | None = None, act_delayed: Delayed | None = None,
) -> list[Tensor]:  # fmt: skip
    if _triton.runs_on(x) and x.numel():
        return gated_backward_triton(
            d_act, x, activation, rows, cols, act_cols, granularity, pow2, margin, high_precision, delayed,
            act_delayed, None, False, sums,
        )  # fmt: skip
    d, act = activation_backward_ref(d_act, x, activation)
    out = codes_ref(d, rows, cols, granularity, pow2, margin, delayed)
    out += codes_ref(act, "", act_cols, granularity, pow2, margin, act_delayed)
    return [*out, *([d.to(x.dtype)] if high_precision else []), *([d.sum(0)] if sums else [])]


def _activation_backward_fake(
    d_act: Tensor, x: Tensor, activation: str, rows: str, cols: str, act_cols: str, granularity: str, pow2: bool,
    margin: int, high_precision: bool, sums: bool,
) -> list[Tensor]:  # fmt: skip
    out = cast_fake(x, rows, cols, granularity, pow2, margin, False)
    out += cast_fake(x, "", act_cols, granularity, pow2, margin, False)
    high = [x.new_empty(x.shape)] if high_precision else []
    return [*out, *high, *([x.new_empty(x.shape[1], dtype=torch.float32)] if sums else [])]


def _activation_delayed(
    x: Tensor, amax: Tensor, staging: Tensor, activation: str, rows: str, cols: str, pow2: bool, margin: int,
    high_precision: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    out = _activation(x, activation, rows, cols, TENSORWISE.name, pow2, margin, high_precision, (amax, staging))
    return in_places(out, (rows, cols), x, high_precision)


def _activation_delayed_fake(
    x: Tensor, amax: Tensor, staging: Tensor, activation: str, rows: str, cols: str, pow2: bool, margin: int,
    high_precision: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    out = _activation_fake(x, activation, rows, cols, TENSORWISE.name, pow2, margin, high_precision)
    return in_places(out, (rows, cols), x, high_precision)


def _activation_backward_delayed(
    d_act: Tensor, x: Tensor, amax: Tensor, staging: Tensor, act_amax: Tensor, act_staging: Tensor, activation: str,
    rows: str, cols: str, act_cols: str, pow2: bool, margin: int, high_precision: bool, sums: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    out = _activation_backward(
        d_act, x, activation, rows, cols, act_cols, TENSORWISE.name, pow2, margin, high_precision, sums,
        (amax, staging), (act_amax, act_staging),
    )  # fmt: skip
    return in_places(out, (rows, cols, act_cols), x, high_precision, sums)


def _activation_backward_delayed_fake(
    d_act: Tensor, x: Tensor, amax: Tensor, staging: Tensor, act_amax: Tensor, act_staging: Tensor, activation: str,
    rows: str, cols: str, act_cols: str, pow2: bool, margin: int, high_precision: bool, sums: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    out = _activation_backward_fake(
        d_act, x, activation, rows, cols, act_cols, TENSORWISE.name, pow2, margin, high_precision, sums
    )
    return in_places(out, (rows, cols, act_cols), x, high_precision, sums)


_FORWARD = "str activation, str rows, str cols"
_OPTIONS = "bool pow2, int margin, bool high_precision"

for _schema, _function, _fake in (
    (
        f"activation(Tensor x, {_FORWARD}, str granularity, {_OPTIONS}) -> Tensor[]",
        _activation,
        _activation_fake,
    ),
    (
        f"activation_delayed(Tensor x, Tensor amax, Tensor staging, {_FORWARD}, {_OPTIONS})"
        " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
        _activation_delayed,
        _activation_delayed_fake,
    ),
    (
        f"activation_backward(Tensor d_act, Tensor x, {_FORWARD}, str act_cols, str granularity, {_OPTIONS}, bool sums)"
        " -> Tensor[]",
        _activation_backward,
        _activation_backward_fake,
    ),
    (
        "activation_backward_delayed(Tensor d_act, Tensor x, Tensor amax, Tensor staging, Tensor act_amax,"
        f" Tensor act_staging, {_FORWARD}, str act_cols, {_OPTIONS}, bool sums)"
        " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
        _activation_backward_delayed,
        _activation_backward_delayed_fake,
    ),
):
    library.define(_schema)
    _name = _schema.partition("(")[0]
    library.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"acceler8::{_name}", _fake, lib=library)


def activation_forward(
    x: Tensor,
    activation: str,
    rows: Format | None,
    cols: Format | None,
    granularity: Granularity,
    *,
    pow2: bool = False,
    margin: int = 0,
    amax: Tensor | None = None,
    staging: Tensor | None = None,
    high_precision: bool = False,
) -> tuple[Quantized | None, Quantized | None, Tensor | None]:
    """``act = f(x)`` in FP8, as it lies (``rows``), transposed (``cols``), and itself (``high_precision``).

    Shape: x [M, F] bf16, fp16 or fp32, contiguous along its rows -> codes [M, F'] for ``rows``, [F, M'] for ``cols``,
        act [M, F] in x's dtype; None for what was not asked. ``activation`` is one of ``ACTIVATIONS``.
    Scales, filler, delayed scaling, saturation, NaN and numerics: as ``gated`` with an ``up`` of one. Deterministic.
    Raises: ShapeError, DtypeError as ``quantize``, and for rows that are not contiguous; RecipeError for another
        activation.
    """
    _check_x("activation_forward", x, activation)
    if rows is None and cols is None and not high_precision:
        raise DtypeError(
            "activation_forward was asked for nothing; give rows=, cols= or both a Format, or set high_precision=True"
        )
    delayed = pair("activation_forward", amax, staging, granularity)
    names = name_of(rows), name_of(cols)
    ops, out = torch.ops.acceler8, []
    if may_go_direct(x) and _triton.runs_on(x) and x.numel():
        out = gated_triton(x, activation, *names, granularity.name, pow2, margin, high_precision, delayed, False)
    elif delayed is not None:
        placed = ops.activation_delayed.default(x, *delayed, activation, *names, pow2, margin, high_precision)
        out = asked(placed, names, high_precision)
    else:
        out = ops.activation.default(x, activation, *names, granularity.name, pow2, margin, high_precision)
    as_rows, as_cols = operands(out, (rows, cols), granularity)
    return as_rows, as_cols, out[-1] if high_precision else None


def activation_backward(
    d_act: Tensor,
    x: Tensor | Quantized,
    activation: str,
    d_rows: Format | None,
    d_cols: Format | None,
    act_cols: Format | None,
    granularity: Granularity,
    *,
    pow2: bool = False,
    margin: int = 0,
    amax: Tensor | None = None,
    staging: Tensor | None = None,
    act_amax: Tensor | None = None,
    act_staging: Tensor | None = None,
    high_precision: bool = False,
    sums: bool = False,
    kept_dtype: torch.dtype = torch.bfloat16,
) -> tuple[Quantized | None, Quantized | None, Quantized | None, Tensor | None, Tensor | None]:
    """``dx = d_act * f'(x)`` in FP8, ``act`` again for the next wgrad, and the sums of ``dx`` over the tokens.

    Shape: d_act [M, F] any strides, x [M, F] contiguous along its rows, bf16, fp16 or fp32 each -> codes [M, F'] for
        ``d_rows``, [F, M'] for ``d_cols``, codes of act [F, M'] for ``act_cols``, dx [M, F] in x's dtype if
        ``high_precision``, and [F] FP32 if ``sums``; None for what was not asked.
    ``x`` may be E4M3 codes with scales of 1x128: then the numbers are those of ``dequantize(x, F, kept_dtype)``, read
        from the codes where F is a multiple of 128.
    Scales, delayed scaling and numerics: as ``gated_backward`` with an ``up`` of one. ``sums`` adds the FP32 values
        that are cast: within (log2(tile) + tiles) 2^-24 of the sum of their magnitudes, a tile having 64 tokens, 128
        with blocks. Deterministic. M may be 0.
    Raises: ShapeError, DtypeError, RecipeError as ``activation_forward``.
    """
    kept = None
    if isinstance(x, Quantized):
        codes, inv, _ = x
        can_read = not d_act.shape[1] % 128 and may_go_direct(codes) and may_go_direct(d_act)
        if can_read and _triton.runs_on(codes) and codes.numel():
            x, kept = codes, (inv, kept_dtype)
        else:
            x = dequantize(x, d_act.shape[1], kept_dtype)
    op = "activation_backward"
    _check_x(op, x, activation, kept is not None)
    if d_act.shape != x.shape:
        raise ShapeError(f"{op} got d_act {tuple(d_act.shape)} and x {tuple(x.shape)}; allowed: the same shape [M, F]")
    if d_act.dtype not in INPUT_DTYPES:
        raise DtypeError(f"{op} got d_act in {d_act.dtype}; allowed: bfloat16, float16, float32; cast it first")
    if d_rows is None and d_cols is None and act_cols is None and not high_precision and not sums:
        raise DtypeError(
            f"{op} was asked for nothing; give d_rows=, d_cols= or act_cols= a Format, or set high_precision=True or"
            " sums=True"
        )
    names = name_of(d_rows), name_of(d_cols), name_of(act_cols)
    of_d = None if d_rows is None and d_cols is None else (amax, staging)
    of_act = None if act_cols is None else (act_amax, act_staging)
    delayed, act_delayed = pairs(op, "dx", of_d, of_act, granularity)
    ops, out = torch.ops.acceler8, []
    if may_go_direct(x) and may_go_direct(d_act) and _triton.runs_on(x) and x.numel():
        out = gated_backward_triton(
            d_act, x, activation, *names, granularity.name, pow2, margin, high_precision, delayed, act_delayed, kept,
            False, sums,
        )  # fmt: skip
    elif delayed is not None or act_delayed is not None:
        unused = x.new_zeros(1, dtype=torch.float32), x.new_zeros(1, dtype=torch.float32)
        placed = ops.activation_backward_delayed.default(
            d_act, x, *(delayed or unused), *(act_delayed or unused), activation, *names, pow2, margin,
            high_precision, sums,
        )  # fmt: skip
        out = asked(placed, names, high_precision, sums)
    else:
        out = ops.activation_backward.default(
            d_act, x, activation, *names, granularity.name, pow2, margin, high_precision, sums
        )
    made = operands(out, (d_rows, d_cols, act_cols), granularity)
    high = out[-1 - sums] if high_precision else None
    return made[0], made[1], made[2], high, out[-1] if sums else None


def _check_x(op: str, x: Tensor, activation: str, is_kept: bool = False) -> None:
    check_activation(op, activation)
    if x.ndim != 2:
        raise ShapeError(f"{op} got x {tuple(x.shape)}; allowed: [M, F]; flatten batch dimensions first")
    check_values(op, "x", x, is_kept)


__all__ = ["activation_backward", "activation_backward_ref", "activation_forward", "activation_ref"]
