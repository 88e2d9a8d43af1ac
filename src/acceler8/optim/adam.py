"""Adam and AdamW with state in FP8, FP16, BF16 or FP32: the interface of ``torch.optim``'s, one fused pass.

    optimizer = acceler8.optim.AdamW(model.named_parameters(), lr=3e-4, moments="fp8", master="bf16_remainder")
    print(optimizer.summary())

Without ``moments`` and ``master`` it is torch's AdamW to a few ulps for FP32 parameters. With FP8 moments and a BF16
remainder a BF16 parameter has 2.06 + 2 bytes of state and the update of FP32 weights. Formulas, formats and why
they are what they are stand in ``acceler8.kernels.adam`` and ``acceler8.formats.blocks``; figures: docs/optimizers.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from operator import is_
from typing import Any, ClassVar

import torch
from torch import Tensor

from acceler8.errors import ConfigError, GradientError
from acceler8.kernels._adam_launch import AdamLaunches
from acceler8.kernels.adam import AdamKind, AdamNumbers, AdamRow, AdamTensors, adam_step
from acceler8.optim.base import Row, StateFormatsOptimizer
from acceler8.optim.formats import StateFormats
from acceler8.optim.state import Moment, shard


class Adam(StateFormatsOptimizer):
    """Adam, a drop-in for ``torch.optim.Adam``.

    params, lr, betas, eps, weight_decay, maximize: as torch's, with its defaults; ``lr`` may be a tensor.
    moments: format of both moments, "fp32" (default), "bf16", "fp16" or "fp8"; exp_avg and exp_avg_sq: of one alone.
    master: "none" (default), "stochastic", "fp32", "bf16_remainder" or "fp16"; float32 parameters need none.
    quantize: "matrices" (default), "all", "none", "level": see ``acceler8.optim.StateFormatsOptimizer``. Every option
        of a format may be set by group, in the same words; there they become ``exp_avg_format``, ``exp_avg_sq_format``.
    foreach, fused, capturable: taken and without effect, for each step is fused, needs no host and can be captured.
    Gradients that ``GradScaler`` found not finite are dropped on the device, without waiting for it.
    Raises: ConfigError for amsgrad or differentiable, and for numbers that torch refuses too; DtypeError for formats.
    """

    MOMENTS: ClassVar[tuple[Moment, ...]] = (Moment("exp_avg"), Moment("exp_avg_sq", is_unsigned=True))
    READS_CODES: ClassVar[bool] = True
    _DECOUPLED = False

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        moments: str = "fp32",
        exp_avg: str | None = None,
        exp_avg_sq: str | None = None,
        master: str = "none",
        quantize: str = "matrices",
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
    ) -> None:
        self._refuse({"amsgrad": amsgrad, "differentiable": differentiable})
        _check_numbers(lr, betas, eps, weight_decay)
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": False, "maximize": maximize,
            "foreach": foreach, "capturable": capturable, "differentiable": False, "fused": fused,
            "decoupled_weight_decay": self._DECOUPLED, "exp_avg_format": moments if exp_avg is None else exp_avg,
            "exp_avg_sq_format": moments if exp_avg_sq is None else exp_avg_sq, "master": master, "quantize": quantize,
        }  # fmt: skip
        self._launches: dict[torch.device, AdamLaunches] = {}
        self._kinds: dict[tuple[torch.dtype, torch.dtype, StateFormats], AdamKind] = {}
        self._told: dict[Tensor, _Told] = {}
        super().__init__(params, defaults)
        self._step_supports_amp_scaling = True  # GradScaler leaves grad_scale and found_inf here and does not wait

    def _refuse(self, options: Mapping[str, Any]) -> None:
        for name in ("amsgrad", "differentiable"):
            if options.get(name):
                raise ConfigError(f"{name}=True is not offered; allowed: False; use torch.optim.{type(self).__name__}")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, with formats of its own if it has any. Raises ConfigError for amsgrad and differentiable."""
        self._refuse(param_group)
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        """Without tables of addresses: a copy makes its own."""
        return {**super().__getstate__(), "_step_supports_amp_scaling": True}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("_launches", {})
        self.__dict__.setdefault("_kinds", {})
        self._told = {}

    def update(self, device: torch.device, rows: Sequence[Row]) -> None:
        """One fused pass over ``rows``."""
        if any(getattr(self, name, None) is not None for name in ("grad_scale", "found_inf")):
            _check_not_coded(rows)
        groups = [self._group_numbers(group) for group in self.param_groups]
        scale, found = (
            None if flag is None else flag.to(device, torch.float32, non_blocking=True)
            for flag in (getattr(self, "grad_scale", None), getattr(self, "found_inf", None))
        )
        launches = self._launches.get(device)
        if launches is None:
            launches = self._launches[device] = AdamLaunches(device)
        adam_step(launches, [self._adam_row(row) for row in rows], groups, grad_scale=scale, found_inf=found)

    def _group_numbers(self, group: dict[str, Any]) -> AdamNumbers:
        beta1, beta2 = group["betas"]
        lr = group["lr"]
        if isinstance(lr, Tensor) and lr.device.type == "cuda" and lr.dtype is not torch.float32:
            lr = lr.float()
        return AdamNumbers(
            lr, float(beta1), float(beta2), group["eps"], group["weight_decay"], group["maximize"], self._DECOUPLED
        )

    def _adam_row(self, row: Row) -> AdamRow:
        told = self._told.get(row.owner)
        if told is None or not told.holds(row):
            told = self._tell(row)
        tensors = AdamTensors(row.param, row.grad, *told.stored, row.grad_scale)  # type: ignore[arg-type, call-arg]
        return AdamRow(told.kind, tensors, row.group, row.number)

    def _tell(self, row: Row) -> _Told:
        state, formats = row.state, row.formats
        key = (row.param.dtype, row.grad.dtype, formats)
        kind = self._kinds.get(key)
        if kind is None:
            (first, second), master = formats.moments, formats.master
            kind = self._kinds[key] = AdamKind(*key[:2], first, second, master, self._DECOUPLED)
        stored = (
            shard(state["exp_avg"]), _shard(state.get("exp_avg_scale")),
            shard(state["exp_avg_sq"]), _shard(state.get("exp_avg_sq_scale")),
            _shard(state.get("master")), _shard(state.get("master_scale")), state["step"],
        )  # fmt: skip
        told = _Told(kind, formats, list(state.values()), stored)
        if all(type(value) is Tensor for value in told.state):  # the shard of a DTensor may be another next time
            self._told[row.owner] = told
        return told


