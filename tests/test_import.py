"""``import acceler8`` is quiet and light, each time in a fresh interpreter."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src"
VENDORS = ("deepspeed", "lightning", "peft", "torchao", "transformer_engine", "transformers", "triton")
ON_USE = ("jinja2", "rich", "torchdata", "typer", "yaml")
# they subclass a vendor's classes, and are imported on use only (test_layers.py)
SUBCLASSES = {f"acceler8/backends/{path}" for path in ("torchao/_layer.py", "transformer_engine/_modules.py")}
MODULES = sorted(
    ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
    for path in SOURCE.rglob("*.py")
    if path.name != "__main__.py" and path.relative_to(SOURCE).as_posix() not in SUBCLASSES
)


def run_python(code: str) -> str:
    """Standard output of ``code`` in a new interpreter on this source tree; fails on any word to stderr."""
    env = {**os.environ, "PYTHONPATH": str(SOURCE), "PYTHONWARNINGS": "error"}
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return result.stdout


def modules_beyond_torch(statement: str) -> dict[str, list[str] | bool]:
    """What ``statement`` loads that ``import torch`` had not, by top-level name, and whether it woke CUDA."""
    code = f"""
import json, os, sys
import torch
before, environment = set(sys.modules), dict(os.environ)
{statement}
new = sorted(set(sys.modules) - before)
same = dict(os.environ) == environment
print(json.dumps({{"new": new, "cuda": torch.cuda.is_initialized(), "environ": same}}))
"""
    return json.loads(run_python(code))


def test_import_prints_nothing():
    assert run_python("import acceler8") == ""


def test_import_is_light_and_touches_nothing():
    found = modules_beyond_torch("import acceler8")
    heavy = [name for name in found["new"] if name.split(".")[0] in (*VENDORS, *ON_USE)]
    assert heavy == []
    # The public names are loaded on first use: a handful of modules is the package, dozens would be a layer.
    assert len([name for name in found["new"] if name.startswith("acceler8")]) <= 5
    assert found["cuda"] is False
    assert found["environ"] is True


def test_no_module_imports_a_vendor_or_prints():
    imports = "\n".join(f"import {name}" for name in MODULES)
    found = modules_beyond_torch(imports)
    loaded = {name.split(".")[0] for name in found["new"]}
    # Triton may come with the kernels, through their one guarded import; nothing else may.
    assert loaded & set(VENDORS) <= {"triton"}
    assert found["cuda"] is False
    assert found["environ"] is True


def test_every_module_imports_without_triton():
    hide = """
from importlib.machinery import PathFinder
find = PathFinder.find_spec
PathFinder.find_spec = lambda name, *rest: None if name.split(".")[0] == "triton" else find(name, *rest)
"""
    show = "\nimport importlib.util, sys\nprint(importlib.util.find_spec('triton'), 'triton' in sys.modules)"
    assert run_python(hide + "\n".join(f"import {name}" for name in MODULES) + show) == "None False\n"


def test_torchao_is_imported_without_what_it_prints():
    code = """
from acceler8.backends.torchao import library
print(library.unavailable() is None, hasattr(library.library(), "Float8LinearConfig"))
"""
    if importlib.util.find_spec("torchao") is None:
        pytest.skip("torchao is not installed")
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert (result.stdout, result.stderr) == ("True True\n", "")
