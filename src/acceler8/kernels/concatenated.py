"""Quantise the concatenation of several weights without making it.

Layers that read the same input (q, k and v; gate and up) run as one GEMM over ``torch.cat(weights)``. Its codes are
those of ``quantize(torch.cat(weights), ...)``, bit for bit; the concatenation itself, as large as all the weights and
gone after the cast, is never written. Every weight's kernels max into one array of amaxes and then write into their
places in one set of codes: rows below one another, in the transposed codes beside one another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from acceler8.errors import DtypeError, ShapeError
from acceler8.formats import FORMATS, Format
from acceler8.kernels import _triton
from acceler8.kernels._launch import Launch, Plans, address, alignment, stream_of, zeros
from acceler8.kernels._library import library, may_go_direct
from acceler8.kernels._quantize_launch import WIDEST_ROW, CastLaunch, as_bits, rows_cast, tiles_cast, words_cast
from acceler8.kernels._sums import Sums, Total, total_of
from acceler8.kernels.amax import amax_launch
from acceler8.kernels.operand import Quantized
from acceler8.kernels.quantize import cast_fake, cast_ref
from acceler8.scaling import GRANULARITIES, ROWWISE, TENSORWISE, Granularity

_INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class _Plan(NamedTuple):
    """What one kind of call allocates and launches."""

    outputs: list[tuple[tuple[int, ...], torch.dtype]]
    places: tuple[int, int, int, int]  # where codes and scales of rows and columns lie: 0 nowhere, n output n - 1
    device: torch.device
    find_amax: list[Launch]
    amax_count: int
    cast: list[CastLaunch]
    total: Total | None


_plans: Plans[_Plan] = Plans()


def concatenated_triton(
    weights: Sequence[Tensor],
    rows: str,
    cols: str,
    granularity: str,
    pow2: bool,
    margin: int,
    amax: Tensor | None = None,
    staging: Tensor | None = None,
    row_sums: bool = False,
) -> list[Tensor]:
    """Launch the kernels: ``[codes, scale_inv]`` of rows, then of columns, as asked, then FP32 sums of rows [N]. No
    weight is empty.
    """
    device = weights[0].get_device()
    if device >= 0 and device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return concatenated_triton(weights, rows, cols, granularity, pow2, margin, amax, staging, row_sums)
    delayed = None if amax is None or staging is None else (alignment(amax), alignment(staging))
    key = (
        *((w.shape, w.stride(), alignment(w)) for w in weights), weights[0].dtype, device, rows, cols, granularity,
        pow2, margin, delayed, row_sums,
    )  # fmt: skip
    plan = _plans.get(
        key,
        lambda: _make_plan(
            weights, FORMATS.get(rows), FORMATS.get(cols), GRANULARITIES[granularity], pow2, margin, amax, staging,
            row_sums,
        ),
    )  # fmt: skip
    out = [torch.empty(shape, dtype=dtype, device=plan.device) for shape, dtype in plan.outputs]
    stream, sources = stream_of(device), [address(w) for w in weights]
    at = [sources[0], *map(address, out)]  # an address that is not asked for is not read
    at_out = [at[i] for i in plan.places]
    found = kept = sources[0]
    known = sources[0] if amax is None else address(amax.view(torch.int32))
    staged = sources[0] if staging is None else address(staging.view(torch.int32))
    if plan.find_amax:
        found, kept = zeros(plan.amax_count, weights[0], device, stream)
        for find_amax, source in zip(plan.find_amax, sources, strict=True):
            find_amax(stream, source, known, found)
    partial = None if plan.total is None else torch.empty(plan.total.partial, dtype=torch.float32, device=plan.device)
    at_partial = sources[0] if partial is None else address(partial)
    for cast, source in zip(plan.cast, sources, strict=True):
        cast(stream, source, found, known, staged, *at_out, at_partial)
    if plan.total is not None:
        out.append(torch.empty(plan.total.partial[1], dtype=torch.float32, device=plan.device))
        plan.total.launch(stream, at_partial, address(out[-1]), address(out[-1]))
    del kept
    return out


def _make_plan(
    weights: Sequence[Tensor],
    rows: Format | None,
    cols: Format | None,
    granularity: Granularity,
    pow2: bool,
    margin: int,
    amax: Tensor | None,
    staging: Tensor | None,
    row_sums: bool,
) -> _Plan:
    row_count, col_count = sum(w.shape[0] for w in weights), weights[0].shape[1]
    multiple = granularity.contraction_multiple
    row_width, col_width = col_count + -col_count % multiple, row_count + -row_count % multiple
    outputs: list[tuple[tuple[int, ...], torch.dtype]] = []
    for fmt, shape, width in ((rows, (row_count, col_count), row_width), (cols, (col_count, row_count), col_width)):
        if fmt is not None:
            outputs += [((shape[0], width), fmt.torch_dtype), (granularity.scale_shape(*shape), torch.float32)]
    first = 2 * (rows is not None)
    places = (1 if rows else 0, 2 if rows else 0, first + 1 if cols else 0, first + 2 if cols else 0)
    by_row, widths = granularity is ROWWISE, (row_width, col_width)
    sums = Sums(1, row_count) if row_sums else None
    is_row_major = all(w.stride(1) == 1 for w in weights)
    one_pass = by_row and cols is None and row_width <= WIDEST_ROW and is_row_major and sums is None
    find_amax: list[Launch] = []
    cast: list[CastLaunch] = []
    start = 0
    for i, w in enumerate(weights):
        end = start + w.shape[0]
        stop = end if i < len(weights) - 1 else col_width
        if one_pass and rows is not None:
            cast.append(rows_cast(w, rows, row_width, pow2, margin, start))
        elif not granularity.rows:
            cast.append(
                words_cast(
                    w, rows, cols, widths, pow2, margin, amax, staging, row_offset=start, col_stop=stop, sums=sums
                )
            )  # fmt: skip
            find_amax.append(amax_launch(w, tensor=True, known=as_bits(amax)))
        else:
            cast.append(
                tiles_cast(
                    w, rows, cols, granularity, widths, pow2, margin,
                    cols_at=row_count if by_row and rows is not None else 0, row_offset=start, col_stop=stop, sums=sums,
                )
            )  # fmt: skip
            if by_row:
                find_amax.append(
                    amax_launch(w, rows=rows is not None, cols=cols is not None, row_offset=start, all_rows=row_count)
                )
        start += w.shape[0]
    assert len({launch.sum_count for launch in cast}) == 1  # each weight fills its columns of all the partial sums
    count = row_count * (rows is not None) + col_count * (cols is not None) if by_row else 1
    return _Plan(outputs, places, weights[0].device, find_amax, count, cast, total_of(sums, cast[0].sum_count))


def _concatenated(
    weights: list[Tensor], rows: str, cols: str, granularity: str, pow2: bool, margin: int,
    amax: Tensor | None = None, staging: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    if _triton.runs_on(weights[0]) and all(w.numel() for w in weights):
        return concatenated_triton(weights, rows, cols, granularity, pow2, margin, amax, staging)
    return cast_ref(
        torch.cat(weights), FORMATS.get(rows), FORMATS.get(cols), GRANULARITIES[granularity], pow2=pow2, margin=margin,
        amax=amax, staging=staging,
    )  # fmt: skip


def _concatenated_fake(
    weights: list[Tensor], rows: str, cols: str, granularity: str, pow2: bool, margin: int
) -> list[Tensor]:
    return cast_fake(torch.cat(weights), rows, cols, granularity, pow2, margin, False)


_Four = tuple[Tensor, Tensor, Tensor, Tensor]


def _concatenated_delayed(
    weights: list[Tensor], amax: Tensor, staging: Tensor, rows: str, cols: str, pow2: bool, margin: int
) -> _Four:
    out = _concatenated(weights, rows, cols, TENSORWISE.name, pow2, margin, amax, staging)
    return _in_four_places(out, weights[0], rows, cols)


def _concatenated_delayed_fake(
    weights: list[Tensor], amax: Tensor, staging: Tensor, rows: str, cols: str, pow2: bool, margin: int
) -> _Four:
    out = _concatenated_fake(weights, rows, cols, TENSORWISE.name, pow2, margin)
    return _in_four_places(out, weights[0], rows, cols)


def _in_four_places(out: list[Tensor], w: Tensor, rows: str, cols: str) -> _Four:
    """Fixed places, empty tensors for what was not asked, as ``quantize`` has them."""
    none = [w.new_empty(0), w.new_empty(0)]
    of_rows, of_cols = out[:2] if rows else none, out[-2:] if cols else none
    return of_rows[0], of_rows[1], of_cols[0], of_cols[1]


library.define(
    "quantize_concatenated(Tensor[] weights, str rows, str cols, str granularity, bool pow2, int margin) -> Tensor[]"
)
library.impl("quantize_concatenated", _concatenated, "CompositeExplicitAutograd")
torch.library.register_fake("acceler8::quantize_concatenated", _concatenated_fake, lib=library)
library.define(
    "quantize_concatenated_delayed(Tensor[] weights, Tensor amax, Tensor staging, str rows, str cols, bool pow2,"
    " int margin) -> (Tensor, Tensor, Tensor, Tensor)"
)
library.impl("quantize_concatenated_delayed", _concatenated_delayed, "CompositeExplicitAutograd")
torch.library.register_fake("acceler8::quantize_concatenated_delayed", _concatenated_delayed_fake, lib=library)


def quantize_concatenated(
    weights: Sequence[Tensor],
    rows: Format | None,
    cols: Format | None,
    granularity: Granularity,
    *,
    pow2: bool = False,
    margin: int = 0,
    amax: Tensor | None = None,
    staging: Tensor | None = None,
) -> tuple[Quantized | None, Quantized | None]:
    """``quantize(torch.cat(weights), rows, cols, granularity, ...)`` without the concatenation.

    Shape: weights [N_i, K] of one dtype (bf16, fp16 or fp32) and device, any strides -> codes [N, K'] for ``rows``,
        [K, N'] for ``cols`` with N the sum of all N_i; None for what was not asked.
    Scales, filler, delayed scaling and numerics: as ``quantize``, bit for bit; tensorwise, and the columns of rowwise,
        have one amax over all weights.
    Raises: ShapeError, DtypeError as ``quantize``, for weights that do not fit together, and where a block would hold
        rows of two weights: blocks along N need every N_i but the last to be a multiple of theirs.
    """
    check_concatenated(weights, rows, cols, granularity, amax, staging)
    names = "" if rows is None else rows.name, "" if cols is None else cols.name
    out: Sequence[Tensor]
    first = weights[0]
    if _triton.runs_on(first) and all(may_go_direct(w) and w.numel() for w in weights):
        out = concatenated_triton(weights, *names, granularity.name, pow2, margin, amax, staging)
    elif amax is not None and staging is not None:
        four = torch.ops.acceler8.quantize_concatenated_delayed.default(
            list(weights), amax, staging, *names, pow2, margin
        )
        out = four if rows is not None else four[2:]
    else:
        out = torch.ops.acceler8.quantize_concatenated.default(list(weights), *names, granularity.name, pow2, margin)
    as_rows = Quantized(out[0], out[1], granularity) if rows is not None else None
    behind = 0 if rows is None else 2
    as_cols = Quantized(out[behind], out[behind + 1], granularity) if cols is not None else None
    return as_rows, as_cols


def check_concatenated(
    weights: Sequence[Tensor], rows: Format | None, cols: Format | None, granularity: Granularity,
    amax: Tensor | None, staging: Tensor | None,
) -> None:  # fmt: skip
    """Raise ShapeError or DtypeError for what ``quantize_concatenated`` does not take."""
    _check(weights, granularity, cols)
    if rows is None and cols is None:
        raise DtypeError("quantize_concatenated was asked for no orientation; give rows=, cols= or both a Format")
    _check_delayed(amax, staging, granularity)


def _check(weights: Sequence[Tensor], granularity: Granularity, cols: Format | None) -> None:
    if not weights:
        raise ShapeError("quantize_concatenated got no weights; allowed: one or more")
    first = weights[0]
    if any(w.ndim != 2 or w.shape[1] != first.shape[1] for w in weights):
        raise ShapeError(
            f"quantize_concatenated got {[tuple(w.shape) for w in weights]}; allowed: [N_i, K] with the same K"
        )
    if any(w.dtype is not first.dtype or w.device != first.device for w in weights):
        raise DtypeError(
            f"quantize_concatenated got {[f'{w.dtype} on {w.device}' for w in weights]}; allowed: one dtype and device"
        )
    if first.dtype not in _INPUT_DTYPES:
        raise DtypeError(
            f"quantize_concatenated got {first.dtype}; allowed: bfloat16, float16, float32; cast the weights first"
        )
    block = max(granularity.rows, granularity.cols if cols is not None else 1)
    if any(w.shape[0] % block for w in weights[:-1] if block > 1):
        raise ShapeError(
            f"quantize_concatenated got N_i={[w.shape[0] for w in weights]} with {granularity} scales; allowed: every"
            f" N_i but the last a multiple of {block}, so that no block holds rows of two weights; choose other scales"
            " or quantise the weights one by one"
        )


def _check_delayed(amax: Tensor | None, staging: Tensor | None, granularity: Granularity) -> None:
    if (amax is None) != (staging is None):
        got, missing = ("staging", "amax") if amax is None else ("amax", "staging")
        raise ShapeError(
            f"quantize_concatenated got {got} but no {missing}; allowed: both (delayed scaling) or neither"
        )
    if amax is not None and granularity is not TENSORWISE:
        raise ShapeError(
            f"quantize_concatenated got an amax of earlier steps with {granularity} scales; allowed: tensorwise"
        )


__all__ = ["quantize_concatenated"]
