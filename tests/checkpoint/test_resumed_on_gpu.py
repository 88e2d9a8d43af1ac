"""On a GPU a run with ``deterministic=True`` that stops and resumes ends where the run that did not stop ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def part(recipe: str, folder: Path, which: str) -> list[str]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    command = [sys.executable, "-m", "tests.checkpoint.resumed_on_gpu", recipe, folder, which]
    out = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert out.returncode == 0, out.stderr
    return [line for line in out.stdout.splitlines() if line.startswith(("loss", "state"))]


@pytest.mark.requires(sm=90)
@pytest.mark.parametrize("recipe", ["rowwise", "delayed", "tensorwise", "blockwise"])
def test_resumed_training_equals_uninterrupted(tmp_path, recipe):
    whole = part(recipe, tmp_path / "state", "whole")
    first = part(recipe, tmp_path / "state", "first")
    second = part(recipe, tmp_path / "state", "second")
    assert "cuda" in whole[-1]
    assert [*first[:-1], *second] == whole
