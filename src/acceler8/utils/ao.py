"""torchao by hand, under Hugging Face Accelerate's names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from acceler8.backends.torchao import TorchaoOptions, library
from acceler8.backends.torchao.filters import (
    filter_first_and_last_linear_layers,
    filter_linear_layers,
    find_first_last_linear_layers,
)
from acceler8.conversion import convert, plan
from acceler8.errors import MissingLibraryError

__all__ = [
    "convert_model_to_fp8_ao",
    "filter_first_and_last_linear_layers",
    "filter_linear_layers",
    "find_first_last_linear_layers",
    "has_ao_layers",
]


def convert_model_to_fp8_ao(
    model: nn.Module, config: Any = None, module_filter_func: Callable[[nn.Module, str], bool] | None = None
) -> None:
    """Make the linear layers of ``model`` torchao's FP8 layers, in place: ``acceler8.convert`` with backend torchao.

    config: a ``torchao.float8.Float8LinearConfig``; None is torchao's default, without padding. ``module_filter_func``
    False leaves a layer; None leaves the first and the last. Modules and Parameters stay the same objects, whatever
    ``config.enable_fsdp_float8_all_gather`` says, and layers that FP8 cannot take stay as they are whatever the filter
    says. ``acceler8.restore`` undoes it; ``Accelerator.prepare`` keeps it.
    Raises: MissingLibraryError (an ImportError) without a torchao that works; PlanError for a converted model.
    """
    _check_library("convert_model_to_fp8_ao")
    if config is None:
        config = library.library().Float8LinearConfig()
    chosen = None
    if module_filter_func is not None and module_filter_func is not filter_first_and_last_linear_layers:
        asked = module_filter_func

        def chosen(name: str, module: nn.Module) -> bool:
            return bool(asked(module, name))

    convert(model, plan(model, backend="torchao", options=TorchaoOptions(config=config), filter_fn=chosen))


def has_ao_layers(model: nn.Module) -> bool:
    """True if ``model`` has an FP8 layer of torchao's, made by acceler8 or by torchao itself.

    Raises: MissingLibraryError (an ImportError) without a torchao that works.
    """
    _check_library("has_ao_layers")
    kind = library.module("float8.float8_linear").Float8Linear
    return any(isinstance(module, kind) for module in model.modules())


def _check_library(function: str) -> None:
    if (problem := library.unavailable()) is not None:
        raise MissingLibraryError(f"{function} needs torchao: {problem}")
