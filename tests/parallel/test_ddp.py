"""DistributedDataParallel with native FP8: its options, one collective a step, and errors where processes disagree.

Two processes run all scenarios once, in ``ddp_worker.py``; each test reads what they left.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.parallel.ddp_worker import OPTIONS, RECIPES, STEPS, TIMEOUT_S

ROOT = Path(__file__).parents[2]
LIMIT_S = 150
pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs torch.distributed with gloo"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ddp")
    env = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    if sys.platform == "linux":
        env["GLOO_SOCKET_IFNAME"] = "lo"
    logs = [(folder / f"log.{rank}").open("w+") for rank in range(2)]
    command = [sys.executable, "-m", "tests.parallel.ddp_worker", str(folder)]
    workers = [
        subprocess.Popen([*command, str(rank)], cwd=ROOT, env=env, stdout=log, stderr=log)
        for rank, log in enumerate(logs)
    ]
    try:
        for worker in workers:
            worker.wait(LIMIT_S)
    finally:
        for worker, log in zip(workers, logs, strict=True):
            worker.kill()
            worker.wait()
            log.close()
    return folder


def both(folder: Path, name: str) -> list[dict[str, Any]]:
    """What a scenario gave on each rank."""
    paths = [folder / f"{name}.{rank}.pt" for rank in range(2)]
    assert all(path.exists() for path in paths), (folder / "log.0").read_text() + (folder / "log.1").read_text()
    return [torch.load(path) for path in paths]


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_options_of_ddp_change_no_weight(folder: Path, recipe: str, option: str):
    zero, one = both(folder, f"{recipe}-{option}")
    assert torch.equal(zero["weights"], one["weights"])
    assert torch.equal(zero["weights"], both(folder, f"{recipe}-plain")[0]["weights"])


@pytest.mark.parametrize(("recipe", "count"), [("rowwise", 0), ("delayed", 1)])
def test_amaxes_travel_in_one_collective_a_step(folder: Path, recipe: str, count: int):
    for found in both(folder, f"{recipe}-plain"):
        assert found["collectives"] == [count] * STEPS


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_sync_gives_the_gradients_of_two_exchanges(folder: Path, recipe: str):
    zero, one = both(folder, f"{recipe}-no_sync")
    assert torch.equal(zero["weights"], one["weights"])
    # The same four gradients, added in another order: a rounding of 2^-24 each, at weights of about 1.
    torch.testing.assert_close(zero["weights"], both(folder, f"{recipe}-synced_twice")[0]["weights"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("recipe", RECIPES)
def test_processes_may_run_different_branches_if_ddp_is_told(folder: Path, recipe: str):
    zero, one = both(folder, f"{recipe}-different_branches")
    assert torch.equal(zero["weights"], one["weights"])
    if recipe == "delayed":  # two FP8 layers, three operands each; the head stays in high precision
        assert torch.equal(zero["amax"], one["amax"])
        assert (zero["amax"][1] > 0).sum() == 6, "amaxes of a branch that only the other process ran are missing"


def test_a_step_more_is_an_error_after_the_timeout(folder: Path):
    zero, _ = both(folder, "fails-rowwise-more_steps")
    assert zero["is_ours"], zero
    assert TIMEOUT_S * 0.5 < zero["after_s"] < TIMEOUT_S + 15
    assert zero["error"].startswith("rank 0 waited in vain for the others in backward of step 2; rank 1 says nothing")


@pytest.mark.parametrize("recipe", RECIPES)
def test_unannounced_branches_are_torch_s_error_at_the_next_step(folder: Path, recipe: str):
    for each in both(folder, f"fails-{recipe}-branches_unannounced"):
        assert "did not receive grad" in each["error"]
        assert each["after_s"] < TIMEOUT_S


def test_a_step_of_one_process_alone_is_named(folder: Path):
    zero, _ = both(folder, "fails-delayed-step_without_the_other")
    assert zero["is_ours"], zero
    assert "rank 0 waited in vain for the others in the exchange of amaxes of step 3; rank 1 says" in zero["error"]
    assert "FP8 operands on rank 0: a.x, a.w, a.dy, b.x, b.w, b.dy" in zero["error"]


def test_what_processes_did_differently_is_named(folder: Path):
    for rank, each in enumerate(both(folder, "fails-both_wait")):
        assert each["is_ours"], each
        own, other = f"FP8 operands only on rank {rank}: {'ab'[rank]}.x", f"only on rank {1 - rank}: {'ba'[rank]}.x"
        assert each["error"] == (
            f"rank {rank} waited in vain for the others in backward of step {7 + rank}; rank {1 - rank} is in backward "
            f"of step {8 - rank}; {own}; FP8 operands {other}. Have every process run the same modules and as many "
            "steps (join_uneven_inputs), or set find_unused_parameters=True"
        )
