"""What ``acceler8 bench`` shows: tables, notes and the line of facts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from acceler8.bench.facts import facts_line
from acceler8.bench.results import Result, Row, check_writable, write_json
from acceler8.costs import BF16, CostTable
from acceler8.errors import MissingLibraryError

Column = tuple[str, Callable[[Row], str]]
GIB = 2**30
WIDTH = 400


def value(key: str, form: str = "{:.1f}", scale: float = 1.0) -> Callable[[Row], str]:
    """A column's text: ``values[key]`` by ``form``, ``-`` where it was not measured."""
    return lambda row: form.format(row.values[key] * scale) if key in row.values else "-"


def label(key: str) -> Callable[[Row], str]:
    """A column's text from the labels."""
    return lambda row: str(row.labels.get(key, "-"))


def milliseconds(row: Row) -> str:
    """The median."""
    return "-" if row.ms is None else f"{row.ms.median:.{_digits(row.ms.median)}f}"


def spread(row: Row) -> str:
    """20th and 80th percentile."""
    if row.ms is None:
        return "-"
    digits = _digits(row.ms.median)
    return f"{row.ms.p20:.{digits}f} to {row.ms.p80:.{digits}f}"


def _digits(ms: float) -> int:
    return 1 if ms >= 20 else 2 if ms >= 2 else 3


STEP_COLUMNS: list[Column] = [
    ("ms/step", milliseconds),
    ("20 to 80 %", spread),
    ("of BF16", value("speed_against_bf16", "{:.2f}x")),
    ("tokens/s", value("tokens_per_s", "{:,.0f}")),
    ("TFLOP/s", value("tflops", "{:.0f}")),
    ("peak GiB", value("peak_bytes", "{:.2f}", 1 / GIB)),
    ("held GiB", value("held_bytes", "{:.2f}", 1 / GIB)),
    ("of floor", value("share_of_floor", "{:.0%}")),
    ("loss", value("last_loss", "{:.4f}")),
    ("moved", lambda row: f"{row.values['moved_matrices']:.0f}/{row.values['matrices']:.0f}"
     if "matrices" in row.values else "-"),
]  # fmt: skip

GEMM_COLUMNS: list[Column] = [
    ("MxKxN", label("shape")),
    ("ms", milliseconds),
    ("20 to 80 %", spread),
    ("TFLOP/s", value("tflops", "{:.0f}")),
    ("of BF16", value("speed_against_bf16", "{:.2f}x")),
    ("SQNR dB", value("sqnr_db", "{:.1f}")),
]

LAYER_COLUMNS: list[Column] = [
    *GEMM_COLUMNS,
    ("timing", label("timing")),
    ("eager ms, host included", value("eager_ms", "{:.3f}")),
    ("eager, of BF16", value("eager_speed_against_bf16", "{:.2f}x")),
]

PRESET_COLUMNS: list[Column] = [
    ("layer", label("layer")),
    ("MxKxN", label("shape")),
    ("ms", lambda row: f"{row.values['layers_ms']:.2f}" if "layers_ms" in row.values else milliseconds(row)),
    *LAYER_COLUMNS[2:],
    ("planned", label("planned")),
]

MODEL_COLUMNS = [column for column in STEP_COLUMNS if column[0] not in ("tokens/s", "TFLOP/s", "of floor")]
GB = 1e-9
MEMORY_COLUMNS: list[Column] = [
    ("peak GB", value("peak_bytes", "{:.1f}", GB)),
    ("held for backward GB", value("held_bytes", "{:.1f}", GB)),
    ("rest GB", value("rest_bytes", "{:.1f}", GB)),
]
THROUGHPUT_COLUMNS: list[Column] = [
    ("batch", label("batch")),
    ("ms/step", milliseconds),
    ("20 to 80 %", spread),
    ("samples/s", value("samples_per_s", "{:.1f}")),
    ("of FP16", value("speed_against_fp16", "{:.2f}x")),
    ("peak GB", value("peak_bytes", "{:.1f}", GB)),
]
ACCURACY_COLUMNS: list[Column] = [
    ("accuracy", value("accuracy", "{:.2%}")),
    ("against FP16, points", value("against_fp16", "{:+.2f}", 100)),
    ("epochs to FP16's, 0.2 points less", value("epochs_to_fp16", "{:.0f}")),
]
OP_COLUMNS: list[Column] = [
    ("shape", label("shape")),
    ("ms", milliseconds),
    ("20 to 80 %", spread),
    ("GB/s", value("gb_per_s", "{:,.0f}")),
    ("floor ms", value("floor_ms", "{:.3f}")),
    ("of floor", value("share_of_floor", "{:.0%}")),
]


