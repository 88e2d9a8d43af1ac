"""Effective values with the source that won, as rows; and two sets of values compared."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

from acceler8.config.backend_choice import fp8_values, preferred_backend
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
    """The settings that some source gave and, with FP8, all that hold for its backend; or all settings."""
    backend = preferred_backend(effective) if effective["mixed_precision"] == "fp8" else None
    fp8 = fp8_values(effective, backend) if backend else {}
    found = []
    for path, entry in ENTRIES.items():
        given, value, source = effective.values.get(path), effective[path], effective.source(path)
        said = str(source) if given else "default"
        if path == "fp8_config.backend" and backend and value in (None, "NO"):
            value, said = backend, "default: the first of backend_order that is installed"
        elif path in fp8:
            value = fp8[path].value
            said = said if value == effective[path] and given else f"default of {backend}"
        elif given is None and not is_all:
            continue
        text = "not given" if value is None and given is None else entry.setting.text(value)
        found.append(Row(path=path, value=value, text=text, source=said))
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
