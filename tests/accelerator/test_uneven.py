"""Batches that do not go up under FSDP2: an error in every process, where the others would have waited for ever."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_process_that_would_run_out_is_an_error_in_all(tmp_path):
    command = [sys.executable, "-W", "ignore", "-m", "tests.accelerator.uneven", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    out = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert out.returncode == 0, out.stderr[-3000:]
    for found in torch.load(tmp_path / "facts.pt", weights_only=False):
        for name in ("short", "split, short"):
            assert "even_batches=False got batches that leave some of 2 processes a batch short" in found[name]
            assert "the strategy 'fsdp2'" in found[name]
        assert "have a length that is not known" in found["no length"]
        assert found["even by itself"] == found["copies"] == 2
        assert found["dropped"] == 1
        assert found["split, a piece for each"] == 3
        assert "join_uneven_inputs got uneven batches and the strategy 'fsdp2'" in found["join"]
        assert found["join, even"]
