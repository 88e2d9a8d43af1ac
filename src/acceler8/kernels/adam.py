"""Adam's update of many parameters at once, with state and master weights in few bits.

    m += (1 - beta1) * (g - m)                  v = beta2 * v + (1 - beta2) * g * g
    w  = w * (1 - lr * decay) - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

m, v and w are read from their codes, changed in FP32 and written back as codes in the same pass; the step itself uses
what was not rounded. (Adam with coupled decay adds ``decay * w`` to g instead.) What each may be stored as:

==============  =====================================================================================================
moments         "fp32"; "bf16", the second rounded stochastically, for to nearest it freezes (3.4 times too large when
                gradients fell tenfold in 2,500 steps at beta2 0.999); "fp16" and "fp8" in blocks of 128 with an FP32
                scale, the first E4M3, the second UE5M3 (``formats.blocks``)
master weights  "none": the parameter, rounded to nearest; "stochastic": the BF16 parameter, rounded stochastically;
                "fp32"; "bf16_remainder": the 16 bits that the BF16 parameter lacks of FP32, so both together are exact;
                "fp16": FP16 in blocks of 128 under powers of two
gradients       FP32, BF16, FP16 of PyTorch's own; or E4M3 in blocks of 128, as training levels store them
==============  =====================================================================================================

On a GPU everything is one launch for each combination of formats, and one before them. The same codes come from the
plain-PyTorch reference, which is what runs on a CPU: divisions and roots are correctly rounded, nothing is contracted
into a fused multiply-add, and powers of beta are products of FP64 numbers in one order.

Source: Kingma & Ba 2015, arXiv:1412.6980; Loshchilov & Hutter 2019, arXiv:1711.05101.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from acceler8.formats import (
    BLOCK,
    E4M3_BLOCK,
    FP16_BLOCK,
    FP16_POW2,
    FP16_UNSIGNED,
    UE5M3_BLOCK,
    BlockCode,
    decode_blocks,
    encode_blocks,
    hash32_int,
    join_bf16,
    random_bits,
    round_stochastic_bf16,
    split_bf16,
)
from acceler8.kernels import _triton
from acceler8.kernels._adam_launch import AdamLaunches

MOMENT_FORMATS = ("fp32", "bf16", "fp16", "fp8")
MASTER_FORMATS = ("none", "stochastic", "fp32", "bf16_remainder", "fp16")
FIRST_CODES: dict[str, BlockCode] = {"fp16": FP16_BLOCK, "fp8": E4M3_BLOCK}
SECOND_CODES: dict[str, BlockCode] = {"fp16": FP16_UNSIGNED, "fp8": UE5M3_BLOCK}
_SLICE = 2**11 * BLOCK  # elements that the reference holds in FP32 at a time
_GOLDEN = 0x9E3779B9


class AdamKind(NamedTuple):
    """What one launch of the kernel has in common."""

    param: torch.dtype
    grad: torch.dtype
    exp_avg: str
    exp_avg_sq: str
    master: str
    decoupled: bool


class AdamTensors(NamedTuple):
    """A parameter with its gradient and state: plain, on one device; None where a format has none.

    All lie in memory without gaps and in the same order; contiguous, where a format has blocks.

    Shapes: those of the parameter; scales [ceil(n / 128)] FP32; step [] FP32. grad_scale: of a gradient that is E4M3.
    """

    param: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_scale: Tensor | None
    exp_avg_sq: Tensor
    exp_avg_sq_scale: Tensor | None
    master: Tensor | None
    master_scale: Tensor | None
    step: Tensor
    grad_scale: Tensor | None = None


class AdamRow(NamedTuple):
    """One parameter of a step. group: index of its ``AdamNumbers``. number: seeds its random bits."""

    kind: AdamKind
    tensors: AdamTensors
    group: int
    number: int


@dataclass(frozen=True)
class AdamNumbers:
    """A group's numbers. ``lr`` may be a tensor of one element, on any device; on a GPU it is read by the kernel."""

    lr: float | Tensor
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    maximize: bool
    decoupled: bool

    def columns(self, device: torch.device) -> tuple[float, ...]:
        """The group's row of the kernel's table."""
        lr = self.lr
        on_device = isinstance(lr, Tensor) and lr.device == device and device.type == "cuda"
        at = lr.data_ptr() if on_device else 0  # type: ignore[union-attr]
        value = 0.0 if on_device else float(lr)
        sign = -1.0 if self.maximize else 1.0
        return (
            value, at, float(self.beta1), float(self.beta2), float(self.eps), float(self.weight_decay), sign,
            float(self.decoupled),
        )  # fmt: skip


