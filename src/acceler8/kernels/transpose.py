"""Transpose FP8 codes without the tensor that they came from: scales of rows become one scale.

    out[c, r] = round(codes[r, c] * scale_inv[r] / largest),   largest = max(scale_inv)

An operand that meets two GEMMs is needed in two orientations, and codes with a scale for each row can't be turned: a
row's scale would lie along the contraction. With scales that are powers of two ``scale_inv / largest`` is one too, at
most 1, so that turning a code lowers its exponent: exact, but for numbers that become subnormal, which are rounded
once. A byte is read and one written, where a cast of the other orientation reads two bytes, twice if it looks for an
amax. The price is range: a row that is 2**k below the largest has k binades fewer (15 of E4M3's are normal).
"""

from __future__ import annotations

import torch
from torch import Tensor

from acceler8.errors import ShapeError
from acceler8.formats import E4M3, E5M2, Format, decode, encode
from acceler8.kernels import _triton
from acceler8.kernels._launch import Launch, Plans, address, alignment, stream_of
from acceler8.kernels._library import library, may_go_direct
from acceler8.kernels._triton import decode_e4m3, hidden, jit, tl
from acceler8.kernels._triton import encode as encode_tile
from acceler8.kernels._words_kernel import words_of, words_origin
from acceler8.kernels.operand import Quantized
from acceler8.scaling import ROWWISE, TENSORWISE

_ROWS, _COLS, _GROUP, _WARPS = 128, 64, 4, 4


