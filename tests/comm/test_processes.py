"""Gradients in FP8 between real processes over Gloo: replicas equal, bytes counted, training as without."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def start(processes: int) -> list[dict[str, Any]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    workers = []
    for rank in range(processes):
        place = {"RANK": rank, "WORLD_SIZE": processes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = os.environ | {name: str(value) for name, value in place.items()}
        environment |= {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tests.comm.workers"]
        pipe = subprocess.PIPE
        workers.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True))
    try:
        outputs = [worker.communicate(timeout=150) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0] * processes, outputs
    return list(json.loads(outputs[0][0].splitlines()[-1]))


@pytest.fixture(scope="module", params=[2, 4])
def found(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return start(request.param)


def test_an_all_reduce_gives_every_process_the_same_mean(found):
    for own in found:
        coded = [own["all_reduce"][i] for i in (0, 2, 3)]
        assert min(coded) > 28
        assert min(own["all_reduce"][1], own["all_reduce"][4]) > 120  # FP32
        assert own["same"]
        assert own["repeats"]


def test_it_sends_what_it_says(found):
    """Buffers of some thousand elements: the plain ones in FP32 and rounding up to 16 bytes are part of it."""
    for own in found:
        assert own["bytes"] == own["said"]
        assert own["bytes"] < 0.6 * own["ring"]


def test_two_levels_agree_everywhere(found):
    if len(found) < 4:
        pytest.skip("two machines of two need four processes")
    for own in found:
        assert min(own["two_levels"][i] for i in (0, 2, 3)) > 26
        assert own["two_levels_same"]


def test_a_reduce_scatter_rounds_once(found):
    for own in found:
        assert own["reduce_scatter"] > 31.5
        assert own["scattered_plain"] > 120


@pytest.mark.parametrize("name", ["fp8", "error_feedback", "small_buckets", "window"])
def test_ddp_trains_as_without(found, name):
    for own in found:
        run = own["ddp"][name]
        assert run["same"]
        assert run["losses"][-1] < 0.7 * run["losses"][0]
        apart = [abs(a / b - 1) for a, b in zip(run["losses"], run["plain"], strict=True)]
        assert max(apart) < 0.02
        assert (run["sent"].get("fp8", 0) > 0) is (name != "small_buckets")
        assert run["losses"] != run["plain"] or name == "small_buckets"


def test_buckets_of_one_shape_keep_what_they_lost_apart(found):
    for own in found:
        assert own["residuals"] == 2
        assert own["twins"] < 1e-5


def test_what_one_process_overflowed_all_see(found):
    for own in found:
        assert own["not_finite"] == found[0]["not_finite"]
        assert own["not_finite"]["0.weight"] > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fsdp2_trains_as_without(found, dtype):
    for own in found:
        run = own["fsdp2"][dtype]
        apart = [abs(a / b - 1) for a, b in zip(run["losses"], run["plain"], strict=True)]
        assert 0 < max(apart) < 0.03
        assert run["losses"][-1] < 0.8 * run["losses"][0]
        assert run["sent"]["fp8"] > run["sent"].get("plain", 0)
