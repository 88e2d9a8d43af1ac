"""Quantise: high precision in, FP8 codes and scales out, in the orientations that GEMMs contract along.

    scale = fmt.max / max(amax of the group, 1e-12)      codes = round_to_nearest_even(clamp(x * scale))

An FP8 GEMM wants both operands contiguous along the contraction, and each tensor of a linear layer is
contracted along two different dimensions, so each is needed twice: as it lies (``rows``) and transposed
(``cols``: the codes of ``x.t()``, groups along its rows). One kernel makes either or both from a single read.
Where the groups are whole tensors, rows or columns, their amax is found first (``amax.py``, or earlier steps
for delayed scaling); local blocks find theirs inside the tile. (The kernels are in ``_quantize_kernel.py``.)

The contracted dimension is filled with zero codes up to ``granularity.contraction_multiple``, after
quantisation: no amax ever sees the filler and it adds exactly zero to a GEMM.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from acceler8.errors import DtypeError, ShapeError
from acceler8.formats import FORMATS, Format, decode
from acceler8.kernels import _triton
from acceler8.kernels._library import library, may_go_direct
from acceler8.kernels._quantize_launch import quantize_triton
from acceler8.kernels.operand import Quantized
from acceler8.kernels.statistics import PACKED, pack_ref
from acceler8.scaling import (
    GRANULARITIES,
    ROWWISE,
    TENSORWISE,
    Granularity,
    compute_scale,
    compute_scale_e8m0,
    expand_groups,
    group_amax,
    multiply_groups,
)

_INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def quantize_ref(
    x: Tensor,
    fmt: Format,
    granularity: Granularity,
    *,
    pow2: bool = False,
    margin: int = 0,
    amax: Tensor | None = None,
    statistics: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Reference: ``(codes [R, C'], scale_inv, packed statistics or None)`` of ``x`` [R, C], plain PyTorch.

    ``amax`` [1] replaces the tensor's own if it is above zero and finite (delayed scaling). For ``cols`` pass
    ``x.t()``: elementwise work follows the strides, only the codes are transposed.
    """
    own = group_amax(x, granularity)
    used = own if amax is None else torch.where((amax[0] > 0) & amax[0].isfinite(), amax[0], own)
    if granularity.e8m0:
        scale, scale_inv = compute_scale_e8m0(used, fmt, margin=margin)
    else:
        scale, scale_inv = compute_scale(used, fmt, pow2=pow2, margin=margin)
    x_fp32 = x.float()
    in_place = x_fp32 is not x and not statistics  # nobody else reads the copy: saves a pass over new memory
    y = multiply_groups(x_fp32, scale, granularity, in_place=in_place)
    clamped = torch.clamp(y, -fmt.max, fmt.max, out=None if statistics else y)
    if not bool(own.isfinite().all()):
        clamped = torch.where(x.isfinite(), clamped, torch.nan)
    codes = clamped.to(fmt.torch_dtype)
    packed = None
    if statistics:
        inv = expand_groups(scale_inv, granularity, *x.shape)
        packed = pack_ref(x_fp32, y, decode(codes), inv, fmt.saturates_above)
    return _contiguous_filled(codes, granularity.contraction_multiple), scale_inv, packed


def _contiguous_filled(codes: Tensor, multiple: int) -> Tensor:
    """Codes as a GEMM reads them: contiguous, rows filled with zeros to a multiple."""
    if filler := -codes.shape[1] % multiple:
        codes = F.pad(codes.view(torch.uint8), (0, filler)).view(codes.dtype)
    return codes.contiguous()  # torch transposes a third faster with an FP8 dtype than with uint8


def cast_ref(
    x: Tensor,
    rows: Format | None,
    cols: Format | None,
    granularity: Granularity,
    *,
    staging: Tensor | None = None,
    **options: Any,
) -> list[Tensor]:
    """Both orientations by reference: ``[codes, scale_inv]`` of ``rows``, of ``cols``, statistics, as asked."""
    out: list[Tensor] = []
    if staging is not None:
        stage(staging, group_amax(x, TENSORWISE))
    packed = of_cols = None
    if rows is not None:
        codes, scale_inv, packed = quantize_ref(x, rows, granularity, **options)
        out += [codes, scale_inv]
    multiple = granularity.contraction_multiple
    if rows is cols and granularity.is_square and not any(n % multiple for n in x.shape):
        # the groups of x.t() are those of x: its codes are the same bytes, transposed
        inv = out[1].t().contiguous() if out[1].ndim else out[1].clone()
        out += [_contiguous_filled(out[0].t(), multiple), inv]
    elif cols is not None:
        options["statistics"] = options.get("statistics", False) and packed is None
        codes, scale_inv, of_cols = quantize_ref(x.t(), cols, granularity, **options)
        out += [codes, scale_inv]
    packed = of_cols if packed is None else packed
    return out if packed is None else [*out, packed]


