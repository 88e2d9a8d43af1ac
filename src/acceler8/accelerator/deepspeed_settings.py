"""What DeepSpeed's engine is told: its own JSON where one is named, else the settings, and the precision of the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import distributed
from torch.distributed import HashStore  # type: ignore[attr-defined]

from acceler8.accelerator.processes import Processes
from acceler8.config.environment import set_if_missing
from acceler8.config.plugins import DeepSpeedPlugin
from acceler8.config.sources import Effective
from acceler8.errors import ConfigError
from acceler8.parallel import DeepSpeedProcesses
from acceler8.parallel.deepspeed_config import (
    AUTO,
    CLIPPING,
    MICRO_BATCH,
    STEPS,
    ZERO,
    is_on,
    read_config,
    value_at,
    without_autos,
)

_SECTION = "deepspeed_config."
_FILE = _SECTION + "deepspeed_config_file"
_SIXTEEN = {"bf16": "bf16", "fp8": "bf16", "fp16": "fp16"}
# of a mixed precision -> the section of DeepSpeed's configuration


def make_deepspeed(effective: Effective, processes: Processes, plugin: DeepSpeedPlugin | None) -> DeepSpeedProcesses:
    """The strategy for a configuration that asks for DEEPSPEED.

    Raises: ConfigError for values that contradict each other, MissingLibraryError without DeepSpeed.
    """
    _join_alone(processes)
    config, where = own_config(effective, plugin)
    precision = effective["mixed_precision"] or precision_of_file(effective, plugin) or "no"
    set_precision(config, precision, where, str(effective.source("mixed_precision")))
    _allow_any_optimizer(config)
    set_if_missing("LOCAL_RANK", str(processes.local_process_index))  # which DeepSpeed reads in every step
    strategy = DeepSpeedProcesses(
        processes.device,
        processes.process_index,
        processes.num_processes,
        config,
        where=where,
        leaf_classes=effective[_SECTION + "deepspeed_moe_layer_cls_names"] or (),
    )
    if strategy.stage == 3 and effective[_SECTION + "zero3_init_flag"] is not False:
        strategy.kept.append(_tell_transformers(config))
    return strategy


def _tell_transformers(config: dict[str, Any]) -> Any:
    """Have ``from_pretrained`` build models in parts, for as long as what this gives lives; None without transformers.

    transformers keeps a weak reference, so it ends with the Accelerator.
    """
    try:
        from transformers.integrations import HfDeepSpeedConfig
    except ImportError:
        return None
    return HfDeepSpeedConfig(without_autos(config))


def _join_alone(processes: Processes) -> None:
    """DeepSpeed needs a process group, of one process too."""
    if not distributed.is_initialized():
        backend = "nccl" if processes.device.type == "cuda" else "gloo"
        distributed.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        processes.owns_group = True


def own_config(effective: Effective, plugin: DeepSpeedPlugin | None) -> tuple[dict[str, Any], str]:
    """DeepSpeed's configuration, ``"auto"`` where the training decides, and the place that messages name."""
    given = None if plugin is None else plugin.hf_ds_config
    given = getattr(given, "config", given)  # transformers' HfDeepSpeedConfig
    if isinstance(given, Mapping):
        where = "DeepSpeedPlugin(hf_ds_config=)"
        return _checked(read_config(given, where), where, effective), where
    if effective[_FILE] is not None:
        where = f"{effective.source(_FILE)} ({effective[_FILE]})"
        return _checked(read_config(effective[_FILE], where), where, effective), where
    return _from_settings(effective), str(effective.source("distributed_type"))


def steps_of_file(effective: Effective, plugin: DeepSpeedPlugin | None) -> int | None:
    """Micro-batches of a step that DeepSpeed's own JSON names; None if none does."""
    if effective["distributed_type"] != "DEEPSPEED":
        return None
    found = own_config(effective, plugin)[0].get(STEPS)
    return found if isinstance(found, int) else None


