"""kill -9 at any moment, in a save too: the next start resumes, with the losses of a run that was not killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def killed(folder: Path, kills: int, until: int, seed: int) -> dict:
    command = [sys.executable, "-m", "tests.checkpoint.killed_training", str(folder)]
    command += ["--kills", str(kills), "--until", str(until), "--seed", str(seed)]
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    out = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert out.returncode == 0, out.stderr
    found = json.loads(out.stdout.splitlines()[-1])
    assert found["codes"] == [-signal.SIGKILL] * (kills + 1) + [0], out.stderr
    assert found["differ"] == []
    assert found["computed"] == until
    assert found["left"] == [f"checkpoint_{until - 2}", f"checkpoint_{until - 1}"]
    return found


def test_killed_in_a_save_and_at_a_random_moment(tmp_path):
    assert killed(tmp_path, kills=1, until=14, seed=3)["in_save"] >= 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1])
def test_killed_20_times_at_random_moments(tmp_path, seed):
    assert killed(tmp_path, kills=20, until=160, seed=seed)["in_save"] >= 3
