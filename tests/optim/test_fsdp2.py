"""State in shards: two processes under FSDP2 against one, bit for bit, and through a distributed checkpoint."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.optim.support import same

ROOT, WORKER = Path(__file__).parents[2], Path(__file__).with_name("fsdp2_worker.py")
RANKS = 2
pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs torch.distributed with gloo"
)


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("fsdp2")
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    if sys.platform == "linux":
        env["GLOO_SOCKET_IFNAME"] = "lo"
    command = [sys.executable, str(WORKER)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(RANKS), str(folder)], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for rank in range(RANKS)
    ]
    try:
        for process in ranks:
            out, _ = process.communicate(timeout=240)
            assert process.returncode == 0, out.decode()[-4000:]
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]


@pytest.fixture(scope="module")
def worker() -> Any:
    spec = importlib.util.spec_from_file_location("optim_fsdp2_worker", WORKER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_two_shards_are_one_process(results, worker):
    net = worker.build()
    # What shards would cut is FP32 there, and so here.
    whole = [net[0].weight, net[2].weight]
    cut = [p for p in net.parameters() if not any(p is q for q in whole)]
    groups = [{"params": whole}, {"params": cut, "quantize": "none"}]
    kept = worker.AdamW(groups, lr=1e-2, moments="fp8")
    worker.train(net, kept, range(worker.STEPS))
    for result in results:
        assert same(result["weights"], {name: p.detach() for name, p in net.named_parameters()})
        for name, p in net.named_parameters():
            for key, value in kept.state[p].items():
                got = result["states"][name][key]
                value = value.view(torch.uint8) if value.element_size() == 1 else value
                assert torch.equal(got.reshape(-1), value.reshape(-1)), (name, key)
    worker.train(net, kept, range(worker.STEPS, worker.STEPS + 2))
    for result in results:
        assert same(result["resumed"], {name: p.detach() for name, p in net.named_parameters()})


def test_codes_and_scales_are_sharded_as_their_parameter(results):
    for result in results:
        places = result["placements"]
        for name in ("0.weight", "2.weight"):
            for key in ("exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale"):
                assert places[f"{name}.{key}"] == "(Shard(dim=0),)"
        assert "4.weight.exp_avg_scale" not in places
        assert result["reasons"]["4.weight"] == "sharded, and its rows of 100 are no multiple of 128"
        assert result["reasons"]["0.weight"] == ""


def test_a_distributed_checkpoint_brings_codes_back(results):
    for result in results:
        assert same(result["loaded"], result["states"])
