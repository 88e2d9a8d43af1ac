"""``acceler8 bench``: options in, tables out. Progress goes to the standard error.

Status 0: measured, peers that are missing or fail included. 1: a result of acceler8's own is wrong or raised, which is
a bug. 2: bad input, or hardware that is not there.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from acceler8.bench.presets import PRESETS

if TYPE_CHECKING:
    from acceler8.bench.results import Result

app = typer.Typer(
    name="bench",
    help="Measure on this machine: steps, GEMMs and layers, single operations, your own model. Everything in one"
    " process on the same work; results are checked before they are timed.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

_PRESETS = "; ".join(f"{preset.name}: {preset.about}" for preset in PRESETS.values())
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:N, or auto (the default): a GPU where there is one.")]
Json = Annotated[Path | None, typer.Option("--json", metavar="PATH", help="Write the result as JSON too.")]
Png = Annotated[Path | None, typer.Option("--png", metavar="PATH", help="Draw it too; needs matplotlib.")]
Recipes = Annotated[
    str | None,
    typer.Option(metavar="NAME,...", help="Recipes of acceler8. Default: all that the device multiplies itself."),
]
Steps = Annotated[int | None, typer.Option(help="Timed steps of each variant. Default: by preset.")]


def _split(text: str | None) -> list[str] | None:
    return None if text is None else [part.strip() for part in text.split(",") if part.strip()]


@app.command()
def step(
    preset: Annotated[str, typer.Option(help=f"What to train. {_PRESETS}.")] = "tiny",
    variants: Annotated[
        str | None,
        typer.Option(metavar="NAME,...", help="Variants, or globs of them (te-*). Default: ours and all peers."),
    ] = None,
    recipes: Recipes = None,
    layers: Annotated[int | None, typer.Option(help="Layers of the model.")] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences a step.")] = None,
    length: Annotated[int | None, typer.Option(help="Tokens of a sequence.")] = None,
    steps: Steps = None,
    no_fuse: Annotated[bool, typer.Option("--no-fuse", help="Run each FP8 layer of ours by itself.")] = False,
    head_loss: Annotated[bool, typer.Option("--head-loss", help="Ours with acceler8's head and loss.")] = False,
    save_for_backward: Annotated[
        str | None, typer.Option(metavar="WHAT", help="What ours keep for backward, where a plan can choose.")
    ] = None,
    no_floor: Annotated[bool, typer.Option("--no-floor", help="Do not measure the floor's parts.")] = False,
    device: Device = None,
    json_path: Json = None,
    png_path: Png = None,
) -> None:
    """Train a few steps in every variant and compare time, memory and loss.

    ours in each recipe, BF16 eager and compiled, and what is installed of torchao, TransformerEngine and Accelerate.
    """
    from acceler8.bench import facts
    from acceler8.bench import variants as registry
    from acceler8.bench.presets import preset_named
    from acceler8.bench.step import measure
    from acceler8.cli.bench_display import STEP_COLUMNS, BenchDisplay, check_outputs

    chosen = preset_named(
        preset,
        layers=layers,
        batch=batch,
        length=length,
        steps=steps,
        fuse=False if no_fuse else None,
        head_loss=True if head_loss else None,
        save_for_backward=save_for_backward,
    )
    where = facts.resolve_device(device)
    wanted = registry.select(chosen.loop, where, _split(variants), _split(recipes))
    check_outputs(json_path, png_path)
    display = BenchDisplay()
    result = measure(chosen, wanted, where, say=display.progress, with_floor=not no_floor)
    display.parts(result)
    title = f"{chosen.name}: {chosen.layers} layers, {chosen.batch} x {chosen.length} tokens a step"
    display.table(title, result.rows, STEP_COLUMNS)
    display.finish(result, json_path, png_path)
    _exit(result)


def _exit(result: Result) -> None:
    """Status 1 if something of ours is wrong."""
    if result.own_failures:
        names = ", ".join(row.name for row in result.own_failures)
        typer.echo(f"acceler8: {names}: wrong or failed, which is a bug; see the table", err=True)
        raise typer.Exit(1)
