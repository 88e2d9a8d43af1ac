"""The tables of ``docs/configuration.md``, made from the schema.

``python -m acceler8.config.docs docs/configuration.md`` writes them between their markers; ``--check`` only says
whether they are as they should be. The text around them is written by hand.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from acceler8.config.registry import ENTRIES, SECTIONS, Entry
from acceler8.config.schema import BACKENDS
from acceler8.errors import ConfigError

_BLOCK = re.compile(r"(<!-- table: (?P<name>\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def tables() -> dict[str, str]:
    """Each table by the name in its marker."""
    found = {name: _settings(name) for name in ("", *SECTIONS)}
    found["top"] = found.pop("")
    return found | {"defaults": _defaults(), "spellings": _spellings()}


def fill(text: str) -> str:
    """The text with every table as it should be. Raises ConfigError for an unknown or a missing table."""
    made = tables()
    named = [match["name"] for match in _BLOCK.finditer(text)]
    if sorted(named) != sorted(made):
        raise ConfigError(f"the tables in the text are {', '.join(sorted(named))}; allowed: {', '.join(sorted(made))}")
    return _BLOCK.sub(lambda match: f"{match[1]}{made[match['name']]}{match[3]}", text)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |\n" for line in lines)


def _settings(section: str) -> str:
    rows = [
        [
            f"`{entry.key}`",
            f"`--{entry.setting.flags[0]}`",
            ", ".join(f"`{name}`" for name in entry.setting.env),
            _allowed(entry),
            entry.setting.help,
        ]
        for entry in ENTRIES.values()
        if entry.section == section
    ]
    return _table(["key", "flag", "variable", "allowed", "meaning"], rows)


def _allowed(entry: Entry) -> str:
    unit = f"; {entry.setting.unit}" if entry.setting.unit else ""
    return f"{entry.setting.kind.allowed}{unit}"


def _defaults() -> str:
    rows = []
    for entry in ENTRIES.values():
        setting = entry.setting
        if entry.is_fp8 and (setting.backends or setting.defaults):
            rows.append([f"`{entry.key}`", *(_default(entry, backend) for backend in BACKENDS)])
    return _table(["key", *BACKENDS], rows)


def _default(entry: Entry, backend: str) -> str:
    setting = entry.setting
    if backend in setting.defaults:
        return f"`{setting.text(setting.defaults[backend])}`"
    return "by recipe" if backend in setting.backends else ""


def _spellings() -> str:
    rows = []
    for entry in ENTRIES.values():
        names = [*entry.setting.aliases, *entry.setting.flags[1:]]
        if names:
            rows.append([f"`{entry.path}`", ", ".join(f"`{name}`" for name in names)])
    return _table(["setting", "other names"], rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check a file; 1 if it is stale and only checked."""
    parser = argparse.ArgumentParser(prog="python -m acceler8.config.docs", description="Tables of the documentation.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if a table is stale")
    asked = parser.parse_args(arguments)
    old = asked.file.read_text(encoding="utf-8")
    new = fill(old)
    if asked.check:
        if old != new:
            print(f"{asked.file}: tables are stale; run python -m acceler8.config.docs {asked.file}", file=sys.stderr)
        return int(old != new)
    asked.file.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
