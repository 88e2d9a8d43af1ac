"""Names that scripts import from here: recipe classes, handlers, plugins, enums, seeds, and what is available.

They are Hugging Face Accelerate's, so that a script changes ``accelerate.utils`` into ``acceler8.utils``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from acceler8.config.availability import (
    check_cuda_fp8_capability,
    is_fp8_available,
    is_msamp_available,
    is_torchao_available,
    is_transformer_engine_available,
    is_transformer_engine_mxfp8_available,
)
from acceler8.config.enums import DistributedType, DynamoBackend, FP8BackendType, LoggerType, PrecisionType
from acceler8.config.environment import current_environment
from acceler8.config.handlers import (
    AORecipeKwargs,
    FP8KwargsHandler,
    FP8RecipeKwargs,
    KwargsHandler,
    MSAMPRecipeKwargs,
    NativeRecipeKwargs,
    TERecipeKwargs,
)
from acceler8.config.kinds import Bool
from acceler8.config.plugins import DeepSpeedPlugin, FullyShardedDataParallelPlugin, TorchDynamoPlugin
from acceler8.config.profile import ProfileKwargs
from acceler8.config.run_handlers import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
)
from acceler8.errors import ConfigError

if TYPE_CHECKING:
    from acceler8.accelerator.nested import send_to_device
    from acceler8.accelerator.seeding import set_seed
    from acceler8.checkpoint.project import ProjectConfiguration
    from acceler8.utils.ao import (
        convert_model_to_fp8_ao,
        filter_first_and_last_linear_layers,
        filter_linear_layers,
        find_first_last_linear_layers,
        has_ao_layers,
    )
    from acceler8.utils.transformer_engine import (
        apply_fp8_autowrap,
        contextual_fp8_autocast,
        convert_model,
        has_transformer_engine_layers,
    )

__all__ = [
    "AORecipeKwargs",
    "AutocastKwargs",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DeepSpeedPlugin",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "DynamoBackend",
    "FP8BackendType",
    "FP8KwargsHandler",
    "FP8RecipeKwargs",
    "FullyShardedDataParallelPlugin",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "KwargsHandler",
    "LoggerType",
    "MSAMPRecipeKwargs",
    "NativeRecipeKwargs",
    "PrecisionType",
    "ProfileKwargs",
    "ProjectConfiguration",
    "TERecipeKwargs",
    "TorchDynamoPlugin",
    "apply_fp8_autowrap",
    "check_cuda_fp8_capability",
    "contextual_fp8_autocast",
    "convert_model",
    "convert_model_to_fp8_ao",
    "filter_first_and_last_linear_layers",
    "filter_linear_layers",
    "find_first_last_linear_layers",
    "has_ao_layers",
    "has_transformer_engine_layers",
    "is_fp8_available",
    "is_msamp_available",
    "is_torchao_available",
    "is_transformer_engine_available",
    "is_transformer_engine_mxfp8_available",
    "parse_flag_from_env",
    "send_to_device",
    "set_seed",
    "str_to_bool",
]

# whose modules need PyTorch, for which the others do not wait
_LATER = {
    "ProjectConfiguration": "acceler8.checkpoint.project",
    "apply_fp8_autowrap": "acceler8.utils.transformer_engine",
    "contextual_fp8_autocast": "acceler8.utils.transformer_engine",
    "convert_model": "acceler8.utils.transformer_engine",
    "convert_model_to_fp8_ao": "acceler8.utils.ao",
    "filter_first_and_last_linear_layers": "acceler8.utils.ao",
    "filter_linear_layers": "acceler8.utils.ao",
    "find_first_last_linear_layers": "acceler8.utils.ao",
    "has_ao_layers": "acceler8.utils.ao",
    "has_transformer_engine_layers": "acceler8.utils.transformer_engine",
    "send_to_device": "acceler8.accelerator.nested",
    "set_seed": "acceler8.accelerator.seeding",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'acceler8.utils' has no attribute {name!r}; it offers: {', '.join(__all__)}")
    return getattr(importlib.import_module(_LATER[name]), name)


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """1 or 0 (``to_bool``: True or False) of a word such as ``yes`` or ``Off``. Raises ConfigError, a ValueError."""
    try:
        found = Bool().parse(value)
    except ValueError:
        raise ConfigError(f"got {value!r}; allowed: {Bool().allowed}, yes, no, on, off, 1, 0, in any case") from None
    return found if to_bool else int(found)


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """The boolean of an environment variable; ``default`` where it is not set. Raises ConfigError naming it."""
    text = current_environment().get(key)
    try:
        return default if text is None else bool(str_to_bool(text))
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from None
