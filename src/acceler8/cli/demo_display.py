"""What ``acceler8 demo`` shows: a progress bar in a terminal, plain lines elsewhere, tables at the end."""

from __future__ import annotations

from collections import deque
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from acceler8.demo.groups import group_coverage, group_health
from acceler8.demo.run_folder import Record, RunFolder

LINES_A_TRAINING = 10
"""Progress lines of a training whose output is not a terminal."""

REASON = "what, or why not"


class DemoDisplay:
    """Prints a run to the standard output; a ``Listener`` of ``execute_run``."""

    def __init__(self, console: Console | None = None) -> None:
        # Paths and commands are to be copied: no wrapping, no markup, no guessed highlights.
        self.console = console or Console(highlight=False, markup=False, soft_wrap=True)
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._steps = 0
        self._times_ms: deque[float] = deque(maxlen=50)

    def note(self, message: str) -> None:
        """Print one message."""
        self.console.print(message)

    def run_started(self, folder: RunFolder, *, is_resumed: bool) -> None:
        """Say what is about to be computed, on what, and where it goes."""
        config = folder.read_json("config.json")
        settings, text, environment = config["settings"], config["text"], config["environment"]
        self.note(f"{'Resuming' if is_resumed else 'Run'} {folder.path}")
        self.note(
            f"  model {settings['size']}, recipe {settings['recipe']}, {settings['steps']} steps of "
            f"{settings['batch']} x {settings['seq']} bytes, seed {settings['seed']}"
        )
        self.note(
            f"  text: {text['source']}, {text['train_bytes']:,} bytes to train on, {text['held_out_bytes']:,} held out"
        )
        self.note(f"  {environment.get('gpu', 'CPU')}, torch {environment['torch']}, FP8 {environment['fp8']}")

    def training_started(self, precision: str, step: int, steps: int) -> None:
        """Begin a progress bar, or say so in a line."""
        self._steps = steps
        self._times_ms.clear()
        if not self.console.is_terminal:
            self.note(f"{precision}: training from step {step} to {steps}")
            return
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}  {task.fields[rate]} tokens/s  ETA"),
            TimeRemainingColumn(),
            console=self.console,
        )
        self._task = self._bar.add_task(f"{precision:<4}", total=steps, completed=step, loss="-", rate="-")
        self._bar.start()

    def step_done(self, record: Record) -> None:
        """Move the bar, or print a line every tenth of the steps."""
        self._times_ms.append(record["time_ms"])
        mean_ms = sum(self._times_ms) / len(self._times_ms)
        rate = f"{record['tokens_per_s'] * record['time_ms'] / mean_ms:,.0f}"
        step = record["step"]
        if self._bar is not None:
            self._bar.update(self._task, completed=step, loss=f"{record['loss']:.3f}", rate=rate)
        elif step == self._steps or step % max(1, self._steps // LINES_A_TRAINING) == 0:
            eta_s = (self._steps - step) * mean_ms / 1e3
            self.note(
                f"{record['precision']}: step {step}/{self._steps}  loss {record['loss']:.3f}  {rate} "
                f"tokens/s  ETA {eta_s:.0f} s"
            )

    def training_ended(self, precision: str) -> None:
        """Take the bar away, leaving its last state."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def run_ended(self, folder: RunFolder, summary: Record) -> None:
        """Print the comparison, the health of the FP8 layers and where the report is."""
        self.console.print(_loss_table(summary))
        self.console.print(_speed_table(summary))
        result = folder.read_json("result-fp8.json")
        self.console.print(_coverage_table(folder.read_json("plan.json")))
        self.console.print(_health_table(result["health"]))
        self.note(f"Report: {folder.path / 'report.html'}")


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 or column == REASON else "right", no_wrap=True)
    return table


def _loss_table(summary: Record) -> Table:
    table = _table("Held-out loss", "model", "nats per byte", "against BF16")
    for name, loss in summary["held_out_loss"].items():
        difference = summary["difference_percent"].get(name)
        table.add_row(
            name.replace("_", " ").replace("evaluated", ", evaluated").replace(" ,", ","),
            f"{loss:.4f}",
            "" if difference is None else f"{difference:+.2f} %",
        )
    return table


def _speed_table(summary: Record) -> Table:
    has_memory = "peak_mem_mib" in summary["trainings"]["fp8"]
    columns = ["training", "median step, ms", "tokens/s", *(["peak memory, MiB"] if has_memory else [])]
    table = _table("Step time without warm-up", *columns)
    for precision, values in summary["trainings"].items():
        memory = [f"{values['peak_mem_mib']:,.0f}"] if has_memory else []
        table.add_row(precision, f"{values['time_ms']:.1f}", f"{values['tokens_per_s']:,.0f}", *memory)
    return table


def _coverage_table(plan: Record) -> Table:
    totals = plan["totals"]
    share = totals["fp8_flops_per_token"] / max(totals["flops_per_token"], 1)
    title = f"FP8 layers: {totals['fp8_layers']} of {totals['layers']}, {share:.0%} of the matrix FLOPs"
    table = _table(title, "group", "weight", "FP8", "FLOPs", REASON)
    for row in group_coverage(plan["rows"]):
        table.add_row(row.group, row.shape, f"{row.fp8_layers}/{row.layers}", f"{row.flops_share:.0%}", row.reason)
    return table


def _health_table(rows: list[dict[str, Any]]) -> Table:
    columns = ("group", "of", "saturated", "underflow", "NaN/inf", "SQNR dB", "worst")
    table = _table("Health of the FP8 layers over one training batch", *columns)
    for row in group_health(rows):
        table.add_row(
            row.group,
            row.role,
            f"{100 * row.saturated:.2g} %",
            f"{100 * row.underflowed:.2g} %",
            str(row.nonfinite),
            "-" if row.mean_sqnr_db is None else f"{row.mean_sqnr_db:.1f}",
            "-" if row.worst_sqnr_db is None else f"{row.worst_sqnr_db:.1f}",
        )
    return table
