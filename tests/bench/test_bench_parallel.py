"""The benchmark of steps under DDP and FSDP2: it runs on two processes, and counts what travels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_it_runs_and_counts_bytes(tmp_path):
    script = ROOT / "benchmarks" / "bench_parallel.py"
    options = ["--preset", "tiny", "--steps", "2", "--strategies", "ddp", "fsdp2", "--device", "cpu"]
    variants = ["--variants", "acceler8-tensorwise", "acceler8-tensorwise-gather"]
    launch = [sys.executable, "-m", "acceler8", "launch", "--num_processes", "2", "--cpu"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launch, str(script), *options, *variants, "--write", str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("*-parallel-2.json")
    rows = json.loads(path.read_text())["rows"]
    found = {(row["strategy"], row["variant"]): row for row in rows}
    assert {name for strategy, name in found if strategy == "ddp"} == {"bf16", "acceler8-tensorwise"}
    assert all(abs(row["loss_gap"]) < 0.01 for row in rows)
    gathered = found["fsdp2", "acceler8-tensorwise-gather"]["wire_mb"]["all_gather"]
    whole = found["fsdp2", "acceler8-tensorwise"]["wire_mb"]["all_gather"]
    assert whole <= found["fsdp2", "bf16"]["wire_mb"]["all_gather"]
    assert 0.5 * whole < gathered < 0.75 * whole  # embedding and head stay in BF16
    assert set(found["ddp", "bf16"]["wire_mb"]) == {"all_reduce"}
