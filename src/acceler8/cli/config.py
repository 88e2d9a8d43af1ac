"""``acceler8 config``: the wizard, and what can be done with a configuration without one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from acceler8.config import Effective, RouteValues
    from acceler8.config.wizard import Prompter

app = typer.Typer(name="config", no_args_is_help=False, rich_markup_mode="markdown")
_ANY = {"allow_extra_args": True, "ignore_unknown_options": True}

File = Annotated[
    Path | None,
    typer.Option("--config_file", "--config-file", metavar="PATH", help="The file. Default: acceler8's default file."),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Overwrite a file without asking.")]
Assignments = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="A setting, such as fp8_config.margin=2; repeatable. No questions."
    ),
]


@app.callback(invoke_without_command=True)
def config(
    ctx: typer.Context,
    defaults: Annotated[bool, typer.Option("--defaults", help="Take every default; no questions.")] = False,
    assignments: Assignments = None,
    from_accelerate: Annotated[
        Path | None,
        typer.Option(
            "--from-accelerate",
            "--from_accelerate",
            metavar="FILE",
            help="Take over a file of Accelerate; no questions.",
        ),
    ] = None,
    config_file: File = None,
    yes: Yes = False,
) -> None:
    """Ask for a configuration and write it to a file.

    Without questions: --defaults, --set (which changes the file that is there) or --from-accelerate. The file is
    shown as a diff and asked about before another one is overwritten.
    """
    if ctx.invoked_subcommand is not None:
        if defaults or assignments or from_accelerate or config_file or yes:
            raise typer.BadParameter(f"options of {ctx.invoked_subcommand} stand after it")
        return
    from acceler8.config.resolve import parse_assignments

    known = parse_assignments(assignments or [])
    path = config_file or _default_path()
    if defaults or assignments or from_accelerate:
        effective = _without_questions(path, known, defaults, from_accelerate)
    else:
        effective = _ask()
    _write(path, effective, is_sure=yes)


@app.command()
def default(
    mixed_precision: Annotated[
        str, typer.Option("--mixed_precision", "--mixed-precision", help="no, fp16, bf16 or fp8.")
    ] = "no",
    config_file: File = None,
    yes: Yes = False,
) -> None:
    """Write a basic file for this machine: its GPUs or its CPU, and a precision."""
    from acceler8.config import Precedence, RouteValues, Source, merge

    route = RouteValues()
    gpus = _gpu_count()
    machine = Source(Precedence.YAML, "this machine")
    route.put("distributed_type", "MULTI_GPU" if gpus > 1 else "NO", machine)
    route.put("num_processes", max(1, gpus), machine)
    route.put("use_cpu", gpus == 0, machine)
    route.put("mixed_precision", mixed_precision, Source(Precedence.FLAG, "--mixed_precision"))
    _write(config_file or _default_path(), merge([route]), is_sure=yes)


@app.command(context_settings=_ANY)
def show(
    ctx: typer.Context,
    config_file: File = None,
    json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    every: Annotated[bool, typer.Option("--all", help="Settings that nothing gives, too.")] = False,
) -> None:
    """Show the effective values, each with the source that won. Takes the flags that launch takes."""
    from acceler8.config import current_environment, parse_flags
    from acceler8.config.resolve import load, notes
    from acceler8.config.show import rows, to_json

    parsed = parse_flags(ctx.args)
    _refuse_words(parsed.rest)
    effective = load(parsed.route, current_environment(), config_file)
    said = notes(effective)
    if json:
        import json as encoder

        typer.echo(encoder.dumps({**to_json(effective, is_all=every), "notes": said}, indent=2))
        return
    _say_notes(said)
    found = rows(effective, is_all=every)
    if not found:
        typer.echo("No file, flag or variable sets anything; --all shows every setting.")
        return
    table = [("setting", "value", "source"), *((row.path, row.text, row.source) for row in found)]
    widths = [max(len(row[i]) for row in table) for i in range(2)]
    for path, text, source in table:
        typer.echo(f"{path:<{widths[0]}}  {text:<{widths[1]}}  {source}")


@app.command()
def validate(file: Annotated[Path, typer.Argument(metavar="FILE")]) -> None:
    """Check a file: exit status 0 if it is valid, else 2 and one line that says where it is not."""
    effective = _read(file)
    from acceler8.config.resolve import notes

    _say_notes(notes(effective))
    count = len(effective.values)
    typer.echo(f"{file}: valid, {count} setting{'s' * (count != 1)}")


@app.command()
def schema() -> None:
    """Print the JSON schema of the file, for an editor."""
    import json

    from acceler8.config.json_schema import json_schema

    typer.echo(json.dumps(json_schema(), indent=2))


@app.command(context_settings=_ANY)
def convert(
    ctx: typer.Context,
    to: Annotated[str, typer.Option("--to", metavar="ROUTE", help="yaml, flags, env or python.")],
    source: Annotated[
        str | None, typer.Option("--from", metavar="ROUTE", help="env or flags. Default: the FILE that is named.")
    ] = None,
) -> None:
    """Turn one route into another: convert FILE --to flags; convert --from env --to yaml.

    With a FILE or the environment, flags on the line win over them, as they do elsewhere.
    """
    from acceler8.config import current_environment, merge, parse_flags, read_environment, read_yaml
    from acceler8.config.resolve import notes
    from acceler8.errors import ConfigError

    words = list(ctx.args)
    files = [words.pop(0)] if words and not words[0].startswith("-") else []
    parsed = parse_flags(words)
    files += parsed.rest
    if source not in (None, "env", "flags"):
        raise ConfigError(f"--from: got {source!r}; allowed: env, flags; or name a FILE instead")
    if len(files) != (source is None):
        raise ConfigError(f"convert: got {files or 'no file'}; allowed: one FILE, or --from env or --from flags")
    routes: list[RouteValues] = [parsed.route]
    if source == "env":
        routes.insert(0, read_environment(current_environment()))
    elif source is None:
        routes.insert(0, read_yaml(files[0]))
    effective = merge(routes)
    text, unexpressed = _written(to, effective)
    _say_notes(notes(effective))
    for line in unexpressed:
        typer.echo(f"acceler8: not expressed in {to}: {line}", err=True)
    typer.echo(text.rstrip("\n"))


def _written(to: str, effective: Effective) -> tuple[str, list[str]]:
    import shlex

    from acceler8.config import to_flags, to_yaml, write_environment
    from acceler8.config.environment import SOURCES
    from acceler8.errors import ConfigError

    if to == "yaml":
        return to_yaml(effective), []
    if to == "flags":
        return shlex.join(to_flags(effective)), []
    if to == "env":
        variables = {name: text for name, text in write_environment(effective).items() if name != SOURCES}
        return "\n".join(f"export {name}={shlex.quote(text)}" for name, text in variables.items()), []
    if to == "python":
        from acceler8.config.code import to_python

        text, unexpressed = to_python(effective)
        return text, list(unexpressed)
    raise ConfigError(f"--to: got {to!r}; allowed: yaml, flags, env, python")


def _default_path() -> Path:
    from acceler8.config import current_environment
    from acceler8.config.files import own_default_file

    return own_default_file(current_environment())


def _gpu_count() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _read(file: Path) -> Effective:
    from acceler8.config import merge, read_yaml

    return merge([read_yaml(file)])


def _without_questions(path: Path, known: RouteValues, is_default: bool, from_accelerate: Path | None) -> Effective:
    """From a file of Accelerate; or the file that is there, changed; or the wizard's defaults."""
    from acceler8.config import merge
    from acceler8.config.wizard import DefaultAnswers, Wizard
    from acceler8.config.yaml_file import read_yaml
    from acceler8.errors import ConfigError

    if from_accelerate and is_default:
        raise ConfigError("--defaults: got --from-accelerate too; allowed: one of the two")
    if from_accelerate:
        return merge([read_yaml(from_accelerate), known])
    if path.exists() and not is_default:
        return merge([read_yaml(path), known])
    return Wizard(DefaultAnswers(), known).run()