@jit
def _turned(  # type: ignore[no-untyped-def]
    codes_ptr, inv_ptr, largest, rows, cols, row_count, col_count, width,
    FMT_MAX: tl.constexpr, E5M2: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Codes of some rows under the one scale; zeros outside."""
    is_row = rows < row_count
    inside = is_row[:, None] & (cols < col_count)[None, :]
    codes = tl.load(codes_ptr + rows[:, None] * width + cols[None, :], mask=inside, other=0)
    if E5M2:  # the upper byte of FP16
        value = (codes.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        value = decode_e4m3(codes, HARDWARE)
    share = tl.div_rn(tl.load(inv_ptr + rows, mask=is_row, other=0.0), largest)
    return encode_tile(value, share[:, None], FMT_MAX, E5M2, HARDWARE)


@jit
def transpose_kernel(  # type: ignore[no-untyped-def]
    codes_ptr, inv_ptr, largest_ptr, out_ptr, row_count, col_count, width, across, out_width,
    FMT_MAX: tl.constexpr, E5M2: tl.constexpr, HARDWARE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """A tile a program, four rows a thread, so that what a column gets is stored as words."""
    first_row, first_col = words_origin(across, ROWS, COLS, GROUP)
    rows, cols = first_row + 4 * tl.arange(0, ROWS // 4), first_col + tl.arange(0, COLS)
    row_count, col_count = hidden(row_count, ROWS), hidden(col_count, COLS)
    largest = tl.load(largest_ptr)
    c0 = _turned(codes_ptr, inv_ptr, largest, rows, cols, row_count, col_count, width, FMT_MAX, E5M2, HARDWARE)
    c1 = _turned(codes_ptr, inv_ptr, largest, rows + 1, cols, row_count, col_count, width, FMT_MAX, E5M2, HARDWARE)
    c2 = _turned(codes_ptr, inv_ptr, largest, rows + 2, cols, row_count, col_count, width, FMT_MAX, E5M2, HARDWARE)
    c3 = _turned(codes_ptr, inv_ptr, largest, rows + 3, cols, row_count, col_count, width, FMT_MAX, E5M2, HARDWARE)
    words_ptr = out_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    inside = (rows < hidden(out_width, ROWS))[:, None] & (cols < col_count)[None, :]
    at = words_ptr + cols[None, :] * (out_width // 4) + (rows // 4)[:, None]
    tl.store(at, words_of(c0, c1, c2, c3), mask=inside)


_plans: Plans[Launch] = Plans()


def _out_width(rows: int) -> int:
    return rows + -rows % TENSORWISE.contraction_multiple


def _format(codes: Tensor) -> Format:
    return E5M2 if codes.dtype is E5M2.torch_dtype else E4M3


def _transpose_triton(codes: Tensor, scale_inv: Tensor, largest: Tensor, cols: int) -> Tensor:
    device = codes.get_device()
    if device >= 0 and device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return _transpose_triton(codes, scale_inv, largest, cols)
    rows, width = codes.shape
    out = torch.empty(cols, _out_width(rows), dtype=codes.dtype, device=codes.device)
    key = (rows, width, cols, codes.dtype, device, alignment(codes), alignment(scale_inv), alignment(largest))

    def make() -> Launch:
        fmt = _format(codes)
        across = -(-cols // _COLS)
        return Launch(
            transpose_kernel,
            -(-out.shape[1] // _ROWS) * across,
            (torch.uint8, scale_inv, largest, torch.uint8),
            (
                rows, cols, width, across, out.shape[1], fmt.max, fmt is E5M2,
                _triton.has_fp8_conversion(codes.device), _ROWS, _COLS, _GROUP,
            ),
            _WARPS,
        )  # fmt: skip

    launch = _plans.get(key, make)
    launch(stream_of(device), address(codes), address(scale_inv), address(largest), address(out))
    return out


def transpose_ref(codes: Tensor, scale_inv: Tensor, largest: Tensor, cols: int) -> Tensor:
    """Reference in plain PyTorch: the codes alone."""
    fmt = _format(codes)
    out = torch.zeros(cols, _out_width(codes.shape[0]), dtype=torch.uint8, device=codes.device)
    values = decode(codes[:, :cols]) * (scale_inv / largest)
    out[:, : codes.shape[0]] = encode(values, fmt).view(torch.uint8).t()
    return out.view(codes.dtype)


def _transpose(codes: Tensor, scale_inv: Tensor, largest: Tensor, cols: int) -> Tensor:
    if _triton.runs_on(codes) and codes.numel() and cols:
        return _transpose_triton(codes, scale_inv, largest, cols)
    return transpose_ref(codes, scale_inv, largest, cols)


def _transpose_fake(codes: Tensor, scale_inv: Tensor, largest: Tensor, cols: int) -> Tensor:
    return codes.new_empty(cols, _out_width(codes.shape[0]))


library.define("transpose_codes(Tensor codes, Tensor scale_inv, Tensor largest, int cols) -> Tensor")
library.impl("transpose_codes", _transpose, "CompositeExplicitAutograd")
torch.library.register_fake("acceler8::transpose_codes", _transpose_fake, lib=library)


def transpose_codes(q: Quantized, cols: int) -> Quantized:
    """The operand that stands for ``q``'s tensor transposed, with one scale.

    Shape: ``q`` [R, C'] E4M3 or E5M2 with a scale for each row, of which ``cols`` columns are no filler -> codes
        [cols, R'], R' = R filled with zeros to a multiple of 16, scale_inv [1, 1] FP32. R may be 0.
    Numerics: scales must be powers of two, as a recipe with ``pow2_scales`` makes them; then codes are exact wherever
        they stay normal, and rounded to nearest even, once, where they do not. Signs of zeros stay; a NaN code gives a
        NaN. Deterministic.
    Raises: ShapeError for another granularity, or ``cols`` outside of 0 to C'.
    """
    if q.granularity is not ROWWISE:
        raise ShapeError(
            f"transpose_codes got scales of {q.granularity}; allowed: rowwise; one scale a tensor needs no shift, and"
            " blocks along the contraction can't be turned: cast the other orientation"
        )
    if not 0 <= cols <= q.codes.shape[1]:
        raise ShapeError(f"transpose_codes got cols={cols}; allowed: 0 to {q.codes.shape[1]}, the width of the codes")
    scale_inv = q.scale_inv
    largest = scale_inv.amax().view(1, 1) if scale_inv.numel() else scale_inv.new_ones(1, 1)
    if may_go_direct(q.codes) and _triton.runs_on(q.codes) and q.codes.numel() and cols:
        turned = _transpose_triton(q.codes, scale_inv, largest, cols)
    else:
        turned = torch.ops.acceler8.transpose_codes.default(q.codes, scale_inv, largest, cols)
    return Quantized(turned, largest, TENSORWISE)


def transpose_bytes(codes: Tensor) -> Tensor:
    """The transposed codes of a tensor whose scale does not change with them: of one scale, or of a scale a column.

    Shape: codes [R, C] E4M3 or E5M2, contiguous -> [C, R'], R' = R filled with zeros to a multiple of 16.
    Numerics: every number keeps its code; a NaN is a NaN. Codes of infinities are not to be among them: no cast makes
        them.
    """
    rows, cols = codes.shape
    if _triton.runs_on(codes) and codes.numel():
        ones = torch.ones(rows, dtype=torch.float32, device=codes.device)
        return _transpose_triton(codes, ones, ones[:1], cols)
    out = torch.zeros(cols, _out_width(rows), dtype=torch.uint8, device=codes.device)
    out[:, :rows] = codes.view(torch.uint8).t()
    return out.view(codes.dtype)
