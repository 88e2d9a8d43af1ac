"""Who wins, who is said to have won, and what takes a value back."""

from __future__ import annotations

import pytest

from acceler8 import recipes
from acceler8.config import (
    RouteValues,
    gather,
    merge,
    parse_flags,
    read_environment,
    read_yaml,
    values_from_code,
    write_environment,
)
from acceler8.config.backend_choice import fp8_values
from acceler8.config.resolve import check, load
from acceler8.errors import ConfigError
from tests.config.packages import forget_environment


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch, tmp_path) -> None:
    forget_environment(monkeypatch)
    monkeypatch.chdir(tmp_path)


def flags(*words: str):
    return parse_flags(words).route


def test_a_variable_that_was_changed_since_the_launch_is_its_own_source():
    written = write_environment(merge([flags("--mixed_precision=fp8", "--fp8_margin=2")]))
    written["ACCELERATE_MIXED_PRECISION"] = "bf16"
    found = read_environment(written).values
    assert str(found["mixed_precision"].source) == "environment ACCELERATE_MIXED_PRECISION"
    assert str(found["fp8_config.margin"].source) == "flag --fp8_margin"


def test_a_worker_of_one_engine_is_not_of_another_by_inheritance():
    parent = {"ACCELERATE_USE_DEEPSPEED": "true"}
    written = parent | write_environment(load(flags("--use_fsdp"), parent, use_default_file=False))
    assert merge([read_environment(written)])["distributed_type"] == "FSDP"


@pytest.mark.parametrize("switch", ["ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"])
def test_an_engine_and_another_kind_are_an_error(switch):
    with pytest.raises(ConfigError, match=f"{switch} is true and ACCELERATE_DISTRIBUTED_TYPE"):
        read_environment({switch: "1", "ACCELERATE_DISTRIBUTED_TYPE": "multi_gpu"})


