"""Plugins of the code route: how a model is spread and compiled, in Hugging Face Accelerate's words.

Field names, variables and defaults are Accelerate's; every field with a setting in the schema is read and checked
there. Values stay words (``"FULL_SHARD"``); PyTorch's enums and policies are taken and turned into them, and what is
more than a word (a policy of one's own, a module) is kept as it is, in code only.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from acceler8.config import fsdp_rules
from acceler8.config.enums import DynamoBackend
from acceler8.config.environment import current_environment, read_environment
from acceler8.config.fsdp_rules import RESHARD, SECTION
from acceler8.config.handlers import SchemaHandler, plain, takes_other_spellings
from acceler8.config.registry import ENTRIES
from acceler8.config.sources import DEFAULT, Precedence, RouteValues, Source, Value
from acceler8.errors import ConfigError

_POLICIES = {
    "transformer_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "size_based_auto_wrap_policy": "SIZE_BASED_WRAP",
}


class Plugin(SchemaHandler):
    """A handler for everything but FP8; ``OBJECTS`` are fields that may hold more than a word."""

    DEFAULTS: ClassVar[Mapping[str, Any]] = {}
    OBJECTS: ClassVar[tuple[str, ...]] = ()

    def _resolve(self) -> None:
        """As every handler, with objects set aside."""
        kept = {name: getattr(self, name) for name in self.OBJECTS if self._is_object(name)}
        for name in kept:
            setattr(self, name, None)
        super()._resolve()
        for name, value in kept.items():
            setattr(self, name, value)

    def _is_object(self, name: str) -> bool:
        """True if the field holds what no other route can say."""
        return getattr(self, name) is not None

    def _default(self, name: str) -> Any:
        return self.DEFAULTS.get(name)

    def route_values(self) -> RouteValues:
        """The settings; objects are left out."""
        kept = {name: getattr(self, name) for name in self.OBJECTS if self._is_object(name)}
        for name in kept:
            setattr(self, name, self._filled[name].value if name in self._filled else None)
        try:
            return super().route_values()
        finally:
            for name, value in kept.items():
                setattr(self, name, value)

    def code_only(self) -> list[str]:
        """The objects."""
        return [
            f"{type(self).__name__}({name}=) is an object: it exists in code only, no flag, variable or YAML key has it"
            for name in self.OBJECTS
            if self._is_object(name)
        ]


def _fsdp(**keys: str) -> dict[str, str]:
    return {field: f"fsdp_config.fsdp_{key}" for field, key in keys.items()}


@takes_other_spellings
@dataclass
class FullyShardedDataParallelPlugin(Plugin):
    """Fully sharded data parallel, version 1 (default) or 2.

    Fields without an argument take ``FSDP_*`` variables, then Accelerate's defaults. Other spellings: the YAML keys,
    ``fsdp_auto_wrap_policy`` and so on. Raises ConfigError for what the version does not have.
    """

    PATHS = _fsdp(
        fsdp_version="version",
        sharding_strategy="sharding_strategy",
        reshard_after_forward="reshard_after_forward",
        backward_prefetch="backward_prefetch",
        auto_wrap_policy="auto_wrap_policy",
        cpu_offload="offload_params",
        ignored_modules="ignored_modules",
        state_dict_type="state_dict_type",
        use_orig_params="use_orig_params",
        sync_module_states="sync_module_states",
        forward_prefetch="forward_prefetch",
        activation_checkpointing="activation_checkpointing",
        activation_checkpointing_offload="activation_checkpointing_offload",
        cpu_ram_efficient_loading="cpu_ram_efficient_loading",
        transformer_cls_names_to_wrap="transformer_layer_cls_to_wrap",
        min_num_params="min_num_params",
    )
    OBJECTS = (
        *("mixed_precision_policy", "auto_wrap_policy", "ignored_modules", "state_dict_config"),
        *("optim_state_dict_config", "param_init_fn"),
    )
    # version -> what a field is without argument and variable
    _BY_VERSION: ClassVar[Mapping[int, Mapping[str, Any]]] = {
        1: {
            "sharding_strategy": "FULL_SHARD",
            "state_dict_type": "FULL_STATE_DICT",
            "use_orig_params": False,
            "sync_module_states": False,
            "forward_prefetch": False,
        },
        2: {"reshard_after_forward": "true", "state_dict_type": "SHARDED_STATE_DICT"},
    }
    DEFAULTS = {  # noqa: RUF012
        "fsdp_version": 1,
        "auto_wrap_policy": "NO_WRAP",
        "cpu_offload": False,
        "activation_checkpointing": False,
        "activation_checkpointing_offload": False,
        "cpu_ram_efficient_loading": False,
    }

    fsdp_version: int | None = None
    sharding_strategy: Any = None
    reshard_after_forward: Any = None
    backward_prefetch: Any = None
    mixed_precision_policy: Any = None
    auto_wrap_policy: Any = None
    cpu_offload: Any = None
    ignored_modules: Any = None
    state_dict_type: Any = None
    state_dict_config: Any = None
    optim_state_dict_config: Any = None
    limit_all_gathers: bool = True
    use_orig_params: bool | None = None
    param_init_fn: Any = None
    sync_module_states: bool | None = None
    forward_prefetch: bool | None = None
    activation_checkpointing: bool | None = None
    activation_checkpointing_offload: bool | None = None
    cpu_ram_efficient_loading: bool | None = None
    transformer_cls_names_to_wrap: Any = None
    min_num_params: int | None = None

    def __post_init__(self) -> None:
        policy = getattr(self.auto_wrap_policy, "__name__", "")
        self.auto_wrap_policy = _POLICIES.get(policy, self.auto_wrap_policy)
        if type(self.cpu_offload).__name__ in ("CPUOffload", "CPUOffloadPolicy", "OffloadPolicy"):
            offload = type(self.cpu_offload).__name__ == "CPUOffloadPolicy"
            self.cpu_offload = getattr(self.cpu_offload, "offload_params", offload)
        self._resolve()
        # Accelerate's launcher exports version 2's word with version 1 too
        if self.filled("reshard_after_forward") and isinstance(self.reshard_after_forward, bool) != self._is_two:
            self._fill("reshard_after_forward", Value(self._default("reshard_after_forward"), DEFAULT))
        is_empty = self.cpu_ram_efficient_loading and not self._is_two and not self.sync_module_states
        if is_empty and self.filled("sync_module_states"):  # the other processes start empty
            self._fill("sync_module_states", Value(True, DEFAULT))
        self._check()

    def set_mixed_precision(self, mixed_precision: Any, buffer_autocast: bool = False, override: bool = False) -> None:
        """Gather weights and reduce gradients in this dtype (``fp32``, ``bf16``, ``fp16`` or ``fp8``, which is BF16).

        A policy that is set already stays unless ``override``. Without any, gradients are reduced in FP32.
        """
        if self.mixed_precision_policy is None or override:
            self.mixed_precision_policy = mixed_precision

    @property
    def _is_two(self) -> bool:
        return self.fsdp_version == 2

    def _check(self) -> None:
        names = {path: name for name, path in self.PATHS.items()}

        def value(key: str) -> Any:
            found = getattr(self, names[SECTION + key])
            return str(found).lower() if key == RESHARD and isinstance(found, bool) else found

        for found in fsdp_rules.problems(value):
            name, against = names[SECTION + found.key], names[SECTION + found.against]
            raise ConfigError(
                f"{self._where(name)}: got {getattr(self, name)} with {against} {getattr(self, against)}"
                f" ({self._where(against)}); allowed: {found.allowed}"
            )

    def _where(self, name: str) -> str:
        found = self.filled(name)
        return str(found.source) if found else self._source(name).where

    def _is_object(self, name: str) -> bool:
        value = getattr(self, name)
        if name in ("auto_wrap_policy", "ignored_modules"):
            return value is not None and not isinstance(plain(value), str)
        return value is not None

    def _default(self, name: str) -> Any:
        return self._BY_VERSION.get(self.fsdp_version or 1, {}).get(name, self.DEFAULTS.get(name))

    def _shown(self, name: str, value: Any) -> Any:
        """Version 2's ``reshard_after_forward`` as the boolean that it is."""
        if name == "reshard_after_forward" and value in ("true", "false"):
            return value == "true"
        return list(value) if name == "transformer_cls_names_to_wrap" and value is not None else value


