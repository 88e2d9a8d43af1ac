"""Sharded training through ``Accelerator``: two processes against replicas and against one process.

The processes run once, in ``fsdp_worker.py``. Each test reads what a scenario gave back.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.accelerator.fsdp_training import ALONE, RECIPES
from tests.accelerator.fsdp_training import SCENARIOS as TRAINING

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("fsdp_worker.py")
LIMIT_S = 240
pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs torch.distributed with gloo"
)


def start(folder: Path, world: int, scenarios: list[str], local: int | None = None) -> list[subprocess.Popen[str]]:
    """Processes that run ``scenarios``, ``local`` of them on each of the machines that they are told of."""
    folder.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(world)}
    own = ("ACCELERATE_", "ACCELER8_", "FSDP_", "RANK", "LOCAL_", "WORLD_SIZE", "MASTER_")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(own)}
    env = {**kept, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    if sys.platform == "linux":
        env["GLOO_SOCKET_IFNAME"] = "lo"
    local = local or world
    started = []
    for rank in range(world):
        ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank % local), "LOCAL_WORLD_SIZE": str(local)}
        with (folder / f"log.{rank}").open("w") as log:
            started.append(
                subprocess.Popen(
                    [sys.executable, str(WORKER), str(folder), *scenarios],
                    env={**env, **place, **ranks} if world > 1 else env,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
    return started


def finish(workers: list[subprocess.Popen[str]]) -> None:
    end = time.monotonic() + LIMIT_S
    try:
        for worker in workers:
            worker.wait(timeout=max(end - time.monotonic(), 0.1))
    except subprocess.TimeoutExpired:
        pass  # what is missing is told by the test that wants it
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of what processes left, in ``two`` and ``one``."""
    folder = tmp_path_factory.mktemp("fsdp")
    finish(start(folder / "two", 2, [*TRAINING]) + start(folder / "one", 1, [*ALONE]))
    return folder


def load(folder: Path, scenario: str, rank: int = 0) -> Any:
    """What a scenario gave back; fails with what that process said if it gave nothing."""
    for failure in sorted(folder.glob(f"{scenario}.*.txt")):
        pytest.fail(f"{failure.name}:\n{failure.read_text()[-4000:]}", pytrace=False)
    path = folder / f"{scenario}.{rank}.pt"
    if not path.exists():
        pytest.fail(f"not reached; process {rank} said:\n{(folder / f'log.{rank}').read_text()[-4000:]}", pytrace=False)
    return torch.load(path, weights_only=True)


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    """Bit for bit, name by name."""
    assert got.keys() == want.keys()
    for name in want:
        assert torch.equal(got[name], want[name]), name


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_sharded_model_trains_as_replicas_do(results, recipe):
    """Weights gathered in FP32 are those that replicas hold, and two gradients have the same mean in either order.

    The norm that clips is a sum in another order, which moves AdamW's update by a few parts in 2**24.
    """
    for rank in range(2):
        sharded, replica = (load(results / "two", f"{way}-{recipe}", rank) for way in ("fsdp in fp32", "ddp"))
        assert sharded["losses"][0] == replica["losses"][0]
        torch.testing.assert_close(sharded["losses"], replica["losses"], rtol=1e-4, atol=0)
