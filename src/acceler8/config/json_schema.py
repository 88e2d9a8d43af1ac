"""The JSON schema of a configuration file, for the completion and the checks of an editor.

It says what ``read_yaml`` takes, spellings included, so that an editor does not mark a file that is read. Where the
two differ, the reader is right: a schema cannot say that ``O2`` may be written ``02``.
"""

from __future__ import annotations

from functools import singledispatch
from typing import Any

from acceler8.config.kinds import (
    FALSE,
    TRUE,
    Bool,
    Choice,
    Int,
    LayerPatterns,
    Names,
    Number,
    Stages,
    Steps,
    Table,
    Text,
    ThreeBools,
    Words,
)
from acceler8.config.registry import ENTRIES, SECTIONS, Entry
from acceler8.config.yaml_file import IGNORED

DRAFT = "https://json-schema.org/draft/2020-12/schema"


def json_schema() -> dict[str, Any]:
    """The schema of a whole file."""
    properties = _properties("")
    for section in SECTIONS:
        properties[section] = {
            "type": ["object", "null"],
            "properties": _properties(section),
            "additionalProperties": False,
        }
    for key, meaning in IGNORED.items():
        properties[key] = {"description": meaning, "deprecated": True}
    return {
        "$schema": DRAFT,
        "title": "acceler8 configuration",
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
    }


def _properties(section: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for entry in ENTRIES.values():
        if entry.section != section:
            continue
        found[entry.key] = _property(entry)
        others = [*entry.setting.aliases, *([f"fp8_{entry.key}"] if entry.is_fp8 else [])]
        for other in others:
            found.setdefault(other, {**_property(entry), "deprecated": True, "description": f"Read as {entry.key}."})
    return found


def _property(entry: Entry) -> dict[str, Any]:
    setting = entry.setting
    return {
        "description": f"{setting.help} Allowed: {setting.kind.allowed}."
        + (f" Unit: {setting.unit}." if setting.unit else ""),
        "anyOf": [*_forms(setting.kind), {"type": "null"}],
        "x-environment": list(setting.env),
        "x-flag": f"--{setting.flags[0]}",
    }


def _spellings(*words: str) -> dict[str, Any]:
    """Words as they are listed and in one case; editors offer them in this order."""
    return {"enum": list(dict.fromkeys(form for word in words for form in (word, word.lower(), word.upper())))}


@singledispatch
def _forms(kind: Any) -> list[dict[str, Any]]:
    raise AssertionError(f"no JSON schema for {type(kind).__name__}")


@_forms.register
def _(kind: Bool) -> list[dict[str, Any]]:
    return [{"type": "boolean"}, _spellings(*TRUE, *FALSE), {"enum": [0, 1]}]


@_forms.register
def _(kind: Int) -> list[dict[str, Any]]:
    bounds = {"minimum": kind.least, "maximum": kind.most}
    number = {"type": "integer", **{name: bound for name, bound in bounds.items() if bound is not None}}
    return [number, {"type": "string", "pattern": r"^\s*[+-]?[0-9][0-9_]*\s*$"}]


@_forms.register
def _(kind: Number) -> list[dict[str, Any]]:
    return [{"type": "number", "minimum": kind.least}, {"type": "string", "pattern": r"^\s*[+-]?[0-9.]"}]


@_forms.register
def _(kind: Choice) -> list[dict[str, Any]]:
    words = [*kind.words, *(alias for alias, _ in kind.aliases)]
    forms = [_spellings(*words)]
    forms += [{"type": "boolean"}] if {"yes", "no"} & {word.lower() for word in words} else []
    numbers = [int(word) for word in words if word.isdecimal()]
    return forms + ([{"enum": numbers}] if numbers else [])


@_forms.register
def _(kind: Text) -> list[dict[str, Any]]:
    return [{"type": "string", "pattern": r"^[^\n\r]*$"}, {"type": "number"}]


@_forms.register
def _(kind: Names) -> list[dict[str, Any]]:
    return [{"type": "array", "items": {"type": "string", "pattern": "^[^,]*$"}}, {"type": "string"}]


@_forms.register
def _(kind: LayerPatterns) -> list[dict[str, Any]]:
    recipe: dict[str, Any] = {"anyOf": [_spellings(*kind.recipes), {"type": "null"}]}
    one = {"type": "string", "pattern": "^[^,]*=[^,=]*$"}
    return [{"type": "array", "items": one}, {"type": "object", "additionalProperties": recipe}, {"type": "string"}]


@_forms.register
def _(kind: Steps) -> list[dict[str, Any]]:
    return [{"type": "string", "pattern": r"^\s*[0-9]*\s*:\s*[0-9]*\s*$"}]


@_forms.register
def _(kind: Stages) -> list[dict[str, Any]]:
    count = [{"type": "integer", "minimum": 1}, {"type": "string", "pattern": r"^\s*([1-9][0-9]*|[aA][lL][lL])\s*$"}]
    stages = r"^\s*(\{.*\}|[0-9]+\s*:\s*[0-9a-zA-Z]+(\s*,\s*[0-9]+\s*:\s*[0-9a-zA-Z]+)*)\s*$"
    return [
        {"type": "string", "pattern": stages},
        {"type": "object", "additionalProperties": {"anyOf": count}},
    ]


@_forms.register
def _(kind: Words) -> list[dict[str, Any]]:
    return [{"type": "array", "items": _spellings(*kind.words), "uniqueItems": True}, {"type": "string"}]


@_forms.register
def _(kind: ThreeBools) -> list[dict[str, Any]]:
    one: dict[str, Any] = {"anyOf": [{"type": "boolean"}, _spellings(*TRUE, *FALSE), {"enum": [0, 1]}]}
    return [{"type": "array", "items": one, "minItems": 1, "maxItems": 3}, {"type": "boolean"}, {"type": "string"}]


@_forms.register
def _(kind: Table) -> list[dict[str, Any]]:
    return [{"type": "object", "additionalProperties": {"type": ["string", "number", "boolean"]}}, {"type": "string"}]
