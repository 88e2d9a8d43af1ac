"""Files as Accelerate writes and documents them, and YAML's traps."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from acceler8.config import RouteValues, merge, read_yaml
from acceler8.config.resolve import check
from acceler8.errors import ConfigError
from tests.config.support import refusal

PLAIN = """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: 'NO'
downcast_bf16: 'no'
enable_cpu_affinity: false
gpu_ids: all
machine_rank: 0
main_training_function: main
mixed_precision: fp8
num_machines: 1
num_processes: 1
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""


def read(text: str, folder: Path, name: str = "run.yaml") -> RouteValues:
    (folder / name).write_bytes(text.encode())
    return read_yaml(folder / name)


def fp8(text: str, folder: Path) -> dict[str, Any]:
    found = merge([read(PLAIN + text, folder)]).given("fp8_config")
    return {path.removeprefix("fp8_config."): value for path, value in found.items()}


@pytest.mark.parametrize("backend", ["TE", "te", "Te", "transformer_engine"])
@pytest.mark.parametrize(
    "gemms",
    [
        "(false, false, true)",
        "[false, false, true]",
        "[no, 'no', 'yes']",
        '"(False, False, True)"',
        "false,false,true",
        "'0, 0, 1'",
        "\n  - false\n  - false\n  - true",
    ],
)
def test_transformer_engine(backend: str, gemms: str, tmp_path: Path):
    text = f"""
fp8_config:
  amax_compute_algo: max
  amax_history_len: 16
  backend: {backend}
  fp8_format: e4m3
  interval: 2
  margin: 1
  override_linear_precision: {gemms}
  use_autocast_during_eval: false
"""
    assert fp8(text, tmp_path) == {
        "backend": "TE",
        "use_autocast_during_eval": False,
        "margin": 1,
        "interval": 2,
        "fp8_format": "E4M3",
        "amax_history_len": 16,
        "amax_compute_algo": "max",
        "override_linear_precision": (False, False, True),
    }


@pytest.mark.parametrize("scalar", ["false", "no", "'False'", "0"])
def test_one_boolean_for_all_gemms(scalar: str, tmp_path: Path):
    text = f"fp8_config: {{backend: TE, override_linear_precision: {scalar}}}"
    assert fp8(text, tmp_path)["override_linear_precision"] == (False, False, False)


@pytest.mark.parametrize("backend", ["AO", "ao", "torchao"])
def test_torchao(backend: str, tmp_path: Path):
    text = f"""
fp8_config:
  backend: {backend}
  pad_inner_dim: true
  enable_fsdp_float8_all_gather: "False"
"""
    assert fp8(text, tmp_path) == {"backend": "AO", "enable_fsdp_float8_all_gather": False, "pad_inner_dim": True}


@pytest.mark.parametrize("backend", ["MSAMP", "msamp", "ms-amp"])
@pytest.mark.parametrize("level", ["O1", "o1", "O1 "])
def test_ms_amp(backend: str, level: str, tmp_path: Path):
    text = f"fp8_config:\n  backend: {backend}\n  opt_level: '{level}'\n"
    assert fp8(text, tmp_path) == {"backend": "MSAMP", "opt_level": "O1"}


@pytest.mark.parametrize("level", ["02", "'02'", "2"])
def test_a_zero_for_the_letter_o_is_read_with_a_note(level: str, tmp_path: Path):
    layer = read(f"mixed_precision: fp8\nfp8_config: {{backend: MSAMP, opt_level: {level}}}", tmp_path)
    assert layer.values["fp8_config.opt_level"].value == "O2"
    assert "is read as O2" in layer.notes[0]


@pytest.mark.parametrize(
    ("dead", "live", "value"),
    [
        ("amax_history_length", "amax_history_len", 8),
        ("amax_compute_algorithm", "amax_compute_algo", "max"),
        ("optimization_level", "opt_level", "O1"),
        ("fp8_margin", "margin", 2),
        ("format", "fp8_format", "HYBRID"),
    ],
)
def test_dead_spellings_are_read_with_a_note(dead: str, live: str, value: Any, tmp_path: Path):
    layer = read(f"fp8_config:\n  {dead}: {value}\n", tmp_path)
    assert layer.values[f"fp8_config.{live}"].value == value
    assert layer.notes == [f"{tmp_path / 'run.yaml'}:2: {dead} is read as {live}"]