@takes_other_spellings
@dataclass
class TorchDynamoPlugin(Plugin):
    """torch.compile. Fields without an argument take ``ACCELERATE_DYNAMO_*``, then Accelerate's defaults."""

    PATHS = {  # noqa: RUF012
        "backend": "dynamo_config.dynamo_backend",
        "mode": "dynamo_config.dynamo_mode",
        "fullgraph": "dynamo_config.dynamo_use_fullgraph",
        "dynamic": "dynamo_config.dynamo_use_dynamic",
        "use_regional_compilation": "dynamo_config.dynamo_use_regional_compilation",
    }
    DEFAULTS = {"backend": "NO", "mode": "default", "fullgraph": False, "use_regional_compilation": False}  # noqa: RUF012
    OBJECTS = ("options",)

    backend: Any = None
    mode: str | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: Any = None
    disable: bool = False
    use_regional_compilation: bool | None = None

    def _shown(self, name: str, value: Any) -> Any:
        return DynamoBackend(value) if name == "backend" else value

    def to_dict(self) -> dict[str, Any]:
        """A copy of the fields; the backend as ``torch.compile`` spells it."""
        return {**super().to_dict(), "backend": str(self.backend).lower()}

    def to_kwargs(self) -> dict[str, Any]:
        """The fields that differ from the defaults and that ``torch.compile`` takes."""
        defaults = {**self._defaults(), "backend": "no"}
        kept = {key: value for key, value in self.to_dict().items() if defaults[key] != value}
        kept.pop("use_regional_compilation", None)
        return kept

    @classmethod
    def spellings(cls) -> dict[str, str]:
        """The YAML keys, with and without ``dynamo_``."""
        table = super().spellings()
        return table | {"use_fullgraph": "fullgraph", "use_dynamic": "dynamic"}


