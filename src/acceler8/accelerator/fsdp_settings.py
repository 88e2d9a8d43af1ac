"""How models are sharded, from the settings and the plugin, in FSDP2's terms.

Both versions of Accelerate's settings are read; version 1, its default, is run by FSDP2 too. ``_ONLY_ONE`` says what
becomes of each setting that only version 1 has.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from acceler8.accelerator.processes import Processes
from acceler8.config.backend_choice import ALL_GATHER, was_told
from acceler8.config.environment import current_environment
from acceler8.config.plugins import FullyShardedDataParallelPlugin
from acceler8.config.sources import Effective
from acceler8.errors import ConfigError
from acceler8.parallel.fsdp2 import ShardingOptions
from acceler8.parallel.fsdp2_units import BLOCKS, DEFAULT_SIZE, SIZE, TRANSFORMER, WrapPolicy

_FSDP = "fsdp_config.fsdp_"
# setting of version 1 -> value that asks for something else than FSDP2 does, and what FSDP2 does
_ONLY_ONE: dict[str, tuple[Callable[[Any], bool], str]] = {
    "backward_prefetch": (lambda v: v != "BACKWARD_PRE", "the next unit is always gathered ahead (BACKWARD_PRE)"),
    "forward_prefetch": (bool, "the next unit is gathered ahead as soon as its turn is known"),
    "use_orig_params": (lambda v: v is False, "parameters keep their names and shapes (true)"),
    "sync_module_states": (lambda v: v is False, "all processes start from the first one's weights (true)"),
}
# fields of the plugin that are objects -> what becomes of them
_OBJECTS_OF_ONE = {
    "state_dict_config": "states are gathered in the main process, on the CPU",
    "optim_state_dict_config": "states are gathered in the main process, on the CPU",
}
_FORMS = {2: "SHARDED_STATE_DICT"}  # of checkpoints, by version, where nobody says it; as Accelerate's classes have it
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp32": torch.float32}


def strategy_word(effective: Effective) -> str:
    """The sharding strategy, in version 1's word: FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD or
    HYBRID_SHARD_ZERO2.
    """
    sharding, reshard = effective[_FSDP + "sharding_strategy"], effective[_FSDP + "reshard_after_forward"]
    if effective[_FSDP + "version"] != 2:
        return str(sharding or reshard or "FULL_SHARD")
    is_hybrid = str(sharding or "").startswith("HYBRID")  # version 2 has no word of its own for it
    if reshard == "false":
        return "HYBRID_SHARD_ZERO2" if is_hybrid else "SHARD_GRAD_OP"
    return "HYBRID_SHARD" if is_hybrid else "FULL_SHARD"


def sharding_options(
    effective: Effective, processes: Processes, plugin: FullyShardedDataParallelPlugin | None
) -> tuple[ShardingOptions, list[str]]:
    """Options of the strategy, and notes on what FSDP2 does otherwise than the settings say.

    Raises: ConfigError for what FSDP2 cannot do, naming where it stands.
    """
    notes = _notes(effective, plugin)
    word = strategy_word(effective)
    size = None
    if word.startswith("HYBRID"):
        size = _processes_of_a_machine(processes)
        if size == processes.num_processes:
            notes.append(f"{word}: there is one machine, so its {size} processes share one copy, as under FULL_SHARD")

    def given(key: str) -> Any:
        return effective[_FSDP + key]

    return ShardingOptions(
        reshard_after_forward=word in ("FULL_SHARD", "HYBRID_SHARD"),
        shard_size=size,
        policy=_policy(effective, plugin),
        mixed_precision=_mixed_precision(plugin),
        offloads=bool(given("offload_params")),
        ignored=_ignored(effective, plugin),
        checkpoints_activations=bool(given("activation_checkpointing")),
        offloads_activations=bool(given("activation_checkpointing_offload")),
        loads_in_first=bool(given("cpu_ram_efficient_loading")),
        gathers_fp8=was_told(effective, ALL_GATHER) and bool(effective[ALL_GATHER]),
        saves_whole=(given("state_dict_type") or _FORMS.get(given("version"), "FULL_STATE_DICT")) == "FULL_STATE_DICT",
    ), notes


def _told(effective: Effective, key: str) -> bool:
    return was_told(effective, _FSDP + key)


def _notes(effective: Effective, plugin: FullyShardedDataParallelPlugin | None) -> list[str]:
    notes = []
    if effective[_FSDP + "version"] != 2:
        where = effective.source(_FSDP + "version") if _told(effective, "version") else "the default"
        notes.append(f"fsdp_version 1 ({where}) is run by FSDP2, which PyTorch offers in its place")
    for key, (differs, does) in _ONLY_ONE.items():
        if _told(effective, key) and differs(effective[_FSDP + key]):
            notes.append(f"{effective.source(_FSDP + key)}: fsdp_{key} is FSDP 1's; FSDP2: {does}")
    if plugin is None:
        return notes
    if plugin.param_init_fn is not None:
        raise ConfigError(
            "FullyShardedDataParallelPlugin(param_init_fn=): got a function; allowed: None, for FSDP2 makes no"
            " parameters; initialise the model before prepare, or set cpu_ram_efficient_loading"
        )
    if not plugin.limit_all_gathers:
        notes.append("limit_all_gathers=False is FSDP 1's; FSDP2 frees weights without it")
    notes += [
        f"{name} is FSDP 1's; {does}" for name, does in _OBJECTS_OF_ONE.items() if getattr(plugin, name) is not None
    ]
    return notes


def _processes_of_a_machine(processes: Processes) -> int:
    """As torchrun says; without it all are taken to be on one machine."""
    text = current_environment().get("LOCAL_WORLD_SIZE", "")
    size = int(text) if text.isascii() and text.isdigit() else 0
    return size if 0 < size <= processes.num_processes else processes.num_processes


def _policy(effective: Effective, plugin: FullyShardedDataParallelPlugin | None) -> WrapPolicy:
    size = effective[_FSDP + "min_num_params"]
    names = tuple(effective[_FSDP + "transformer_layer_cls_to_wrap"] or ())
    given = None if plugin is None else plugin.auto_wrap_policy
    if given is not None and not isinstance(given, str):
        return _policy_of_object(given, names, size)
    kind = effective[_FSDP + "auto_wrap_policy"] if _told(effective, "auto_wrap_policy") else None
    if kind is None:
        kind = TRANSFORMER if names else BLOCKS
    return WrapPolicy(kind=kind, class_names=names, min_num_params=size or DEFAULT_SIZE)


def _policy_of_object(given: Any, names: tuple[str, ...], size: int | None) -> WrapPolicy:
    """PyTorch's two policies with their arguments bound, its ModuleWrapPolicy, or a function of a module."""
    inner = getattr(given, "func", given)
    bound: Mapping[str, Any] = getattr(given, "keywords", None) or {}
    word = getattr(inner, "__name__", "")
    if isinstance(given, functools.partial) and word == "transformer_auto_wrap_policy":
        classes = bound.get("transformer_layer_cls") or ()
        return WrapPolicy(kind=TRANSFORMER, class_names=tuple(sorted(c.__name__ for c in classes)) or names)
    if isinstance(given, functools.partial) and word == "size_based_auto_wrap_policy":
        return WrapPolicy(kind=SIZE, min_num_params=bound.get("min_num_params") or size or DEFAULT_SIZE)
    if classes := getattr(given, "_module_classes", None):
        return WrapPolicy(kind=TRANSFORMER, class_names=tuple(sorted(c.__name__ for c in classes)))
    if not callable(given):
        raise ConfigError(
            f"FullyShardedDataParallelPlugin(auto_wrap_policy=): got a {type(given).__name__}; allowed: one of"
            " TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP, NO_WRAP, a policy of torch.distributed.fsdp.wrap, or a function"
            " of a module that returns True for a unit"
        )
    return WrapPolicy(wants=lambda module: bool(given(module)))


