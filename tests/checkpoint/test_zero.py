"""DeepSpeed's ZeRO in checkpoints: the plain files of every other training, at any stage and number of processes."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoint.support import assert_same

ROOT = Path(__file__).parent.parent.parent

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"),
]


def run(folder: Path, *pairs: str) -> dict:
    command = [sys.executable, "-W", "ignore", "-m", "tests.checkpoint.zero_training", str(folder), *pairs]
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    out = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert out.returncode == 0, out.stderr[-5000:]
    facts = torch.load(folder / "facts.pt", weights_only=False)
    for (source, target), processes in facts["resumed"].items():
        saved, resumed = facts["saved"][source][0], processes[0]
        for part in ("model", "optimizer", "fp8"):
            assert_same(in_order(resumed["state"][part]), in_order(saved["state"][part]))
        assert resumed["state"]["steps"] == saved["state"]["steps"] == 3
        assert saved["state"]["fp8"]
        if source == target:
            for one, other in zip(facts["saved"][source], processes, strict=True):
                assert other["losses"] == one["losses"]
                assert other["reset"] == ()
            assert_same(in_order(resumed["last"]), in_order(saved["last"]))
        told = [process["told"] for process in processes if "told" in process]
        assert len(told) == (len(processes) if target.startswith("zero") else 0)
        if told:
            assert told.pop() == "ValueError: planted"
            other = f"CheckpointError: process {len(told)} could not do its part of the checkpoint: planted"
            assert told == [other] * len(told)
    for key, told in facts.items():
        if key[0] == "damaged":
            assert all("optimizer.safetensors has sha256" in text for text in told)
    return facts


def in_order(state):
    return {name: state[name] for name in sorted(state)}


def test_saved_by_four_and_resumed_by_four_two_and_one(tmp_path):
    facts = run(tmp_path, "zero2:4", "zero2:4,zero2:2,single:1")
    names = {path.name for path in (tmp_path / "zero2-4").iterdir()}
    assert {"model.safetensors", "optimizer.safetensors", "acceler8_state.safetensors", "process_3.json"} <= names
    assert not [name for name in names if ".shard" in name]
    exported = load_file(tmp_path / "zero2-4-export" / "model.safetensors")
    last = facts["saved"]["zero2:4"][0]["last"]
    assert sorted([*exported, "head.weight"]) == sorted(last)
    assert_same(in_order(exported), in_order({name: last[name] for name in exported}))
    assert ("damaged", "zero2:4") in facts


@pytest.mark.slow
def test_stages_and_strategies_resume_each_other(tmp_path):
    run(
        tmp_path,
        *("zero1:4", "zero1:4,zero3:2,single:1"),
        *("zero3:4", "zero3:4,zero3:2,zero1:2,single:1,shards:2,ddp:2"),
        *("zero0:2", "zero0:2,zero2:4"),
        *("shards:4", "zero2:2,zero3:4"),
        *("ddp:2", "zero3:2"),
        *("single:1", "zero1:2,zero3:2"),
    )
