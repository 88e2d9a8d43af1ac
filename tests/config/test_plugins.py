"""Plugins: Accelerate's fields, variables and defaults; documented spellings; each field one setting."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys

import pytest
import torch
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, ShardingStrategy, StateDictType
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from acceler8.config import ENTRIES
from acceler8.config.enums import DynamoBackend
from acceler8.config.plugins import DeepSpeedPlugin, FullyShardedDataParallelPlugin, TorchDynamoPlugin
from acceler8.errors import ConfigError
from tests.config.packages import forget_environment

PLUGINS = (FullyShardedDataParallelPlugin, TorchDynamoPlugin, DeepSpeedPlugin)


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch) -> None:
    forget_environment(monkeypatch)


@pytest.mark.parametrize("kind", PLUGINS)
def test_names_and_order_are_accelerates(kind) -> None:
    theirs = getattr(pytest.importorskip("accelerate.utils.dataclasses"), kind.__name__)
    assert list(inspect.signature(kind).parameters) == [f.name for f in dataclasses.fields(theirs)]


def test_each_setting_has_one_field() -> None:
    for kind, section in zip(PLUGINS, ("fsdp_config", "dynamo_config", "deepspeed_config"), strict=True):
        paths = list(kind.PATHS.values())
        assert len(set(paths)) == len(paths)
        assert set(kind.PATHS) <= {f.name for f in dataclasses.fields(kind)}
        missing = {p for p, e in ENTRIES.items() if e.section == section} - set(paths)
        of_the_launch = {"multinode_launcher", "hostfile", "exclusion_filter", "inclusion_filter"}
        assert missing <= {f"deepspeed_config.deepspeed_{name}" for name in of_the_launch}


def test_fsdp_defaults_are_accelerates() -> None:
    theirs = pytest.importorskip("accelerate.utils.dataclasses").FullyShardedDataParallelPlugin
    for version in (1, 2):
        ours, other = FullyShardedDataParallelPlugin(fsdp_version=version), theirs(fsdp_version=version)
        for name in (
            *("use_orig_params", "sync_module_states", "forward_prefetch", "activation_checkpointing"),
            *("activation_checkpointing_offload", "cpu_ram_efficient_loading", "reshard_after_forward"),
            *("backward_prefetch", "min_num_params", "transformer_cls_names_to_wrap", "ignored_modules"),
        ):
            assert getattr(ours, name) == getattr(other, name), (version, name)
        assert ours.state_dict_type == other.state_dict_type.name
        assert ours.sharding_strategy == (other.sharding_strategy and other.sharding_strategy.name)


def test_documented_and_yaml_spellings() -> None:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_auto_wrap_policy="transformer_based_wrap",
        fsdp_transformer_layer_cls_to_wrap="A,B",
        fsdp_offload_params=True,
        fsdp_backward_prefetch_policy="backward_pre",
    )
    assert plugin.auto_wrap_policy == "TRANSFORMER_BASED_WRAP"
    assert plugin.transformer_cls_names_to_wrap == ["A", "B"]
    assert (plugin.cpu_offload, plugin.backward_prefetch) == (True, "BACKWARD_PRE")
    assert TorchDynamoPlugin(dynamo_backend="eager", use_dynamic=True).dynamic is True
    with pytest.raises(ConfigError, match="fsdp_auto_wrap_policy and auto_wrap_policy are one setting"):
        FullyShardedDataParallelPlugin(auto_wrap_policy="NO_WRAP", fsdp_auto_wrap_policy="NO_WRAP")


def test_pytorchs_objects_become_words() -> None:
    plugin = FullyShardedDataParallelPlugin(
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        backward_prefetch=BackwardPrefetch.BACKWARD_POST,
        state_dict_type=StateDictType.SHARDED_STATE_DICT,
        auto_wrap_policy=transformer_auto_wrap_policy,
        cpu_offload=CPUOffload(offload_params=True),
    )
    assert {path.rpartition(".")[2]: value.value for path, value in plugin.route_values().values.items()} == {
        "fsdp_sharding_strategy": "HYBRID_SHARD",
        "fsdp_backward_prefetch": "BACKWARD_POST",
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_offload_params": True,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    }
    assert plugin.code_only() == []


def test_objects_of_ones_own_are_kept_and_named() -> None:
    def policy(*args: object) -> bool:
        return True

    modules = [torch.nn.Linear(1, 1)]
    plugin = FullyShardedDataParallelPlugin(auto_wrap_policy=policy, ignored_modules=modules, min_num_params=5)
    assert plugin.auto_wrap_policy is policy
    assert plugin.ignored_modules is modules
    assert list(plugin.route_values().values) == ["fsdp_config.fsdp_min_num_params"]
    assert plugin.auto_wrap_policy is policy
    assert len(plugin.code_only()) == 2


def test_fsdp_variables(monkeypatch) -> None:
    monkeypatch.setenv("FSDP_VERSION", "2")
    monkeypatch.setenv("FSDP_RESHARD_AFTER_FORWARD", "false")
    monkeypatch.setenv("FSDP_TRANSFORMER_CLS_TO_WRAP", "Block")
    plugin = FullyShardedDataParallelPlugin(activation_checkpointing=True)
    assert (plugin.fsdp_version, plugin.reshard_after_forward) == (2, False)
    assert plugin.transformer_cls_names_to_wrap == ["Block"]
    assert str(plugin.route_values().values["fsdp_config.fsdp_version"].source) == "environment FSDP_VERSION"
    monkeypatch.setenv("FSDP_VERSION", "1")  # Accelerate's launcher exports version 2's word beside it
    assert FullyShardedDataParallelPlugin().reshard_after_forward is None


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (
            {"fsdp_version": 2, "reshard_after_forward": "FULL_SHARD"},
            "got FULL_SHARD with fsdp_version 2 .*; allowed: true, false",
        ),
        (
            {"fsdp_version": 1, "reshard_after_forward": True},
            "got True with fsdp_version 1 .*; allowed: a sharding strategy",
        ),
        ({"fsdp_version": 2, "forward_prefetch": True}, "forward_prefetch=.*with fsdp_version 2"),
        ({"fsdp_version": 2, "state_dict_type": "LOCAL_STATE_DICT"}, "allowed: FULL_STATE_DICT, SHARDED_STATE_DICT"),
        ({"fsdp_version": 3}, r"FullyShardedDataParallelPlugin\(fsdp_version=\).*an integer from 1 to 2"),
        ({"sharding_strategy": "FULL"}, "allowed: FULL_SHARD, SHARD_GRAD_OP"),
        ({"activation_checkpointing_offload": True}, "allowed: with activation_checkpointing and fsdp_version 2"),
        (
            {"cpu_ram_efficient_loading": True, "sync_module_states": False},
            "allowed: true: the other processes start empty",
        ),
    ],
)
def test_fsdp_contradictions(arguments, match) -> None:
    with pytest.raises(ConfigError, match=match):
        FullyShardedDataParallelPlugin(**arguments)


def test_efficient_loading_turns_syncing_on() -> None:
    assert FullyShardedDataParallelPlugin(cpu_ram_efficient_loading=True).sync_module_states is True


def test_dynamo(monkeypatch) -> None:
    plugin = TorchDynamoPlugin()
    assert plugin.backend is DynamoBackend.NO
    assert (plugin.mode, plugin.fullgraph, plugin.dynamic) == ("default", False, None)
    assert plugin.to_kwargs() == {}
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_DYNAMIC", "no")
    plugin = TorchDynamoPlugin(backend="inductor", options={"a": 1}, use_regional_compilation=True)
    assert plugin.dynamic is False
    assert plugin.to_kwargs() == {"backend": "inductor", "dynamic": False, "options": {"a": 1}}
    assert "TorchDynamoPlugin(options=)" in plugin.code_only()[0]
    with pytest.raises(ValueError, match="allowed: NO, EAGER"):
        TorchDynamoPlugin(backend="gcc")


def test_dynamo_kwargs_are_accelerates(monkeypatch) -> None:
    theirs = pytest.importorskip("accelerate.utils.dataclasses").TorchDynamoPlugin
    for arguments in ({}, {"backend": "INDUCTOR", "fullgraph": True}, {"backend": "eager", "mode": "max-autotune"}):
        assert TorchDynamoPlugin(**arguments).to_kwargs() == theirs(**arguments).to_kwargs()


def test_deepspeed_defaults_and_levels(monkeypatch) -> None:
    plugin = DeepSpeedPlugin()
    assert (plugin.zero_stage, plugin.gradient_accumulation_steps, plugin.gradient_clipping) == (2, "auto", "auto")
    assert (plugin.enable_msamp, plugin.msamp_opt_level, plugin.zero3_init_flag) == (False, "O2", False)
    assert plugin.route_values().values == {}
    assert DeepSpeedPlugin(zero_stage=3).zero3_init_flag is True
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "msamp")
    assert DeepSpeedPlugin().enable_msamp is True
    layer = DeepSpeedPlugin(enable_msamp=True, gradient_accumulation_steps="auto", zero_stage=1).route_values()
    assert layer.values["fp8_config.opt_level"].value == "O2"
    assert "deepspeed_config.gradient_accumulation_steps" not in layer.values
    with pytest.raises(NotImplementedError, match="zero_stage 3; allowed with stages 0, 1, 2"):
        DeepSpeedPlugin(zero_stage=3, enable_msamp=True)
    with pytest.raises(ValueError, match="allowed: O1, O2, O3"):
        DeepSpeedPlugin(enable_msamp=True, msamp_opt_level="O9")
    with pytest.warns(UserWarning, match="it is off with stage 2"):
        assert DeepSpeedPlugin(zero3_init_flag=True).zero3_init_flag is False


def test_deepspeeds_own_file() -> None:
    assert DeepSpeedPlugin(hf_ds_config="ds.json").route_values().values["deepspeed_config.deepspeed_config_file"]
    plugin = DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 1}})
    assert plugin.route_values().values == {}
    assert "DeepSpeedPlugin(hf_ds_config=)" in plugin.code_only()[0]


def test_nothing_of_deepspeed_is_imported() -> None:
    code = "import sys; from acceler8.utils import DeepSpeedPlugin; DeepSpeedPlugin(zero_stage=2)"
    code += "; print('deepspeed' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