class BenchDisplay:
    """Prints to the standard output; progress goes to the standard error, so that a table can be piped."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False, markup=False, soft_wrap=True)
        # a table that is wider than the terminal is wrapped by it; one that is cut could not be read at all
        self._wide = Console(file=self.console.file, highlight=False, markup=False, soft_wrap=True, width=WIDTH)
        self._progress = Console(highlight=False, markup=False, soft_wrap=True, stderr=True)

    def progress(self, message: str) -> None:
        """Say what is being done."""
        self._progress.print(f"  {message} ...")

    def heading(self, message: str) -> None:
        """Print a line."""
        self.console.print(message)

    def table(self, title: str, rows: list[Row], columns: list[Column], first: str = "variant") -> None:
        """One row a line; a row that is not ok says why in the last column."""
        shown = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        shown.add_column(first, no_wrap=True)
        for name, _ in columns:
            shown.add_column(name, justify="right", no_wrap=True)
        with_details = any(row.detail or row.status != "ok" for row in rows)
        if with_details:
            shown.add_column("what", no_wrap=True)
        for row in rows:
            what = row.detail if row.status in ("ok", "not installed") else f"{row.status}: {row.detail}"
            shown.add_row(row.name, *(text(row) for _, text in columns), *([what] if with_details else []))
        self._wide.print(shown)

    def parts(self, result: Result) -> None:
        """The floor's parts."""
        if not result.parts:
            return
        shown = Table(
            title=f"Floor: each part alone; copy {result.settings['copy_tb_per_s']:.2f} TB/s",
            title_justify="left",
            box=box.SIMPLE_HEAD,
            pad_edge=False,
        )
        shown.add_column("part")
        shown.add_column("ms", justify="right")
        for name, ms in result.parts.items():
            shown.add_row(name, f"{ms:.2f}")
        self.console.print(shown)

    def costs(self, table: CostTable) -> None:
        """Speed of each recipe against BF16, by tokens: over the sizes of the grid, from the least to the most."""
        shown = Table(
            title="Linear layers, forward and backward: speed of BF16, least to most over K and N",
            title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False,
        )  # fmt: skip
        shown.add_column("tokens", justify="right")
        for name in table.recipes:
            shown.add_column(name, justify="right")
        plain = table.entries[BF16]
        for tokens in sorted({m for m, _, _ in plain}):
            ratios = {
                name: [plain[s] / ms for s, ms in table.entries[name].items() if s[0] == tokens]
                for name in table.recipes
            }
            shown.add_row(str(tokens), *(f"{min(r):.2f} to {max(r):.2f}" if r else "-" for r in ratios.values()))
        self._wide.print(shown)

    def finish(self, result: Result, json_path: Path | None, png_path: Path | None) -> None:
        """Notes and facts, then the files."""
        for note in result.notes:
            self.console.print(f"  note: {note}")
        self.console.print(f"  {facts_line(result.facts)}")
        if json_path is not None:
            write_json(result.to_dict(), json_path)
            self.console.print(f"  written: {json_path}")
        if png_path is not None:
            from acceler8.bench.chart import draw_png

            draw_png(result, png_path)
            self.console.print(f"  written: {png_path}")


def check_outputs(json_path: Path | None, png_path: Path | None) -> None:
    """Refuse what could not be written, before anything is measured. Raises RunError, MissingLibraryError."""
    for path in (json_path, png_path):
        if path is not None:
            check_writable(path)
    if png_path is None:
        return
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise MissingLibraryError(
            "--png needs matplotlib, which is not installed; pip install matplotlib, or use --json and draw elsewhere"
        ) from None
