"""What settings and plugins become under FSDP2, in one process."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy, transformer_auto_wrap_policy

from acceler8 import Accelerator
from acceler8.accelerator.fsdp_settings import sharding_options, strategy_word
from acceler8.accelerator.processes import Processes
from acceler8.config.code import values_from_code
from acceler8.config.sources import merge
from acceler8.config.yaml_file import read_yaml
from acceler8.errors import ConfigError
from acceler8.parallel import ShardingOptions
from acceler8.parallel.fsdp2_units import BLOCKS, DEFAULT_SIZE, NOTHING, SIZE, TRANSFORMER
from acceler8.utils import AORecipeKwargs, FullyShardedDataParallelPlugin, NativeRecipeKwargs
from tests.models import Mlp

FOUR = Processes(torch.device("cpu"), 4)


def options(*handlers: Any, processes: Processes = FOUR, **fields: Any) -> tuple[ShardingOptions, list[str]]:
    from acceler8.config.code import sort_handlers

    plugin = FullyShardedDataParallelPlugin(**fields)
    effective = merge(
        [values_from_code(mixed_precision="fp8", fsdp_plugin=plugin, handlers=sort_handlers(list(handlers)))]
    )
    return sharding_options(effective, processes, plugin)


@pytest.mark.parametrize(
    ("fields", "word", "reshards"),
    [
        ({"fsdp_version": 2}, "FULL_SHARD", True),
        ({"fsdp_version": 2, "reshard_after_forward": False}, "SHARD_GRAD_OP", False),
        ({"fsdp_version": 2, "sharding_strategy": "HYBRID_SHARD"}, "HYBRID_SHARD", True),
        ({"fsdp_version": 2, "sharding_strategy": "HYBRID_SHARD", "reshard_after_forward": False},
         "HYBRID_SHARD_ZERO2", False),
        ({}, "FULL_SHARD", True),
        ({"sharding_strategy": "SHARD_GRAD_OP"}, "SHARD_GRAD_OP", False),
        ({"sharding_strategy": "HYBRID_SHARD"}, "HYBRID_SHARD", True),
        ({"sharding_strategy": "HYBRID_SHARD_ZERO2"}, "HYBRID_SHARD_ZERO2", False),
        ({"sharding_strategy": "NO_SHARD"}, "NO_SHARD", False),
    ],
)  # fmt: skip
def test_strategies_of_both_versions(fields, word, reshards):
    plugin = FullyShardedDataParallelPlugin(**fields)
    assert strategy_word(merge([values_from_code(fsdp_plugin=plugin)])) == word
    assert options(**fields)[0].reshard_after_forward is reshards


def test_copies_are_those_of_machines(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert options(sharding_strategy="HYBRID_SHARD")[0].shard_size == 2
    assert options(sharding_strategy="FULL_SHARD")[0].shard_size is None
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    made, notes = options(sharding_strategy="HYBRID_SHARD")
    assert made.shard_size == 4
    assert notes[-1] == "HYBRID_SHARD: there is one machine, so its 4 processes share one copy, as under FULL_SHARD"


def test_version_one_runs_and_says_so():
    _, notes = options(backward_prefetch="NO_PREFETCH", use_orig_params=False, forward_prefetch=True)
    assert notes[0] == "fsdp_version 1 (the default) is run by FSDP2, which PyTorch offers in its place"
    assert [note.partition(": ")[2] for note in notes[1:]] == [
        "fsdp_backward_prefetch is FSDP 1's; FSDP2: the next unit is always gathered ahead (BACKWARD_PRE)",
        "fsdp_forward_prefetch is FSDP 1's; FSDP2: the next unit is gathered ahead as soon as its turn is known",
        "fsdp_use_orig_params is FSDP 1's; FSDP2: parameters keep their names and shapes (true)",
    ]
    assert options(fsdp_version=2)[1] == []
    assert len(options(backward_prefetch="BACKWARD_PRE", use_orig_params=True, sync_module_states=True)[1]) == 1
    notes = options(fsdp_version=2, limit_all_gathers=False, state_dict_config=object())[1]
    assert [note.partition(" is FSDP 1's")[0] for note in notes] == ["limit_all_gathers=False", "state_dict_config"]


@pytest.mark.parametrize(
    ("fields", "kind", "names", "size"),
    [
        ({}, BLOCKS, (), DEFAULT_SIZE),
        ({"auto_wrap_policy": "no_wrap"}, NOTHING, (), DEFAULT_SIZE),
        ({"auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}, TRANSFORMER, (), DEFAULT_SIZE),
        ({"transformer_cls_names_to_wrap": ["A", "B"]}, TRANSFORMER, ("A", "B"), DEFAULT_SIZE),
        ({"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 5}, SIZE, (), 5),
        ({"auto_wrap_policy": transformer_auto_wrap_policy, "transformer_cls_names_to_wrap": "A"}, TRANSFORMER, ("A",),
         DEFAULT_SIZE),
        ({"auto_wrap_policy": functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.Linear})},
         TRANSFORMER, ("Linear",), DEFAULT_SIZE),
        ({"auto_wrap_policy": functools.partial(size_based_auto_wrap_policy, min_num_params=7)}, SIZE, (), 7),
        ({"auto_wrap_policy": ModuleWrapPolicy({nn.Linear, nn.GELU})}, TRANSFORMER, ("GELU", "Linear"), DEFAULT_SIZE),
    ],
)  # fmt: skip
def test_wrap_policies(fields, kind, names, size):
    policy = options(fsdp_version=2, **fields)[0].policy
    assert (policy.kind, policy.class_names, policy.min_num_params, policy.wants) == (kind, names, size, None)


def test_a_policy_of_ones_own():
    policy = options(fsdp_version=2, auto_wrap_policy=lambda m: isinstance(m, nn.Linear))[0].policy
    assert policy.wants is not None
    assert policy.wants(nn.Linear(1, 1))
    assert not policy.wants(nn.GELU())
    with pytest.raises(ConfigError, match="auto_wrap_policy=\\): got a list; allowed: one of TRANSFORMER_BASED_WRAP"):
        options(fsdp_version=2, auto_wrap_policy=["Block"])


BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, None),
        (MixedPrecisionPolicy(param_dtype=BF16), MixedPrecisionPolicy(param_dtype=BF16)),
        ("bf16", MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16)),
        (BF16, MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16)),
        (MixedPrecision(param_dtype=BF16, reduce_dtype=FP32, buffer_dtype=BF16),
         MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)),
        ({"param_dtype": BF16, "reduce_dtype": FP32, "output_dtype": BF16, "cast_forward_inputs": False},
         MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32, output_dtype=BF16, cast_forward_inputs=False)),
    ],
)  # fmt: skip
def test_mixed_precision_policies(given, expected):
    assert options(fsdp_version=2, mixed_precision_policy=given)[0].mixed_precision == expected


def test_what_no_policy_is_is_refused():
    for given in ("fp64", 16):
        with pytest.raises(ConfigError, match=r"mixed_precision_policy=\): got .* allowed: a torch.distributed"):
            options(fsdp_version=2, mixed_precision_policy=given)
    with pytest.raises(ConfigError, match="param_init_fn=\\): got a function; allowed: None"):
        options(fsdp_version=2, param_init_fn=print)


def test_a_plugins_own_method_sets_a_policy_once():
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    plugin.set_mixed_precision("bf16")
    plugin.set_mixed_precision("fp16")
    assert plugin.mixed_precision_policy == "bf16"
    plugin.set_mixed_precision("fp16", override=True)
    assert plugin.mixed_precision_policy == "fp16"


@pytest.mark.parametrize(
    ("handlers", "gathers"),
    [
        ([], False),
        ([NativeRecipeKwargs(recipe="tensorwise")], False),
        ([NativeRecipeKwargs(recipe="tensorwise", enable_fsdp_float8_all_gather=True)], True),
        ([AORecipeKwargs()], False),
        ([AORecipeKwargs(enable_fsdp_float8_all_gather=True)], True),
    ],
)
def test_weights_are_gathered_in_fp8_where_it_is_said(handlers, gathers):
    assert options(*handlers, fsdp_version=2)[0].gathers_fp8 is gathers


def test_ignored_modules_by_pattern_or_object():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    by_name = options(fsdp_version=2, ignored_modules="1")[0].ignored
    by_object = options(fsdp_version=2, ignored_modules=[model[1]])[0].ignored
    assert by_name is not None
    assert by_object is not None
    assert by_name(model) == by_object(model) == [model[1]]
    with pytest.raises(ConfigError, match="'2' fits no module of this Sequential"):
        (options(fsdp_version=2, ignored_modules="2")[0].ignored or list)(model)


def test_the_yaml_says_the_same(tmp_path: Path):
    (tmp_path / "run.yaml").write_text(
        "distributed_type: FSDP\nmixed_precision: fp8\nfp8_config: {backend: AO, enable_fsdp_float8_all_gather: true}\n"
        "fsdp_config:\n  fsdp_version: 2\n  fsdp_reshard_after_forward: false\n  fsdp_offload_params: true\n"
        "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  fsdp_transformer_layer_cls_to_wrap: Layer\n"
        "  fsdp_activation_checkpointing: true\n  fsdp_cpu_ram_efficient_loading: true\n"
    )
    made, notes = sharding_options(merge([read_yaml(tmp_path / "run.yaml")]), FOUR, None)
    assert notes == []
    assert (made.reshard_after_forward, made.offloads, made.checkpoints_activations) == (False, True, True)
    assert (made.loads_in_first, made.gathers_fp8) == (True, True)
    assert (made.policy.kind, made.policy.class_names) == (TRANSFORMER, ("Layer",))


def test_one_process_holds_the_whole_model(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, "acceler8"):
        accelerator = Accelerator("fp8", cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    assert "distributed_type FSDP: this is the only process, so it holds the whole model" in caplog.text
    assert accelerator.strategy.name == "single"
    assert not accelerator.is_fsdp2
    assert accelerator.distributed_type.value == "NO"
    assert accelerator.prepare(Mlp()) is not None
