"""Runs kernel tests in Triton's interpreter: kernels decide when they are imported, so in a process of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from acceler8.kernels._triton import HAVE_TRITON, INTERPRETED

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not HAVE_TRITON, reason="needs the triton package, which is made for Linux only")
@pytest.mark.skipif(INTERPRETED, reason="this process is the interpreter's own")
@pytest.mark.parametrize(
    ("file", "some", "at_least"),
    [
        ("test_triton", "", 100),
        ("test_concatenated", "", 20),
        ("test_cross_entropy", "", 15),
        ("test_dequantize", "", 35),
        ("test_gated", "silu and rowwise", 2),
        ("test_norm", "rowwise", 2),
        pytest.param("test_gated", "", 60, marks=pytest.mark.slow),
        pytest.param("test_norm", "", 70, marks=pytest.mark.slow),
    ],
)
def test_kernels_give_the_same_codes_in_the_interpreter(file, some, at_least):
    tests = Path(__file__).with_name(f"{file}.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", some, str(tests)]
    # numpy works on one tile at a time, so a second thread would only wait for the first
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    counts = {what: int(n) for n, what in re.findall(r"(\d+) (passed|skipped|failed)", done.stdout.splitlines()[-1])}
    assert counts.get("failed", 0) == 0
    assert counts["passed"] >= at_least  # not a run that skipped everything
