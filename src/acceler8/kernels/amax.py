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
from acceler8.kernels._triton import LAUNCH_OPTIONS, TILE, as_fp32, jit, magnitude_bits, tile_offsets, tl
from acceler8.scaling import ROWWISE, TENSORWISE, group_amax


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
def _amax_kernel(  # type: ignore[no-untyped-def]
    x_ptr, known_ptr, tensor_ptr, row_ptr, col_ptr, row_count, col_count, row_stride, col_stride,
    TENSOR: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, UNLESS_KNOWN: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    if UNLESS_KNOWN and is_known(known_ptr):
        return
    rows, cols = tile_offsets(row_count, col_count, TILE)
    inside = (rows < row_count)[:, None] & (cols < col_count)[None, :]
    x = tl.load(x_ptr + rows[:, None] * row_stride + cols[None, :] * col_stride, mask=inside, other=0.0)
    bits = magnitude_bits(as_fp32(x))
    if ROWS:
        tl.atomic_max(row_ptr + rows, tl.max(bits, 1), mask=rows < row_count, sem="relaxed")
    if COLS:
        tl.atomic_max(col_ptr + cols, tl.max(bits, 0), mask=cols < col_count, sem="relaxed")
    if TENSOR:
        tl.atomic_max(tensor_ptr, tl.max(tl.max(bits, 1), 0), sem="relaxed")


def amax_bits(
    x: Tensor,
    *,
    tensor: bool = False,
    rows: bool = False,
    cols: bool = False,
    unless_known: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the kernel: amax of the tensor [1], of rows [R], of columns [C]; what was not asked for is
    empty.

    Results are int32, the bit patterns of FP32. ``x`` is 2-D, any strides, on a device that runs Triton.
    ``unless_known`` is an FP32 tensor [1] on it; where that is a usable amax, results stay 0 and ``x`` is not
    read.
    """
    row_count, col_count = x.shape
    sizes = [int(tensor), rows * row_count, cols * col_count]
    zeros = torch.zeros(sum(sizes), dtype=torch.int32, device=x.device)
    of_tensor, of_rows, of_cols = zeros.split(sizes)
    known = zeros if unless_known is None else unless_known.view(torch.int32)
    if x.numel():
        with torch.cuda.device_of(x):
            _amax_kernel[(_triton.tiles(row_count, col_count),)](
                x, known, of_tensor, of_rows, of_cols, row_count, col_count, x.stride(0), x.stride(1),
                tensor, rows, cols, unless_known is not None, TILE, **LAUNCH_OPTIONS,
            )  # fmt: skip
    return of_tensor, of_rows, of_cols


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
    tensor, rows, cols = amax_bits(x, tensor=dim is None, rows=dim == 1, cols=dim == 0)
    return (tensor.squeeze(0) if dim is None else rows if dim == 1 else cols).view(torch.float32)
