"""What torchao can be told beside the recipe."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import Enum
from typing import Any, Self

import torch

from acceler8.backends.options import BackendOptions
from acceler8.backends.torchao import library
from acceler8.errors import PlanError


@dataclass(frozen=True, kw_only=True)
class TorchaoOptions(BackendOptions):
    """Settings of the torchao backend. Raises PlanError for a ``config`` that is none of torchao's."""

    config: Any = None
    """A ``torchao.float8.Float8LinearConfig``, which then says everything but ``eval`` and what is left out."""
    pad_inner_dim: bool = True
    """Fill the contracted dimension of GEMMs up to a multiple of 16, so that any number of tokens works. Without a
    ``config`` only."""
    all_gather: bool = False
    """Gather FSDP2's weights in FP8; without FSDP2 it does nothing, and the plan says so."""
    skip_first_and_last: bool = True
    """Leave the first and the last linear layer in high precision, in the order of registration."""
    eval: str | None = None
    """With a ``config``: ``high_precision`` or ``fp8``, what layers in eval() mode compute in; else the recipe says."""

    def __post_init__(self) -> None:
        if self.config is not None and (problem := library.unavailable()) is not None:
            raise PlanError(f"backend 'torchao' cannot be used: {problem}")
        if self.config is not None and not isinstance(self.config, library.library().Float8LinearConfig):
            raise PlanError(
                f"config is a {type(self.config).__name__}; allowed: a torchao.float8.Float8LinearConfig; for a recipe"
                " by name give recipe="
            )

    def to_dict(self) -> dict[str, Any]:
        """JSON-able, the config too."""
        return {f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Inverse of ``to_dict``. Raises PlanError for an unknown key, or if torchao is not there to read a config."""
        if data.get("config") is None:
            return super().from_dict(data)
        if (problem := library.unavailable()) is not None:
            raise PlanError(f"the plan holds a Float8LinearConfig, and backend 'torchao' cannot be used: {problem}")
        return super().from_dict({**data, "config": _config(data["config"])})


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value


def _config(data: dict[str, Any]) -> Any:
    """A Float8LinearConfig from what ``_plain`` made of it."""
    config, made = library.module("float8.config"), {}
    for name, value in data.items():
        if name.startswith("cast_config"):
            kind, granularity = config.ScalingType(value["scaling_type"]), value["scaling_granularity"]
            dtype = getattr(torch, value["target_dtype"])
            value = config.CastConfig(kind, config.ScalingGranularity(granularity), dtype)
        elif name.startswith("gemm_config"):
            value = config.Float8GemmConfig(**value)
        made[name] = value
    return config.Float8LinearConfig(**made)
