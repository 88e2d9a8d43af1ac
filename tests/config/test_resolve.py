"""Loading with precedence, assignments, and contradictions between values."""

from __future__ import annotations

from pathlib import Path

import pytest

from acceler8.config import Precedence, RouteValues, merge, parse_flags, read_yaml
from acceler8.config.resolve import check, contradictions, load, parse_assignments
from acceler8.errors import ConfigError


def home(folder: Path) -> dict[str, str]:
    return {"HOME": str(folder), "XDG_CONFIG_HOME": str(folder)}


def test_flag_environment_yaml_default(tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_text("fp8_config:\n  margin: 1\n  interval: 1\n  amax_history_len: 1\n")
    environ = {**home(tmp_path), "ACCELERATE_FP8_MARGIN": "2", "ACCELERATE_FP8_INTERVAL": "2"}
    effective = load(parse_flags(["--fp8_margin=3"]).route, environ, file)
    found = {key: effective[f"fp8_config.{key}"] for key in ("margin", "interval", "amax_history_len", "recipe")}
    assert found == {"margin": 3, "interval": 2, "amax_history_len": 1, "recipe": None}
    assert [str(effective.source(f"fp8_config.{key}")) for key in found] == [
        "flag --fp8_margin",
        "environment ACCELERATE_FP8_INTERVAL",
        f"yaml {file}:4",
        "default",
    ]


def test_the_default_file_is_read_with_a_note_unless_another_is_named(tmp_path: Path):
    default = tmp_path / "acceler8" / "config.yaml"
    default.parent.mkdir()
    default.write_text("debug: true\n")
    named = tmp_path / "named.yaml"
    named.write_text("use_cpu: true\n")
    by_default = load(None, home(tmp_path))
    assert by_default["debug"] is True
    assert by_default.notes == (f"reading {default}, the default file",)
    by_name = load(None, home(tmp_path), named)
    assert by_name.given() == {"use_cpu": True}
    assert by_name.notes == ()
    assert not load(None, home(tmp_path), use_default_file=False).values


def test_no_file_is_no_error_and_a_missing_named_file_is(tmp_path: Path):
    assert load(RouteValues(), home(tmp_path)).values == {}
    with pytest.raises(ConfigError, match=r"none.yaml: cannot be read \(No such file"):
        load(None, home(tmp_path), tmp_path / "none.yaml")


def test_assignments():
    layer = parse_assignments(
        ["fp8_config.margin=2", "backend=te", "fp8_format = E4M3", 'environment={"NCCL_A": "b=c"}']
    )
    assert {path: value.value for path, value in layer.values.items()} == {
        "fp8_config.margin": 2,
        "fp8_config.backend": "TE",
        "fp8_config.fp8_format": "E4M3",
        "environment": {"NCCL_A": "b=c"},
    }
    assert layer.values["fp8_config.margin"].source.precedence is Precedence.FLAG


@pytest.mark.parametrize(
    ("assignments", "message"),
    [
        (["margin"], "--set margin: got no value; allowed: key=value"),
        (["margn=2"], "--set margn: unknown setting 'margn'; did you mean"),
        (["margin=x"], "--set margin: fp8_config.margin got 'x'; allowed: an integer"),
        (["margin=1", "fp8_config.margin=1"], "is set twice"),
        (["=1"], "unknown setting ''"),
    ],
)
def test_a_wrong_assignment_is_named(assignments: list[str], message: str):
    with pytest.raises(ConfigError) as caught:
        parse_assignments(assignments)
    assert message in str(caught.value)


FSDP1, FSDP2 = ["distributed_type=FSDP", "fsdp_version=1"], ["distributed_type=FSDP", "fsdp_version=2"]
ZERO = ["distributed_type=DEEPSPEED"]
WRONG = [
    (["use_cpu=true", "distributed_type=MULTI_GPU"], "distributed_type", "use_cpu"),
    (["use_cpu=false", "distributed_type=MULTI_CPU"], "use_cpu", "distributed_type"),
    (["gpu_ids=0,1", "use_cpu=true"], "gpu_ids", "use_cpu"),
    (["gpu_ids=0", "distributed_type=MULTI_CPU"], "gpu_ids", "distributed_type"),
    (["gpu_ids=0,0"], "gpu_ids", "different numbers"),
    (["gpu_ids=first"], "gpu_ids", "all, or"),
    (["enable_cpu_affinity=true", "use_cpu=true"], "enable_cpu_affinity", "use_cpu"),
    (["num_processes=2", "distributed_type=NO"], "num_processes", "distributed_type"),
    (["num_processes=3", "num_machines=2"], "num_processes", "num_machines"),
    (["machine_rank=2", "num_machines=2"], "machine_rank", "num_machines"),
    (["machine_rank=1"], "machine_rank", "num_machines"),
    ([*FSDP2, "fsdp_reshard_after_forward=FULL_SHARD"], "fsdp_reshard_after_forward", "fsdp_version"),
    ([*FSDP1, "fsdp_reshard_after_forward=true"], "fsdp_reshard_after_forward", "fsdp_version"),
    (["distributed_type=FSDP", "fsdp_reshard_after_forward=true"], "fsdp_reshard_after_forward", "fsdp_version 2"),
    ([*FSDP2, "fsdp_state_dict_type=LOCAL_STATE_DICT"], "fsdp_state_dict_type", "fsdp_version"),
    ([*FSDP2, "fsdp_forward_prefetch=true"], "fsdp_forward_prefetch", "fsdp_version"),
    ([*FSDP2, "fsdp_activation_checkpointing_offload=true"], "fsdp_activation_checkpointing_offload", "fsdp_version"),
    ([*FSDP1, "fsdp_sync_module_states=no", "fsdp_cpu_ram_efficient_loading=yes"], "fsdp_sync_module_states", "start"),
    ([*ZERO, "deepspeed_config_file=a", "zero_stage=2"], "zero_stage", "deepspeed_config_file"),
    ([*ZERO, "mixed_precision=fp8", "backend=msamp", "zero_stage=3"], "backend", "zero_stage"),
]


@pytest.mark.parametrize(("assignments", "first", "second"), WRONG, ids=lambda value: str(value)[:60])
def test_a_contradiction_is_an_error_that_names_both_places(assignments: list[str], first: str, second: str):
    with pytest.raises(ConfigError) as caught:
        check(merge([parse_assignments(assignments)]))
    message = str(caught.value)
    assert message.startswith(f"--set {first}: ")
    assert second in message
    assert "allowed: " in message
    assert len(message.splitlines()) == 1


RIGHT = [
    [*FSDP2, "mixed_precision=fp8", "backend=ao", "fsdp_cpu_ram_efficient_loading=true"],
    ["use_cpu=true", "distributed_type=MULTI_CPU", "num_processes=2"],
    ["gpu_ids=all", "use_cpu=true"],
    ["gpu_ids=0, 1"],
    ["num_processes=4", "num_machines=2", "machine_rank=1", "main_process_ip=a"],
    ["num_processes=1", "distributed_type=NO"],
    [*FSDP1, "fsdp_reshard_after_forward=FULL_SHARD", "fsdp_cpu_ram_efficient_loading=yes"],
    [*FSDP2, "fsdp_reshard_after_forward=no", "fsdp_state_dict_type=SHARDED_STATE_DICT"],
    [*ZERO, "deepspeed_config_file=a", "zero3_init_flag=true"],
]


@pytest.mark.parametrize("assignments", RIGHT, ids=str)
def test_what_fits_passes_without_a_note(assignments: list[str]):
    assert check(merge([parse_assignments(assignments)])) == []


def test_a_contradiction_in_a_file_names_its_lines(tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_text("use_cpu: true\ngpu_ids: 0,1\n")
    (message,) = contradictions(merge([read_yaml(file)]))
    assert message == (
        f"{file}:2: got gpu_ids 0,1 ({file}:2) with use_cpu true ({file}:1); allowed: all, or leave it out on a CPU"
    )


def test_what_accelerates_launcher_exports_is_no_contradiction():
    environ = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1", "FSDP_RESHARD_AFTER_FORWARD": "true"}
    assert list(contradictions(load(None, environ, use_default_file=False))) == []


def test_a_section_without_its_engine_is_noted(tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_text("fsdp_config:\n  fsdp_version: 2\ndistributed_type: MULTI_GPU\n")
    assert check(merge([read_yaml(file)])) == [
        f"{file}:2: fsdp_config is not used: distributed_type is MULTI_GPU, not FSDP"
    ]


def test_an_idle_zero3_flag_is_noted():
    (note,) = check(merge([parse_assignments([*ZERO, "zero_stage=2", "zero3_init_flag=true"])]))
    assert "zero3_init_flag is not used: zero_stage is 2" in note
