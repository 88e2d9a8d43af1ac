"""The ``acceler8`` command: its top level, and how errors leave it.

Errors that acceler8 raises on purpose are printed as one message without a traceback, with exit status 2; a
traceback is therefore always a bug. Commands import what they need when they run, so that ``--help`` answers
at once.
"""

from __future__ import annotations

import sys

import typer

from acceler8.cli.bench import app as bench
from acceler8.cli.checkpoint import app as checkpoint
from acceler8.cli.config import app as config
from acceler8.cli.demo import demo
from acceler8.cli.env import env
from acceler8.cli.launch import RawCommand, launch
from acceler8.cli.plan import plan
from acceler8.errors import Acceler8Error

app = typer.Typer(
    name="acceler8",
    help="Train PyTorch models in FP8, and see that it worked.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(demo)
app.add_typer(bench)
app.add_typer(checkpoint)
app.add_typer(config)
app.command()(env)
app.command()(plan)
app.command(cls=RawCommand, add_help_option=False)(launch)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        import acceler8

        typer.echo(f"acceler8 {acceler8.__version__}")
        raise typer.Exit


@app.callback()
def top_level(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    """Train PyTorch models in FP8, and see that it worked."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line on ``arguments`` (default: those of the process) and exit with its status.

    Status 0: done. 1: a bug. 2: bad input, with a message that says what was got, what is allowed and what to
    do. 128 + N: stopped by signal N.
    """
    try:
        app(args=arguments, prog_name="acceler8")
    except Acceler8Error as error:
        typer.echo(f"acceler8: error: {error}", err=True)
        sys.exit(2)