@pytest.mark.parametrize("order", [1, -1])
def test_both_spellings_are_an_error_in_either_order(order: int, tmp_path: Path):
    lines = ["  amax_history_len: 4", "  amax_history_length: 5"][::order]
    with pytest.raises(ConfigError, match=r"run.yaml:3: amax_.*run.yaml:2 gives too; keep one"):
        read("\n".join(["fp8_config:", *lines]), tmp_path)


def accelerate_configs() -> dict[str, dict[str, Any]]:
    gemms = (False, True, False)
    te = {"backend": "TE", "amax_history_length": 32, "amax_compute_algorithm": "max", "margin": 0, "interval": 1}
    te |= {"fp8_format": "HYBRID", "override_linear_precision": list(gemms), "use_autocast_during_eval": False}
    fsdp = {"fsdp_version": 2, "fsdp_reshard_after_forward": True, "fsdp_offload_params": False}
    fsdp |= {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_state_dict_type": "SHARDED_STATE_DICT"}
    fsdp |= {"fsdp_transformer_layer_cls_to_wrap": "BertLayer", "fsdp_activation_checkpointing": False}
    fsdp1 = {"fsdp_version": 1, "fsdp_reshard_after_forward": "FULL_SHARD", "fsdp_forward_prefetch": False}
    fsdp1 |= {"fsdp_backward_prefetch": "BACKWARD_PRE", "fsdp_use_orig_params": True, "fsdp_sync_module_states": True}
    zero = {"zero_stage": 3, "offload_optimizer_device": "none", "offload_param_device": "cpu"}
    zero |= {"gradient_accumulation_steps": 2, "gradient_clipping": 1.0, "zero3_init_flag": True}
    zero |= {"zero3_save_16bit_model": True}
    dynamo = {"dynamo_backend": "INDUCTOR", "dynamo_mode": "reduce-overhead", "dynamo_use_fullgraph": False}
    dynamo |= {"dynamo_use_dynamic": False, "dynamo_use_regional_compilation": True}
    level = {"backend": "MSAMP", "optimization_level": "O2"}
    ao = {"backend": "AO", "enable_fsdp_float8_all_gather": True, "pad_inner_dim": True}
    eight = {"mixed_precision": "fp8"}
    return {
        "plain": {},
        "te": {**eight, "fp8_config": te},
        "ao": {**eight, "fp8_config": ao},
        "msamp": {**eight, "fp8_config": level},
        "multi_gpu": {"distributed_type": "MULTI_GPU", "num_processes": 4, "gpu_ids": "0,1,2,3"},
        "multi_cpu": {"distributed_type": "MULTI_CPU", "num_processes": 2, "use_cpu": True},
        "fsdp": {"distributed_type": "FSDP", "num_processes": 2, "fsdp_config": fsdp},
        "fsdp1": {"distributed_type": "FSDP", "num_processes": 2, "fsdp_config": fsdp1},
        "deepspeed": {"distributed_type": "DEEPSPEED", "num_processes": 2, "deepspeed_config": zero},
        "dynamo": {"dynamo_config": dynamo},
        "machines": {
            **{"distributed_type": "MULTI_GPU", "num_processes": 16, "num_machines": 2, "machine_rank": 1},
            **{"main_process_ip": "10.0.0.1", "main_process_port": 29500, "rdzv_backend": "c10d"},
        },
    }


@pytest.mark.parametrize("name", accelerate_configs())
@pytest.mark.parametrize("form", ["yaml", "json"])
def test_what_accelerate_writes_is_read(name: str, form: str, tmp_path: Path):
    pytest.importorskip("accelerate")
    from accelerate.commands.config.config_args import ClusterConfig

    basic = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "NO", "mixed_precision": "no"}
    basic |= {"use_cpu": False, "debug": False, "num_processes": 1}
    wanted = basic | accelerate_configs()[name]
    config = ClusterConfig(**{k: dict(v) if isinstance(v, dict) else v for k, v in wanted.items()})
    path = tmp_path / f"default_config.{form}"
    (config.to_json_file if form == "json" else config.to_yaml_file)(str(path))
    effective = merge([read_yaml(path)])
    check(effective)
    dead = {"amax_history_length": "amax_history_len", "amax_compute_algorithm": "amax_compute_algo"}
    dead |= {"optimization_level": "opt_level"}
    for key, value in wanted.items():
        if key == "compute_environment":
            continue
        for inner, raw in value.items() if isinstance(value, dict) else [(None, value)]:
            path_ = f"{key}.{dead.get(inner, inner)}" if inner else key
            found = effective[path_]
            expected = tuple(raw) if isinstance(raw, list) else raw
            if inner == "fsdp_reshard_after_forward" and raw is True:
                expected = "true"
            if inner == "fsdp_transformer_layer_cls_to_wrap":
                expected = (raw,)
            assert found == expected, path_


