"""Two processes write one checkpoint: the common part once, each its own; what fails in one raises in both."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from acceler8 import Accelerator
from tests.checkpoint.runs import Counter

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    workers = []
    for rank in range(2):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = os.environ | {name: str(value) for name, value in place.items()}
        environment |= {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tests.checkpoint.two_processes", str(folder)]
        pipe = subprocess.PIPE
        workers.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True))
    try:
        outputs = [worker.communicate(timeout=150) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0, 0], outputs
    return folder, [json.loads(out.splitlines()[-1]) for out, _ in outputs]


def test_each_process_goes_on_with_its_own_random_numbers(outcome):
    _, (zero, one) = outcome
    for found in (zero, one):
        assert found["resumed"] == found["expected"]
        assert found["resumed_at"] == 2
        assert found["newest"] == {"second": True}
        assert found["next"] == 2
    assert zero["expected"] != one["expected"]


def test_what_fails_in_one_raises_in_both(outcome):
    _, (zero, one) = outcome
    assert "custom_1, a Fails, cannot be saved" in zero["save_error"]
    assert one["save_error"].startswith("process 0 could not do its part of the checkpoint: custom_1, a Fails, cannot")
    assert zero["load_error"].startswith(
        "process 1 could not do its part of the checkpoint: custom_1 rejects its saved"
    )
    assert "custom_1 rejects its saved state (rejected)" in one["load_error"]
    assert zero["left"] == one["left"] == ["checkpoint_1", "checkpoint_8"]


def test_the_folder_holds_each_part_once(outcome):
    folder, _ = outcome
    names = {path.name for path in (folder / "checkpoints" / "checkpoint_1").iterdir()}
    assert {"process_0.json", "process_1.json", "model.safetensors", "optimizer.json"} <= names
    assert "process_2.json" not in names
    state = load_file(folder / "export" / "model.safetensors")
    assert sorted(state) == ["0.bias", "0.weight"]  # no wrapper's prefix


def test_one_process_resumes_what_two_saved(outcome):
    folder, _ = outcome
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    model = nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.3))
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.register_for_checkpointing(Counter())
    report = accelerator.load_state(folder / "checkpoints" / "checkpoint_1")
    assert [line for line in report.reset if "recipe delayed" in line]
    assert not [line for line in report.reset if "loader" in line]  # there was none
