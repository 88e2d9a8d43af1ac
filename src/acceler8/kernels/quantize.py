"""Quantise: high precision in, FP8 codes and scales out, in the orientations that GEMMs contract along.

    scale = fmt.max / max(amax of the group, 1e-12)      codes = round_to_nearest_even(clamp(x * scale))

An FP8 GEMM wants both operands contiguous along the contraction, and each tensor of a linear layer is
contracted along two different dimensions, so each is needed twice: as it lies (``rows``) and transposed
(``cols``: the codes of ``x.t()``, groups along its rows). One kernel makes either or both from a single read.
Where the groups are whole tensors, rows or columns, their amax is found first (``amax.py``, or earlier steps
for delayed scaling); local blocks find theirs inside the tile. (The kernel is in ``_quantize_kernel.py``.)

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
from acceler8.kernels._library import library
from acceler8.kernels._quantize_kernel import quantize_triton
from acceler8.kernels.operand import Quantized
from acceler8.kernels.statistics import PACKED, pack_ref
from acceler8.scaling import (
    GRANULARITIES,
    TENSORWISE,
    Granularity,
    compute_scale,
    compute_scale_e8m0,
    expand_groups,
    group_amax,
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
    spread = expand_groups(scale, granularity, *x.shape)
    in_place = x_fp32 is not x and not statistics  # nobody else reads the copy: saves a pass over new memory
    y = x_fp32.mul_(spread) if in_place else x_fp32 * spread
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
    raw = codes.view(torch.uint8)
    cols = raw.shape[1]
    if filler := -cols % multiple:
        raw = F.pad(raw, (0, filler))
    elif cols % 16 == 0 and not raw.is_contiguous() and raw.t().is_contiguous():
        # torch transposes a 2-D tensor of bytes on one thread; as 16-wide slices it takes all (368 -> 230 us
        # for 1024 x 512 on two cores, torch 2.13)
        raw = raw.t().unflatten(0, (cols // 16, 16)).permute(2, 0, 1).reshape(raw.shape)
    return raw.contiguous().view(codes.dtype)


def _quantize_both_square(x: Tensor, fmt: Format, granularity: Granularity, **kwargs: Any) -> list[Tensor | None]:
    """Both orientations from one cast, where the groups of ``x.t()`` are the transposed groups of ``x``."""
    codes, scale_inv, packed = quantize_ref(x, fmt, granularity, **kwargs)
    inv = scale_inv.t().contiguous() if scale_inv.ndim else scale_inv.clone()
    return [codes, scale_inv, _contiguous_filled(codes.t(), granularity.contraction_multiple), inv, packed]


def _quantize(
    x: Tensor, amax: Tensor | None, staging: Tensor | None, rows_fmt: str, cols_fmt: str, granularity_name: str,
    pow2: bool, margin: int, statistics: bool,
) -> list[Tensor]:  # fmt: skip
    """The library op: a format is its name, or "" where that orientation is not wanted."""
    granularity = GRANULARITIES[granularity_name]
    rows, cols = FORMATS.get(rows_fmt), FORMATS.get(cols_fmt)
    if _triton.runs_on(x) and x.numel():
        return quantize_triton(
            x,
            rows,
            cols,
            granularity,
            pow2=pow2,
            margin=margin,
            amax=amax,
            staging=staging,
            statistics=statistics,
        )
    out: list[Tensor | None] = []
    packed = None
    keywords = {"pow2": pow2, "margin": margin, "amax": amax, "statistics": statistics}
    is_filled = any(n % granularity.contraction_multiple for n in x.shape)
    if rows is not None and rows is cols and granularity.is_square and not is_filled:
        *out, packed = _quantize_both_square(x, rows, granularity, **keywords)
    else:
        if rows is not None:
            *out, packed = quantize_ref(x, rows, granularity, **keywords)
        if cols is not None:
            keywords["statistics"] = statistics and packed is None
            *of_cols, packed_cols = quantize_ref(x.t(), cols, granularity, **keywords)
            out += of_cols
            packed = packed_cols if packed is None else packed
    if staging is not None and x.numel():
        torch.maximum(staging, group_amax(x, TENSORWISE), out=staging)
    return [t for t in (*out, packed) if t is not None]


def _quantize_fake(
    x: Tensor, amax: Tensor | None, staging: Tensor | None, rows_fmt: str, cols_fmt: str, granularity_name: str,
    pow2: bool, margin: int, statistics: bool,
) -> list[Tensor]:  # fmt: skip
    granularity = GRANULARITIES[granularity_name]
    multiple = granularity.contraction_multiple
    out = []
    for name, (rows, cols) in ((rows_fmt, x.shape), (cols_fmt, (x.shape[1], x.shape[0]))):
        if name:
            width = (cols + multiple - 1) // multiple * multiple
            out += [
                x.new_empty(rows, width, dtype=FORMATS[name].torch_dtype),
                x.new_empty(granularity.scale_shape(rows, cols), dtype=torch.float32),
            ]
    return [*out, x.new_empty(len(PACKED), dtype=torch.float64)] if statistics else out


def _current(
    x: Tensor, rows_fmt: str, cols_fmt: str, granularity: str, pow2: bool, margin: int, statistics: bool
) -> list[Tensor]:
    return _quantize(x, None, None, rows_fmt, cols_fmt, granularity, pow2, margin, statistics)


def _current_fake(
    x: Tensor, rows_fmt: str, cols_fmt: str, granularity: str, pow2: bool, margin: int, statistics: bool
) -> list[Tensor]:
    return _quantize_fake(x, None, None, rows_fmt, cols_fmt, granularity, pow2, margin, statistics)


Five = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _delayed(
    x: Tensor, amax: Tensor, staging: Tensor, rows_fmt: str, cols_fmt: str, pow2: bool, margin: int, statistics: bool
) -> Five:  # fmt: skip
    out = _quantize(x, amax, staging, rows_fmt, cols_fmt, TENSORWISE.name, pow2, margin, statistics)
    return _in_five_places(out, x, bool(rows_fmt), bool(cols_fmt))


def _delayed_fake(
    x: Tensor, amax: Tensor, staging: Tensor, rows_fmt: str, cols_fmt: str, pow2: bool, margin: int, statistics: bool
) -> Five:  # fmt: skip
    out = _quantize_fake(x, amax, staging, rows_fmt, cols_fmt, TENSORWISE.name, pow2, margin, statistics)
    return _in_five_places(out, x, bool(rows_fmt), bool(cols_fmt))


def _in_five_places(out: list[Tensor], x: Tensor, rows: bool, cols: bool) -> Five:
    """Fixed places, empty tensors for what was not asked: torch.compile takes an op that mutates an argument only
    if its results are single tensors, not a list.
    """
    none = [x.new_empty(0), x.new_empty(0)]
    of_rows = out[:2] if rows else none
    of_cols = out[2 * rows : 2 * rows + 2] if cols else none
    packed = out[-1] if len(out) % 2 else x.new_empty(0)
    return of_rows[0], of_rows[1], of_cols[0], of_cols[1], packed


library.define(
    "quantize(Tensor x, str rows_fmt, str cols_fmt, str granularity, bool pow2, int margin, bool statistics)"
    " -> Tensor[]"
)
library.impl("quantize", _current, "CompositeExplicitAutograd")
torch.library.register_fake("acceler8::quantize", _current_fake, lib=library)
library.define(
    "quantize_delayed(Tensor x, Tensor amax, Tensor(a!) staging, str rows_fmt, str cols_fmt, bool pow2, int margin,"
    " bool statistics) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
library.impl("quantize_delayed", _delayed, "CompositeExplicitAutograd")
torch.library.register_fake("acceler8::quantize_delayed", _delayed_fake, lib=library)


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
) -> tuple[Quantized | None, Quantized | None, Tensor | None]:
    """Quantise ``x`` as it lies (``rows``), transposed (``cols``), or both from one read.

    Shape: x [R, C] bf16, fp16 or fp32, any strides -> Quantized with codes [R, C'] for ``rows``, [C, R'] for
        ``cols`` (the codes of ``x.t()``), and packed statistics (FP64 [6], see ``read_statistics``); None for
        what was not asked. C', R' are filled with zero codes to ``granularity.contraction_multiple``.
    Scales: current scaling from ``x`` itself. With ``amax`` [1] FP32 (tensorwise only) delayed scaling: that
        amax if above zero, else the tensor's own; ``staging`` [1] FP32 is then maxed in place with the
        tensor's amax.
        ``pow2`` rounds scales down to powers of two; ``margin`` leaves powers of two of headroom.
    Numerics: round to nearest even, saturating; same codes on CPU and GPU. NaN and inf become NaN codes; a
        group that holds one has scale 1. All-zero groups give zeros. R or C may be 0.
    Raises: ShapeError if ``x`` is not 2-D; DtypeError if its dtype is not one of the three, or nothing was
        asked.
    Source: Micikevicius et al. 2022, arXiv:2209.05433; DeepSeek-AI 2024, arXiv:2412.19437 (1x128, 128x128);
        OCP MX 1.0.
    """
    if x.ndim != 2:
        raise ShapeError(
            f"quantize got {x.ndim} dimensions {tuple(x.shape)}; allowed: 2; flatten batch dimensions first"
        )
    if x.dtype not in _INPUT_DTYPES:
        raise DtypeError(f"quantize got {x.dtype}; allowed: bfloat16, float16, float32; cast the tensor first")
    if amax is not None and granularity is not TENSORWISE:
        raise ShapeError(f"quantize got an amax of earlier steps with {granularity} scales; allowed: tensorwise")
    if rows is None and cols is None:
        raise DtypeError("quantize was asked for no orientation; give rows=, cols= or both a Format")
    names = rows.name if rows else "", cols.name if cols else ""
    if amax is not None:
        if staging is None:
            raise ShapeError("quantize got an amax of earlier steps but no staging; give both")
        five = torch.ops.acceler8.quantize_delayed(x, amax, staging, *names, pow2, margin, statistics)
        as_rows = Quantized(five[0], five[1], granularity) if rows else None
        as_cols = Quantized(five[2], five[3], granularity) if cols else None
        return as_rows, as_cols, five[4] if statistics else None
    out: list[Any] = torch.ops.acceler8.quantize(x, *names, granularity.name, pow2, margin, statistics)
    packed = out.pop() if statistics else None
    parts = [Quantized(out[i], out[i + 1], granularity) for i in range(0, len(out), 2)]
    return (parts[0] if rows else None), (parts[-1] if cols else None), packed


__all__ = ["Quantized", "library", "quantize", "quantize_ref", "quantize_triton"]
