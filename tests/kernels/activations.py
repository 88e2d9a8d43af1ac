"""What tests of activations share, with a gate and without: exact values, bounds, and how codes are compared."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from acceler8.formats import Format
from acceler8.kernels import Quantized, quantize_ref
from acceler8.kernels._triton import INTERPRETED
from tests.kernels.support import assert_same

# numpy, which the interpreter computes with, reports what the hardware does in silence
SILENT_OVERFLOWS = [
    pytest.mark.filterwarnings(f"ignore:{what} encountered:RuntimeWarning")
    for what in ("invalid value", "overflow", "divide by zero", "underflow")
]
U = 2.0**-24
EXACT: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    # PyTorch's cancels, even in float64, where it is near zero
    "gelu_tanh": lambda x: x * torch.sigmoid((8 / math.pi) ** 0.5 * x * (1 + 0.044715 * x * x)),
    "relu": F.relu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
}


def some(shapes: list[tuple[int, int]], index: int, device: str) -> list[tuple[int, int]]:
    """All on a GPU; on a CPU two, in the interpreter one, of which each combination sees others."""
    return shapes if device == "cuda" else [shapes[(index + 3 * i) % len(shapes)] for i in range(1 + (not INTERPRETED))]


def value_and_slope(x: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """``(f, f')`` in float64, by PyTorch's own activation and autograd."""
    leaf = x.double().clone().requires_grad_()
    value = EXACT[activation](leaf)
    (slope,) = torch.autograd.grad(value.sum(), leaf)
    return value.detach(), slope


def of(q: Quantized | None, x: Tensor, fmt: Format, case: object, **options: object) -> None:
    """``q`` has the codes and scales that the reference gives FP32 ``x``."""
    assert q is not None
    assert q.codes.dtype is fmt.torch_dtype
    codes, scale_inv, _ = quantize_ref(x, fmt, q.granularity, **options)  # type: ignore[arg-type]
    assert_same(q, codes, scale_inv, case)


def near(q: Quantized | None, x: Tensor, fmt: Format, activation: str, **options: object) -> None:
    """Codes of ``x`` but for few that an FP32 rounding moved to a neighbour.

    1 + erf cancels, so the tail of gelu is right absolutely, not relatively, and is left out: |g up| 4 U < 1e-5 here.
    """
    assert q is not None
    codes, _, _ = quantize_ref(x, fmt, q.granularity, **options)  # type: ignore[arg-type]
    a, b = (t.cpu().view(torch.uint8).int() for t in (q.codes, codes))
    apart = torch.where((a ^ b) > 127, (a & 127) + (b & 127), (a - b).abs())  # -0 is next to 0
    if activation == "gelu":
        apart[:, : x.shape[1]][x.abs() < 1e-4] = 0
    assert apart.max() <= 1
    assert (apart > 0).sum() <= max(2, 1e-3 * apart.numel())


def bounds(gate: Tensor, value: Tensor, slope: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Error allowed of f and of f', absolute. U = 2^-24 is half an ulp: what one rounding does, relatively.

    exp(t): the product t * log2(e) and that constant are off by 1.5 U of it, so exp by (1.5 |t| + 4) U, 4 U being the
    hardware's 2 ulp. s = 1 / (1 + exp(-t)) then by e = (1 - s) (1.5 |t| + 4) U + 5 U: sum 1, division 4. 1 - s is off
    by s e + U.
    silu: f = g s by e + U. f' = s (1 + g (1 - s)): by s (|g| (s e + 2 U) + (e + 3 U) (1 + |g| (1 - s))).
    gelu: erf by 4 U and by what 2.5 U of its argument do, x erf'(x) < 0.5; so p = (1 + erf) / 2 by 4 U. f = g p by
    4 U |g| + U |f|. f' = p + g n, n the normal density: its exponent is off by 2.5 U of g^2 / 2, so it by
    (1.25 g^2 + 8) U.
    quick_gelu: s of t = 1.702 g, itself off by 2 U, so e = (1 - s) (3.5 |t| + 4) U + 5 U, within gelu_tanh's;
    f' = s + 1.702 g s (1 - s) is bounded as gelu_tanh's, with t' = 1.702.
    gelu_tanh: s of t, itself off by 5 U, so e = (1 - s) (7 |t| + 4) U + 5 U. f' = s + g s (1 - s) t': the product's
    factors by e + (s e + U) / (1 - s) + 12 U.
    Where s underflows, it is 0: 2^-100 covers |g| 2^-126.
    """
    size = gate.abs()
    tiny = 2.0**-100
    if activation == "relu":
        return 0 * size, 0 * size
    if activation == "gelu":
        density = torch.exp(-0.5 * gate * gate) * 0.3989422804014327
        of_slope = 4 * U + size * density * (1.25 * gate * gate + 8) * U + U * slope.abs()
        return 4 * U * size + U * value.abs() + tiny, of_slope + tiny
    t = 1.5957691216057308 * gate * (1 + 0.044715 * gate * gate)
    t = {"silu": gate, "quick_gelu": 1.702 * gate}.get(activation, t)
    s = torch.sigmoid(t)
    if activation == "silu":
        e = (1 - s) * (1.5 * size + 4) * U + 5 * U
        of_slope = s * (size * (s * e + 2 * U) + (e + 3 * U) * (1 + size * (1 - s)))
        return (e + U) * value.abs() + tiny, of_slope + tiny
    e = (1 - s) * (7 * t.abs() + 4) * U + 5 * U
    slope_of_t = 1.702 if activation == "quick_gelu" else 1.5957691216057308 * (1 + 0.134145 * gate * gate)
    inner = size * slope_of_t
    of_slope = s * e + inner * s * (e * (1 - s) + s * e + U + 12 * U * (1 - s)) + 2 * U * slope.abs()
    return (e + U) * value.abs() + tiny, of_slope + tiny
