"""A picture of a result: bars of time, and of memory where it was measured."""

from __future__ import annotations

import textwrap
from pathlib import Path

from acceler8.bench.facts import facts_line
from acceler8.bench.results import Result, Row
from acceler8.errors import RunError

COLOURS = {"PyTorch": "#7f7f7f", "acceler8": "#1f77b4", "torchao": "#ff7f0e", "TransformerEngine": "#2ca02c",
           "Accelerate": "#9467bd"}  # fmt: skip


def draw_png(result: Result, path: Path) -> None:
    """Write it to ``path``. Needs matplotlib. Raises RunError if the file cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [row for row in result.rows if row.ms is not None]
    with_memory = any("peak_bytes" in row.values for row in rows)
    figure = Figure(figsize=(12 if with_memory else 7, 2 + 0.3 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 1 + with_memory, squeeze=False, sharey=True)[0]
    names = [_name(row) for row in rows]
    colours = [COLOURS.get(str(row.labels.get("group", "acceler8")), "#1f77b4") for row in rows]
    medians = [row.ms.median for row in rows if row.ms]
    errors = [
        [row.ms.median - row.ms.p20 for row in rows if row.ms],
        [row.ms.p80 - row.ms.median for row in rows if row.ms],
    ]
    axes[0].barh(names, medians, xerr=errors, color=colours)
    axes[0].invert_yaxis()
    axes[0].set_xlabel("ms, median; line: 20th to 80th percentile; diamond: floor")
    floors = [(i, row.values["floor_ms"]) for i, row in enumerate(rows) if "floor_ms" in row.values]
    if floors:
        axes[0].plot([ms for _, ms in floors], [i for i, _ in floors], "kD", markersize=4)
    if with_memory:
        axes[1].barh(names, [row.values.get("peak_bytes", 0.0) / 2**30 for row in rows], color=colours, alpha=0.4)
        axes[1].barh(names, [row.values.get("held_bytes", 0.0) / 2**30 for row in rows], color=colours)
        axes[1].set_xlabel("GiB: peak (light), held for backward (full)")
    title = f"acceler8 bench {result.command} {result.settings.get('name', '')}".rstrip()
    facts = "\n".join(textwrap.wrap(facts_line(result.facts), width=90 if with_memory else 70))
    figure.suptitle(f"{title}\n{facts}", fontsize=9)
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise RunError(f"cannot write {str(path)!r}: {error.strerror}; name another file") from error


def _name(row: Row) -> str:
    extra = [str(value) for key, value in row.labels.items() if key in ("shape", "recipe") and _tells_apart(key, row)]
    return " ".join([row.name, *extra])


def _tells_apart(key: str, row: Row) -> bool:
    """True if the label tells this row from others: shapes do; the recipe where the name does not say it."""
    return key == "shape" or ("shape" in row.labels and str(row.labels[key]) not in row.name)
