"""Data that bites, and an independent quantiser: numpy and ml_dtypes, from the definitions, a group at a time."""

from __future__ import annotations

import itertools
import math

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from acceler8.formats import Format
from acceler8.kernels import Quantized
from acceler8.scaling import Granularity

_INDEPENDENT = {"E4M3": ml_dtypes.float8_e4m3fn, "E5M2": ml_dtypes.float8_e5m2}

# 1, primes, 16n +- 1, more than one tile in each direction
SHAPES = [(1, 1), (7, 48), (17, 31), (127, 16), (15, 129), (130, 272)]
DATA = ["gaussian", "outliers", "zero_rows", "one_nan", "infinities", "ties", "tiny", "huge", "any_bits"]
LAYOUTS = ["contiguous", "transposed", "strided", "expanded_rows", "expanded_cols", "offset"]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def make(kind: str, rows: int, cols: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """A tensor [rows, cols] of ``dtype`` on the CPU."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=g)
    at = (rows // 2, cols // 3)
    if kind == "outliers":
        x[at] = 1e4
        x[-1, -1] = -3e3
    elif kind == "zero_rows":
        x[::3] = 0
        x[:, ::5] = -0.0
    elif kind == "one_nan":
        x[at] = math.nan
    elif kind == "infinities":
        x[at], x[-1, -1] = math.inf, -math.inf
    elif kind == "ties":
        x = _ties(rows, cols, g)
    elif kind == "tiny":  # amax below the floor, FP32 denormals among them
        x *= 1e-13
        x[:, ::2] *= 1e-26
    elif kind == "huge":
        x *= 1e4 if dtype is torch.float16 else 7e37
        x.clamp_(-3e38, 3e38)
    elif kind == "any_bits":
        bits = torch.randint(0, 2**16, (rows, cols), generator=g, dtype=torch.int32)
        if dtype is torch.float32:
            return (bits << 16 | torch.randint(0, 2**16, (rows, cols), generator=g, dtype=torch.int32)).view(dtype)
        return bits.to(torch.int16).view(dtype)
    return x.to(dtype)


def _ties(rows: int, cols: int, g: torch.Generator) -> Tensor:
    """Values half way between two E4M3 numbers, in groups whose scale is 1: each holds a 448."""
    numbers = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (numbers[1:] + numbers[:-1]) / 2
    x = ties[torch.randint(0, len(ties), (rows, cols), generator=g)]
    x = torch.where(torch.rand(rows, cols, generator=g) < 0.5, -x, x)
    x[::32], x[:, ::32] = 448.0, 448.0
    return x


def lay_out(x: Tensor, layout: str) -> Tensor:
    """``x`` (or, where elements are shared, a tensor made of its first row or column) in another layout."""
    rows, cols = x.shape
    if layout == "transposed":
        return x.t().contiguous().t()
    if layout == "strided":
        return torch.zeros(2 * rows, 3 * cols + 1, dtype=x.dtype)[::2, 1::3].copy_(x)
    if layout == "expanded_rows":
        return x[:1].expand(rows, cols)
    if layout == "expanded_cols":
        return x[:, :1].expand(rows, cols)
    if layout == "offset":  # starts at an odd element, so that no vector load is aligned
        return torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].view(rows, cols).copy_(x)
    return x.contiguous()


def quantize_independently(
    x: Tensor,
    fmt: Format,
    granularity: Granularity,
    *,
    pow2: bool = False,
    margin: int = 0,
    amax: float | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """``(codes as bytes, scale_inv)`` of ``x``, by the definitions."""
    values = x.float().numpy()
    rows, cols = values.shape
    height, width = granularity.rows or max(rows, 1), granularity.cols or max(cols, 1)
    multiple = max(16, granularity.cols)
    codes = np.zeros((rows, -(-cols // multiple) * multiple), dtype=np.uint8)
    scale_inv = np.zeros((-(-rows // height), -(-cols // width)), dtype=np.float32)
    for i, j in itertools.product(range(0, rows, height), range(0, cols, width)):
        group = values[i : i + height, j : j + width]
        largest = np.abs(group).max()
        if amax is not None and 0 < amax < math.inf:
            largest = np.float32(amax)
        scale, inverse = _scale(largest, fmt.max * 2.0**-margin, pow2, granularity.e8m0)
        with np.errstate(invalid="ignore", over="ignore"):  # signalling NaNs; overflow saturates
            scaled = np.clip(group * scale, -fmt.max, fmt.max)
        good = np.isfinite(group)
        rounded = np.where(good, scaled, 0).astype(_INDEPENDENT[fmt.name]).view(np.uint8)
        codes[i : i + height, j : j + group.shape[1]] = np.where(good, rounded, 0x7F)
        scale_inv[i // height, j // width] = inverse
    return codes, scale_inv if granularity.rows else scale_inv.reshape(())


def _scale(amax: np.float32, target: float, pow2: bool, e8m0: bool) -> tuple[np.float32, np.float32]:
    one = np.float32(1)
    if not np.isfinite(amax):
        return one, one
    amax = max(amax, np.float32(1e-12))
    if e8m0:
        mantissa, exponent = np.frexp(amax / np.float32(target))
        inverse = np.ldexp(one, exponent - (mantissa == 0.5))
        return one / inverse, inverse
    scale = np.clip(np.float32(target) / amax, np.float32(2.0**-126), np.float32(2.0**126))
    if pow2:
        scale = np.ldexp(one, np.frexp(scale)[1] - 1)
    return scale, one / scale


def assert_same(got: Quantized, codes: np.ndarray | Tensor, scale_inv: np.ndarray | Tensor, case: object) -> None:
    """Codes byte for byte, scales bit for bit, in shape, dtype and layout that a GEMM takes."""
    assert got.codes.is_contiguous(), case
    assert got.scale_inv.is_contiguous(), case
    assert got.scale_inv.dtype == torch.float32, case
    if isinstance(codes, Tensor):
        codes, scale_inv = codes.view(torch.uint8).numpy(), scale_inv.numpy()
    raw, scales = got.codes.cpu().view(torch.uint8).numpy(), got.scale_inv.cpu().numpy()
    assert raw.shape == codes.shape, case
    assert scales.shape == scale_inv.shape, case
    wrong = np.argwhere(raw != codes)
    assert not len(wrong), (
        case,
        f"{len(wrong)} codes differ, first",
        wrong[0],
        raw[tuple(wrong[0])],
        codes[tuple(wrong[0])],
    )
    assert np.array_equal(scales.view(np.uint32), scale_inv.view(np.uint32)), case


def spread(q: Quantized, rows: int, cols: int) -> Tensor:
    """The ``scale_inv`` that each element of ``q`` meets, by its index; broadcasts to [rows, cols]."""
    g = q.granularity
    if q.scale_inv.ndim == 0:
        return q.scale_inv
    i = torch.arange(rows) // g.rows
    j = torch.arange(cols) // g.cols if g.cols else torch.zeros(cols, dtype=torch.long)
    return q.scale_inv[i][:, j]
