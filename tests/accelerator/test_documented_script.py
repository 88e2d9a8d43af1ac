"""A script written against Accelerate's documentation, and the same text with only its imports changed.

Each side runs it as its users do: one process by Python, two by torchrun there and by ``acceler8 launch`` here.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
TEXT = Path(__file__).with_name("documented_script.py").read_text(encoding="utf-8")
LIMIT_S = 120
SAVED = (1, 4)
"""Epoch and batch at which the script saves its state, and from which it trains once more."""

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs torch.distributed with gloo"
)


def run(folder: Path, library: str, launcher: list[str], *options: str) -> dict[str, Any]:
    """What the script saw, with its imports from ``library``."""
    folder.mkdir()
    text, imports = re.subn(r"^from accelerate\b", f"from {library}", TEXT, flags=re.MULTILINE)
    assert imports == 2
    (folder / "script.py").write_text(text, encoding="utf-8")
    own = ("ACCELERATE_", "ACCELER8_", "RANK", "LOCAL_", "WORLD_SIZE", "MASTER_")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(own)}
    env = kept | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "XDG_CONFIG_HOME": str(folder)}
    if sys.platform == "linux":
        env["GLOO_SOCKET_IFNAME"] = "lo"
    command = [sys.executable, *launcher, str(folder / "script.py"), str(folder), *options]
    out = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert out.returncode == 0, out.stderr[-4000:]
    return json.loads((folder / "results.json").read_text())


def launcher(library: str, processes: int) -> list[str]:
    if processes == 1:
        return []
    if library == "acceler8":
        return ["-m", "acceler8", "launch", "--cpu", "--num_processes", str(processes)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return ["-m", "torch.distributed.run", "--nproc_per_node", str(processes), "--master_port", str(port)]


@pytest.mark.parametrize("processes", [1, 2])
def test_with_only_its_imports_changed_a_script_trains_the_same(tmp_path: Path, processes: int) -> None:
    pytest.importorskip("accelerate")
    theirs, ours = (
        run(tmp_path / library, library, launcher(library, processes)) for library in ("accelerate", "acceler8")
    )
    assert ours["processes"] == theirs["processes"] == processes
    assert len(ours["losses"]) == 3 * (19 if processes == 1 else 10)
    assert ours["losses"][-1][2] < ours["losses"][0][2] / 2
    assert [epoch["seen"] for epoch in ours["evaluations"]] == [37] * 3
    for what in ("losses", "evaluations"):  # losses with norms of gradients and learning rates, to the bit
        assert ours[what] == theirs[what]
    # Behind load_state Accelerate draws for the loader anew, so its dropout is another; here it is as if never stopped.
    behind = [entry for entry in theirs["losses"] if tuple(entry[:2]) >= SAVED]
    assert ours["resumed"] == behind
    assert ours["resumed_evaluations"] == theirs["evaluations"][SAVED[0] :]


@pytest.mark.slow
def test_the_script_shows_a_difference_of_precision(tmp_path: Path) -> None:
    """What the comparison above rests on: its losses are those of BF16 and of nothing else."""
    bf16, fp32 = (run(tmp_path / name, "acceler8", [], "--mixed_precision", name)["losses"] for name in ("bf16", "no"))
    assert [entry[2] for entry in bf16] != [entry[2] for entry in fp32]
    assert [entry[2] for entry in bf16[:4]] == pytest.approx([entry[2] for entry in fp32[:4]], rel=0.02)
