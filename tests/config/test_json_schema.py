"""The schema for editors takes what the reader takes, and the templates."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given
from hypothesis import settings as examples

from acceler8.config import ENTRIES, merge, read_yaml, to_yaml
from acceler8.config.json_schema import json_schema
from tests.config.support import effective_of, settings

SCHEMA = json_schema()
TYPES: dict[str, Any] = {"string": str, "object": dict, "array": list, "null": type(None), "boolean": bool}


def is_type(value: Any, name: str) -> bool:
    if name in ("integer", "number"):
        return isinstance(value, int if name == "integer" else int | float) and not isinstance(value, bool)
    return isinstance(value, TYPES[name])


def is_valid(value: Any, schema: dict[str, Any]) -> bool:
    """JSON Schema, as far as ours uses it."""
    checks = []
    for word, said in schema.items():
        match word:
            case "type":
                checks.append(any(is_type(value, name) for name in ([said] if isinstance(said, str) else said)))
            case "enum":
                checks.append(any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in said))
            case "anyOf":
                checks.append(any(is_valid(value, one) for one in said))
            case "properties" if isinstance(value, dict):
                checks.append(all(is_valid(inner, said[key]) for key, inner in value.items() if key in said))
            case "additionalProperties" if isinstance(value, dict):
                others = [inner for key, inner in value.items() if key not in schema.get("properties", {})]
                checks.append(all(said is not False and is_valid(inner, said) for inner in others))
            case "items" if isinstance(value, list):
                checks.append(all(is_valid(item, said) for item in value))
            case "minItems" if isinstance(value, list):
                checks.append(len(value) >= said)
            case "maxItems" if isinstance(value, list):
                checks.append(len(value) <= said)
            case "uniqueItems" if isinstance(value, list):
                checks.append(len({str(item) for item in value}) == len(value))
            case "minimum" if is_type(value, "number"):
                checks.append(value >= said)
            case "maximum" if is_type(value, "number"):
                checks.append(value <= said)
            case "pattern" if isinstance(value, str):
                checks.append(re.search(said, value) is not None)
    return all(checks)


@given(values=settings())
@examples(max_examples=80, deadline=None)
def test_every_valid_file_is_valid(values: dict[str, Any]):
    assert is_valid(yaml.safe_load(to_yaml(effective_of(values))), SCHEMA)


@pytest.mark.parametrize(
    "path",
    sorted((Path(__file__).parents[2] / "examples" / "config_yaml_templates").glob("*.yaml")),
    ids=lambda path: path.stem,
)
def test_templates_are_valid(path: Path):
    assert is_valid(yaml.safe_load(path.read_text()), SCHEMA)


@pytest.mark.parametrize(
    "text",
    [
        "mixed_precision: FP8\nfp8_config: {backend: te, override_linear_precision: '(false, false, false)'}",
        "fp8_config: {amax_history_length: 4, optimization_level: o2, backend: torchao, opt_level: 2}",
        "fp8_config: null\nfsdp_config: {fsdp_sharding_strategy: 1, fsdp_reshard_after_forward: true}",
        "mixed_precision: no\nuse_cpu: 'yes'\ncompute_environment: LOCAL_MACHINE\ntpu_env: []\nnum_processes: '2'",
    ],
)
def test_other_spellings_that_are_read_are_valid(text: str, tmp_path: Path):
    (tmp_path / "a.yaml").write_text(text.replace("opt_level: 2", "margin: 2"))
    read_yaml(tmp_path / "a.yaml")
    assert is_valid(yaml.safe_load(text), SCHEMA)


@pytest.mark.parametrize(
    "text",
    [
        "mixed_precison: fp8",
        "fp8_config: {margn: 1}",
        "fp8_config: {margin: 99}",
        "fp8_config: {margin: true}",
        "fp8_config: [1]",
        "mixed_precision: fp9",
        "environment: {A: [1]}",
        "fp8_config: {backend_order: [AO, AO]}",
        "- a",
    ],
)
def test_what_is_refused_is_not_valid(text: str):
    assert not is_valid(yaml.safe_load(text), SCHEMA)


def test_every_setting_is_described():
    for entry in ENTRIES.values():
        place = SCHEMA["properties"][entry.section] if entry.section else SCHEMA
        described = place["properties"][entry.key]
        assert described["description"].startswith(entry.setting.help)
        assert described["x-environment"] == list(entry.setting.env)


@given(values=settings())
@examples(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_model_of_the_schema_holds_the_values(tmp_path: Path, values: dict[str, Any]):
    config = effective_of(values).config
    for path, value in values.items():
        found: Any = config
        for part in path.split("."):
            found = getattr(found, part)
        assert found == value
    assert merge([]).config.mixed_precision is None
