"""``acceler8 demo``: options in, progress and tables out."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from acceler8.demo.settings import SIZES

_SIZES = ", ".join(SIZES)


def demo(
    steps: Annotated[int | None, typer.Option(help="Optimizer steps of each training. Default: by size.")] = None,
    recipe: Annotated[
        str | None, typer.Option(help="FP8 recipe, such as rowwise (the default), tensorwise or delayed.")
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(help=f"Size of the model: {_SIZES}. Default: small on a CPU, large on a GPU."),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:N, or auto (the default): a GPU where there is one.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Initial weights and order of the batches. Default: 0.")] = None,
    text: Annotated[
        str | None,
        typer.Option(help="File or folder to learn from. Default: the source of Python's standard library."),
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Windows of text a step. Default: by size.")] = None,
    seq: Annotated[int | None, typer.Option(help="Bytes predicted in a window. Default: by size.")] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate. Default: by size.")] = None,
    out: Annotated[Path, typer.Option(help="Folder in which the run's own folder is made.")] = Path("runs"),
    resume: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Go on with the stopped run in this folder.")
    ] = None,
) -> None:
    """Train a small Llama-style model on real text, in BF16 and then in FP8, and compare.

    Both trainings start from the same weights and see the same batches. The run's folder gets metrics.jsonl,
    plan.json, summary.json and report.html. Ctrl-C leaves a run that --resume goes on with. Without an FP8
    GPU the same numerics are emulated: about two minutes on two CPU cores.
    """
    asked = {
        "steps": steps,
        "recipe": recipe,
        "size": size,
        "device": device,
        "seed": seed,
        "text": text,
        "batch": batch,
        "seq": seq,
        "lr": lr,
    }
    # torch is imported from here on: --help does without
    from acceler8.cli.demo_display import DemoDisplay
    from acceler8.demo.interrupt import RunInterruptedError, StopRequest
    from acceler8.demo.run import changed_environment, create_run, execute_run, reopen_run

    display = DemoDisplay()
    with StopRequest() as stop:
        folder, corpus = create_run(asked, out) if resume is None else reopen_run(asked, resume)
        display.run_started(folder, is_resumed=resume is not None)
        for difference in changed_environment(folder):
            display.note(f"  note: {difference}; the curves may differ in their last bits")
        command = f"acceler8 demo --resume {shlex.quote(str(folder.path))}"
        try:
            summary = execute_run(folder, corpus, display, stop)
        except RunInterruptedError as interrupt:
            display.note(f"Stopped; the run is saved. Go on with:\n  {command}")
            raise typer.Exit(128 + interrupt.signum) from None
        except KeyboardInterrupt:
            display.note(f"Stopped at once; the run goes on from its last checkpoint with:\n  {command}")
            raise typer.Exit(130) from None
    display.run_ended(folder, summary)