@pytest.mark.parametrize("precision", ["no", "bf16", "fp8"])
def test_what_accelerates_basic_config_writes_is_read(precision: str, tmp_path: Path):
    pytest.importorskip("accelerate")
    from accelerate.utils import write_basic_config

    path = tmp_path / "default_config.yaml"  # it writes JSON under this name
    write_basic_config(mixed_precision=precision, save_location=str(path))
    effective = merge([read_yaml(path)])
    assert effective["mixed_precision"] == precision
    assert effective["distributed_type"] in ("NO", "MULTI_GPU")
    assert check(effective) == []


def test_a_cluster_config_without_processes_is_read(tmp_path: Path):
    layer = read("num_processes: -1\n", tmp_path)
    assert not layer.values
    assert "not given" in layer.notes[0]


def test_old_files(tmp_path: Path):
    layer = read("fp16: true\ndynamo_backend: INDUCTOR\nfsdp_config:\n  fsdp_sharding_strategy: 1\n", tmp_path)
    assert {path: value.value for path, value in layer.values.items()} == {
        "mixed_precision": "fp16",
        "dynamo_config.dynamo_backend": "INDUCTOR",
        "fsdp_config.fsdp_sharding_strategy": "FULL_SHARD",
    }
    assert len(layer.notes) == 2


def test_what_asks_for_something_that_is_not_here_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"run.yaml:2: tpu_name got 'mine'; allowed: nothing"):
        read("debug: false\ntpu_name: mine\n", tmp_path)
    with pytest.raises(ConfigError, match=r"run.yaml:1: distributed_type got 'MEGATRON_LM'"):
        read("distributed_type: MEGATRON_LM\n", tmp_path)


TRAPS = [
    ("mixed_precision: no", "mixed_precision", "no"),
    ("mixed_precision: off", "mixed_precision", "no"),
    ("distributed_type: NO", "distributed_type", "NO"),
    ("use_cpu: on", "use_cpu", True),
    ("use_cpu: y", "use_cpu", True),
    ("main_process_port: 1_000", "main_process_port", 1000),
    ("main_process_port: !!int 8", "main_process_port", 8),
    ("num_machines: '2'", "num_machines", 2),
    ("gpu_ids: 0", "gpu_ids", "0"),
    ("gpu_ids: 00", "gpu_ids", "0"),
    ("main_training_function: 1.10", "main_training_function", "1.10"),
    ("main_training_function: 2020-01-01", "main_training_function", "2020-01-01"),
    ("monitor_interval: 1e1", "monitor_interval", 10.0),
    ("monitor_interval: .5", "monitor_interval", 0.5),
    ("environment: {NCCL_A: 1.10, NCCL_B: 010, NCCL_C: 1:30, NCCL_D: no, NCCL_E: true}", "environment", None),
    ("# only a comment\n---\nuse_cpu: true\n...\n", "use_cpu", True),
    ("\ufeffuse_cpu: true", "use_cpu", True),
    ("use_cpu: true\r\ndebug: false\r\n", "use_cpu", True),
    ("fp8_config: &here {margin: &two 2}", "fp8_config.margin", 2),
    ("num_processes: &n 2\nnum_machines: *n", "num_machines", 2),
    (
        "fsdp_config:\n  fsdp_transformer_layer_cls_to_wrap: [A, B]",
        "fsdp_config.fsdp_transformer_layer_cls_to_wrap",
        None,
    ),
]