def precision_of_file(effective: Effective, plugin: DeepSpeedPlugin | None) -> str | None:
    """The mixed precision that DeepSpeed's own JSON asks for; None if it leaves it open."""
    if effective["distributed_type"] != "DEEPSPEED":
        return None
    config, _ = own_config(effective, plugin)
    return next((word for word in ("fp16", "bf16") if is_on(config, word)), None)


def _from_settings(effective: Effective) -> dict[str, Any]:
    def value(key: str) -> Any:
        return effective[_SECTION + key]

    stage = 2 if value("zero_stage") is None else value("zero_stage")
    zero: dict[str, Any] = {"stage": stage}
    for part in ("optimizer", "param"):
        device = value(f"offload_{part}_device") or "none"
        if device != "none":
            zero[f"offload_{part}"] = {"device": device}
        if device == "nvme":
            zero[f"offload_{part}"]["nvme_path"] = value(f"offload_{part}_nvme_path")
    if value("zero3_save_16bit_model") is not None:
        zero["stage3_gather_16bit_weights_on_model_save"] = value("zero3_save_16bit_model")
    return {
        MICRO_BATCH: AUTO,
        STEPS: AUTO,
        CLIPPING: AUTO if value("gradient_clipping") is None else value("gradient_clipping"),
        ZERO: zero,
    }


def _checked(config: dict[str, Any], where: str, effective: Effective) -> dict[str, Any]:
    """Check a file against what is set elsewhere, and complete what DeepSpeed requires."""
    for section in ("optimizer", "scheduler"):
        if section in config:
            raise ConfigError(
                f"{where}: DeepSpeed's configuration has {section}; allowed: none, for the script makes its own and"
                " gives it to prepare; remove it there"
            )
    path = _SECTION + "gradient_accumulation_steps"
    said, asked = config.setdefault(STEPS, AUTO), effective[path]
    if said != AUTO and asked is not None and asked != said:
        raise ConfigError(
            f"{effective.source(path).where}: gradient_accumulation_steps {asked}, and DeepSpeed's configuration says"
            f' {said}; allowed: one of the two; or "auto" in the latter'
        )
    config.setdefault(CLIPPING, AUTO)  # DeepSpeed's own default is to clip to 1.0, which no script asked for
    if MICRO_BATCH not in config and "train_batch_size" not in config:
        config[MICRO_BATCH] = AUTO
    return config


def set_precision(config: dict[str, Any], precision: str, where: str, asked_by: str) -> None:
    """Fill ``bf16`` and ``fp16``. A file that turns 16 bits off keeps FP32 weights, under autocast.

    Raises: ConfigError if the file asks for 16 bits of another kind.
    """
    wanted = _SIXTEEN.get(precision)
    for section in ("bf16", "fp16"):
        said = value_at(config, f"{section}.enabled")
        if said == AUTO:
            config[section]["enabled"] = section == wanted
        elif said is None and section == wanted and not is_on(config, "torch_autocast"):
            config[section] = {**config.get(section, {}), "enabled": True}
        elif is_on(config, section) and section != wanted:
            raise ConfigError(
                f"{where}: {section} is enabled, and mixed_precision is {precision!r} ({asked_by}); allowed: the same"
                f' 16-bit format, or "enabled": "auto"; fp8 trains a bf16 model'
            )
    if precision == "fp16" and not is_on(config, "fp16"):
        raise ConfigError(
            f"{where}: fp16 is not enabled, and mixed_precision is 'fp16' ({asked_by}); allowed: enabled, for only"
            " DeepSpeed's own loss scaler reaches its gradients; or train in bf16"
        )


def _allow_any_optimizer(config: dict[str, Any]) -> None:
    """The script's optimizer is taken as it is, also with its states on the CPU; a file that says otherwise counts."""
    config.setdefault("zero_allow_untested_optimizer", True)
    config.setdefault("zero_force_ds_cpu_optimizer", False)
    config.setdefault("steps_per_print", 2**31)