def _zero(*keys: str) -> dict[str, str]:
    return {key: f"deepspeed_config.{key}" for key in keys}


@takes_other_spellings
@dataclass
class DeepSpeedPlugin(Plugin):
    """DeepSpeed ZeRO. ``hf_ds_config``: DeepSpeed's own JSON, a path or (in code only) its contents.

    ``enable_msamp`` asks for MS-AMP's levels; not given: true if the FP8 backend in the environment is MSAMP, in any
    case. ``"auto"`` leaves gradient_accumulation_steps and gradient_clipping to the Accelerator.
    Raises: NotImplementedError for MS-AMP with ZeRO-3, as Accelerate does.
    """

    PATHS = {  # noqa: RUF012
        "hf_ds_config": "deepspeed_config.deepspeed_config_file",
        **_zero(
            *("gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device"),
            *("offload_param_device", "offload_optimizer_nvme_path", "offload_param_nvme_path", "zero3_init_flag"),
            "zero3_save_16bit_model",
        ),
        "transformer_moe_cls_names": "deepspeed_config.deepspeed_moe_layer_cls_names",
        "msamp_opt_level": "fp8_config.opt_level",
    }
    DEFAULTS = {  # noqa: RUF012
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_stage": 2,
        "offload_optimizer_device": "none",
        "offload_param_device": "none",
        "zero3_save_16bit_model": False,
    }
    OBJECTS = ("hf_ds_config",)

    hf_ds_config: Any = None
    gradient_accumulation_steps: int | str | None = None
    gradient_clipping: float | str | None = None
    zero_stage: int | None = None
    is_train_batch_min: bool = True
    offload_optimizer_device: str | None = None
    offload_param_device: str | None = None
    offload_optimizer_nvme_path: str | None = None
    offload_param_nvme_path: str | None = None
    zero3_init_flag: bool | None = None
    zero3_save_16bit_model: bool | None = None
    transformer_moe_cls_names: Any = None
    enable_msamp: bool | None = None
    msamp_opt_level: str | None = None

    def __post_init__(self) -> None:
        self.deepspeed_config: dict[str, Any] = {}
        """DeepSpeed's own configuration, once an Accelerator has this plugin; a script may change it before prepare."""
        for name in ("gradient_accumulation_steps", "gradient_clipping"):
            if getattr(self, name) == "auto":
                setattr(self, name, None)
        self._asked_for_msamp = self.enable_msamp is not None
        if self.enable_msamp is None:
            named = read_environment(current_environment()).values.get("fp8_config.backend")
            self.enable_msamp = named is not None and named.value == "MSAMP"
        self._resolve()
        if self.zero3_init_flag and self.zero_stage != 3:
            warnings.warn(
                f"DeepSpeedPlugin: zero3_init_flag is for ZeRO-3; it is off with stage {self.zero_stage}",
                UserWarning,
                stacklevel=4,
            )
            self._fill("zero3_init_flag", Value(False, DEFAULT))
        if self.enable_msamp and self.zero_stage == 3:
            raise NotImplementedError(
                "DeepSpeedPlugin(enable_msamp=): got True with zero_stage 3; allowed with stages 0, 1, 2; leave"
                " enable_msamp out, or choose a lower stage"
            )

    def _is_object(self, name: str) -> bool:
        value = getattr(self, name)
        return value is not None and not isinstance(value, str)

    def _default(self, name: str) -> Any:
        if name == "zero3_init_flag":
            return self.zero_stage == 3
        if name == "msamp_opt_level":
            return ENTRIES["fp8_config.opt_level"].setting.defaults["MSAMP"]
        return self.DEFAULTS.get(name)

    @property
    def asks_for_levels(self) -> bool:
        """True if code, not the environment, turned MS-AMP's levels on."""
        return bool(self.enable_msamp) and self._asked_for_msamp

    def route_values(self) -> RouteValues:
        """The settings; the level only where MS-AMP is on."""
        route = super().route_values()
        if not self.enable_msamp:
            route.values.pop("fp8_config.opt_level", None)
        elif "fp8_config.opt_level" not in route.values:
            route.put("fp8_config.opt_level", self.msamp_opt_level, Source(Precedence.DEFAULT, "of DeepSpeedPlugin"))
        return route
