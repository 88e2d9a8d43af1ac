"""What a backend is told beside the recipe, from settings and recipe objects."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import nn

from acceler8.backends import BackendOptions
from acceler8.backends.torchao import TorchaoOptions
from acceler8.backends.torchao.filters import filter_first_and_last_linear_layers
from acceler8.backends.transformer_engine import TransformerEngineOptions
from acceler8.config.backend_choice import ALL_GATHER, was_told
from acceler8.config.handlers import AORecipeKwargs
from acceler8.config.sources import Effective
from acceler8.errors import ConfigError

_FP8 = "fp8_config."
Filter = Callable[[str, nn.Module], bool]


def options_of(effective: Effective, backend: str, handler: AORecipeKwargs | None) -> BackendOptions | None:
    """The options of a backend, by the word that settings use for it; None if it has none."""

    def value(key: str, default: bool) -> bool:
        found: bool | None = effective[_FP8 + key]
        return default if found is None else found

    if backend == "TE":
        return TransformerEngineOptions(convert_norms=value("convert_norms", True))
    if backend != "AO":
        return None
    config = None if handler is None else handler.config
    evaluates = value("use_autocast_during_eval", False)
    return TorchaoOptions(
        config=config,
        pad_inner_dim=value("pad_inner_dim", True),
        # on by default in Accelerate, where it freezes weights without FSDP2; here it counts where it is given
        all_gather=was_told(effective, ALL_GATHER) and value("enable_fsdp_float8_all_gather", False),
        skip_first_and_last=value("skip_first_and_last", True),
        eval=("fp8" if evaluates else "high_precision") if config is not None else None,
    )


def filter_of(effective: Effective, backend: str, handler: AORecipeKwargs | None) -> Filter | None:
    """``module_filter_func`` with the arguments in the order of plans; None if there is none.

    Raises: ConfigError for a place from which no function can be imported, naming where it stands.
    """
    if backend != "AO":
        return None
    given: Any = None if handler is None else handler.module_filter_func
    path = _FP8 + "module_filter_func"
    if not callable(given):
        place = effective[path]
        if place is None:
            return None
        given = _imported(place, str(effective.source(path)))
    if given is filter_first_and_last_linear_layers:
        return None  # what is left by default
    return lambda name, module: bool(given(module, name))


def _imported(place: str, where: str) -> Callable[..., Any]:
    module, _, name = place.partition(":")
    try:
        found = getattr(import_module(module), name) if name else None
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{where}: module_filter_func got {place!r}, which cannot be imported: {error}") from None
    if not callable(found):
        raise ConfigError(
            f"{where}: module_filter_func got {place!r}; allowed: MODULE:FUNCTION of a function of a module and its"
            " name, such as my_filters:keep_experts"
        )
    made: Callable[..., Any] = found
    return made