def _ask() -> Effective:
    """The wizard, in a terminal."""
    from acceler8.config.wizard import Wizard
    from acceler8.errors import ConfigError

    if not sys.stdin.isatty():
        raise ConfigError(
            "config: got no terminal to ask questions in; allowed: --defaults, --set KEY=VALUE, --from-accelerate FILE"
        )
    try:
        return Wizard(_prompter(), missing=_missing).run()
    except (KeyboardInterrupt, EOFError) as left:
        raise _left(left) from None


def _left(left: BaseException) -> typer.Exit:
    """The exit of someone who left in the middle: 130 by Ctrl-C, 1 at the end of the input."""
    typer.echo("\nStopped; nothing was written.", err=True)
    return typer.Exit(130 if isinstance(left, KeyboardInterrupt) else 1)


def _prompter() -> Prompter:
    from rich.console import Console

    from acceler8.cli.config_prompts import best_prompter
    from acceler8.config import current_environment

    console = Console(highlight=False, markup=False, soft_wrap=True)
    return best_prompter(console, is_dumb=current_environment().get("TERM", "") in ("", "dumb"))


def _missing(backend: str) -> list[str]:
    """What this machine lacks for a backend: its library, and a GPU with FP8."""
    from acceler8.config import Precedence, RouteValues, Source, availability, backend_choice, merge

    lines = []
    is_installed = availability.is_backend_available(backend)
    if not is_installed:
        lines.append(f"{backend} is not installed here; {availability.INSTALL[backend]}")
    if not availability.check_cuda_fp8_capability():
        lines.append("there is no GPU with FP8 here (compute capability 8.9 or newer); FP8 would be emulated, slowly")
    route = RouteValues()
    route.put("fp8_config.backend", backend, Source(Precedence.FLAG, "answer"))
    route.put("mixed_precision", "fp8", Source(Precedence.FLAG, "answer"))
    limits = backend_choice.cannot_run(merge([route]))
    return [*lines, *(limit.removeprefix("flag answer: ") for limit in limits)]


