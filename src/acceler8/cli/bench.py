"""``acceler8 bench``: options in, tables out. Progress goes to the standard error.

Status 0: measured, peers that are missing or fail included. 1: a result of acceler8's own is wrong or raised, which is
a bug. 2: bad input, or hardware that is not there.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from acceler8.bench.presets import PRESETS

if TYPE_CHECKING:
    import torch

    from acceler8.bench.presets import Preset
    from acceler8.bench.results import Result
    from acceler8.bench.variants import Variant
    from acceler8.cli.bench_display import BenchDisplay

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
    epochs: Annotated[
        int | None, typer.Option(help="practitioner: epochs of the accuracy table, 0 for none. Default: 3.")
    ] = None,
    epoch_steps: Annotated[int | None, typer.Option(help="practitioner: steps of an epoch. Default: 80.")] = None,
    budget_gb: Annotated[
        float | None, typer.Option(help="practitioner: memory for the largest batch. Default: what FP16 takes.")
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
    from acceler8.errors import RunError

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
    patterns = _split(variants)
    if chosen.name == "practitioner" and patterns is None and recipes is None:
        from acceler8.bench.practitioner import DEFAULT_VARIANTS

        patterns = list(DEFAULT_VARIANTS)
    wanted = registry.select(chosen.loop, where, patterns, _split(recipes))
    if chosen.name == "practitioner" and variants is None:  # each is trained for epochs
        wanted = [variant for variant in wanted if variant.group != "Accelerate" and not variant.is_compiled]
    if head_loss:  # what the head alone gains, so that it is not taken for FP8's
        wanted.insert(1, registry.find("bf16-head-loss", chosen.loop))
    check_outputs(json_path, png_path)
    display = BenchDisplay()
    account = {"epochs": epochs, "epoch_steps": epoch_steps, "budget_gb": budget_gb}
    if chosen.name == "practitioner":
        _practitioner(chosen, wanted, where, account, not no_floor, display, json_path, png_path)
        return
    for name, given in account.items():
        if given is not None:
            raise RunError(f"--{name.replace('_', '-')} is for --preset practitioner; got it with {chosen.name!r}")
    result = measure(chosen, wanted, where, say=display.progress, with_floor=not no_floor)
    display.parts(result)
    title = f"{chosen.name}: {chosen.layers} layers, {chosen.batch} x {chosen.length} tokens a step"
    display.table(title, result.rows, STEP_COLUMNS)
    display.finish(result, json_path, png_path)
    _exit(result)


def _practitioner(
    preset: Preset,
    wanted: list[Variant],
    where: torch.device,
    account: dict[str, Any],
    with_floor: bool,
    display: BenchDisplay,
    json_path: Path | None,
    png_path: Path | None,
) -> None:
    """The step's table and the three of a practitioner's account."""
    from acceler8.bench import practitioner
    from acceler8.bench.results import write_json
    from acceler8.cli import bench_display as columns

    asked = practitioner.Account(**{name: given for name, given in account.items() if given is not None})

    def keep(result: Result) -> None:
        if json_path is not None:
            write_json(result.to_dict(), json_path)

    result = practitioner.measure(preset, wanted, where, asked, say=display.progress, keep=keep, with_floor=with_floor)
    display.parts(result)
    display.table(f"{preset.name}: {preset.batch} x {preset.length} tokens a step", result.rows, columns.STEP_COLUMNS)
    for title, chosen in (
        (practitioner.MEMORY, columns.MEMORY_COLUMNS),
        (practitioner.THROUGHPUT, columns.THROUGHPUT_COLUMNS),
        (practitioner.ACCURACY, columns.ACCURACY_COLUMNS),
    ):
        if title in result.tables:
            display.table(title, result.tables[title], chosen)
    display.finish(result, json_path, png_path)
    _exit(result)


def _exit(result: Result) -> None:
    """Status 1 if something of ours is wrong."""
    if result.own_failures:
        names = ", ".join(row.name for row in result.own_failures)
        typer.echo(f"acceler8: {names}: wrong or failed, which is a bug; see the table", err=True)
        raise typer.Exit(1)


@app.command()
def gemm(
    path: Annotated[Path | None, typer.Argument(help="With --save: the file. Default: this user's table.")] = None,
    shapes: Annotated[
        str | None, typer.Option(metavar="MxKxN,...", help="Tokens, inputs, outputs. Default: those of the presets.")
    ] = None,
    preset: Annotated[
        str | None, typer.Option(help=f"The layers of this one alone, as they run in its model: {', '.join(PRESETS)}.")
    ] = None,
    recipes: Recipes = None,
    save: Annotated[
        bool, typer.Option("--save", help="Measure layers over a grid and write the cost table of this GPU.")
    ] = False,
    budget: Annotated[float, typer.Option(help="With --save: seconds after which the rest is left out.")] = 170.0,
    device: Device = None,
    json_path: Json = None,
    png_path: Png = None,
) -> None:
    """Multiply in BF16 and in each way of FP8, and run linear layers forward and backward.

    Layers are timed by what the GPU is busy for. With --preset, the layers of its model, q/k/v and the MLP as they run
    there. With --save, layers over a grid of shapes (under 3 minutes), written as the table that plans read.
    """
    from acceler8.bench import facts
    from acceler8.bench import gemm as bench
    from acceler8.bench.layers import layer_recipes
    from acceler8.bench.presets import preset_named
    from acceler8.cli.bench_display import GEMM_COLUMNS, LAYER_COLUMNS, BenchDisplay, check_outputs
    from acceler8.errors import HardwareError, RunError

    where = facts.resolve_device(device)
    chosen = bench.parse_shapes(shapes) if shapes else bench.TINY_SHAPES if where.type == "cpu" else bench.SHAPES
    model = None if preset is None else preset_named(preset)
    names = layer_recipes(where, _split(recipes))
    display = BenchDisplay()
    if path is not None and not save:
        raise RunError(f"got the file {str(path)!r} without --save; allowed: --save {path}; or --json for the tables")
    if save:
        if shapes or model or json_path or png_path:
            raise RunError("--save goes without --shapes, --preset, --json and --png; run them one after the other")
        if where.type == "cpu":
            raise HardwareError("--save got the CPU; a cost table is measured on the GPU that it is for")
        _save_costs(display, where, names, path, budget)
        return
    if model is not None and shapes:
        raise RunError("got --preset and --shapes; allowed: one of them; run them one after the other")
    check_outputs(json_path, png_path)
    if model is not None:
        _preset_layers(display, model, names, where, json_path, png_path)
        return
    result = bench.measure(chosen, names, where, say=display.progress)
    display.table("GEMMs, operands cast already; SQNR against float64", result.rows, GEMM_COLUMNS)
    for title, rows in result.tables.items():
        display.table(f"{title}; worst SQNR against BF16", rows, LAYER_COLUMNS)
    display.finish(result, json_path, png_path)
    _exit(result)


def _preset_layers(
    display: BenchDisplay,
    preset: Preset,
    names: list[str],
    where: torch.device,
    json_path: Path | None,
    png_path: Path | None,
) -> None:
    """The linear layers of a preset's model."""
    from acceler8.bench.preset_layers import measure
    from acceler8.cli.bench_display import PRESET_COLUMNS

    result = measure(preset, names, where, say=display.progress)
    title = f"Linear layers of {preset.name}, {preset.tokens} tokens, {preset.parameters} weights"
    display.table(f"{title}; all: of {preset.layers} layers; worst SQNR against BF16", result.rows, PRESET_COLUMNS)
    display.finish(result, json_path, png_path)
    _exit(result)


