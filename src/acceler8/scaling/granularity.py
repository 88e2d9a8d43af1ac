"""Which elements of an operand share one scale.

An operand is a 2-D tensor ``[R, C]`` whose last dimension is the one that its GEMM contracts. A granularity
is the size of the group that owns a scale: the whole tensor, a row, or a block of it. Small groups confine an
outlier (or a NaN) to few neighbours; large ones cost fewer scales and let one cast serve both orientations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from acceler8.errors import ShapeError


@dataclass(frozen=True)
class Granularity:
    """Group of ``rows x cols`` elements; 0 means the whole extent of that dimension."""

    name: str
    rows: int
    cols: int
    e8m0: bool = False  # scales are powers of two, rounded up (MX)

    @property
    def is_blockwise(self) -> bool:
        """True if groups are local blocks, so that no pass over the whole tensor or row is needed."""
        return self.cols > 0

    @property
    def is_square(self) -> bool:
        """True if the groups of the transposed tensor are the transposed groups: one cast serves both."""
        return (self.rows, self.cols) == (0, 0) or (self.rows == self.cols and self.rows > 0)

    @property
    def contraction_multiple(self) -> int:
        """The contracted dimension is filled with zero codes up to a multiple of this (16 is the GEMM's own)."""
        return 128 if self.cols == 128 else 32 if self.cols == 32 else 16

    def scale_shape(self, rows: int, cols: int) -> tuple[int, ...]:
        """Shape of ``scale_inv`` for an operand ``[rows, cols]``; ``()`` for one scale a tensor."""
        if self.rows == 0:
            return ()
        return -(-rows // self.rows), 1 if self.cols == 0 else -(-cols // self.cols)

    def __str__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[Callable[[str], Granularity], tuple[str]]:
        """Copies and pickles are the one registered object, so identity tells granularities apart."""
        return _by_name, (self.name,)


def _by_name(name: str) -> Granularity:
    return GRANULARITIES[name]


TENSORWISE = Granularity("tensorwise", 0, 0)
ROWWISE = Granularity("rowwise", 1, 0)
BLOCK_1x128 = Granularity("1x128", 1, 128)
BLOCK_128x128 = Granularity("128x128", 128, 128)
MX_1x32 = Granularity("mx1x32", 1, 32, e8m0=True)

GRANULARITIES: dict[str, Granularity] = {g.name: g for g in (TENSORWISE, ROWWISE, BLOCK_1x128, BLOCK_128x128, MX_1x32)}

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by element size


def group_amax(x: Tensor, granularity: Granularity) -> Tensor:
    """Amax of each scaling group of ``x``, in the units of ``x``.

    Shape: x [R, C] -> FP32, ``granularity.scale_shape(R, C)``. A group at the edge may be smaller than a block.
    Numerics: exact. NaN in a group makes its amax NaN; an empty tensor has amax 0.
    Raises: ShapeError if ``x`` is not 2-D.
    """
    if x.ndim != 2:
        raise ShapeError(f"group_amax got {x.ndim} dimensions; allowed: 2; flatten batch dimensions first")
    if x.numel() == 0:
        return torch.zeros(granularity.scale_shape(*x.shape), dtype=torch.float32, device=x.device)
    if granularity.rows == 0:
        # one pass along memory, no copy; NaN wins in both
        low, high = torch.aminmax(x.t() if x.stride(0) < x.stride(1) else x)
        return torch.maximum(high, -low).float()
    # magnitudes ordered as integers: the same order, NaN above infinity so never lost, and faster on a CPU
    bits = x.abs().view(_BITS[x.element_size()])
    if granularity.cols == 0:
        largest = bits.amax(1, keepdim=True)
    else:
        largest = _block_max(bits, granularity.rows, granularity.cols).contiguous()
    return largest.view(x.dtype).float()


def _block_max(bits: Tensor, rows: int, cols: int) -> Tensor:
    """Maximum over blocks of ``rows x cols``; ``bits`` is not empty."""
    if bits.stride(0) < bits.stride(1):  # along memory: a CPU takes a tenth of the time
        return _block_max(bits.t(), cols, rows).t()
    fill = (0, -bits.shape[1] % cols, 0, -bits.shape[0] % rows)
    bits = torch.nn.functional.pad(bits, fill) if any(fill) else bits
    return bits.reshape(-1, rows, bits.shape[1] // cols, cols).amax((1, 3))


def expand_groups(scale: Tensor, granularity: Granularity, rows: int, cols: int) -> Tensor:
    """A scale per group -> a tensor that broadcasts against ``[rows, cols]``: each element meets its own."""
    if not granularity.is_blockwise:
        return scale
    row_blocks, col_blocks = scale.shape
    spread = (row_blocks, granularity.rows, col_blocks, granularity.cols)
    full = scale[:, None, :, None].expand(spread).reshape(row_blocks * spread[1], col_blocks * spread[3])
    return full[:rows, :cols]


def multiply_groups(x: Tensor, scale: Tensor, granularity: Granularity, *, in_place: bool = False) -> Tensor:
    """``x * scale``, each element with the scale of its group.

    Shape: x [R, C] FP32, scale ``granularity.scale_shape(R, C)`` FP32 -> [R, C] FP32, strides as x has them.
    ``in_place`` writes into ``x``, which must not share elements. The product is rounded once.
    """
    rows, cols = granularity.rows, granularity.cols
    if granularity.is_blockwise and x.numel() and not (x.shape[0] % rows or x.shape[1] % cols):
        # over a view of blocks: an expanded scale costs two passes, and slow ones where x is transposed
        blocks, scale = x.unflatten(1, (-1, cols)).unflatten(0, (-1, rows)), scale[:, None, :, None]
        product: Tensor = blocks.mul_(scale) if in_place else blocks * scale
        return product.reshape(x.shape)
    scale = expand_groups(scale, granularity, *x.shape)
    return x.mul_(scale) if in_place else x * scale