def test_none_takes_back_what_a_lower_source_gave(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("deepspeed_config: {gradient_clipping: 1.0}\nfp8_config: {skip: [lm_head], amax_history_len: 4}\n")
    environ = {"ACCELERATE_FP8_AMAX_HISTORY_LEN": "none"}
    effective = load(flags("--gradient_clipping", "none", "--fp8_skip=none"), environ, file)
    assert effective["deepspeed_config.gradient_clipping"] is None
    assert effective["fp8_config.skip"] is None
    values = fp8_values(merge([effective_layer(effective), flags("--fp8_recipe=delayed")]), "NATIVE")
    assert values["fp8_config.amax_history_len"].value == 1024
    assert values["fp8_config.skip"].value == ()
    # and stays taken back on the way to a worker
    again = merge([read_environment(write_environment(effective))])
    assert "fp8_config.skip" in again.values
    assert again["fp8_config.skip"] is None


def effective_layer(effective):
    return RouteValues(values=dict(effective.values))


def test_an_empty_variable_takes_nothing_back(tmp_path):
    (tmp_path / "run.yaml").write_text("fp8_config: {margin: 3}\n")
    assert load(None, {"ACCELERATE_FP8_MARGIN": " "}, tmp_path / "run.yaml")["fp8_config.margin"] == 3


def test_fp8_that_is_overridden_gets_a_word_on_every_route(tmp_path):
    (tmp_path / "run.yaml").write_text("mixed_precision: fp8\n")
    effective = load(flags("--mixed_precision", "bf16"), {}, tmp_path / "run.yaml")
    assert [note for note in effective.notes if note.endswith("this run is not FP8")]


def test_the_variable_that_names_the_file_counts_for_launch_and_code(tmp_path, monkeypatch):
    (tmp_path / "a.yaml").write_text("fp8_config: {margin: 1}\n")
    (tmp_path / "b.yaml").write_text("fp8_config: {margin: 2}\n")
    environ = {"ACCELER8_CONFIG_FILE": str(tmp_path / "a.yaml")}
    assert load(None, environ)["fp8_config.margin"] == 1
    assert load(None, environ, tmp_path / "b.yaml")["fp8_config.margin"] == 2
    monkeypatch.setenv("ACCELER8_CONFIG_FILE", str(tmp_path / "a.yaml"))
    assert gather(values_from_code())["fp8_config.margin"] == 1
    assert gather(values_from_code(), tmp_path / "b.yaml")["fp8_config.margin"] == 2


def test_a_file_named_in_code_wins_over_the_file_of_the_launcher(tmp_path, monkeypatch):
    (tmp_path / "launcher.yaml").write_text("fp8_config: {margin: 1, interval: 5}\n")
    (tmp_path / "code.yaml").write_text("fp8_config: {margin: 2}\n")
    for name, text in write_environment(load(None, {}, tmp_path / "launcher.yaml")).items():
        monkeypatch.setenv(name, text)
    effective = gather(values_from_code(), tmp_path / "code.yaml")
    assert (effective["fp8_config.margin"], effective["fp8_config.interval"]) == (2, 5)
    assert str(effective.source("fp8_config.margin")) == f"yaml {tmp_path / 'code.yaml'}:1"


@pytest.mark.parametrize(
    "name", ["ACCELERATE_MIXED_PRECISION", "ACCELER8_CONFIG_SOURCES", "ACCELERATE_USE_FSDP", "OMP_NUM_THREADS"]
)
def test_a_setting_is_not_said_as_a_variable(name, tmp_path):
    (tmp_path / "run.yaml").write_text(f"mixed_precision: fp8\nenvironment:\n  {name}: '1'\n")
    with pytest.raises(ConfigError, match=rf"run.yaml:2: environment variable {name} cannot come"):
        check(merge([read_yaml(tmp_path / "run.yaml")]))


@pytest.mark.parametrize("name", ["LD_PRELOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "HF_TOKEN", "RANK"])
def test_a_file_that_brings_code_along_is_refused_when_it_is_read(name, tmp_path):
    (tmp_path / "run.yaml").write_text(f"environment: {{{name}: x}}\n")
    with pytest.raises(ConfigError, match=rf"run.yaml:1: environment variable {name} cannot come"):
        read_yaml(tmp_path / "run.yaml")


def test_accumulation_belongs_to_every_engine():
    assert check(merge([flags("--gradient_accumulation_steps=4")])) == []


def test_a_setting_without_effect_says_so():
    assert any("--debug" in note and "no effect" in note for note in check(merge([flags("--debug")])))


@pytest.mark.parametrize(("word", "value"), [("0", False), ("off", False), ("on", True), ("no", False)])
def test_a_bare_switch_takes_a_boolean_word(word, value):
    parsed = parse_flags(["--use_cpu", word, "train.py"])
    assert parsed.route.values["use_cpu"].value is value
    assert parsed.rest == ["train.py"]


def test_a_recipe_object_says_everything():
    mine = recipes.get("delayed", margin=3).replace(name="mine")
    below = read_environment({"ACCELERATE_FP8_OVERRIDE_WGRAD": "true", "ACCELERATE_FP8_INTERVAL": "9"})
    effective = merge([below, values_from_code(mixed_precision="fp8", recipe=mine)])
    assert effective["fp8_config.interval"] == 1
    assert effective["fp8_config.override_linear_precision"] in (None, (False, False, False))


def test_processes_asked_for_above_a_file_that_says_no(tmp_path):
    (tmp_path / "run.yaml").write_text("distributed_type: 'NO'\n")
    assert check(load(flags("--num_processes=2"), {}, tmp_path / "run.yaml")) == []
    (tmp_path / "run.yaml").write_text("distributed_type: 'NO'\nnum_processes: 2\n")
    with pytest.raises(ConfigError, match=r"run.yaml:2: got num_processes 2"):
        check(load(None, {}, tmp_path / "run.yaml"))