def stage(staging: Tensor, amax: Tensor) -> None:
    """Max ``amax`` [] into ``staging`` [1] unseen: its version does not change, as it does not for a kernel."""
    unseen = staging.data
    torch.maximum(unseen, amax, out=unseen)


# The library ops. A format is its name, or "" where that orientation is not wanted.
#
# Those of delayed scaling max into ``staging`` and do not declare it. Declared, torch.compile makes the change itself:
# it saves the state for backward and finds it changed by the next block or the next micro-batch, or writes back what it
# read before another call staged more. Undeclared is right because nothing in a step reads staging and a maximum may
# be taken in any order and twice. It needs that no copy of ``staging`` is made on the way: see ``AmaxState``. A
# compiled layer whose result nobody uses is left out, and stages nothing; run eagerly it does.


def _cast(
    x: Tensor, rows_fmt: str, cols_fmt: str, granularity: str, pow2: bool, margin: int, statistics: bool,
    amax: Tensor | None = None, staging: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    # Statistics come from the reference, on the tensor's own device: with its sums in the kernel, Triton 3.6 on an
    # H200 gave sums and filler codes that differed from run to run; without them the kernel gave the reference's
    # codes wherever it was compared.
    if _triton.runs_on(x) and x.numel() and not statistics:
        return quantize_triton(x, rows_fmt, cols_fmt, granularity, pow2, margin, amax, staging)
    rows, cols = FORMATS.get(rows_fmt), FORMATS.get(cols_fmt)
    return cast_ref(
        x, rows, cols, GRANULARITIES[granularity], pow2=pow2, margin=margin, amax=amax, staging=staging,
        statistics=statistics,
    )  # fmt: skip


def cast_fake(
    x: Tensor, rows_fmt: str, cols_fmt: str, granularity: str, pow2: bool, margin: int, statistics: bool
) -> list[Tensor]:
    """What a cast of ``x`` gives, without values."""
    groups = GRANULARITIES[granularity]
    multiple = groups.contraction_multiple
    out = []
    for name, (rows, cols) in ((rows_fmt, x.shape), (cols_fmt, (x.shape[1], x.shape[0]))):
        if name:
            width = (cols + multiple - 1) // multiple * multiple
            out += [
                x.new_empty(rows, width, dtype=FORMATS[name].torch_dtype),
                x.new_empty(groups.scale_shape(rows, cols), dtype=torch.float32),
            ]
    return [*out, x.new_empty(len(PACKED), dtype=torch.float64)] if statistics else out


_Five = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _cast_delayed(
    x: Tensor, amax: Tensor, staging: Tensor, rows_fmt: str, cols_fmt: str, pow2: bool, margin: int, statistics: bool
) -> _Five:
    out = _cast(x, rows_fmt, cols_fmt, TENSORWISE.name, pow2, margin, statistics, amax, staging)
    return _in_five_places(out, x, bool(rows_fmt), bool(cols_fmt))


def _cast_delayed_fake(
    x: Tensor, amax: Tensor, staging: Tensor, rows_fmt: str, cols_fmt: str, pow2: bool, margin: int, statistics: bool
) -> _Five:
    out = cast_fake(x, rows_fmt, cols_fmt, TENSORWISE.name, pow2, margin, statistics)
    return _in_five_places(out, x, bool(rows_fmt), bool(cols_fmt))


def _in_five_places(out: list[Tensor], x: Tensor, rows: bool, cols: bool) -> _Five:
    """Fixed places, empty tensors for what was not asked."""
    none = [x.new_empty(0), x.new_empty(0)]
    of_rows = out[:2] if rows else none
    of_cols = out[2 * rows : 2 * rows + 2] if cols else none
    packed = out[-1] if len(out) % 2 else x.new_empty(0)
    return of_rows[0], of_rows[1], of_cols[0], of_cols[1], packed


library.define(
    "quantize(Tensor x, str rows_fmt, str cols_fmt, str granularity, bool pow2, int margin, bool statistics)"
    " -> Tensor[]"
)
library.impl("quantize", _cast, "CompositeExplicitAutograd")
torch.library.register_fake("acceler8::quantize", cast_fake, lib=library)
library.define(
    "quantize_delayed(Tensor x, Tensor amax, Tensor staging, str rows_fmt, str cols_fmt, bool pow2, int margin,"
    " bool statistics) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
library.impl("quantize_delayed", _cast_delayed, "CompositeExplicitAutograd")
torch.library.register_fake("acceler8::quantize_delayed", _cast_delayed_fake, lib=library)


def quantize(
    x: Tensor,
    rows: Format | None,
    cols: Format | None,
    granularity: Granularity,
    *,
    pow2: bool = False,
    margin: int = 0,
    amax: Tensor | None = None,
    staging: Tensor | None = None,
    statistics: bool = False,
    column_amax: Tensor | None = None,
) -> tuple[Quantized | None, Quantized | None, Tensor | None]:
    """Quantise ``x`` as it lies (``rows``), transposed (``cols``), or both from one read.

    Shape: x [R, C] bf16, fp16 or fp32, any strides -> Quantized with codes [R, C'] for ``rows``, [C, R'] for
        ``cols`` (the codes of ``x.t()``), and packed statistics (FP64 [6], see ``read_statistics``); None for
        what was not asked. C', R' are filled with zero codes to ``granularity.contraction_multiple``.
    Scales: current scaling from ``x`` itself. With ``amax`` [1] FP32 (tensorwise only) delayed scaling: that
        amax if it is above zero and finite, else the tensor's own; ``staging`` [1] FP32 is then maxed in place
        with the tensor's amax. ``pow2`` rounds scales down to powers of two (MX scales always are, rounded up);
        ``margin`` leaves powers of two of headroom. ``column_amax`` [C] int32, the bits of the FP32 amax of each
        column, as whoever made ``x`` found it, saves the search for it where ``cols`` alone is asked with row scales.
    Numerics: round to nearest even, saturating; same codes on CPU and GPU. NaN and inf become NaN codes; a
        group that holds one has scale 1. All-zero groups give zeros. R or C may be 0. Statistics are those of
        ``rows`` if that is asked, else of ``cols``; their counts are exact, their sums FP64.
    Raises: ShapeError if ``x`` is not 2-D, or ``amax`` comes without ``staging`` or with groups smaller than
        the tensor; DtypeError if ``x`` is not one of the three, or nothing was asked.
    Source: Micikevicius et al. 2022, arXiv:2209.05433; DeepSeek-AI 2024, arXiv:2412.19437 (1x128, 128x128);
        OCP MX 1.0.
    """
    check_cast(x, rows, cols, granularity, amax, staging)
    names = rows.name if rows is not None else "", cols.name if cols is not None else ""
    out: list[Tensor]
    if not statistics and may_go_direct(x) and _triton.runs_on(x) and x.numel():
        known_columns = column_amax if rows is None and granularity is ROWWISE else None
        out = quantize_triton(x, *names, granularity.name, pow2, margin, amax, staging, known_columns)
    elif amax is not None and staging is not None:
        return _quantize_delayed(x, amax, staging, names, granularity, pow2, margin, statistics)
    else:
        out = torch.ops.acceler8.quantize.default(x, *names, granularity.name, pow2, margin, statistics)
    as_rows = Quantized(out[0], out[1], granularity) if rows is not None else None
    behind = 0 if rows is None else 2  # not bool(rows): torch 2.11's Dynamo cannot trace it
    as_cols = Quantized(out[behind], out[behind + 1], granularity) if cols is not None else None
    return as_rows, as_cols, out[-1] if statistics else None


def check_cast(
    x: Tensor, rows: Format | None, cols: Format | None, granularity: Granularity,
    amax: Tensor | None, staging: Tensor | None,
) -> None:  # fmt: skip
    """Raise ShapeError or DtypeError for what ``quantize`` does not take."""
    if x.ndim != 2:
        raise ShapeError(
            f"quantize got {x.ndim} dimensions {tuple(x.shape)}; allowed: 2; flatten batch dimensions first"
        )
    if x.dtype not in _INPUT_DTYPES:
        raise DtypeError(f"quantize got {x.dtype}; allowed: bfloat16, float16, float32; cast the tensor first")
    if rows is None and cols is None:
        raise DtypeError("quantize was asked for no orientation; give rows=, cols= or both a Format")
    if amax is None and staging is None:
        return
    if granularity is not TENSORWISE:
        raise ShapeError(f"quantize got an amax of earlier steps with {granularity} scales; allowed: tensorwise")
    if amax is None or staging is None:
        got, missing = ("staging", "amax") if amax is None else ("amax", "staging")
        raise ShapeError(f"quantize got {got} but no {missing}; allowed: both (delayed scaling) or neither")


def _quantize_delayed(
    x: Tensor, amax: Tensor, staging: Tensor, names: tuple[str, str], granularity: Granularity,
    pow2: bool, margin: int, statistics: bool,
) -> tuple[Quantized | None, Quantized | None, Tensor | None]:  # fmt: skip
    five: _Five = torch.ops.acceler8.quantize_delayed.default(x, amax, staging, *names, pow2, margin, statistics)
    as_rows = Quantized(five[0], five[1], granularity) if names[0] else None
    as_cols = Quantized(five[2], five[3], granularity) if names[1] else None
    return as_rows, as_cols, five[4] if statistics else None


__all__ = ["Quantized", "library", "quantize", "quantize_ref", "quantize_triton"]
