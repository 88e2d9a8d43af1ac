"""``fp8_last_layers`` on every route, and beside ``fp8_steps``."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from acceler8.config import ENTRIES, read_yaml
from acceler8.config.backend_choice import check, fp8_values, schedule_problem
from acceler8.config.environment import read_environment
from acceler8.config.flags import parse_flags
from acceler8.config.json_schema import json_schema
from acceler8.errors import ConfigError
from acceler8.recipes import get
from acceler8.utils import NativeRecipeKwargs
from tests.config.support import effective_of
from tests.config.test_json_schema import is_valid

PATH = "fp8_config.fp8_last_layers"
VALUE = "0:4,1000:8,2000:all"
YAML = [
    f"fp8_config: {{fp8_last_layers: '{VALUE}'}}",
    "fp8_config:\n  fp8_last_layers: {0: 4, 1000: 8, 2000: all}",
    "fp8_config:\n  fp8_last_layers:\n    2000: all\n    0: 4\n    1000: 8",
    'fp8_config:\n  fp8_last_layers:\n    "0": "4"\n    "1000": 8\n    "2000": ALL',
]


@pytest.mark.parametrize("text", YAML)
def test_yaml_takes_a_text_and_a_mapping(tmp_path, text: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text + "\n")
    assert read_yaml(file).values[PATH].value == VALUE
    described = {**yaml.safe_load(text)}
    stages = described["fp8_config"]["fp8_last_layers"]
    if isinstance(stages, dict):  # an editor sees names of keys
        described["fp8_config"]["fp8_last_layers"] = {str(step): count for step, count in stages.items()}
    assert is_valid(described, json_schema())


def test_a_flag_and_a_variable() -> None:
    for flag in ("--fp8_last_layers", "--fp8-last-layers"):
        assert parse_flags([flag, VALUE]).route.values[PATH].value == VALUE
    for text in (VALUE, '{"0": 4, "1000": 8, "2000": "all"}'):
        assert read_environment({"ACCELERATE_FP8_LAST_LAYERS": text}).values[PATH].value == VALUE


@pytest.mark.parametrize("given", [VALUE, {0: 4, 1000: 8, 2000: "all"}])
@pytest.mark.parametrize("recipe", [None, "delayed", get("rowwise"), {"a": "rowwise", "*": get("delayed")}])
def test_a_handler(given: Any, recipe: Any) -> None:
    handler = NativeRecipeKwargs(recipe=recipe, fp8_last_layers=given)
    assert handler.route_values().values[PATH].value == VALUE
    assert handler.fp8_last_layers == VALUE


def test_a_handler_takes_its_variable(monkeypatch) -> None:
    monkeypatch.setenv("ACCELERATE_FP8_LAST_LAYERS", VALUE)
    assert NativeRecipeKwargs().fp8_last_layers == VALUE
    assert NativeRecipeKwargs(get("rowwise")).fp8_last_layers == VALUE
    assert NativeRecipeKwargs(fp8_last_layers="1:all").fp8_last_layers == "1:all"


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ("4", "run.yaml:3: fp8_last_layers got '4'; allowed: STEP:K with commas between them, or a mapping"),
        ("0:8,5:4", "run.yaml:3: fp8_last_layers got 0:8,5:4, where step 5 does not widen what step 0 has"),
        (4, "run.yaml:3: fp8_config.fp8_last_layers got 4; allowed: STEP:K with commas"),
    ],
)
def test_errors_name_the_place(raw: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ENTRIES[PATH].parse(raw, "run.yaml:3")


def effective(**settings: Any) -> Any:
    return effective_of({"mixed_precision": "fp8", **{f"fp8_config.{key}": value for key, value in settings.items()}})


def test_it_must_leave_the_window_of_steps_a_step() -> None:
    assert check(effective(fp8_steps=":6", fp8_last_layers="5:4")) == []
    with pytest.raises(ConfigError, match=r"^test, test: fp8_steps :5 ends before fp8_last_layers 5:4 begins"):
        check(effective(fp8_steps=":5", fp8_last_layers="5:4"))
    assert schedule_problem(None, "5:4") is schedule_problem(":5", None) is None


def test_the_default_is_every_layer_from_the_start() -> None:
    assert fp8_values(effective(), "NATIVE")[PATH].value == "0:all"
    assert fp8_values(effective(), "TE")[PATH].value == "0:all"
    assert fp8_values(effective(), "MSAMP")[PATH].value == "0:all"  # levels are on the native backend's layers
    assert NativeRecipeKwargs().fp8_last_layers == "0:all"