def _mixed_precision(plugin: FullyShardedDataParallelPlugin | None) -> MixedPrecisionPolicy | None:
    """The plugin's policy: FSDP2's object, FSDP 1's, a dict of its fields, or a word."""
    given = None if plugin is None else plugin.mixed_precision_policy
    if given is None or isinstance(given, MixedPrecisionPolicy):
        return given
    dtype = _DTYPES.get(given) if isinstance(given, str) else given
    if isinstance(dtype, torch.dtype):
        return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    found = given if isinstance(given, Mapping) else vars(given) if hasattr(given, "param_dtype") else None
    if found is None:
        raise ConfigError(
            f"FullyShardedDataParallelPlugin(mixed_precision_policy=): got {given!r}; allowed: a"
            f" torch.distributed.fsdp.MixedPrecisionPolicy, its fields as a dict, a dtype, or one of"
            f" {', '.join(_DTYPES)}"
        )
    fields = {key: found[key] for key in ("param_dtype", "reduce_dtype", "output_dtype") if found.get(key) is not None}
    if isinstance(given, Mapping) and given.get("cast_forward_inputs") is not None:  # FSDP 1's is another thing
        fields["cast_forward_inputs"] = found["cast_forward_inputs"]
    return MixedPrecisionPolicy(**fields)


def _ignored(
    effective: Effective, plugin: FullyShardedDataParallelPlugin | None
) -> Callable[[nn.Module], list[nn.Module]] | None:
    given = None if plugin is None else plugin.ignored_modules
    if given is None:
        given = effective[_FSDP + "ignored_modules"]
    if given is None:
        return None
    if not isinstance(given, str):
        modules = list(given)
        return lambda model: [module for module in model.modules() if any(module is one for one in modules)]
    pattern = re.compile(given)

    def find(model: nn.Module) -> list[nn.Module]:
        found = [module for name, module in model.named_modules() if pattern.fullmatch(name)]
        if not found:
            raise ConfigError(
                f"fsdp_ignored_modules: {given!r} fits no module of this {type(model).__name__}; allowed: a regular"
                " expression for whole names, as model.named_modules() gives them; correct it, or leave it out"
            )
        return found

    return find


__all__ = ["sharding_options", "strategy_word"]