def _write(path: Path, effective: Effective, *, is_sure: bool) -> None:
    """Check, show what changes, ask, and write the file whole."""
    from acceler8.config.files import render, write_file
    from acceler8.config.resolve import notes
    from acceler8.config.show import diff
    from acceler8.errors import ConfigError

    _say_notes(notes(effective.of_one_route()))
    text = render(path, effective)
    if path.exists():
        try:
            if not path.is_file():
                raise ConfigError(f"{path}: is no file that can be written; name another")
            with path.open("rb") as file:
                old = file.read(1 << 20).decode("utf-8", errors="replace")
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror}); name another file") from None
        if old == text:
            typer.echo(f"{path}: nothing to change")
            return
        typer.echo(diff(old, text, str(path)))
        if not is_sure and not _is_wanted(path):
            typer.echo("Nothing was written.")
            return
    write_file(path, effective)
    typer.echo(f"Wrote {path}")


def _is_wanted(path: Path) -> bool:
    from acceler8.errors import ConfigError

    if not sys.stdin.isatty():
        raise ConfigError(f"{path}: exists and is different, and there is no terminal to ask in; add --yes")
    try:
        return _prompter().confirm(f"Overwrite {path}?", "The lines above show what changes.", False)
    except (KeyboardInterrupt, EOFError) as left:
        raise _left(left) from None


def _refuse_words(words: list[str]) -> None:
    from acceler8.errors import ConfigError

    if words:
        raise ConfigError(f"command line: got {words[0]!r}; allowed: flags of launch, such as --fp8_margin 2")


def _say_notes(notes: list[str]) -> None:
    for note in dict.fromkeys(notes):
        typer.echo(f"acceler8: {note}", err=True)
