"""Launches the kernels of ``_gated_kernel.py``, with a gate and without: which, on what grid, into what memory."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from acceler8.formats import E5M2, FORMATS, Format
from acceler8.kernels import _triton
from acceler8.kernels._gated_kernel import (
    gated_amax_kernel,
    gated_backward_amax_kernel,
    gated_backward_tiles_kernel,
    gated_backward_words_kernel,
    gated_rows_kernel,
    gated_tiles_kernel,
    gated_words_kernel,
)
from acceler8.kernels._launch import Launch, Plans, address, alignment, stream_of, zeros
from acceler8.kernels._quantize_kernel import scales_kernel
from acceler8.kernels._quantize_launch import WIDEST_ROW, as_bits
from acceler8.kernels.amax import FEW
from acceler8.scaling import GRANULARITIES, ROWWISE, Granularity

Delayed = tuple[Tensor, Tensor]  # amax in use, staging

# Elements a thread: 32 of each input, 64 where local blocks must not straddle tiles
_TILE, _BLOCK_TILE = 64, 128
_WARPS, _BLOCK_WARPS = 4, 8
_BACKWARD_WARPS, _BACKWARD_BLOCK_WARPS = 8, 8
# One scale a tensor, backward of 16384 x 14336 (H200, 2026-11-30): 0.82 ms. With the 172 registers that it wants 1.09,
# with 160 0.89, with 96 0.99; 128 rows 0.87 to 1.00; programs that go from tile to tile 0.99; as tiles 1.08
_ROWS, _COLS, GROUP, _WORDS_WARPS, _WORDS_REGISTERS = 64, 64, 4, 4, 128
_AMAX_TILE, _AMAX_WARPS = 64, 2
_SCALES = 512  # of them a program makes
# Rows that a program holds whole, as in quantize
_ELEMENTS, _PER_WARP = 4096, 1024

_Outputs = list[tuple[tuple[int, ...], torch.dtype]]


class _Plan(NamedTuple):
    """What one kind of call allocates and launches."""

    outputs: _Outputs
    places: tuple[int, ...]  # where each output pointer of the kernel lies: 0 nowhere, n output n - 1
    device: torch.device
    find_amax: Launch | None
    amax_count: int
    cast: Launch
    amaxes: str  # what the kernel takes of them beside its inputs and outputs: "none", "found", or "known" ones as well
    find_scales: Launch | None = None


_plans: Plans[_Plan] = Plans()


def gated_triton(
    gate_up: Tensor,
    activation: str,
    rows: str,
    cols: str,
    granularity: str,
    pow2: bool,
    margin: int,
    high_precision: bool,
    delayed: Delayed | None = None,
    is_gated: bool = True,
) -> list[Tensor]:
    """Launch the kernels of the forward: ``[codes, scale_inv]`` of rows, of columns, then act, as asked.

    ``gate_up`` [M, 2F], or [M, F] without a gate, is not empty, contiguous along its rows, and lies on a device that
    runs Triton. Arguments as in ``gated``, formats and granularity by name ("" where an orientation is not wanted).
    Deterministic.
    """
    device = gate_up.get_device()
    if device >= 0 and device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return gated_triton(
                gate_up, activation, rows, cols, granularity, pow2, margin, high_precision, delayed, is_gated
            )
    key = (
        "forward", gate_up.shape, gate_up.stride(), gate_up.dtype, device, alignment(gate_up), activation, rows, cols,
        granularity, pow2, margin, high_precision, _alignments(delayed), is_gated,
    )  # fmt: skip
    plan = _plans.get(
        key,
        lambda: _plan_forward(
            gate_up, activation, FORMATS.get(rows), FORMATS.get(cols), GRANULARITIES[granularity], pow2, margin,
            high_precision, delayed, is_gated,
        ),
    )  # fmt: skip
    out = [torch.empty(shape, dtype=dtype, device=plan.device) for shape, dtype in plan.outputs]
    stream, at_x = stream_of(device), address(gate_up)
    at = [at_x, *map(address, out)]  # an address that is not asked for is not read
    at_out = [at[i] for i in plan.places]
    if plan.amaxes == "none":
        plan.cast(stream, at_x, *at_out)
        return out
    found = kept = at_x
    known, staged = (at_x, at_x) if delayed is None else (address(t.view(torch.int32)) for t in delayed)
    if plan.find_amax is not None:
        found, kept = zeros(plan.amax_count, gate_up, device, stream)
        plan.find_amax(stream, at_x, known, found)
    plan.cast(stream, at_x, found, *((known, staged) if plan.amaxes == "known" else ()), *at_out)
    del kept
    return out


def gated_backward_triton(
    d_act: Tensor,
    gate_up: Tensor,
    activation: str,
    rows: str,
    cols: str,
    act_cols: str,
    granularity: str,
    pow2: bool,
    margin: int,
    high_precision: bool,
    delayed: Delayed | None = None,
    act_delayed: Delayed | None = None,
    kept: tuple[Tensor, torch.dtype] | None = None,
    is_gated: bool = True,
    sums: bool = False,
) -> list[Tensor]:
    """Launch the kernels of the backward: ``[codes, scale_inv]`` of rows and columns of d_gate_up, of columns of act,
    then d_gate_up and the sums over tokens of its left half [F] FP32, as asked.

    As ``gated_triton``; ``d_act`` [M, F] may have any strides, F is a multiple of the granularity's. With ``kept``
    ``gate_up`` is E4M3 codes, whose scales for 128 elements of a row and dtype these are; F is a multiple of 128 then.
    """
    device = gate_up.get_device()
    if device >= 0 and device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return gated_backward_triton(
                d_act, gate_up, activation, rows, cols, act_cols, granularity, pow2, margin, high_precision, delayed,
                act_delayed, kept, is_gated, sums,
            )  # fmt: skip
    # what is not asked for is neither read nor staged, so either pair may stand for the other
    first, second = delayed or act_delayed, act_delayed or delayed
    key = (
        "backward", gate_up.shape, gate_up.stride(), gate_up.dtype, device, alignment(gate_up),
        d_act.stride(), d_act.dtype, alignment(d_act), activation, rows, cols, act_cols, granularity, pow2, margin,
        high_precision, _alignments(first), _alignments(second),
        None if kept is None else (alignment(kept[0]), kept[1]), is_gated, sums,
    )  # fmt: skip
    plan = _plans.get(
        key,
        lambda: _plan_backward(
            d_act, gate_up, activation, (FORMATS.get(rows), FORMATS.get(cols), FORMATS.get(act_cols)),
            GRANULARITIES[granularity], pow2, margin, high_precision, first, second, kept,
            is_gated, sums,
        ),
    )  # fmt: skip
    out = [torch.empty(shape, dtype=dtype, device=plan.device) for shape, dtype in plan.outputs]
    stream, at_d, at_x = stream_of(device), address(d_act), address(gate_up)
    at_inv = at_x if kept is None else address(kept[0])
    at = [at_x, *map(address, out)]
    at_out = [at[i] for i in plan.places]
    found = memory = at_x
    known = staged = act_known = act_staged = at_x
    if first is not None and second is not None:
        known, staged, act_known, act_staged = (address(t.view(torch.int32)) for t in (*first, *second))
    if plan.find_amax is not None:
        found, memory = zeros(plan.amax_count, gate_up, device, stream)
        plan.find_amax(stream, at_d, at_x, at_inv, known, act_known, found)
    if plan.find_scales is not None:
        plan.find_scales(stream, found, *at_out[1:6:2])
    delays = (known, staged, act_known, act_staged) if plan.amaxes == "known" else ()
    plan.cast(stream, at_d, at_x, at_inv, found, *delays, *at_out)
    del memory
    if sums:
        out[-1] = out[-1].sum(0)  # of tiles, one after the other: deterministic
    return out


def _alignments(delayed: Delayed | None) -> tuple[int, int] | None:
    return None if delayed is None else (alignment(delayed[0]), alignment(delayed[1]))


def _pointers(delayed: Delayed | None) -> tuple[Tensor | torch.dtype, Tensor | torch.dtype]:
    """What a launch is compiled for: known amax and staging, as bits."""
    if delayed is None:
        return torch.int32, torch.int32
    known, staged = as_bits(delayed[0]), as_bits(delayed[1])
    assert known is not None and staged is not None
    return known, staged


def _lay_out(
    operands: list[tuple[Format | None, int, int]],
    granularity: Granularity,
    *others: tuple[tuple[int, ...], torch.dtype] | None,
) -> tuple[_Outputs, tuple[int, ...]]:
    """``(outputs, places)`` of operands (format, rows, columns), of which some are not asked for, and of tensors in
    high precision behind them.
    """
    outputs: _Outputs = []
    places: list[int] = []
    multiple = granularity.contraction_multiple
    for fmt, rows, cols in operands:
        if fmt is None:
            places += [0, 0]
            continue
        width = cols + -cols % multiple
        outputs += [((rows, width), fmt.torch_dtype), (granularity.scale_shape(rows, cols), torch.float32)]
        places += [len(outputs) - 1, len(outputs)]
    for high in others:
        if high is not None:
            outputs.append(high)
        places.append(0 if high is None else len(outputs))
    return outputs, tuple(places)


def _plan_forward(
    x: Tensor,
    activation: str,
    rows: Format | None,
    cols: Format | None,
    granularity: Granularity,
    pow2: bool,
    margin: int,
    high_precision: bool,
    delayed: Delayed | None,
    is_gated: bool,
) -> _Plan:
    row_count, features = x.shape[0], x.shape[1] // 2 if is_gated else x.shape[1]
    multiple = granularity.contraction_multiple
    row_width, col_width = features + -features % multiple, row_count + -row_count % multiple
    outputs, places = _lay_out(
        [(rows, row_count, features), (cols, features, row_count)],
        granularity,
        ((row_count, features), x.dtype) if high_precision else None,
    )
    hardware = _triton.has_fp8_conversion(x.device)
    if granularity is ROWWISE and rows is not None and cols is None and row_width <= WIDEST_ROW:
        extent = 1 << (row_width - 1).bit_length()
        at_once = max(1, _ELEMENTS // extent)
        launch = Launch(
            gated_rows_kernel,
            -(-row_count // at_once),
            (x, torch.uint8, torch.float32, x.dtype),
            (
                row_count, features, x.stride(0), row_width, activation, is_gated, rows is E5M2, rows.max, pow2,
                2.0**-margin, high_precision, hardware, at_once, extent,
            ),
            at_once * extent // _PER_WARP,
        )  # fmt: skip
        return _Plan(outputs, (places[0], places[1], places[4]), x.device, None, 0, launch, "none")
    fmt, cols_fmt = rows or cols or E5M2, cols or rows or E5M2
    asked = (activation, is_gated, rows is not None, cols is not None, high_precision)
    casts = (fmt is E5M2, cols_fmt is E5M2, fmt.max, cols_fmt.max, pow2, 2.0**-margin)
    by_row = granularity is ROWWISE
    cols_at = row_count if by_row and rows is not None else 0
    known, staged = _pointers(delayed)
    written = (torch.uint8, torch.float32, torch.uint8, torch.float32, x.dtype)
    if granularity.rows:
        tile, warps = (_BLOCK_TILE, _BLOCK_WARPS) if granularity.is_blockwise else (_TILE, _WARPS)
        amaxes = "found"
        cast = Launch(
            gated_tiles_kernel,
            _triton.tiles(row_count, features, tile),
            (x, torch.int32, *written),
            (
                row_count, features, x.stride(0), cols_at, row_width, col_width, *asked, *casts, granularity.rows,
                granularity.cols, hardware, tile,
            ),
            warps,
        )  # fmt: skip
    else:
        across, amaxes = -(-features // _COLS), "known"
        cast = Launch(
            gated_words_kernel,
            -(-row_count // _ROWS) * across,
            (x, torch.int32, known, staged, *written),
            (
                row_count, features, x.stride(0), across, row_width, col_width, *asked, *casts,
                delayed is not None, hardware, _ROWS, _COLS, GROUP,
            ),
            _WORDS_WARPS,
        )  # fmt: skip
    if granularity.is_blockwise or (rows is None and cols is None):
        return _Plan(outputs, places, x.device, None, 0, cast, amaxes)
    tile_count = _triton.tiles(row_count, features, _AMAX_TILE)
    find_amax = Launch(
        gated_amax_kernel,
        tile_count if delayed is None else min(tile_count, FEW),
        (x, known, torch.int32),
        (
            row_count, features, x.stride(0), cols_at, tile_count, activation, is_gated, not by_row,
            by_row and rows is not None, by_row and cols is not None, delayed is not None, _AMAX_TILE,
        ),
        _WARPS,
    )  # fmt: skip
    count = row_count * (rows is not None) + features * (cols is not None) if by_row else 1
    return _Plan(outputs, places, x.device, find_amax, count, cast, amaxes)


def _plan_backward(
    d_act: Tensor,
    x: Tensor,
    activation: str,
    formats: tuple[Format | None, Format | None, Format | None],
    granularity: Granularity,
    pow2: bool,
    margin: int,
    high_precision: bool,
    delayed: Delayed | None,
    act_delayed: Delayed | None,
    kept: tuple[Tensor, torch.dtype] | None,
    is_gated: bool,
    sums: bool,
) -> _Plan:
    rows, cols, act_cols = formats
    inv: Tensor | torch.dtype = torch.float32
    high_dtype, kept_as = x.dtype, None
    if kept is not None:
        inv, high_dtype = kept
        kept_as = _triton.type_of(high_dtype)
    codes = x if kept is None else x.view(torch.uint8)
    hardware = _triton.has_fp8_conversion(x.device)
    row_count, features = d_act.shape
    all_features = 2 * features if is_gated else features
    in_blocks = granularity.is_blockwise
    tile, warps = (_BLOCK_TILE, _BACKWARD_BLOCK_WARPS) if in_blocks else (_TILE, _BACKWARD_WARPS)
    tall = tile if granularity.rows else _ROWS
    outputs, places = _lay_out(
        [(rows, row_count, all_features), (cols, all_features, row_count), (act_cols, features, row_count)],
        granularity,
        ((row_count, all_features), high_dtype) if high_precision else None,
        ((-(-row_count // tall), features), torch.float32) if sums else None,
    )
    by_row = granularity is ROWWISE
    has_d = rows is not None or cols is not None
    cols_at = row_count if by_row and rows is not None else 0
    act_at = cols_at + all_features * (cols is not None) if by_row else 1
    asked = [fmt or E5M2 for fmt in formats]
    strides = (*d_act.stride(), x.stride(0))
    multiple = granularity.contraction_multiple
    widths = all_features + -all_features % multiple, row_count + -row_count % multiple
    wanted = (activation, is_gated, rows is not None, cols is not None, act_cols is not None, high_precision, sums)
    casts = (*(fmt is E5M2 for fmt in asked), *(fmt.max for fmt in asked), pow2, 2.0**-margin)
    written = (*(torch.uint8, torch.float32) * 3, high_dtype, torch.float32)
    if granularity.rows:
        amaxes = "found"
        cast = Launch(
            gated_backward_tiles_kernel,
            _triton.tiles(row_count, features, tile),
            (d_act, codes, inv, torch.int32, *written),
            (
                row_count, features, *strides, cols_at, act_at, *widths, *wanted, *casts, granularity.rows,
                granularity.cols, kept_as, hardware, tile, by_row,
            ),
            warps,
        )  # fmt: skip
    else:
        across, amaxes = -(-features // _COLS), "known"
        cast = Launch(
            gated_backward_words_kernel,
            -(-row_count // _ROWS) * across,
            (d_act, codes, inv, torch.int32, *_pointers(delayed), *_pointers(act_delayed), *written),
            (
                row_count, features, *strides, across, *widths, *wanted, *casts,
                delayed is not None, kept_as, hardware, _ROWS, _COLS, GROUP,
            ),
            _WORDS_WARPS,
            _WORDS_REGISTERS,
        )  # fmt: skip
    if in_blocks or not (has_d or act_cols is not None):
        return _Plan(outputs, places, x.device, None, 0, cast, amaxes)
    tile_count = _triton.tiles(row_count, features, _AMAX_TILE)
    find_amax = Launch(
        gated_backward_amax_kernel,
        tile_count if delayed is None else min(tile_count, FEW),
        (d_act, codes, inv, _pointers(delayed)[0], _pointers(act_delayed)[0], torch.int32),
        (
            row_count, features, *strides, cols_at, act_at, tile_count, activation, is_gated,
            has_d and not by_row, by_row and rows is not None, by_row and cols is not None,
            act_cols is not None and not by_row, by_row and act_cols is not None, delayed is not None, kept_as,
            hardware, _AMAX_TILE,
        ),
        _AMAX_WARPS,
    )  # fmt: skip
    if not by_row:
        return _Plan(outputs, places, x.device, find_amax, 2, cast, amaxes)
    count = act_at + features * (act_cols is not None)
    find_scales = Launch(
        scales_kernel,
        -(-count // _SCALES),
        (torch.int32, *[torch.float32 if place else codes.dtype for place in places[1:6:2]]),
        (cols_at, act_at, count, *(fmt.max * 2.0**-margin for fmt in asked), pow2, _SCALES),
        4,
    )  # fmt: skip
    return _Plan(outputs, places, x.device, find_amax, count, cast, amaxes, find_scales)
