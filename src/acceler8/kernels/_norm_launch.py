"""Launches the kernels of ``_norm_kernel.py``: on what grid, into what memory."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from acceler8.formats import E4M3, E5M2, FORMATS
from acceler8.kernels import _triton
from acceler8.kernels._launch import Launch, Plans, address, alignment, stream_of, zeros, zeros_tensor
from acceler8.kernels._norm_kernel import (
    cast_rows_kernel,
    norm_backward_kernel,
    norm_forward_kernel,
)
from acceler8.kernels._sums import sum_partials_launch
from acceler8.scaling import GRANULARITIES

_NARROWEST = 128  # a row with filler of any cast: y must not depend on which codes are wanted of it
WIDEST_ROW = 16384  # that a program holds: 32 elements a thread of the largest program
_ELEMENTS, _PER_WARP, _MOST_WARPS = 4096, 512, 16  # 16 elements a thread: x, y and a maximum of each stay in registers
# Programs that stay take 64 to 128 registers a thread (ptxas of Triton 3.6, sm_90a; only the widest spill, up to 248
# bytes), so that many warps find room on a processor; others 48 to 83.
_RESIDENT_WARPS = 20


class Options(NamedTuple):
    """What a norm and its cast depend on beside their tensors; formats and granularity by name, "" for no codes."""

    eps: float
    is_layer: bool
    weight_offset: float
    cast_before_weight: bool
    dtype: torch.dtype
    rows: str
    granularity: str
    pow2: bool
    margin: int
    column_amax: bool


class Outputs(NamedTuple):
    """What a forward gives; None for what was not asked. ``amax`` int32 bits [1] of tensorwise current scaling, ``h``
    the sum of x and a residual.
    """

    y: Tensor
    inverse_std: Tensor
    mean: Tensor | None
    codes: Tensor | None
    scale_inv: Tensor | None
    column_amax: Tensor | None
    amax: Tensor | None
    h: Tensor | None = None


class _Grid(NamedTuple):
    programs: int
    steps: int
    rows: int
    cols: int
    warps: int


class _Plan(NamedTuple):
    norm: Launch
    cast: Launch | None
    codes: tuple[tuple[int, ...], torch.dtype] | None
    scales: tuple[int, ...]
    device: torch.device


class _BackwardPlan(NamedTuple):
    dx: Launch
    total: Launch | None
    partial: tuple[int, ...]
    device: torch.device


_plans: Plans[_Plan] = Plans()
_backward_plans: Plans[_BackwardPlan] = Plans()


def filled_width(cols: int, options: Options) -> int:
    """Columns of the codes, filler too, or of y where there are none."""
    return cols + -cols % GRANULARITIES[options.granularity].contraction_multiple if options.rows else cols


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _grid(row_count: int, width: int, device: torch.device, stays: bool) -> _Grid:
    """Programs that ``stay`` keep something of each column and walk over many rows, as many as find room at once.
    A fixed rule: sums depend on it.
    """
    cols = max(_NARROWEST, 1 << (width - 1).bit_length())
    rows = max(1, _ELEMENTS // cols)
    warps = min(_MOST_WARPS, rows * cols // _PER_WARP)
    blocks = programs = -(-row_count // rows)
    if stays:
        programs = min(blocks, _processors(device) * max(1, _RESIDENT_WARPS // warps))
    return _Grid(programs, -(-blocks // programs), rows, cols, warps)


def with_dense_rows(t: Tensor) -> Tensor:
    """``t`` [M, D] or a copy whose rows lie without gaps; they may lie anywhere."""
    return t if t.stride(1) == 1 or t.shape[1] == 1 else t.contiguous()


def normed_dtype(x: Tensor, residual: Tensor | None) -> torch.dtype:
    """The dtype of what is normalised: of ``x``, or that of ``x + residual``."""
    return x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)


def _layout_of(t: Tensor | None) -> tuple[Any, ...] | None:
    return None if t is None else (t.dtype, t.stride(), alignment(t))


def _key_of(t: Tensor | None) -> tuple[Any, ...] | None:
    return None if t is None else (t.dtype, alignment(t))


def norm_triton(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    options: Options,
    amax: Tensor | None = None,
    staging: Tensor | None = None,
    shares_memory: bool = True,
    residual: Tensor | None = None,
) -> Outputs:
    """Launch the kernels on ``x`` [M, D], which is not empty, of at most ``WIDEST_ROW`` columns with filler, on a
    device that runs Triton; ``residual`` [M, D] is added first.

    ``shares_memory`` False gives every result its own memory, as an operation's must have. Deterministic.
    """
    device = x.get_device()
    if device >= 0 and device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return norm_triton(x, weight, bias, options, amax, staging, shares_memory, residual)
    x = with_dense_rows(x)
    residual = None if residual is None else with_dense_rows(residual)
    weight, bias = (t if t is None or t.is_contiguous() else t.contiguous() for t in (weight, bias))
    delayed = None if amax is None or staging is None else (alignment(amax), alignment(staging))
    key = (
        x.shape, x.stride(), x.dtype, device, alignment(x), _key_of(weight), _key_of(bias), delayed, options,
        _layout_of(residual),
    )  # fmt: skip
    plan = _plans.get(key, lambda: _make_plan(x, residual, weight, bias, options, amax, staging))
    rows, cols = x.shape
    on = plan.device
    y = torch.empty((rows, cols), dtype=options.dtype, device=on)
    inverse_std = torch.empty(rows, dtype=torch.float32, device=on)
    mean = torch.empty(rows, dtype=torch.float32, device=on) if options.is_layer else None
    codes = scale_inv = column = found = None
    at_x = address(x)  # an address that is not asked for is neither read nor written
    stream = stream_of(device)
    at_codes = at_scales = at_column = at_found = at_x
    if plan.codes is not None:
        codes = torch.empty(plan.codes[0], dtype=plan.codes[1], device=on)
        scale_inv = torch.empty(plan.scales, dtype=torch.float32, device=on)
        at_codes, at_scales = address(codes), address(scale_inv)
    kept = None
    make = zeros_tensor if shares_memory else _own_zeros
    if options.column_amax:
        column = make(cols, x, device, stream)
        at_column = address(column)
    if delayed is not None:
        at_found, kept = zeros(1, x, device, stream)
    elif plan.cast is not None:
        found = make(1, x, device, stream)
        at_found = address(found)
    known = at_x if amax is None else address(amax.view(torch.int32))
    staged = at_x if staging is None else address(staging.view(torch.int32))
    at_y, h, at_residual, at_h = address(y), None, at_x, at_x
    if residual is not None:
        h = torch.empty((rows, cols), dtype=normed_dtype(x, residual), device=on)
        at_residual, at_h = address(residual), address(h)
    plan.norm(
        stream, at_x, at_residual, at_x if weight is None else address(weight), at_x if bias is None else address(bias),
        known, staged, at_found, at_column, at_h, at_y, address(inverse_std), at_x if mean is None else address(mean),
        at_codes, at_scales,
    )  # fmt: skip
    if plan.cast is not None:
        plan.cast(stream, at_y, known, at_found, at_codes, at_scales)
    del kept
    return Outputs(y, inverse_std, mean, codes, scale_inv, column, found, h)


def _own_zeros(count: int, like: Tensor, device: int, stream: int) -> Tensor:
    return torch.zeros(count, dtype=torch.int32, device=like.device)


def _make_plan(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    options: Options,
    amax: Tensor | None,
    staging: Tensor | None,
) -> _Plan:
    row_count, col_count = x.shape
    granularity = GRANULARITIES[options.granularity]
    width = filled_width(col_count, options)
    fmt = FORMATS.get(options.rows, E4M3)
    is_tensor = bool(options.rows) and granularity.rows == 0
    known, staged = (None if t is None else t.view(torch.int32) for t in (amax, staging))
    is_delayed = known is not None
    hardware = _triton.has_fp8_conversion(x.device)
    grid = _grid(row_count, width, x.device, options.column_amax or is_tensor)
    pointers: Sequence[Tensor | torch.dtype] = (
        x, torch.float32 if residual is None else residual, torch.float32 if weight is None else weight,
        torch.float32 if bias is None else bias,
        torch.int32 if known is None else known, torch.int32 if staged is None else staged, torch.int32, torch.int32,
        normed_dtype(x, residual), options.dtype, torch.float32, torch.float32, torch.uint8, torch.float32,
    )  # fmt: skip
    norm = Launch(
        norm_forward_kernel,
        grid.programs,
        pointers,
        (
            row_count, col_count, x.stride(0), 0 if residual is None else residual.stride(0), width, grid.steps,
            residual is not None, options.eps, options.is_layer, weight is not None, bias is not None,
            options.weight_offset, options.cast_before_weight and normed_dtype(x, residual) is not torch.float32,
            bool(options.rows) and (is_delayed or not is_tensor), is_tensor, is_delayed, options.column_amax,
            fmt is E5M2, fmt.max, options.pow2, 2.0**-options.margin, granularity.cols, hardware, grid.rows, grid.cols,
        ),
        grid.warps,
    )  # fmt: skip
    cast = None
    if is_tensor:  # where it has nothing to do, few programs should find that out
        at = _grid(row_count, width, x.device, is_delayed)
        cast = Launch(
            cast_rows_kernel,
            at.programs,
            (options.dtype, torch.int32 if known is None else known, torch.int32, torch.uint8, torch.float32),
            (
                row_count, col_count, width, at.steps, fmt is E5M2, fmt.max, options.pow2, 2.0**-options.margin,
                is_delayed, hardware, at.rows, at.cols,
            ),
            at.warps,
        )  # fmt: skip
    codes = ((row_count, width), fmt.torch_dtype) if options.rows else None
    return _Plan(norm, cast, codes, granularity.scale_shape(row_count, col_count), x.device)


def norm_backward_triton(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    inverse_std: Tensor,
    mean: Tensor | None,
    weight_offset: float,
    cast_before_weight: bool,
    weight_grad: bool,
    bias_grad: bool,
    dh: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """``(dx, dweight, dbias)``, ``dh`` being added to dx; ``x`` as in ``norm_triton``. Deterministic: sums follow the
    shape and the number of the device's processors.
    """
    device = x.get_device()
    if device >= 0 and device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return norm_backward_triton(
                dy, x, weight, inverse_std, mean, weight_offset, cast_before_weight, weight_grad, bias_grad, dh
            )
    x, dy = with_dense_rows(x), with_dense_rows(dy)
    dh = None if dh is None else with_dense_rows(dh)
    weight = weight if weight is None or weight.is_contiguous() else weight.contiguous()
    key = (
        x.shape, x.stride(), x.dtype, device, alignment(x), dy.stride(), dy.dtype, alignment(dy), _key_of(weight),
        None if mean is None else alignment(mean), alignment(inverse_std), weight_offset,
        cast_before_weight, weight_grad, bias_grad, _layout_of(dh),
    )  # fmt: skip
    plan = _backward_plans.get(
        key,
        lambda: _make_backward_plan(
            dy, dh, x, weight, inverse_std, mean, weight_offset, cast_before_weight, weight_grad, bias_grad
        ),
    )
    rows, cols = x.shape
    dx = torch.empty((rows, cols), dtype=x.dtype, device=plan.device)
    stream, at_x = stream_of(device), address(x)
    partial = torch.empty(plan.partial, dtype=torch.float32, device=plan.device) if plan.total is not None else None
    at_partial = at_x if partial is None else address(partial)
    plan.dx(
        stream, address(dy), at_x if dh is None else address(dh), at_x, at_x if weight is None else address(weight),
        address(inverse_std), at_x if mean is None else address(mean), address(dx), at_partial,
    )  # fmt: skip
    dweight = torch.empty(cols, dtype=torch.float32, device=plan.device) if weight_grad else None
    dbias = torch.empty(cols, dtype=torch.float32, device=plan.device) if bias_grad else None
    if plan.total is not None:
        sums = [address(t) for t in (dweight, dbias) if t is not None]
        plan.total(stream, at_partial, sums[0], sums[-1])
    return dx, dweight, dbias


def _make_backward_plan(
    dy: Tensor,
    dh: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    inverse_std: Tensor,
    mean: Tensor | None,
    weight_offset: float,
    cast_before_weight: bool,
    weight_grad: bool,
    bias_grad: bool,
) -> _BackwardPlan:
    row_count, col_count = x.shape
    parts = weight_grad + bias_grad
    grid = _grid(row_count, col_count, x.device, parts > 0)
    dx = Launch(
        norm_backward_kernel,
        grid.programs,
        (
            dy, torch.float32 if dh is None else dh, x, torch.float32 if weight is None else weight, inverse_std,
            torch.float32 if mean is None else mean, x.dtype, torch.float32,
        ),
        (
            row_count, col_count, dy.stride(0), 0 if dh is None else dh.stride(0), x.stride(0), grid.steps,
            dh is not None, mean is not None, weight is not None, weight_offset,
            cast_before_weight and x.dtype is not torch.float32, weight_grad, bias_grad, grid.rows, grid.cols,
        ),
        grid.warps,
    )  # fmt: skip
    total = sum_partials_launch(grid.programs, parts, col_count) if parts else None
    return _BackwardPlan(dx, total, (grid.programs, max(parts, 1), col_count), x.device)
