"""From what a user wants to run to an argument list; everything that can be wrong is found before a start.

An error in here costs a second; the same error in a worker costs the start of all workers and comes N-fold.
The module's file is found without importing it or its packages: an import runs code, and may take seconds.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from acceler8.errors import LaunchError


def resolve_command(
    command: Sequence[str], *, is_module: bool, is_program: bool, is_unbuffered: bool, search_path: str | None
) -> tuple[str, ...]:
    """Argument list that runs ``command``, whose own arguments are kept as they are.

    A script runs as ``python script.py``, a module as ``python -m module``, a program, looked up in
    ``search_path`` (a PATH), without Python in front. Relative names are relative to the current folder.
    Raises: LaunchError if it is empty, names both kinds, or cannot be found, read or executed.
    """
    if not command:
        raise LaunchError("the command is empty; give a script, or a module, or a program, and its arguments")
    if is_module and is_program:
        raise LaunchError(
            "--module (is_module) and --no_python (is_program) are both set; a command is one of them, or a script:"
            " leave one out"
        )
    for word in command:
        if "\0" in word:
            raise LaunchError(f"argument {word!r} holds a NUL, which no argument of a process can; remove it")
    name, arguments = command[0], tuple(command[1:])
    if is_program:
        return (find_program(name, search_path), *arguments)
    python = (sys.executable, *(("-u",) if is_unbuffered else ()))
    if is_module:
        check_module(name)
        return (*python, "-m", name, *arguments)
    check_script(name)
    return (*python, name, *arguments)


def check_script(name: str) -> None:
    """Raise LaunchError unless ``python name`` would find something to run."""
    path = Path(name)
    if name.startswith("-"):
        raise LaunchError(f"script {name!r} starts with a dash, which Python takes for an option; write ./{name}")
    if not name or not path.exists():
        raise LaunchError(f"script {name!r} does not exist (current folder: {Path.cwd()}); {_other_kind(name)}")
    if path.is_dir() and not (path / "__main__.py").is_file():
        raise LaunchError(f"script {name!r} is a folder without a __main__.py; name the script in it")
    if not os.access(path, os.R_OK):
        raise LaunchError(f"script {name!r} cannot be read by this user; change its permissions (chmod u+r)")


def _other_kind(name: str) -> str:
    """What the user may have meant by a script that does not exist."""
    if name and shutil.which(name):
        return "a program of that name exists: to run it without Python in front, say so (--no_python)"
    if name and all(part.isidentifier() for part in name.split(".")) and find_module(name) is not None:
        return "a module of that name exists: to run it like python -m, say so (--module)"
    return "check the name"


def find_module(name: str) -> ModuleSpec | None:
    """Specification of the module that ``python -m name`` would find from the current folder; imports nothing."""
    parts = name.split(".")
    spec = PathFinder.find_spec(parts[0], [str(Path.cwd())]) or _ask_finders(parts[0], None)
    for end in range(2, len(parts) + 1):
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = _ask_finders(".".join(parts[:end]), list(spec.submodule_search_locations))
    return spec


def _ask_finders(name: str, path: list[str] | None) -> ModuleSpec | None:
    for finder in sys.meta_path:
        try:
            spec = finder.find_spec(name, path)
        except KeyError:  # a folder without __init__.py asks its parent package, which is not imported
            return _namespace(name, path or [])
        if spec is not None:
            return spec
    return None


def _namespace(name: str, path: list[str]) -> ModuleSpec:
    spec = ModuleSpec(name, None, is_package=True)
    folders = (Path(folder, name.rpartition(".")[2]) for folder in path)
    spec.submodule_search_locations = [str(folder) for folder in folders if folder.is_dir()]
    return spec


def check_module(name: str) -> None:
    """Raise LaunchError unless ``python -m name`` would find something to run."""
    if not all(part.isidentifier() for part in name.split(".")):
        do = f"a module is named {name[:-3].replace('/', '.')!r}" if name.endswith(".py") else "correct the name"
        raise LaunchError(f"module {name!r} is not a dotted Python name such as package.train; {do}")
    spec = find_module(name)
    if spec is None:
        raise LaunchError(
            f"module {name!r} is not found in {Path.cwd()} or among the installed packages; check the name, "
            "or install it"
        )
    if spec.submodule_search_locations is not None and find_module(f"{name}.__main__") is None:
        raise LaunchError(f"module {name!r} is a package without a __main__ module; name the module in it to run")


def find_program(name: str, search_path: str | None) -> str:
    """Path of the executable ``name``; a name without a slash is looked up in ``search_path``."""
    if found := shutil.which(name, path=search_path):
        return found
    path = Path(name)
    if "/" not in name:
        raise LaunchError(f"program {name!r} is not in the PATH; install it, or give its path (./{name})")
    if not path.exists():
        raise LaunchError(f"program {name!r} does not exist (current folder: {Path.cwd()}); check the name")
    what = "is a folder" if path.is_dir() else "is not executable by this user"
    raise LaunchError(f"program {name!r} {what}; make it executable (chmod u+x), or run a Python script without it")
