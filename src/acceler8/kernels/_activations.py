"""The activations of MLPs, and what the operations on them have in common: ``gated.py`` with a gate, ``activation.py``
without.

``f`` is silu ``g * s(g)`` with ``s`` the sigmoid, gelu ``g * (1 + erf(g / sqrt(2))) / 2``, gelu_tanh ``g * s(2 * sqrt(2
/ pi) * (g + 0.044715 g^3))`` (the usual tanh, which cancels, written as a sigmoid, which does not), relu, or quick_gelu
``g * s(1.702 g)``.

Source: Hendrycks and Gimpel 2016, arXiv:1606.08415.
"""

from __future__ import annotations

import torch
from torch import Tensor

from acceler8.errors import DtypeError, RecipeError, ShapeError
from acceler8.formats import FORMATS, Format
from acceler8.kernels._gated_launch import Delayed
from acceler8.kernels.operand import Quantized
from acceler8.kernels.quantize import cast_ref
from acceler8.scaling import GRANULARITIES, TENSORWISE, Granularity

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "quick_gelu")
INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def activate_ref(gate: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Reference: ``(f(gate), f'(gate))`` in the dtype of ``gate``, FP32 or FP64; both finite where ``gate`` is."""
    if activation == "silu":
        sigmoid = 1.0 / (1.0 + torch.exp(-gate))
        return gate * sigmoid, sigmoid * (1.0 + gate * (1.0 - sigmoid))
    if activation == "quick_gelu":
        sigmoid = 1.0 / (1.0 + torch.exp(-1.702 * gate))
        return gate * sigmoid, sigmoid + 1.702 * (gate * (sigmoid * (1.0 - sigmoid)))  # 1.702 * gate may overflow
    if activation == "gelu":
        normal = 0.5 * (1.0 + torch.erf(gate * 0.5**0.5))
        return gate * normal, normal + gate * (0.3989422804014327 * torch.exp(-0.5 * (gate * gate)))
    if activation == "gelu_tanh":
        near = torch.where(gate > 32.0, 32.0, torch.where(gate < -32.0, -32.0, gate))  # f is gate or 0 beyond
        square = near * near
        sigmoid = 1.0 / (1.0 + torch.exp(-1.5957691216057308 * near * (1.0 + 0.044715 * square)))
        inner = 1.5957691216057308 * (1.0 + 0.134145 * square)
        return gate * sigmoid, sigmoid + near * (sigmoid * (1.0 - sigmoid)) * inner
    value = torch.where(gate <= 0.0, 0.0, gate)
    return value, torch.where(gate > 0.0, 1.0, value)


def codes_ref(
    x: Tensor, rows: str, cols: str, granularity: str, pow2: bool, margin: int, delayed: Delayed | None
) -> list[Tensor]:
    """Reference: ``[codes, scale_inv]`` of rows and of columns, as asked, formats and granularity by name."""
    if not (rows or cols):
        return []
    amax, staging = (None, None) if delayed is None else delayed
    groups = GRANULARITIES[granularity]
    return cast_ref(
        x, FORMATS.get(rows), FORMATS.get(cols), groups, pow2=pow2, margin=margin, amax=amax, staging=staging
    )  # fmt: skip


def in_places(out: list[Tensor], names: tuple[str, ...], x: Tensor, *others: bool) -> tuple[Tensor, ...]:
    """The results of an op with delayed scaling: fixed places, empty tensors for what was not asked: codes and scales
    in the formats ``names``, then tensors of ``others``.
    """
    left, wanted = iter(out), [*(bool(name) for name in names for _ in range(2)), *others]
    return tuple(next(left) if is_asked else x.new_empty(0) for is_asked in wanted)


def name_of(fmt: Format | None) -> str:
    """As the library's operations take a format."""
    return "" if fmt is None else fmt.name


def asked(placed: tuple[Tensor, ...], names: tuple[str, ...], *others: bool) -> list[Tensor]:
    """What ``in_places`` was given."""
    wanted = [*(bool(name) for name in names for _ in range(2)), *others]
    return [t for t, is_asked in zip(placed, wanted, strict=True) if is_asked]


def operands(
    out: list[Tensor] | tuple[Tensor, ...], formats: tuple[Format | None, ...], granularity: Granularity
) -> list[Quantized | None]:
    """Codes and scales, one behind the other, as operands; None for a format that was not asked for."""
    left = iter(out)
    return [None if fmt is None else Quantized(next(left), next(left), granularity) for fmt in formats]


def check_activation(op: str, activation: str) -> None:
    """Raise RecipeError unless it is one of ``ACTIVATIONS``."""
    if activation not in ACTIVATIONS:
        raise RecipeError(f"{op} got activation {activation!r}; allowed: {', '.join(ACTIVATIONS)}")


def check_values(op: str, name: str, x: Tensor, is_kept: bool = False) -> None:
    """Raise unless the matrix ``x`` is laid out as the kernels read it, in a dtype that they read, or kept codes."""
    if x.dtype not in INPUT_DTYPES and not is_kept:
        raise DtypeError(f"{op} got {name} in {x.dtype}; allowed: bfloat16, float16, float32; cast it first")
    if x.stride(1) != 1:
        raise ShapeError(
            f"{op} got {name} with strides {x.stride()}; allowed: contiguous rows, as a GEMM writes them; call"
            " .contiguous() first"
        )


def pair(op: str, amax: Tensor | None, staging: Tensor | None, granularity: Granularity) -> Delayed | None:
    """What delayed scaling needs, checked; None under current scaling."""
    if amax is None and staging is None:
        return None
    if granularity is not TENSORWISE:
        raise ShapeError(f"{op} got an amax of earlier steps with {granularity} scales; allowed: tensorwise")
    if amax is None or staging is None:
        got, missing = ("staging", "amax") if amax is None else ("amax", "staging")
        raise ShapeError(f"{op} got {got} but no {missing}; allowed: both (delayed scaling) or neither")
    return amax, staging


def pairs(
    op: str,
    what: str,
    of_d: tuple[Tensor | None, Tensor | None] | None,
    of_act: tuple[Tensor | None, Tensor | None] | None,
    granularity: Granularity,
) -> tuple[Delayed | None, Delayed | None]:
    """``(amax, staging)`` of the gradient and of act, each if its codes are asked for; both or neither."""
    delayed = None if of_d is None else pair(op, *of_d, granularity)
    act_delayed = None if of_act is None else pair(op, *of_act, granularity)
    if of_d is not None and of_act is not None and (delayed is None) != (act_delayed is None):
        raise ShapeError(f"{op} got an amax of earlier steps for one of {what} and act; allowed: for both or neither")
    return delayed, act_delayed