def _save_costs(display: BenchDisplay, where: torch.device, names: list[str], path: Path | None, budget: float) -> None:
    """Measure the grid, write it, and say where FP8 gains."""
    from acceler8.bench.cost_grid import measure_costs
    from acceler8.bench.results import check_writable
    from acceler8.costs import file_name, user_folder

    if path is not None:
        check_writable(path)
    table, notes = measure_costs(where, names, say=display.progress, budget_s=budget)
    target = path or user_folder() / file_name(table.gpu)
    table.save(target)
    display.costs(table)
    for note in notes:
        display.heading(f"  note: {note}")
    display.heading(f"  {table.gpu}, torch {table.torch}, {table.date}, commit {table.commit}")
    display.heading(f"  written: {target}")


@app.command()
def op(
    ops: Annotated[
        str | None, typer.Option(metavar="NAME,...", help="Operations, or globs ('quantize*'). Default: all.")
    ] = None,
    shapes: Annotated[
        str | None, typer.Option(metavar="ROWSxCOLUMNS,...", help="Of the activation. Default: those of the presets.")
    ] = None,
    device: Device = None,
    json_path: Json = None,
    png_path: Png = None,
) -> None:
    """Run each operation of the kernels: GB/s, and the share of the copy bandwidth.

    Results are compared with the reference in plain PyTorch before anything is timed.
    """
    from acceler8.bench import facts
    from acceler8.bench import op as bench
    from acceler8.cli.bench_display import OP_COLUMNS, BenchDisplay, check_outputs

    where = facts.resolve_device(device)
    chosen = bench.select(_split(ops), bench.all_ops())
    sizes = bench.parse_shapes(shapes) if shapes else bench.TINY_SHAPES if where.type == "cpu" else bench.SHAPES
    check_outputs(json_path, png_path)
    display = BenchDisplay()
    result = bench.measure(chosen, sizes, where, say=display.progress)
    title = f"Operations; copy {result.settings['copy_tb_per_s']:.2f} TB/s"
    display.table(title, result.rows, OP_COLUMNS, first="operation")
    display.finish(result, json_path, png_path)
    _exit(result)