@dataclass
class _Told:
    """What the kernel is told of a parameter in every step, and what must be the same for that.

    To find it out takes some microseconds of the host's time, for each of hundreds of parameters. Addresses are read
    anew. Without the gradient, which it would keep alive.
    """

    kind: AdamKind
    formats: StateFormats
    state: list[Any]
    stored: tuple[Tensor | None, ...]

    def holds(self, row: Row) -> bool:
        return (
            self.kind.param is row.param.dtype
            and self.kind.grad is row.grad.dtype
            and self.formats is row.formats
            and len(self.state) == len(row.state)
            and all(map(is_, self.state, row.state.values()))
        )


def _check_not_coded(rows: Sequence[Row]) -> None:
    """``GradScaler`` scales losses, unscales ``p.grad`` and looks there for infinities: it sees no gradient in FP8."""
    if any(row.grad_scale is not None for row in rows):
        raise GradientError(
            "optimizer.step got the scale of a GradScaler and gradients that are stored in FP8, which it neither"
            " unscales nor checks; allowed: one of them; leave GradScaler out (GradScaler(enabled=False)) and compute"
            " in BF16: each block of an FP8 gradient has a scale of its own"
        )


def _shard(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else shard(tensor)


class AdamW(Adam):
    """Adam with decoupled weight decay, a drop-in for ``torch.optim.AdamW``. Arguments and errors are ``Adam``'s;
    ``weight_decay`` is 0.01 by default, as torch's.
    """

    _DECOUPLED = True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **options)


def _check_numbers(lr: float | Tensor, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ConfigError(f"lr is a tensor of {lr.numel()} elements; allowed: one")
    for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
        if not isinstance(value, Tensor | Real):
            raise ConfigError(f"{name}={value!r}; allowed: a number from 0")
        if not float(value) >= 0.0:
            raise ConfigError(f"{name}={value}; allowed: from 0")
    if not isinstance(betas, Sequence) or len(betas) != 2:
        raise ConfigError(f"betas={betas!r}; allowed: two numbers, those of the first and the second moment")
    for index, beta in enumerate(betas):
        if not 0.0 <= float(beta) < 1.0:
            raise ConfigError(f"betas[{index}]={beta}; allowed: from 0 to below 1")
