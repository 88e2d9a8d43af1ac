"""DeepSpeed's own JSON: read, filled, and refused where it contradicts the settings. No process is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from acceler8.accelerator.deepspeed_settings import own_config, precision_of_file, set_precision, steps_of_file
from acceler8.config.code import gather, values_from_code
from acceler8.config.resolve import check, load, parse_assignments
from acceler8.config.sources import Effective
from acceler8.errors import ConfigError
from acceler8.parallel.deepspeed_config import fill, read_config, sizes_of, without_autos
from acceler8.utils import DeepSpeedPlugin

ZERO = {"zero_optimization": {"stage": 2}}


def effective(**values: Any) -> Effective:
    """Settings of a run under DeepSpeed."""
    texts = [f"{key}={value}" for key, value in {"distributed_type": "DEEPSPEED", **values}.items()]
    return load(parse_assignments(texts), {}, use_default_file=False)


def test_every_auto_gets_its_value_and_the_rest_stays():
    config = {"train_batch_size": "auto", **ZERO, "optimizer": {"params": {"lr": "auto", "betas": [0.9, 0.95]}}}
    values = {"train_batch_size": 8, "optimizer.params.lr": 1e-3, "unused": 1}
    assert fill(config, values, "x.json") == {
        "train_batch_size": 8,
        **ZERO,
        "optimizer": {"params": {"lr": 1e-3, "betas": [0.9, 0.95]}},
    }
    assert config["train_batch_size"] == "auto"


def test_an_auto_that_nobody_knows_is_an_error_that_names_it():
    config = {"wall_clock": "auto", "zero_optimization": {"stage": 2, "sub_group_size": "auto"}}
    with pytest.raises(ConfigError, match=r"x\.json: got auto for wall_clock, zero_optimization\.sub_group_size"):
        fill(config, {}, "x.json")


def test_sizes_follow_the_width_of_a_transformers_model():
    model = nn.Linear(2, 2)
    assert sizes_of(model) == {}
    model.config = type("Config", (), {"hidden_size": 100})()
    assert sizes_of(model) == {
        "zero_optimization.reduce_bucket_size": 10000,
        "zero_optimization.stage3_prefetch_bucket_size": 9000,
        "zero_optimization.stage3_param_persistence_threshold": 1000,
    }
    model.config = type("Config", (), {"hidden_sizes": [10, 20]})()
    assert sizes_of(model)["zero_optimization.reduce_bucket_size"] == 400


def test_transformers_is_told_no_auto():
    left = without_autos({"train_batch_size": "auto", "gradient_clipping": "auto", "bf16": {"enabled": True}, **ZERO})
    assert left == {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": True},
        **ZERO,
    }


@pytest.mark.parametrize(
    ("text", "says"),
    [("{", "cannot be read"), ("[]", "has no zero_optimization"), ('{"zero_optimization": 2}', "has no zero_optim")],
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, text: str, says: str):
    file = tmp_path / "ds.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=f"here: .*{says}"):
        read_config(str(file), "here")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_config(str(tmp_path / "missing.json"), "here")


def test_settings_become_a_configuration():
    given = effective(
        **{"deepspeed_config.zero_stage": 3, "gradient_clipping": 1.5, "offload_param_device": "nvme"},
        offload_param_nvme_path="/nvme",
        offload_optimizer_device="cpu",
        zero3_save_16bit_model="true",
    )
    config, where = own_config(given, None)
    assert where.startswith("flag --set distributed_type")
    assert config == {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": 1.5,
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "offload_param": {"device": "nvme", "nvme_path": "/nvme"},
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    }
    assert own_config(effective(), None)[0]["zero_optimization"] == {"stage": 2}


@pytest.mark.parametrize("by", ["file", "plugin"])
def test_the_json_says_it_all_but_clipping_is_the_scripts_where_it_is_silent(tmp_path: Path, by: str):
    config = {**ZERO, "gradient_accumulation_steps": 4, "bf16": {"enabled": True}, "comms_logger": {"enabled": True}}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    plugin = DeepSpeedPlugin(hf_ds_config=config) if by == "plugin" else None
    settings = {} if plugin else {"deepspeed_config_file": str(tmp_path / "ds.json")}
    given = effective(**settings)
    found, where = own_config(given, plugin)
    assert found == {**config, "gradient_clipping": "auto", "train_micro_batch_size_per_gpu": "auto"}
    assert ("hf_ds_config" if plugin else "ds.json") in where
    assert steps_of_file(given, plugin) == 4
    assert precision_of_file(given, plugin) == "bf16"
    with pytest.raises(ConfigError, match="gradient_accumulation_steps 2, and DeepSpeed's configuration says 4"):
        own_config(effective(**settings, gradient_accumulation_steps=2), plugin)


@pytest.mark.parametrize("said", ["auto", 1, 4])
def test_a_script_may_name_the_steps_that_its_file_leaves_open(tmp_path: Path, monkeypatch, said: Any):
    """A script that passes ``gradient_accumulation_steps=1``, as examples do, was refused with any file."""
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(tmp_path / "ds.json"))
    (tmp_path / "ds.json").write_text(json.dumps({**ZERO, "gradient_accumulation_steps": said}))
    given = gather(values_from_code(gradient_accumulation_steps=1))
    check(given)
    if said == 4:
        with pytest.raises(ConfigError, match="gradient_accumulation_steps 1, and DeepSpeed's configuration says 4"):
            own_config(given, None)
    else:
        assert own_config(given, None)[0]["gradient_accumulation_steps"] == said


@pytest.mark.parametrize("section", ["optimizer", "scheduler"])
def test_an_optimizer_of_the_json_is_refused(section: str):
    plugin = DeepSpeedPlugin(hf_ds_config={**ZERO, section: {"type": "AdamW"}})
    with pytest.raises(ConfigError, match=f"hf_ds_config=.: DeepSpeed's configuration has {section}; .* remove it"):
        own_config(effective(), plugin)


@pytest.mark.parametrize(
    ("precision", "config", "expected"),
    [
        ("fp8", {}, {"bf16": {"enabled": True}}),
        ("bf16", {"bf16": {"enabled": "auto"}}, {"bf16": {"enabled": True}}),
        ("fp16", {"fp16": {"loss_scale": 0}}, {"fp16": {"loss_scale": 0, "enabled": True}}),
        ("fp8", {"bf16": {"enabled": False}}, {"bf16": {"enabled": False}}),
        ("fp8", {"fp16": {"enabled": "auto"}}, {"fp16": {"enabled": False}, "bf16": {"enabled": True}}),
        ("fp8", {"torch_autocast": {"enabled": True}}, {"torch_autocast": {"enabled": True}}),
        ("no", {}, {}),
    ],
)
def test_the_engine_has_the_dtype_of_the_precision(precision: str, config: dict[str, Any], expected: dict[str, Any]):
    set_precision(config, precision, "ds.json", "code mixed_precision")
    assert config == expected


@pytest.mark.parametrize(
    ("precision", "config", "says"),
    [
        ("fp8", {"fp16": {"enabled": True}}, "fp16 is enabled, and mixed_precision is 'fp8'"),
        ("no", {"bf16": {"enabled": True}}, "bf16 is enabled, and mixed_precision is 'no'"),
        ("fp16", {"fp16": {"enabled": False}}, "fp16 is not enabled"),
    ],
)
def test_another_16_bit_format_is_refused(precision: str, config: dict[str, Any], says: str):
    with pytest.raises(ConfigError, match=rf"^ds\.json: {says}"):
        set_precision(config, precision, "ds.json", "code mixed_precision")