@app.command()
def model(
    spec: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="module:function giving (model, batch), or a Hugging Face config."),
    ],
    recipes: Recipes = None,
    variants: Annotated[
        str | None, typer.Option(metavar="NAME,...", help="Variants, or globs of them. Default: BF16 and ours.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences of random tokens, for a configuration.")] = 4,
    length: Annotated[int, typer.Option(help="Tokens of each.")] = 512,
    lr: Annotated[float | None, typer.Option(help="Learning rate of AdamW. Default: 1e-4.")] = None,
    steps: Steps = None,
    device: Device = None,
    json_path: Json = None,
    png_path: Png = None,
) -> None:
    """Train your own model a few steps in BF16 and in each recipe, as Accelerator.prepare gives it."""
    from acceler8.bench import facts
    from acceler8.bench import model as bench
    from acceler8.bench import variants as registry
    from acceler8.bench.step import measure
    from acceler8.cli.bench_display import MODEL_COLUMNS, BenchDisplay, check_outputs

    where = facts.resolve_device(device)
    chosen = bench.preset_of(spec, batch, length, steps, lr)
    patterns = _split(variants)
    wanted = registry.select(chosen.loop, where, patterns, _split(recipes))
    if patterns is None:
        wanted = [variant for variant in wanted if variant.group != "Accelerate"]
    check_outputs(json_path, png_path)
    work = bench.OwnWork(chosen, where, bench.resolve(spec, batch, length))
    display = BenchDisplay()
    result = measure(chosen, wanted, where, say=display.progress, with_floor=False, command="model", work=work)
    result.settings = {"name": spec, "parameters": work.parameters, "lr": chosen.lr, "steps": chosen.steps, "seed": 0}
    for row in result.rows:  # rates and FLOPs of a shape that is not this model's
        for key in ("tokens_per_s", "samples_per_s", "tflops"):
            row.values.pop(key, None)
    display.table(f"{spec}: {work.parameters:,} parameters", result.rows, MODEL_COLUMNS)
    display.finish(result, json_path, png_path)
    _exit(result)
