"""What a benchmark found, as rows and as JSON: the schema that docs/bench.md describes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from acceler8.bench.timing import Spread
from acceler8.errors import RunError

FORMAT, VERSION = "acceler8-bench", 1
Status = Literal["ok", "wrong", "error", "not installed"]


@dataclass(kw_only=True)
class Row:
    """One variant, or one operation on one shape. None: not measured, or means nothing here."""

    name: str
    status: Status = "ok"
    detail: str = ""
    """Why it is not ok, in one line; else what was found on the way."""
    labels: dict[str, Any] = field(default_factory=dict)
    """What tells rows apart beside the name: group, shape, recipe."""
    ms: Spread | None = None
    values: dict[str, float] = field(default_factory=dict)
    """Numbers, each with its unit in its name."""

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return dataclasses.asdict(self)


@dataclass(kw_only=True)
class Result:
    """All rows of a run, with what they need beside them to be read."""

    command: str
    facts: dict[str, str]
    settings: dict[str, Any]
    rows: list[Row]
    notes: list[str] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=dict)
    """Of the floor: name -> ms."""
    tables: dict[str, list[Row]] = field(default_factory=dict)
    """Further rows by the title of their table."""

    @property
    def all_rows(self) -> list[Row]:
        """Those of every table."""
        return [*self.rows, *(row for rows in self.tables.values() for row in rows)]

    @property
    def own_failures(self) -> list[Row]:
        """Rows of acceler8 itself that are wrong or raised: bugs."""
        return [
            row
            for row in self.all_rows
            if row.status in ("wrong", "error") and row.labels.get("group", "acceler8") == "acceler8"
        ]

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "command": self.command,
            "facts": self.facts,
            "settings": self.settings,
            "notes": self.notes,
            "floor_ms": self.parts,
            "rows": [row.to_dict() for row in self.rows],
            "tables": {title: [row.to_dict() for row in rows] for title, rows in self.tables.items()},
        }


def check_writable(path: Path) -> None:
    """Raise RunError now rather than after the measurement."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise RunError(
            f"cannot write {str(path)!r}: it is a folder or lies in none; name a file in a folder that exists"
        )


def write_json(data: Mapping[str, Any], path: Path) -> None:
    """Write it indented, with a newline at the end."""
    try:
        path.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise RunError(f"cannot write {str(path)!r}: {error.strerror}; name another file") from error


def one_line(error: BaseException, limit: int = 200) -> str:
    """Kind and message of an error in one line."""
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said}"[:limit]
