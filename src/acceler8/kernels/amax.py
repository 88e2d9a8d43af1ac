"""amax: the largest magnitude of a tensor, of each row, of each column.

``amax = max |x|`` over the group, FP32, exact. The kernel takes the maximum over integer bit patterns (for
non-negative floats the order is the same, and NaN sorts above everything), so a NaN is never lost, and the
atomic maximum across tiles gives the same result in any order: deterministic.
"""

from __future__ import annotations

import torch
from torch import Tensor

from acceler8.errors import ShapeError
from acceler8.kernels import _triton
from acceler8.kernels._launch import Launch, Plans, address, alignment, stream_of
from acceler8.kernels._triton import as_fp32, jit, magnitude_bits, tile_offsets, tile_origin, tl
from acceler8.scaling import ROWWISE, TENSORWISE, group_amax

# 128 elements a thread. Rows and columns of 16384 x 4096 in BF16 (H200, 2026-11-30): 47 us; 8 warps 60, 16 warps 114;
# tiles of 64 with 4 warps 59
TILE, WARPS = 128, 4
# Programs of a pass that will seldom be needed, as an amax is known: each that starts only to return takes its time
FEW = 1056


def amax_ref(x: Tensor, dim: int | None = None) -> Tensor:
    """Reference of ``compute_amax`` in plain PyTorch; any floating point dtype."""
    if dim is None:
        return group_amax(x, TENSORWISE)
    return group_amax(x if dim == 1 else x.t(), ROWWISE).squeeze(1)


@jit
def is_known(amax_ptr):  # type: ignore[no-untyped-def]
    """True if an amax of earlier steps can be used: above zero and finite."""
    bits = tl.load(amax_ptr)
    return (bits > 0) & (bits < 0x7F800000)


@jit
def amax_kernel(  # type: ignore[no-untyped-def]
    x_ptr, known_ptr, out_ptr, row_count, col_count, row_stride, col_stride, row_offset, cols_at, tile_count,
    TENSOR: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, UNLESS_KNOWN: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Max into ``out``, which holds zeros: the tensor's, or those of rows from ``row_offset`` on and those of columns
    from ``cols_at`` on. Tiles go round the programs.
    """
    if UNLESS_KNOWN and is_known(known_ptr):
        return
    for number in range(tl.program_id(0), tile_count, tl.num_programs(0)):
        first_row, first_col = tile_origin(number, col_count, TILE)
        rows, cols = tile_offsets(first_row, first_col, TILE)
        inside = (rows < row_count)[:, None] & (cols < col_count)[None, :]
        x = tl.load(x_ptr + rows[:, None] * row_stride + cols[None, :] * col_stride, mask=inside, other=0.0)
        bits = magnitude_bits(as_fp32(x))
        max_into(
            bits, out_ptr, out_ptr + row_offset, out_ptr + cols_at, rows, cols, row_count, col_count, TENSOR, ROWS, COLS
        )  # fmt: skip


@jit
def max_into(  # type: ignore[no-untyped-def]
    bits, out_ptr, rows_ptr, cols_ptr, rows, cols, row_count, col_count,
    TENSOR: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Max the magnitudes of a tile into the tensor's amax, into those of its rows and of its columns, as asked."""
    if TENSOR:
        tl.atomic_max(out_ptr, tl.max(tl.max(bits, 1), 0), sem="relaxed")
    if ROWS:
        tl.atomic_max(rows_ptr + rows, tl.max(bits, 1), mask=rows < row_count, sem="relaxed")
    if COLS:
        tl.atomic_max(cols_ptr + cols, tl.max(bits, 0), mask=cols < col_count, sem="relaxed")


def amax_launch(
    x: Tensor,
    *,
    tensor: bool = False,
    rows: bool = False,
    cols: bool = False,
    known: Tensor | None = None,
    row_offset: int = 0,
    all_rows: int | None = None,
) -> Launch:
    """The kernel for tensors like ``x`` [R, C]: called with ``x``, the known amax, and int32 zeros for the result, bit
    patterns of FP32: one for the tensor, or R for the rows and then C for the columns.

    ``x`` is not empty, any strides, on a device that runs Triton. Where ``known``, the int32 bits [1] of an amax, can
    be used, the zeros stay zeros and ``x`` is not read. Where ``x`` is rows ``row_offset`` on of a matrix of
    ``all_rows`` rows, the result is that matrix's.
    """
    row_count, col_count = x.shape
    cols_at = (row_count if all_rows is None else all_rows) if rows else 0
    tile_count = _triton.tiles(row_count, col_count, TILE)
    return Launch(
        amax_kernel,
        tile_count if known is None else min(tile_count, FEW),
        (x, torch.int32 if known is None else known, torch.int32),
        (
            row_count, col_count, *x.stride(), row_offset, cols_at, tile_count,
            tensor, rows, cols, known is not None, TILE,
        ),
        WARPS,
    )  # fmt: skip


_plans: Plans[Launch] = Plans()


def compute_amax(x: Tensor, dim: int | None = None) -> Tensor:
    """Amax of ``x``, of the whole tensor or along ``dim``.

    Shape: x [R, C] bf16, fp16 or fp32, any strides -> [] if ``dim`` is None, [C] for dim 0, [R] for dim 1.
        FP32, units of ``x``.
    Numerics: exact and deterministic. NaN anywhere in a group makes its amax NaN; an empty group has amax 0.
    Raises: ShapeError if ``x`` is not 2-D or ``dim`` is not None, 0 or 1.
    """
    if x.ndim != 2:
        raise ShapeError(f"compute_amax got {x.ndim} dimensions; allowed: 2; flatten batch dimensions first")
    if dim not in (None, 0, 1):
        raise ShapeError(f"compute_amax got dim={dim}; allowed: None, 0, 1")
    if not _triton.runs_on(x):
        return amax_ref(x, dim)
    found = torch.zeros(() if dim is None else x.shape[1 - dim], dtype=torch.int32, device=x.device)
    if x.numel():
        device = x.get_device()
        with torch.cuda.device_of(x):
            launch = _plans.get(
                (x.shape, x.stride(), x.dtype, device, alignment(x), dim),
                lambda: amax_launch(x, tensor=dim is None, rows=dim == 1, cols=dim == 0),
            )
            launch(stream_of(device), address(x), address(found), address(found))
    return found.view(torch.float32)
