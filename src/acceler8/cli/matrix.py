"""``acceler8 env --matrix``: which backend runs which recipe under which strategy, from the backends' own tables."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any


def rows() -> list[dict[str, Any]]:
    """One row a backend and recipe: both, ``devices``, why it is ``unavailable`` here, and the cells by strategy."""
    from acceler8 import backends

    found = []
    for name in backends.names():
        backend = backends.find(name)
        table = backend.capabilities()
        cells = backends.cells(name, table)
        unavailable = backend.unavailable()
        for row in table:
            own = [asdict(cell) for cell in cells if cell.recipe == row.recipe]
            found.append(
                {
                    "backend": name,
                    "recipe": row.recipe,
                    "devices": backends.needs(row),
                    "unavailable": unavailable,
                    "strategies": {cell.pop("strategy"): cell for cell in own},
                }
            )
    return found


def text(found: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table, reasons as numbered notes below."""
    strategies = list(found[0]["strategies"])
    notes: list[str] = []
    lines = [
        "| backend | recipe | devices | " + " | ".join(strategies) + " |",
        "|" + "---|" * (3 + len(strategies)),
    ]
    for row in found:
        said = [_said(row["strategies"][name], notes) for name in strategies]
        lines.append(f"| {row['backend']} | {row['recipe']} | {row['devices']} | " + " | ".join(said) + " |")
    absent = {row["backend"]: row["unavailable"] for row in found if row["unavailable"]}
    legend = ["yes+: FSDP2 can gather the weights as FP8 codes", "no: refused when the Accelerator is made, because"]
    numbered = [f"  {i}. {note}" for i, note in enumerate(notes, 1)]
    here = [f"not usable here: {name}: {reason}" for name, reason in absent.items()]
    return "\n".join([*lines, "", *(legend if notes else legend[:1]), *numbered, *here])


def _said(cell: dict[str, Any], notes: list[str]) -> str:
    if cell["runs"]:
        return "yes+" if cell["gathers_fp8"] else "yes"
    if cell["reason"] not in notes:
        notes.append(cell["reason"])
    return f"no ({notes.index(cell['reason']) + 1})"
