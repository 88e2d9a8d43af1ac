"""``acceler8 plan``: what FP8 would do to a model, before any weight is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import torch

_MODEL = (
    "A preset of `acceler8 bench step` (tiny, llama3-8b-4l, ...), a Hugging Face configuration (name, folder or JSON"
    " file), or MODULE:FUNCTION, which returns the model."
)


def plan(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=_MODEL)],
    recipe: Annotated[
        str | None, typer.Option(help="tensorwise, rowwise, blockwise, delayed, mxfp8, ... Default: the backend's.")
    ] = None,
    backend: Annotated[str, typer.Option(help="native, torchao, transformer_engine, or one that is registered.")] = "",
    compare: Annotated[bool, typer.Option("--compare", help="One row for every backend.")] = False,
    tokens: Annotated[
        int | None, typer.Option(help="Tokens of one forward on one GPU, for predicted times. Default: a preset's.")
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help="GPU whose cost table predicts, such as 'NVIDIA H200'. Default: this one's.")
    ] = None,
    skip: Annotated[str | None, typer.Option(metavar="NAME,...", help="Layers to leave in high precision.")] = None,
    as_json: Annotated[
        Path | None, typer.Option("--json", metavar="PATH", help="Write JSON too; - prints it instead of the table.")
    ] = None,
) -> None:
    """Show layer by layer what becomes FP8 and why, or compare backends. No memory and no GPU is needed."""
    from acceler8.bench.model import on_meta
    from acceler8.conversion import plan as make_plan
    from acceler8.conversion.compare import compare as compare_backends
    from acceler8.conversion.compare import render
    from acceler8.errors import PlanError

    if compare and backend:
        raise PlanError(f"plan got --backend {backend} and --compare, which shows all of them; give one of them")
    built, of_preset = on_meta(model)
    device, found_gpu = _here()
    gpu, tokens = gpu or found_gpu, tokens or of_preset
    options: dict[str, Any] = {"skip": skip.split(",") if skip else None}
    timed: dict[str, Any] = {"tokens": tokens, "gpu": gpu if tokens is not None else None}
    if compare:
        rows = compare_backends(built, recipe, device=device, **timed, **options)
        _put(as_json, [row.to_dict() for row in rows], render(rows, tokens))
        return
    made = make_plan(built, recipe, backend or "native", **timed, **options)
    _put(as_json, made.to_dict(), str(made))


def _here() -> tuple[torch.device | None, str | None]:
    """This machine's GPU, and its name if it has a cost table."""
    import torch

    from acceler8.costs import gpu_of, known_gpus

    if not torch.cuda.is_available():
        return None, None
    device = torch.device("cuda")
    name = gpu_of(device)
    return device, name if name in known_gpus() else None


def _put(path: Path | None, data: Any, text: str) -> None:
    """The table, and JSON to a file, or JSON alone."""
    if path is not None and str(path) == "-":
        typer.echo(json.dumps(data, indent=2))
        return
    typer.echo(text)
    if path is not None:
        path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
