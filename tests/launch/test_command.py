"""From a script, module or program to an argument list, and what is wrong with it before anything starts."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from acceler8.errors import LaunchError
from acceler8.launch.command import resolve_command
from tests.launch.support import write


def resolve(*command: str, is_module: bool = False, is_program: bool = False, path: str | None = None):
    return resolve_command(command, is_module=is_module, is_program=is_program, is_unbuffered=False, search_path=path)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_scripts_modules_and_programs(folder: Path):
    write(folder, "train.py", "")
    write(folder, "pkg/__init__.py", "raise SystemExit('imported')")
    write(folder, "pkg/train.py", "")
    write(folder, "pkg/runs/__main__.py", "")
    write(folder, "plain/deep/train.py", "")  # namespace packages
    write(folder, "bin/tool", "#!/bin/sh\n").chmod(0o755)
    arguments = ("a b", "'", '"', "--x", "-", "", "l1\nl2", "$HOME", "$$", "${local_rank}", "*", "ü")
    assert resolve("train.py", *arguments) == (sys.executable, "train.py", *arguments)
    for name in ("pkg.train", "pkg.runs", "plain.deep.train", "json.tool", "timeit"):
        assert resolve(name, *arguments, is_module=True) == (sys.executable, "-m", name, *arguments)
    assert resolve("bin/tool", *arguments, is_program=True) == ("bin/tool", *arguments)
    assert resolve("tool", is_program=True, path=str(folder / "bin")) == (str(folder / "bin" / "tool"),)
    assert resolve("pkg/runs")[1:] == ("pkg/runs",)  # a folder with a __main__.py is a script too


@pytest.mark.parametrize(
    ("command", "kind", "message"),
    [
        ((), {}, "command is empty"),
        (("a",), {"is_module": True, "is_program": True}, "both set"),
        (("a.py", "x\0y"), {}, "NUL"),
        (("absent.py",), {}, "'absent.py' does not exist (current folder: "),
        (("pkg",), {}, "folder without a __main__.py"),
        (("-c",), {}, "write ./-c"),
        (("json.tool",), {}, "--module"),
        (("sh",), {}, "--no_python"),
        (("pkg.absent",), {"is_module": True}, "'pkg.absent' is not found"),
        (("absent",), {"is_module": True}, "'absent' is not found"),
        (("pkg",), {"is_module": True}, "package without a __main__"),
        (("pkg/train.py",), {"is_module": True}, "named 'pkg.train'"),
        (("absent",), {"is_program": True}, "not in the PATH"),
        (("./absent",), {"is_program": True}, "does not exist"),
        (("./pkg",), {"is_program": True}, "is a folder"),
        (("./data",), {"is_program": True}, "not executable"),
    ],
)
def test_what_cannot_run_is_refused(folder: Path, command: tuple[str, ...], kind: dict[str, bool], message: str):
    write(folder, "pkg/__init__.py", "raise SystemExit('imported')")
    write(folder, "data", "")
    with pytest.raises(LaunchError) as caught:
        resolve(*command, **kind, path=os.defpath)
    assert message in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_script_is_refused(folder: Path):
    write(folder, "train.py", "").chmod(0)
    with pytest.raises(LaunchError, match="cannot be read"):
        resolve("train.py")
