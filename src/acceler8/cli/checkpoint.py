"""``acceler8 checkpoint``: what is inside of one, and its weights as one plain file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(name="checkpoint", no_args_is_help=True, rich_markup_mode="markdown", help="Look into checkpoints.")
Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="What `save_state` wrote.")]


@app.command()
def consolidate(
    folder: Folder,
    output: Annotated[
        Path | None, typer.Option(metavar="OUT", help="Folder to write to. Default: FOLDER-consolidated.")
    ] = None,
    max_shard_size: Annotated[
        str, typer.Option("--max_shard_size", "--max-shard-size", help="Larger models get several files and an index.")
    ] = "10GB",
) -> None:
    """Write the weights of a checkpoint of shards as one plain file, or as several with an index.

    Needs no GPU, no process group and not the model's code. Files of weights are hashed first; memory grows with the
    largest tensor, not with the model.
    """
    from acceler8.checkpoint import consolidate as write

    for path in write(folder, output, max_shard_size):
        typer.echo(f"{path}  {_size(path.stat().st_size)}")


@app.command()
def show(
    folder: Folder,
    verify: Annotated[bool, typer.Option("--verify", help="Hash every file too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print how far the run was, its precision, its processes, and what its parts weigh."""
    from acceler8.checkpoint import load
    from acceler8.checkpoint.summary import describe_checkpoint

    found = describe_checkpoint(folder)
    if verify:
        load(folder).verify()
        found["verified"] = True
    typer.echo(json.dumps(found, indent=2) if as_json else "\n".join(_lines(found)))


def _lines(found: Mapping[str, Any]) -> list[str]:
    lines = [f"{found['folder']}, by acceler8 {found['versions']['acceler8']} with torch {found['versions']['torch']}"]
    if found.get("verified"):
        lines.append("  every file is as it was written")
    if "steps" in found:
        inside = found["micro_batches_of_an_unfinished_step"]
        more = f", and {inside} micro-batches of the next" if inside else ""
        lines.append(f"  {found['steps']} steps{more}; {found['mixed_precision']}; {found['processes']} processes")
        lines += [f"  {_model(entry)}" for entry in found["models"]]
    lines += [f"  progress: {found['progress']}"] if found["progress"] else []
    for part, entry in found["parts"].items():
        files = "1 file" if entry["files"] == 1 else f"{entry['files']} files"
        lines.append(f"  {part}: {files}, {_size(entry['bytes'])}")
    return lines


def _model(entry: Mapping[str, Any]) -> str:
    text = f"{entry['type']}: "
    if not entry["fp8_layers"]:
        return text + "no FP8 layers"
    recipes, backends = (", ".join(dict.fromkeys(map(str, entry[key]))) for key in ("recipes", "backends"))
    return text + f"{entry['fp8_layers']} FP8 layers, recipe {recipes}, backend {backends}"


def _size(count: int) -> str:
    """Bytes, in powers of 1024."""
    size, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
