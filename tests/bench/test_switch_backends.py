"""benchmarks/parity/switch_backends.py as a user runs it, on a CPU."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from acceler8.backends.torchao import library

FILE = Path(__file__).parents[2] / "benchmarks" / "parity" / "switch_backends.py"
pytestmark = pytest.mark.skipif(library.unavailable() is not None, reason=f"torchao: {library.unavailable()}")
ASKED = ("--backends", "torchao,native,torchao", "--steps", "30", "--ahead", "4", "--device", "cpu")


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("switch_backends", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_run_goes_from_backend_to_backend(tmp_path, capsys):
    assert script().main([*ASKED, "--json", str(tmp_path / "run.json")]) == 0
    assert capsys.readouterr().out.count(": continuous; ") == 2
    found = json.loads((tmp_path / "run.json").read_text())
    assert [(one["from"], one["to"], one["step"]) for one in found["switches"]] == [
        ("torchao", "native", 30),
        ("native", "torchao", 60),
    ]
    assert found["losses"][-1] < 0.8 * found["losses"][0]
    for one in found["switches"]:
        assert one["held_out"][0] == one["held_out"][1]
        assert any("backend was" in line for line in one["said"])


def test_moments_that_are_lost_are_seen(capsys):
    assert script().main([*ASKED, "--plant"]) == 1
    assert "NOT CONTINUOUS" in capsys.readouterr().out
