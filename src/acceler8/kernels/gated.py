"""Gated activation, forward and backward, straight into FP8: the middle of a Llama-like MLP.

    act = f(gate) * up        d_gate = d_act * up * f'(gate)        d_up = d_act * f(gate)

The projections of gate and up are one GEMM over concatenated weights, so ``gate`` and ``up`` are the left and right
half of one matrix, and so are their gradients. ``act`` is read by one GEMM of the forward and one of the backward, the
gradients by two of the backward: none of them is ever needed in high precision, and here none of them meets memory in
it. Nor is ``act`` kept for the backward, which computes it again, bit for bit, beside its own work.

Everything is FP32 between the load and the cast. ``f`` is one of ``_activations.py``. (The kernels are in
``_gated_kernel.py``.)

Source: Shazeer 2020, "GLU Variants Improve Transformer", arXiv:2002.05202.
"""

from __future__ import annotations

import torch
from torch import Tensor

from acceler8.errors import DtypeError, ShapeError
from acceler8.formats import Format
from acceler8.kernels import _triton
from acceler8.kernels._activations import (
    ACTIVATIONS,
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


def gated_ref(gate_up: Tensor, activation: str) -> Tensor:
    """Reference: ``act`` [M, F] of ``gate_up`` [M, 2F], FP32 (FP64 if that is what comes), plain PyTorch."""
    gate, up = _halves(gate_up)
    return activate_ref(gate, activation)[0] * up


def gated_backward_ref(d_act: Tensor, gate_up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Reference: ``(d_gate_up [M, 2F], act [M, F])``, FP32 (FP64 if that is what comes), plain PyTorch."""
    gate, up = _halves(gate_up)
    value, slope = activate_ref(gate, activation)
    d = d_act.to(gate.dtype)
    return torch.cat([d * up * slope, d * value], 1), value * up


def _halves(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = (gate_up if gate_up.dtype is torch.float64 else gate_up.float()).chunk(2, 1)
    return gate, up


# The library ops. A format is its name, or "" where that orientation is not wanted.


def _gated(
    gate_up: Tensor, activation: str, rows: str, cols: str, granularity: str, pow2: bool, margin: int,
    high_precision: bool, delayed: Delayed | None = None,
) -> list[Tensor]:  # fmt: skip
    if _triton.runs_on(gate_up) and gate_up.numel():
        return gated_triton(gate_up, activation, rows, cols, granularity, pow2, margin, high_precision, delayed)
    act = gated_ref(gate_up, activation)
    out = codes_ref(act, rows, cols, granularity, pow2, margin, delayed)
    return [*out, act.to(gate_up.dtype)] if high_precision else out


def _gated_fake(
    gate_up: Tensor, activation: str, rows: str, cols: str, granularity: str, pow2: bool, margin: int,
    high_precision: bool,
) -> list[Tensor]:  # fmt: skip
    act = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    out = cast_fake(act, rows, cols, granularity, pow2, margin, False)
    return [*out, act] if high_precision else out


def _gated_backward(
    d_act: Tensor, gate_up: Tensor, activation: str, rows: str, cols: str, act_cols: str, granularity: str,
    pow2: bool, margin: int, high_precision: bool, delayed: Delayed | None = None, act_delayed: Delayed | None = None,
) -> list[Tensor]:  # fmt: skip
    if _triton.runs_on(gate_up) and gate_up.numel():
        return gated_backward_triton(
            d_act, gate_up, activation, rows, cols, act_cols, granularity, pow2, margin, high_precision, delayed,
            act_delayed,
        )  # fmt: skip
    d, act = gated_backward_ref(d_act, gate_up, activation)
    out = codes_ref(d, rows, cols, granularity, pow2, margin, delayed)
    out += codes_ref(act, "", act_cols, granularity, pow2, margin, act_delayed)
    return [*out, d.to(gate_up.dtype)] if high_precision else out


def _gated_backward_fake(
    d_act: Tensor, gate_up: Tensor, activation: str, rows: str, cols: str, act_cols: str, granularity: str,
    pow2: bool, margin: int, high_precision: bool,
) -> list[Tensor]:  # fmt: skip
    d = torch.empty_like(gate_up, memory_format=torch.contiguous_format)
    out = cast_fake(d, rows, cols, granularity, pow2, margin, False)
    out += cast_fake(gate_up.new_empty(d_act.shape), "", act_cols, granularity, pow2, margin, False)
    return [*out, d] if high_precision else out


# With delayed scaling, which maxes into staging as quantize's op does


def _gated_delayed(
    gate_up: Tensor, amax: Tensor, staging: Tensor, activation: str, rows: str, cols: str, pow2: bool, margin: int,
    high_precision: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    out = _gated(
        gate_up, activation, rows, cols, TENSORWISE.name, pow2, margin, high_precision, (amax, staging)
    )  # fmt: skip
    return in_places(out, (rows, cols), gate_up, high_precision)


def _gated_delayed_fake(
    gate_up: Tensor, amax: Tensor, staging: Tensor, activation: str, rows: str, cols: str, pow2: bool, margin: int,
    high_precision: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    out = _gated_fake(gate_up, activation, rows, cols, TENSORWISE.name, pow2, margin, high_precision)
    return in_places(out, (rows, cols), gate_up, high_precision)


def _gated_backward_delayed(
    d_act: Tensor, gate_up: Tensor, amax: Tensor, staging: Tensor, act_amax: Tensor, act_staging: Tensor,
    activation: str, rows: str, cols: str, act_cols: str, pow2: bool, margin: int, high_precision: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    out = _gated_backward(
        d_act, gate_up, activation, rows, cols, act_cols, TENSORWISE.name, pow2, margin, high_precision,
        (amax, staging), (act_amax, act_staging),
    )  # fmt: skip
    return in_places(out, (rows, cols, act_cols), gate_up, high_precision)


def _gated_backward_delayed_fake(
    d_act: Tensor, gate_up: Tensor, amax: Tensor, staging: Tensor, act_amax: Tensor, act_staging: Tensor,
    activation: str, rows: str, cols: str, act_cols: str, pow2: bool, margin: int, high_precision: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    out = _gated_backward_fake(
        d_act, gate_up, activation, rows, cols, act_cols, TENSORWISE.name, pow2, margin, high_precision
    )  # fmt: skip
    return in_places(out, (rows, cols, act_cols), gate_up, high_precision)


for _name, _schema, _function, _fake in (
    (
        "gated",
        "(Tensor gate_up, str activation, str rows, str cols, str granularity, bool pow2, int margin,"
        " bool high_precision) -> Tensor[]",
        _gated,
        _gated_fake,
    ),
    (
        "gated_delayed",
        "(Tensor gate_up, Tensor amax, Tensor staging, str activation, str rows, str cols, bool pow2, int margin,"
        " bool high_precision) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
        _gated_delayed,
        _gated_delayed_fake,
    ),
    (
        "gated_backward",
        "(Tensor d_act, Tensor gate_up, str activation, str rows, str cols, str act_cols, str granularity, bool pow2,"
        " int margin, bool high_precision) -> Tensor[]",
        _gated_backward,
        _gated_backward_fake,
    ),
    (
        "gated_backward_delayed",
        "(Tensor d_act, Tensor gate_up, Tensor amax, Tensor staging, Tensor act_amax, Tensor act_staging,"
        " str activation, str rows, str cols, str act_cols, bool pow2, int margin, bool high_precision)"
        " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
        _gated_backward_delayed,
        _gated_backward_delayed_fake,
    ),
):
    library.define(_name + _schema)
    library.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"acceler8::{_name}", _fake, lib=library)


def gated(
    gate_up: Tensor,
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
    """``act = f(gate) * up`` in FP8, as it lies (``rows``), transposed (``cols``), and itself (``high_precision``).

    Shape: gate_up [M, 2F] bf16, fp16 or fp32, contiguous along its rows, gate left, up right -> codes [M, F'] for
        ``rows``, [F, M'] for ``cols``, act [M, F] in gate_up's dtype; None for what was not asked. ``activation`` is
        one of ``ACTIVATIONS``.
    Scales, filler, delayed scaling, saturation and NaN: as ``quantize`` does it, of the FP32 ``act``, which is rounded
        to FP8 once, not to 16 bits before. Without codes nothing is staged.
    Numerics: FP32, each operation rounded once. With u = 2^-24, on a GPU exp within (1.5 |t| + 4) u, a division within
        4 u and erf within 4 u: act is within (1.5 |g| + 11) u of its own magnitude (silu), within |up g| 5 u + 2 u
        |act| (gelu), within (7.5 |t| + 12) u with t the sigmoid's argument (gelu_tanh, quick_gelu), within u (relu);
        absolutely 2^-100 |up| where the sigmoid underflows. Deterministic.
        An infinite gate may give NaN where the limit would be 0. M may be 0.
    Raises: ShapeError, DtypeError as ``quantize``, for an odd number of columns, and for rows that are not contiguous;
        RecipeError for another activation.
    """
    _check_gate_up("gated", gate_up, activation)
    if rows is None and cols is None and not high_precision:
        raise DtypeError("gated was asked for nothing; give rows=, cols= or both a Format, or set high_precision=True")
    delayed = pair("gated", amax, staging, granularity)
    names = name_of(rows), name_of(cols)
    out: list[Tensor] | tuple[Tensor, ...]
    if may_go_direct(gate_up) and _triton.runs_on(gate_up) and gate_up.numel():
        out = gated_triton(gate_up, activation, *names, granularity.name, pow2, margin, high_precision, delayed)
    elif delayed is not None:
        placed = torch.ops.acceler8.gated_delayed.default(
            gate_up, *delayed, activation, *names, pow2, margin, high_precision
        )
        out = asked(placed, names, high_precision)
    else:
        out = torch.ops.acceler8.gated.default(
            gate_up, activation, *names, granularity.name, pow2, margin, high_precision
        )
    as_rows, as_cols = operands(out, (rows, cols), granularity)
    return as_rows, as_cols, out[-1] if high_precision else None


def gated_backward(
    d_act: Tensor,
    gate_up: Tensor | Quantized,
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
    kept_dtype: torch.dtype = torch.bfloat16,
) -> tuple[Quantized | None, Quantized | None, Quantized | None, Tensor | None]:
    """``d_gate_up = [d_act * up * f'(gate), d_act * f(gate)]`` in FP8, and ``act`` again for the next wgrad.

    Shape: d_act [M, F] any strides, gate_up [M, 2F] contiguous along its rows, bf16, fp16 or fp32 each -> codes
        [M, 2F] for ``d_rows``, [2F, M'] for ``d_cols``, codes of act [F, M'] for ``act_cols``, and d_gate_up [M, 2F] in
        gate_up's dtype if ``high_precision``; None for what was not asked.
    ``gate_up`` may be E4M3 codes with scales of 1x128: then the numbers are those of ``dequantize(gate_up, 2F,
    kept_dtype)``, read from the codes where F is a multiple of 128.
    Scales: those of the whole d_gate_up: a row's amax, and the tensor's, run over both halves. Delayed scaling with
        ``amax`` and ``staging`` for d_gate_up, ``act_amax`` and ``act_staging`` for act: as ``quantize``, for each
        whose codes are asked, or for none.
    Numerics: as ``gated``, and act has the bits that ``gated`` gave it. With e and u as there, f' is within 4 e + 16 u
        of max(1, |g|) times; d_gate adds 2 u, d_up 1 u. Deterministic. M may be 0.
    Raises: ShapeError if F is not a multiple of ``granularity.contraction_multiple`` (the halves would share a group or
        filler), and as ``gated``; DtypeError; RecipeError.
    """
    kept = None
    if isinstance(gate_up, Quantized):
        codes, inv, _ = gate_up
        can_read = not d_act.shape[1] % 128 and may_go_direct(codes) and may_go_direct(d_act)
        if can_read and _triton.runs_on(codes) and codes.numel():
            gate_up, kept = codes, (inv, kept_dtype)
        else:
            gate_up = dequantize(gate_up, 2 * d_act.shape[1], kept_dtype)
    _check_gate_up("gated_backward", gate_up, activation, kept is not None)
    _check_d_act(d_act, gate_up, granularity)
    if d_rows is None and d_cols is None and act_cols is None and not high_precision:
        raise DtypeError(
            "gated_backward was asked for nothing; give d_rows=, d_cols= or act_cols= a Format, or set"
            " high_precision=True"
        )
    names = name_of(d_rows), name_of(d_cols), name_of(act_cols)
    delayed, act_delayed = pairs(
        "gated_backward",
        "d_gate_up",
        None if d_rows is None and d_cols is None else (amax, staging),
        None if act_cols is None else (act_amax, act_staging),
        granularity,
    )
    out: list[Tensor] | tuple[Tensor, ...]
    if may_go_direct(gate_up) and may_go_direct(d_act) and _triton.runs_on(gate_up) and gate_up.numel():
        out = gated_backward_triton(
            d_act, gate_up, activation, *names, granularity.name, pow2, margin, high_precision, delayed, act_delayed,
            kept,
        )  # fmt: skip
    elif delayed is not None or act_delayed is not None:
        unused = gate_up.new_zeros(1, dtype=torch.float32), gate_up.new_zeros(1, dtype=torch.float32)
        placed = torch.ops.acceler8.gated_backward_delayed.default(
            d_act, gate_up, *(delayed or unused), *(act_delayed or unused), activation, *names,
            pow2, margin, high_precision,
        )  # fmt: skip
        out = asked(placed, names, high_precision)
    else:
        out = torch.ops.acceler8.gated_backward.default(
            d_act, gate_up, activation, *names, granularity.name, pow2, margin, high_precision
        )
    made = operands(out, (d_rows, d_cols, act_cols), granularity)
    return made[0], made[1], made[2], out[-1] if high_precision else None


def _check_gate_up(op: str, gate_up: Tensor, activation: str, is_kept: bool = False) -> None:
    check_activation(op, activation)
    if gate_up.ndim != 2 or gate_up.shape[1] % 2:
        raise ShapeError(
            f"{op} got gate_up {tuple(gate_up.shape)}; allowed: [M, 2F], gate left and up right; flatten batch"
            " dimensions first"
        )
    check_values(op, "gate_up", gate_up, is_kept)


def _check_d_act(d_act: Tensor, gate_up: Tensor, granularity: Granularity) -> None:
    features = gate_up.shape[1] // 2
    if d_act.shape != (gate_up.shape[0], features):
        raise ShapeError(
            f"gated_backward got d_act {tuple(d_act.shape)} and gate_up {tuple(gate_up.shape)}; allowed: [M, F] and"
            " [M, 2F]"
        )
    if d_act.dtype not in INPUT_DTYPES:
        raise DtypeError(
            f"gated_backward got d_act in {d_act.dtype}; allowed: bfloat16, float16, float32; cast it first"
        )
    if features % granularity.contraction_multiple:
        raise ShapeError(
            f"gated_backward got F={features} with {granularity} scales; allowed: multiples of"
            f" {granularity.contraction_multiple}, so that gate and up share no group and no filler; choose other"
            " scales or keep the MLP unfused"
        )


__all__ = ["ACTIVATIONS", "activate_ref", "gated", "gated_backward", "gated_backward_ref", "gated_ref"]
