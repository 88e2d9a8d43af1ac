"""Runs kernel tests in Triton's interpreter: kernels decide when they are imported, so in a process of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from acceler8.kernels._triton import HAVE_TRITON, INTERPRETED

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not HAVE_TRITON, reason="needs the triton package, which is made for Linux only")
@pytest.mark.skipif(INTERPRETED, reason="this process is the interpreter's own")
@pytest.mark.parametrize(
    "files",
    [
        pytest.param({"test_triton": ("", 100)}, id="triton"),
        pytest.param(
            {
                "test_cast_and_sum": ("(both and (of_several or (exact and transposed))) or many_tiles or delayed", 25),
                "test_activation": ("quick_gelu and rowwise or sums_alone or delayed", 10),
                "test_adam": ("kernel_gives or launches", 8),
                "test_concatenated": ("", 20),
                "test_cross_entropy": ("", 15),
                "test_dequantize": ("", 35),
                "test_gated": ("silu and rowwise", 2),
                "test_gradient_blocks": ("", 25),
                "test_norm": ("rowwise", 2),
                "test_stored_gradient": ("", 18),
                "test_transpose": ("", 20),
            },
            id="fused",
        ),
        pytest.param(
            {
                "test_activation": ("", 80),
                "test_cast_and_sum": ("", 195),
                "test_gated": ("", 60),
                "test_norm": ("", 70),
            },
            id="all of activations and norms",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_kernels_give_the_same_codes_in_the_interpreter(files: dict[str, tuple[str, int]]):
    """Each file: which of its tests (as of ``-k``; all if empty), and how many at least; one process for all files."""
    wanted = " or ".join(f"({file}.py{f' and ({some})' if some else ''})" for file, (some, _) in files.items())
    paths = [str(Path(__file__).with_name(f"{file}.py")) for file in files]
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-k", wanted, *paths]
    # numpy works on one tile at a time, so a second thread would only wait for the first
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    passed = Counter(re.findall(r"/(\w+)\.py::.* PASSED +\[", done.stdout))
    assert " failed" not in done.stdout.splitlines()[-1]
    for file, (_, at_least) in files.items():
        assert passed[file] >= at_least  # not a run that skipped everything
