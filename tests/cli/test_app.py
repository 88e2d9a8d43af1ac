"""The top level of the command line: help, version, speed of both, and errors without a traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import acceler8
from acceler8.cli.app import app, main

SOURCE = Path(acceler8.__file__).parent.parent


def test_help_lists_the_commands():
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    assert "demo" in result.output
    assert "--version" in result.output


def test_no_arguments_show_the_help():
    assert "Usage" in CliRunner().invoke(app, []).output


def test_version():
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.output == f"acceler8 {acceler8.__version__}\n"


@pytest.mark.parametrize("arguments", [["--help"], ["demo", "--help"], ["--version"]])
def test_help_and_version_do_not_import_torch(arguments: list[str]):
    code = (
        "import sys\n"
        "from acceler8.cli import main\n"
        "try:\n"
        f"    main({arguments!r})\n"
        "finally:\n"
        "    heavy = {'torch', 'numpy', 'triton', 'jinja2'} & set(sys.modules)\n"
        "    assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(SOURCE)},
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_unknown_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        main(["dmo"])
    assert caught.value.code == 2
    assert "No such command 'dmo'" in capsys.readouterr().err