def power(beta: float, exponent: int) -> float:
    """``beta ** exponent`` for an exponent below 2**31, by squaring in FP64: the same products on every device."""
    result, base = 1.0, beta
    for _ in range(31):
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


def adam_step(
    launches: AdamLaunches,
    rows: Sequence[AdamRow],
    groups: Sequence[AdamNumbers],
    *,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Update parameters and state of ``rows``, all on the device of ``launches``, in place.

    grad_scale: FP32 [] or [1] by which gradients are divided. found_inf: FP32 [] or [1]; unless it is 0 nothing
        changes, not the step counters either. Both are read on the device.
    Numerics: FP32; the same codes on every device for gradients that are finite. NaN and inf reach the element, and of
        moments in blocks the block's other elements lose precision for this step.
    """
    if not rows:
        return
    if _triton.runs_on(rows[0].tensors.param):
        launches.step(rows, groups, grad_scale, found_inf)
        return
    if found_inf is not None and bool(found_inf.reshape(()) != 0):
        return
    divisor = 1.0 if grad_scale is None else float(grad_scale)
    for row in rows:
        adam_ref(row, groups[row.group], divisor)


class _Scalars(NamedTuple):
    """FP32 numbers of one parameter's step, as the first kernel computes them."""

    seed: int
    grad: float
    complement1: float
    beta2: float
    complement2: float
    eps: float
    root: float
    step_size: float
    decay: float
    coupled: float


def _scalars(step: int, number: int, numbers: AdamNumbers, grad_scale: float) -> _Scalars:
    lr = float(numbers.lr)
    correction1, correction2 = 1.0 - power(numbers.beta1, step), 1.0 - power(numbers.beta2, step)
    values = (
        (-1.0 if numbers.maximize else 1.0) / grad_scale,
        1.0 - numbers.beta1,
        numbers.beta2,
        1.0 - numbers.beta2,
        numbers.eps,
        1.0 / math.sqrt(correction2) if correction2 else math.inf,
        lr / correction1 if correction1 else math.inf,
        1.0 - lr * numbers.weight_decay if numbers.decoupled else 1.0,
        0.0 if numbers.decoupled else numbers.weight_decay,
    )
    return _Scalars(hash32_int(number * _GOLDEN + step), *(float(np.float32(value)) for value in values))


def adam_ref(row: AdamRow, numbers: AdamNumbers, grad_scale: float = 1.0) -> None:
    """Reference: one parameter's update, plain PyTorch, in slices of 2**18 elements."""
    tensors, kind = row.tensors, row.kind
    tensors.step.add_(1)
    scalars = _scalars(int(tensors.step), row.number, numbers, grad_scale)
    # in the order of memory, as kernels go: a view, also of a tensor that is dense but not contiguous
    flat = {
        name: None if t is None else t.as_strided((t.numel(),), (1,))
        for name, t in tensors._asdict().items()
        if name != "step"
    }
    for start in range(0, tensors.param.numel(), _SLICE):
        part = {
            name: None if t is None else t[start // BLOCK :][: _SLICE // BLOCK] if name.endswith("scale") else
            t[start : start + _SLICE]
            for name, t in flat.items()
        }  # fmt: skip
        _update(AdamTensors(**part, step=tensors.step), kind, scalars, start)  # type: ignore[arg-type]


def _update(part: AdamTensors, kind: AdamKind, scalars: _Scalars, start: int) -> None:
    random = torch.zeros((), dtype=torch.int32)
    if kind.master == "stochastic" or kind.exp_avg_sq == "bf16":
        random = random_bits(start, part.param.numel(), scalars.seed, part.param.device)
    gradient = load_moment(part.grad, part.grad_scale, E4M3_BLOCK) * scalars.grad
    weight = load_weight(part.param, part.master, part.master_scale, kind.master)
    first = load_moment(part.exp_avg, part.exp_avg_scale, FIRST_CODES.get(kind.exp_avg))
    second = load_moment(part.exp_avg_sq, part.exp_avg_sq_scale, SECOND_CODES.get(kind.exp_avg_sq))
    if not kind.decoupled:
        gradient = gradient + weight * scalars.coupled
    first = first + (gradient - first) * scalars.complement1
    second = second * scalars.beta2 + gradient * gradient * scalars.complement2
    # Through FP64, whose root rounds to FP32's correctly. torch's own FP32 root, MKL's on a CPU, is an ulp off for
    # 0.7 % of numbers (torch 2.13).
    root = second.double().sqrt_().float() * scalars.root + scalars.eps
    if kind.decoupled:
        weight = weight * scalars.decay
    weight = weight - first / root * scalars.step_size
    store_moment(first, part.exp_avg, part.exp_avg_scale, FIRST_CODES.get(kind.exp_avg))
    above = (random >> 16) & 0xFFFF
    bits = above if kind.exp_avg_sq == "bf16" else None
    store_moment(second, part.exp_avg_sq, part.exp_avg_sq_scale, SECOND_CODES.get(kind.exp_avg_sq), bits)
    store_weight(weight, part.param, part.master, part.master_scale, kind.master, random & 0xFFFF)


def load_moment(stored: Tensor, scale: Tensor | None, code: BlockCode | None) -> Tensor:
    """A moment in FP32, in the shape in which it is stored."""
    return stored.float() if code is None or scale is None else decode_blocks(stored, scale, code)


def store_moment(
    x: Tensor, stored: Tensor, scale: Tensor | None, code: BlockCode | None, bits16: Tensor | None = None
) -> None:
    """Write FP32 ``x`` into ``stored`` (and ``scale``); ``bits16`` round it stochastically to BF16."""
    if code is not None and scale is not None:
        codes, scale_inv = encode_blocks(x, code)
        stored.copy_(codes)
        scale.copy_(scale_inv)
    else:
        stored.copy_(x if bits16 is None else round_stochastic_bf16(x, bits16))


def load_weight(param: Tensor, master: Tensor | None, scale: Tensor | None, kind: str) -> Tensor:
    """The weight that the optimizer updates, in FP32."""
    if kind == "bf16_remainder" and master is not None:
        return join_bf16(param, master)
    if kind == "fp16" and master is not None and scale is not None:
        return decode_blocks(master, scale, FP16_POW2)
    return (param if master is None else master).float()


def store_weight(
    weight: Tensor, param: Tensor, master: Tensor | None, scale: Tensor | None, kind: str, bits16: Tensor
) -> None:
    """Write an updated FP32 weight into the parameter and its master."""
    if kind == "bf16_remainder" and master is not None:
        high, low = split_bf16(weight)
        param.copy_(high)
        master.copy_(low)
        return
    if kind == "stochastic":
        param.copy_(round_stochastic_bf16(weight, bits16))
        return
    if kind == "fp16" and master is not None and scale is not None:
        codes, scale_inv = encode_blocks(weight, FP16_POW2)
        master.copy_(codes)
        scale.copy_(scale_inv)
        weight = decode_blocks(codes, scale_inv, FP16_POW2)
    elif master is not None:
        master.copy_(weight)
    param.copy_(weight)
