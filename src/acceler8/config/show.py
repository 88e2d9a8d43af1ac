"""Effective values with the source that won, as rows; and two sets of values compared."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

from acceler8.config.registry import ENTRIES
from acceler8.config.sources import Effective


@dataclass(frozen=True, kw_only=True)
class Row:
    """One setting: its path, its value (None: not given and without one default), and who gave it."""

    path: str
    value: Any
    text: str
    source: str


def rows(effective: Effective, *, is_all: bool = False) -> list[Row]:
    """The settings that some source gave and, with FP8, the defaults of the named backend; or all settings."""
    backend = effective["fp8_config.backend"] if effective["mixed_precision"] == "fp8" else None
    found = []
    for path, entry in ENTRIES.items():
        value = effective[path]
        is_default = value is None
        if is_default and entry.is_fp8:
            value = entry.setting.defaults.get(backend or "")
        if not is_default or value is not None or is_all:
            text = "not given" if value is None else entry.setting.kind.text(value)
            source = "default" if is_default else str(effective.source(path))
            if is_default and value is not None:
                source = f"default of {backend}"
            found.append(Row(path=path, value=value, text=text, source=source))
    return found


def to_json(effective: Effective, *, is_all: bool = False) -> dict[str, Any]:
    """The rows as one object: ``settings`` by path, each with value and source, and ``notes``."""
    return {
        "settings": {
            row.path: {"value": row.value, "text": row.text, "source": row.source}
            for row in rows(effective, is_all=is_all)
        },
        "notes": list(effective.notes),
    }


def diff(old: str, new: str, name: str) -> str:
    """What changes from one text of a file to another, as a unified diff; empty if nothing does."""
    lines = difflib.unified_diff(
        old.splitlines(), new.splitlines(), f"{name} (there now)", f"{name} (to be written)", lineterm=""
    )
    return "\n".join(lines)
