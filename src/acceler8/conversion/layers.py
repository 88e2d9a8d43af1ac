"""Which modules of a model multiply by matrices of their own: the rows of a plan, and what a conversion checks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from acceler8.errors import PlanError
from acceler8.nn import converted_layers, find_state

ROOT = "(root)"


def check_is_plain(model: nn.Module) -> None:
    """Raise PlanError unless nothing in ``model`` is converted and every parameter has its shape."""
    kind = type(model).__name__
    if find_state(model) is not None:
        raise PlanError(f"{kind} is converted already; call acceler8.restore(model) first")
    if next(converted_layers(model), None) is not None:
        raise PlanError(f"{kind} is part of a converted model; call acceler8.restore on that model first")
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise PlanError(f"parameter {name!r} is not initialised yet; run the model's forward once, then plan it")


def matrix_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module, list[torch.Tensor]]]:
    """``(name, module, weights)`` of each module that has rows in a plan: it multiplies by matrices of its own."""
    for name, module in model.named_modules():
        if weights := _own_matrices(module):
            yield name, module, weights


def _own_matrices(module: nn.Module) -> list[torch.Tensor]:
    """Weights of two or more dimensions that the module itself multiplies by. A lookup is no multiplication."""
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag, ParametrizationList)):
        return []  # the last: its parametrised layer has the row
    if hasattr(module, "parametrizations") and isinstance(module, nn.Linear):
        return [module.weight]
    return [p for p in module._parameters.values() if p is not None and p.ndim >= 2]


def largest_shape(weights: list[torch.Tensor]) -> tuple[int, ...]:
    """The shape that a plan's row shows."""
    return tuple(max(weights, key=torch.Tensor.numel).shape)


def row_name(name: str) -> str:
    """The name that a plan's row shows; the model itself has none."""
    return name or ROOT


def module_name(row: str) -> str:
    """Inverse of ``row_name``."""
    return "" if row == ROOT else row
