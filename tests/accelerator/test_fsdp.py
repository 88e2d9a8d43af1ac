"""Sharded training through ``Accelerator``: two processes against replicas and against one process.

The processes run once, in ``fsdp_worker.py``. Each test reads what a scenario gave back.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.accelerator.fsdp_checks import COMPILED, OF_FOUR
from tests.accelerator.fsdp_checks import SCENARIOS as CHECKS
from tests.accelerator.fsdp_models import SCENARIOS as MODELS
from tests.accelerator.fsdp_support import STEPS
from tests.accelerator.fsdp_training import ALONE, EQUAL
from tests.accelerator.fsdp_training import SCENARIOS as TRAINING

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("fsdp_worker.py")
LIMIT_S = 480
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
    finish(start(folder / "two", 2, [*CHECKS, *TRAINING]) + start(folder / "one", 1, [*ALONE]))
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


@pytest.mark.parametrize("check", CHECKS)
def test_two_processes(results, check):
    for rank in range(2):
        load(results / "two", check, rank)


@pytest.mark.slow
def test_compiled_blocks(tmp_path):
    finish(start(tmp_path / "two", 2, [*COMPILED]))
    for rank in range(2):
        for check in COMPILED:
            load(tmp_path / "two", check, rank)


@pytest.mark.slow
def test_models_of_transformers_and_peft(tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    finish(start(tmp_path / "two", 2, [*MODELS]))
    for rank in range(2):
        for check in MODELS:
            load(tmp_path / "two", check, rank)


YAML = """
distributed_type: FSDP
use_cpu: true
num_processes: 2
mixed_precision: fp8
fp8_config: {backend: AO, enable_fsdp_float8_all_gather: true}
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
  fsdp_cpu_ram_efficient_loading: false
dynamo_config:
  dynamo_backend: AOT_EAGER
  dynamo_use_regional_compilation: true
"""


@pytest.mark.slow
@pytest.mark.parametrize("route", ["code", "file"])
def test_the_torchao_script_of_accelerates_guide(tmp_path, route):
    """torchao, FSDP2 and regional compilation, by objects and by a file: one script whose import is acceler8's."""
    pytest.importorskip("transformers")
    (tmp_path / "run.yaml").write_text(YAML if route == "file" else "use_cpu: true\ndistributed_type: MULTI_CPU\n")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "ACCELER8_", "FSDP_"))}
    env = {**kept, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    words = ["--config_file", str(tmp_path / "run.yaml"), "--num_processes", "2"]
    script = [str(Path(__file__).with_name("fsdp_scripts.py")), str(tmp_path), *(["code"] if route == "code" else [])]
    ran = subprocess.run(
        [sys.executable, "-m", "acceler8", "launch", *words, *script],
        env=env,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]
    facts = json.loads((tmp_path / "losses.json").read_text())
    assert (facts["fsdp2"], facts["type"]) == (True, "FSDP")
    assert facts["wrapped"] == "WeightWithDynamicFloat8CastTensor"
    assert facts["losses"][3] < facts["losses"][0]


@pytest.mark.slow
def test_four_processes_on_two_machines(tmp_path):
    finish(start(tmp_path / "four", 4, [*OF_FOUR], local=2))
    for rank in range(4):
        for check in OF_FOUR:
            load(tmp_path / "four", check, rank)


@pytest.mark.parametrize(("training", "same"), EQUAL.items())
def test_the_same_arithmetic_gives_the_same_training(results, training, same):
    """Weights gathered in FP32 are those that replicas hold; shards cast to FP8 have the whole weight's codes; and two
    gradients have the same mean in either order.

    So the first loss is equal bit for bit, and without clipping all would be. The norm that clips is a sum of 26,000
    squares in another order: gradients differ by less than 1e-6 of themselves, AdamW's update by as much, and 1e-2 of
    that moves a value over a rounding boundary here and there: one code of 128 x 64 then changes by 2**-3 at most.
    """
    for rank in range(2):
        got, want = (load(results / "two", name, rank) for name in (training, same))
        assert got["losses"][0] == want["losses"][0]
        torch.testing.assert_close(got["losses"], want["losses"], rtol=1e-4, atol=0)
        torch.testing.assert_close(got["norms"], want["norms"], rtol=1e-3, atol=0)
        assert (got["is_fsdp2"], got["type"]) == (True, "FSDP")
        assert len(set(got["losses"].tolist())) == len(got["losses"])  # it trains


@pytest.mark.parametrize("training", [name for name in TRAINING if "-no" not in name and "-fp16" not in name])
def test_training_is_verified_on_each_process(results, training):
    for rank in range(2):
        facts = load(results / "two", training, rank)
        checks = facts["verified"]
        layers = "0" if "activations_only" in training else "[67]"  # which has no codes of weights
        said = rf"19 parameters moved, {layers} layers used codes of their new weight$"
        assert re.match(said, checks["moved and fresh"])
        assert checks["optimizer"] == "19 trainable parameters, each in one group"
        assert facts["steps"] == STEPS + 2


def test_two_processes_train_as_one_on_all_data(results):
    """x and dy scaled by token, weights by row, wgrad in BF16: only the order of sums over tokens differs.

    So the first step's losses are equal. One process rounds wgrad's sum over 32 tokens to BF16, two round their sums
    over 16 each, so gradients differ by up to 2**-8 of themselves. Of gradients that are clipped to 1, a step of 0.01
    moves a loss by 0.01 at most, and what differs of it by 4e-5; some values then fall on the other side of a rounding
    boundary, which moves a token's loss by a code's width of one of some hundred values: a few 1e-3, a mean over 32
    tokens by less. In the third step the differences of two steps have moved a value or more of every token.
    """
    one = load(results / "one", "ddp-gw_hp")
    for way in ("fsdp in fp32", "ddp"):
        two = load(results / "two", f"{way}-gw_hp")
        differences = (two["losses"] - one["losses"]).abs()
        assert differences[:2].max() < 1e-6
        assert differences[2:4].max() < 1e-3
        assert differences.max() < 5e-2


def test_weights_gathered_in_bf16_are_near(results):
    """BF16 rounds weights by up to 2**-9 in front of E4M3's 2**-4: an eighth of a code's width at most, so a loss is
    within the FP8 recipe's own noise of that of FP32 gathers.
    """
    bf16, fp32 = (load(results / "two", f"{way}-gw_hp") for way in ("fsdp", "fsdp in fp32"))
    torch.testing.assert_close(bf16["losses"], fp32["losses"], rtol=5e-2, atol=0)
    assert not torch.equal(bf16["losses"], fp32["losses"])


def test_processes_hold_shards(results):
    for rank in range(2):
        local = load(results / "two", "fsdp in fp32-rowwise", rank)["local"]
        assert local["blocks.0.up.weight"] == (64, 64)
        assert local["head.weight"] == ((3, 64), (2, 64))[rank]
        assert len(local) == 19


def test_ends_are_equal_on_both_processes(results):
    for training in TRAINING:
        first, second = (load(results / "two", training, rank)["end"] for rank in range(2))
        for name, value in first.items():
            assert torch.equal(value, second[name]), (training, name)