@pytest.mark.parametrize(("text", "path", "value"), TRAPS)
def test_yaml_means_what_a_flag_means(text: str, path: str, value: Any, tmp_path: Path):
    found = read(text, tmp_path).values[path].value
    if path == "environment":
        assert found == {"NCCL_A": "1.10", "NCCL_B": "010", "NCCL_C": "1:30", "NCCL_D": "no", "NCCL_E": "true"}
    elif value is None:
        assert found == ("A", "B")
    else:
        assert found == value
        assert type(found) is type(value)


@pytest.mark.parametrize("text", ["", "\n", "# nothing", "---", "{}", "---\n...\n", "fp8_config:\nfsdp_config: {}"])
def test_nothing_is_a_file_too(text: str, tmp_path: Path):
    assert not read(text, tmp_path).values


def test_json_indented_with_tabs_and_beyond_16_bits(tmp_path: Path):
    text = '{\n\t"use_cpu": true,\n\t"environment": {"NCCL_A": "\\ud83d\\ude00"}\n}'
    values = read(text, tmp_path, "run.json").values
    assert values["environment"].value == {"NCCL_A": "\U0001f600"}


def test_a_value_remembers_its_line(tmp_path: Path):
    layer = read("\nmixed_precision: fp8\nfp8_config:\n  # here\n  margin: 2\n", tmp_path)
    assert layer.values["fp8_config.margin"].source.where == f"{tmp_path / 'run.yaml'}:5"


PIECES = st.sampled_from(
    [
        *("fp8_config", "margin", "environment", ": ", ":", "- ", "\n", "  ", "{", "}", "[", "]", ",", "&a ", "*a"),
        *("<<: *a", "!!python/object:os.system ", "!!int ", "!x ", "'", '"', "|", ">", "%", "? ", "#", "1e3", "~"),
        *("true", "\t", "\\U"),
    ]
)


@given(text=st.text(max_size=60) | st.lists(PIECES, max_size=30).map("".join) | st.binary(max_size=40))
@example(text='x: "\\UFFFFFFFF"')
@example(text="%YAML 99999999999999999999999999.1\n---\na: 1")
@example(text="{" * 1500)
@example(text="[" * 1500)
@example(text="environment: &a {x: *a}")
@example(text="a: &a [*a]\n*a : 1")
@examples(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_is_read_or_refused_with_a_place(tmp_path: Path, text: str | bytes):
    path = tmp_path / "any.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
    message = refusal(lambda: merge([read_yaml(path)]))
    if message is not None:
        assert message.startswith(f"{path}:")
        assert len(message.splitlines()) == 1
        assert len(message) < 1200


def test_aliases_that_would_grow_without_end_are_refused_at_once(tmp_path: Path):
    rows = ["a0: &a0 [x, x]"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 60)]
    with pytest.raises(ConfigError, match="unknown key"):
        read("\n".join(rows), tmp_path)
    with pytest.raises(ConfigError, match="a sequence in a value"):
        read("fp8_config:\n  skip: &a [&b [x, x], *b, *b]\n", tmp_path)


def test_a_file_without_end_is_refused():
    if not Path("/dev/zero").exists():
        pytest.skip("needs /dev/zero")
    with pytest.raises(ConfigError, match="got more than"):
        read_yaml("/dev/zero")


def test_a_missing_file_a_folder_and_a_name_with_nul(tmp_path: Path):
    for path in (tmp_path / "none.yaml", tmp_path, "a\0b"):
        with pytest.raises(ConfigError, match="cannot be read"):
            read_yaml(path)


def test_no_code_is_run(tmp_path: Path):
    before = set(sys.modules)
    with pytest.raises(ConfigError, match="with the tag"):
        read("main_process_ip: !!python/object/apply:os.system ['touch here']", tmp_path)
    assert not (Path.cwd() / "here").exists()
    assert "antigravity" not in set(sys.modules) - before
