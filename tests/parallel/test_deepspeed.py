"""DeepSpeed ZeRO 0 to 3 on two processes and four, against DistributedDataParallel and one process.

The processes run once, in ``deepspeed_worker.py``; each test reads what one scenario there gave back. An engine that
keeps FP32 weights computes what DDP computes; one with BF16 weights, what ``fp8`` gives, is compared with itself.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.parallel.deepspeed_support import MICRO_BATCHES, ROWS_ALONE, STEPS, Training, make_accelerator, make_data

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("deepspeed_worker.py")
ZERO = ("zero0", "zero1", "zero2", "zero3")
ONE_STAGE = ("zero1", "zero2", "zero3")
NUMBERED = ("zero0", "zero2")
BY_WAY = {
    "plain": ZERO,
    "gated": ("zero2", "zero3"),
    "delayed": ("zero2", "zero3"),
    "torchao": ONE_STAGE,
    "llama": ("zero2", "zero3"),
}
SCENARIOS = (
    *(f"{kind}-{way}" for kind, ways in BY_WAY.items() for way in ("ddp", *ways)),
    *(f"bf16-{way}" for way in ZERO),
    "bf16-accumulated-in-fp32",
    "fused-zero3",
    "offload-zero2",
    "offload-zero3",
    *(f"save-{way}-bf16" for way in ONE_STAGE),
    *(f"resume-{way}-from-save-{way}" for way in ONE_STAGE),
    "resume-zero3-from-save-zero1",
    "resume-ddp-from-save-zero3",
    "resume-zero2-from-save-four",
    *(f"{part}-number-{way}" for part in ("save", "resume") for way in NUMBERED),
    "discard-zero2",
    "discard-zero3",
    *(f"two-losses-{way}" for way in ("ddp", *ONE_STAGE)),
    "evaluation-zero2",
    "evaluation-zero3",
    "recipes-ddp",
    "recipes-zero3",
    "parts",
    "stale",
    "refusals",
)
pytestmark = [
    pytest.mark.skipif(
        not (dist.is_available() and dist.is_gloo_available()), reason="needs torch.distributed with gloo"
    ),
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs DeepSpeed"),
]


def run_ranks(folder: Path, ranks: int, scenarios: tuple[str, ...]) -> None:
    """Run the worker as so many processes; the first that fails ends the others and the test."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "DEEPSPEED_LOG_LEVEL": "warning"}
    if sys.platform == "linux":
        env["GLOO_SOCKET_IFNAME"] = "lo"
    logs = [(folder / f"log.{rank}").open("w+") for rank in range(ranks)]
    processes = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), str(ranks), str(folder), *scenarios],
            env=env,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        for rank, log in enumerate(logs)
    ]
    end = time.monotonic() + 600
    try:
        while any(p.poll() is None for p in processes) and not any(p.poll() for p in processes):
            assert time.monotonic() < end, "the ranks did not end in 600 s"
            time.sleep(0.05)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for rank, (process, log) in enumerate(zip(processes, logs, strict=True)):
        log.seek(0)
        assert process.returncode in (0, -9), f"rank {rank} failed:\n{log.read()[-4000:]}"
        log.close()


def read(folder: Path, name: str, ranks: int) -> list[Any]:
    """What each rank gave back."""
    return [torch.load(folder / f"{name}.{rank}.pt", weights_only=True) for rank in range(ranks)]


@pytest.fixture(scope="module")
def of_four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What four ranks of ZeRO-3 saved, and its file."""
    folder = tmp_path_factory.mktemp("four")
    run_ranks(folder, 4, ("save-zero3-bf16",))
    return read(folder, "save-zero3-bf16", 4)[0] | {"file": folder / "save-zero3-bf16.0.pt"}


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory, of_four: dict[str, Any]) -> dict[str, list[Any]]:
    """Scenario -> what each of two ranks gave back."""
    folder = tmp_path_factory.mktemp("zero")
    (folder / "save-four-bf16.0.pt").symlink_to(of_four["file"])
    run_ranks(folder, 2, SCENARIOS)
    return {name: read(folder, name, 2) for name in SCENARIOS}


def alone(kind: str, pace: int | None = 2, optimizer: str = "sgd", **options: Any) -> Training:
    """The same training in this process, which stands for two."""
    return Training(make_accelerator("ddp", recipe=ROWS_ALONE, **options), kind, pace=pace, optimizer=optimizer)


def same(a: Any, b: Any) -> bool:
    """Equal, tensors in dtype and every bit but the sign of zero."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def assert_near(weights: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], atol: float) -> None:
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=atol, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize(("kind", "way"), [(kind, way) for kind, ways in BY_WAY.items() for way in ways])
def test_zero_with_fp32_weights_computes_what_ddp_computes(facts, kind, way):
    """SGD, clipped to a fifth: a gradient that is scaled wrongly shows. Sums over ranks and micro-batches run in
    another order, and the factor of clipping is a product there and a quotient here: a few ulp of FP32 an update, which
    may move a value over a boundary of FP8 and so a loss of a model with attention by 1e-4 of itself.
    """
    near = 2e-4 if kind == "llama" else 1e-6
    for got, expected in zip(facts[f"{kind}-{way}"], facts[f"{kind}-ddp"], strict=True):
        assert len(set(got["losses"])) == STEPS * MICRO_BATCHES
        assert got["losses"] == pytest.approx(expected["losses"], rel=near)
        assert got["norms"] == pytest.approx(expected["norms"], rel=10 * near)
        assert got["lr"] == expected["lr"]
        assert got["dtypes"] == ["torch.float32"]
    assert min(facts[f"{kind}-ddp"][0]["norms"]) > 0.2, "nothing was clipped"
    assert_near(facts[f"{kind}-{way}"][0]["weights"], facts[f"{kind}-ddp"][0]["weights"], atol=near)
    assert facts[f"{kind}-{way}"][1]["weights"].keys() == (set() if way != "zero0" else expected["weights"].keys())


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise", "mxfp8", "activations_only", "torchao tensorwise"])
def test_every_recipe_runs_in_the_engine(facts, recipe):
    """As above; of scales that span a tensor one ulp of a gradient may move a code, and a loss by 1e-4."""
    for got, expected in zip(facts["recipes-zero3"], facts["recipes-ddp"], strict=True):
        assert got[recipe]["losses"] == pytest.approx(expected[recipe]["losses"], rel=2e-4)
    assert len({tuple(run["losses"]) for run in facts["recipes-ddp"][0].values()}) == 5, "recipes make no difference"


@pytest.mark.parametrize("kind", ["plain", "llama"])
def test_zero3_computes_what_one_process_computes_on_both_batches(facts, kind):
    """Scales by token: only the order of sums over tokens differs. 64 terms in another order differ by up to 64 *
    2**-24 = 4e-6 of their magnitude; a value that moves over a boundary of FP8 moves a loss by less than 2e-4.
    """
    training = alone(kind)
    expected = training.run(make_data(kind, 2), None)
    ranks = facts[f"{kind}-zero3"]
    means = [sum(losses) / 2 for losses in zip(*(got["losses"] for got in ranks), strict=True)]
    assert means == pytest.approx(expected["losses"], rel=2e-4)
    assert ranks[0]["norms"] == pytest.approx(expected["norms"], rel=2e-3)
    assert ranks[0]["lr"] == pytest.approx(expected["lr"])
    assert_near(ranks[0]["weights"], training.weights(), atol=2e-4)


@pytest.mark.parametrize("way", ["zero0", "zero1", "zero2"])
def test_stages_with_bf16_weights_agree(facts, way):
    """Weights, and gradients on the wire, are BF16: where micro-batches are summed before or behind an exchange they
    are rounded elsewhere, by 2**-8 of a gradient that moves a weight by a tenth of it.
    """
    for got, expected in zip(facts[f"bf16-{way}"], facts["bf16-zero3"], strict=True):
        assert got["dtypes"] == expected["dtypes"] == ["torch.bfloat16"]
        assert got["losses"][:MICRO_BATCHES] == expected["losses"][:MICRO_BATCHES]
        assert got["losses"] == pytest.approx(expected["losses"], rel=2e-3)
        assert got["norms"] == pytest.approx(expected["norms"], rel=5e-3)
    masters = facts[f"bf16-{way}"][0]["weights"]
    assert {weight.dtype for weight in masters.values()} == {torch.float32}
    assert any(not torch.equal(weight, weight.bfloat16().float()) for weight in masters.values())
    assert_near(masters, facts["bf16-zero3"][0]["weights"], atol=2e-3)


def test_bf16_weights_train_as_fp32_weights_do(facts):
    """BF16 holds a weight to 2**-9 of itself, FP8's codes to 2**-4."""
    for name in ("bf16-zero3", "bf16-accumulated-in-fp32"):
        got = [loss for of_rank in facts[name] for loss in of_rank["losses"]]
        expected = [loss for of_rank in facts["gated-ddp"] for loss in of_rank["losses"]]
        assert got == pytest.approx(expected, rel=2e-2)


VERIFIED = [f"{kind}-{way}" for kind, ways in BY_WAY.items() for way in ways]


@pytest.mark.parametrize("scenario", [*VERIFIED, *(f"bf16-{way}" for way in ZERO), "fused-zero3", "offload-zero3"])
def test_verify_holds_on_every_rank(facts, scenario):
    for got in facts[scenario]:
        assert got["verified"]["optimizer"].endswith("each in one group")
        moved = got["verified"]["moved and fresh"]
        trained = {"plain": 8, "delayed": 8, "torchao": 8, "offload": 8, "llama": 20, "fused": 20}.get(
            scenario.split("-")[0], 8
        )
        assert moved.startswith(f"{trained} parameters moved"), moved
        assert "resolution" not in moved


def test_fused_mlps_run_as_one_under_zero3(facts):
    """Called by keyword and by position; q, k and v of Llama each run alone there."""
    for scenario in ("gated-zero3", "fused-zero3"):
        for got in facts[scenario]:
            assert "2 of 2 gated MLPs ran as one operation" in got["verified"]["fused"]


@pytest.mark.parametrize("way", ONE_STAGE)
def test_a_resume_at_the_same_stage_is_bit_for_bit(facts, way):
    """ZeRO-3 resumes before its first step, the others behind three of another training."""
    saved, resumed = facts[f"save-{way}-bf16"][0], facts[f"resume-{way}-from-save-{way}"][0]
    assert len(saved["saved"][1]["state"]) == 8
    assert same(resumed["loaded"], saved["saved"])
    assert same(resumed["after"], saved["after"])
    assert same(resumed["end"], saved["end"])
    assert not same(saved["end"][0], saved["saved"][0])
    assert facts[f"save-{way}-bf16"][1]["saved"][0] == {}


@pytest.mark.parametrize("way", NUMBERED)
def test_a_parameter_without_dimensions_leaves_the_moments_of_all_others(facts, way):
    """Its moments look like the optimizer's count of steps, and it comes last."""
    saved, resumed = facts[f"save-number-{way}"][0], facts[f"resume-number-{way}"][0]
    states = saved["saved"][1]["state"]
    assert len(states) == 9
    assert states[max(states)]["exp_avg_sq"].ndim == 0
    assert all(float(values["exp_avg_sq"].sum()) > 0 for values in states.values())
    assert float(saved["saved"][0]["temperature.scale"]) != 1
    for part in ("loaded", "after", "end"):
        assert same(resumed[part], saved["saved" if part == "loaded" else part])


def test_a_resume_at_another_stage_starts_from_the_same_state(facts):
    saved, resumed = facts["save-zero1-bf16"][0], facts["resume-zero3-from-save-zero1"][0]
    assert same(resumed["loaded"], saved["saved"])
    assert resumed["after"]["losses"] == pytest.approx(saved["after"]["losses"], rel=2e-3)


def test_ddp_resumes_from_zero_with_the_masters(facts):
    saved, resumed = facts["save-zero3-bf16"][0], facts["resume-ddp-from-save-zero3"][0]
    weights, states = resumed["loaded"]
    assert same(weights, saved["saved"][0])
    assert same(states["state"], saved["saved"][1]["state"])
    assert resumed["after"]["losses"] == pytest.approx(saved["after"]["losses"], rel=2e-2)


def test_four_processes_resume_as_two_and_as_one(facts, of_four):
    """The four see what two see, twice, so what follows is the same within BF16's rounding."""
    two = facts["resume-zero2-from-save-four"][0]
    assert same(two["loaded"], of_four["saved"])
    assert two["after"]["losses"] == pytest.approx(of_four["after"]["losses"], rel=2e-3)
    one = alone("plain", pace=None, optimizer="adamw")
    one.load(*(two["loaded"]))
    assert same(one.weights(), of_four["saved"][0])
    after = one.run(make_data("plain", 2, seed=8), None)
    means = [
        sum(losses) / 2
        for losses in zip(*(of["after"]["losses"] for of in facts["resume-zero2-from-save-four"]), strict=True)
    ]
    assert means == pytest.approx(after["losses"], rel=2e-2)


@pytest.mark.parametrize("way", ["zero2", "zero3"])
def test_zero_grad_drops_what_was_not_stepped_on(facts, way):
    for got in facts[f"discard-{way}"]:
        assert got["with"][0]["losses"] == got["without"][0]["losses"]
        assert same(got["with"][1], got["without"][1])


@pytest.mark.parametrize("way", ONE_STAGE)
def test_two_losses_of_a_step_add_up_or_raise(facts, way):
    """Without ``no_sync`` ZeRO-1 and 2 would step on the second loss alone."""
    for got, expected in zip(facts[f"two-losses-{way}"], facts["two-losses-ddp"], strict=True):
        if got["weights"]:
            assert_near(got["weights"], expected["weights"], atol=1e-6)
        lost = "GradientError: backward was called again before optimizer.step(); allowed under ZeRO"
        assert got["again"].startswith(lost if way != "zero3" else "nothing was raised")


def test_what_else_an_accelerator_says_under_deepspeed(facts):
    for got, alone_of_rank in zip(facts["two-losses-zero2"], facts["plain-zero2"], strict=True):
        assert got["uneven"].startswith(
            "NotInThisVersionError: join_uneven_inputs got uneven batches and the strategy 'zero2'"
        )
        assert got["precision"].startswith("ConfigError: mixed_precision was set to 'bf16' under DeepSpeed")
        assert got["second"][0] == alone_of_rank["losses"][0]  # after free_memory another training begins


def test_evaluation_and_generation_under_zero3(facts):
    for got, expected in zip(facts["evaluation-zero3"], facts["evaluation-zero2"], strict=True):
        assert got["type"] == "LlamaForCausalLM"
        assert got["logits"].dtype is torch.float32
        torch.testing.assert_close(got["logits"], expected["logits"], rtol=0, atol=1e-3)
        assert torch.equal(got["tokens"], expected["tokens"])
        assert got["after"]["losses"] == pytest.approx(expected["after"]["losses"], rel=2e-4)


@pytest.mark.parametrize("stage", [2, 3])
def test_states_on_the_cpu_change_nothing(facts, stage):
    for got, expected in zip(facts[f"offload-zero{stage}"], facts[f"plain-zero{stage}"], strict=True):
        assert got["losses"] == expected["losses"]
        assert_near(got["weights"], expected["weights"], atol=1e-6)


def test_models_that_transformers_builds_in_parts_are_converted(facts):
    for got in facts["parts"]:
        assert got["parts"].pop("is_in_parts")
        assert not got["whole"].pop("is_in_parts")
        assert got["parts"] == got["whole"]
        assert got["parts"]["layers"] == 14


@pytest.mark.parametrize(
    ("planted", "found"),
    [
        ("zero2, kept", "used codes of an older weight"),
        ("zero2, not gathered", "is not its FP32 master rounded"),
    ],
)
def test_verify_finds_what_is_older_than_the_step(facts, planted, found):
    for got in facts["stale"]:
        assert got["zero2, dropped"].startswith("{")
        assert got[planted].startswith("VerifyError: ")
        assert found in got[planted]


def test_each_rank_sees_its_own_data(facts):
    for scenario in ("plain-zero3", "llama-zero3"):
        first, second = (got["losses"] for got in facts[scenario])
        assert all(a != b for a, b in zip(first, second, strict=True))
        assert all(a != b for a, b in pairwise(first))


@pytest.mark.parametrize(
    ("case", "error", "says"),
    [
        ("model alone", "ConfigError", "got 1 models and 0 optimizers"),
        ("optimizer alone", "ConfigError", "got 0 models and 1 optimizers"),
        ("two models", "ConfigError", "got 2 models and 1 optimizers"),
        ("second model", "ConfigError", "prepare_model(model, evaluation_mode=True)"),
        ("coded states", "ConfigError", "acceler8.optim.AdamW, whose states have formats"),
        ("clip value", "ConfigError", "use clip_grad_norm_"),
        ("clip early", "ConfigError", "if accelerator.sync_gradients:"),
        ("clip inf", "ConfigError", "norm_type inf"),
        ("clip of the file", "ConfigError", "gradient_clipping 0.5"),
        ("group", "ConfigError", "add it before prepare"),
        ("params", "ConfigError", "build it anew"),
        ("closure", "ConfigError", "got a closure"),
        ("shape", "CheckpointError", "has shape [3], the parameter [64, 64]"),
        ("groups", "CheckpointError", "groups of [] parameters"),
        ("number", "ConfigError", "the parameter '1.scale' without dimensions"),
        ("no state", "CheckpointError", "is damaged (KeyError('state'))"),
        ("mixed", "CheckpointError", "momentum_buffer has the shape of some parameters and is one number for others"),
        ("weights", "CheckpointError", "0.weight is [3]; allowed: [64, 64]"),
    ],
)
def test_what_deepspeed_cannot_do_is_refused(facts, case, error, says):
    for got in facts["refusals"]:
        assert got["again"]
        assert got[case].startswith(f"{error}: "), got[case]
        assert says in got[case]


SCRIPT = """
import torch
from torch import nn
from acceler8 import Accelerator

accelerator = Accelerator()
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 48))
optimizer = torch.optim.AdamW(model.parameters())
samples = torch.utils.data.TensorDataset(torch.randn(32, 64), torch.randn(32, 48))
model, optimizer, loader = accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(samples, batch_size=8))
for x, y in loader:
    with accelerator.accumulate(model):
        accelerator.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
plugin = accelerator.deepspeed_plugin
print(
    *("trained", accelerator.distributed_type, accelerator.num_processes, accelerator.process_index),
    *(type(model).__name__, plugin.zero_stage, plugin.deepspeed_config["train_micro_batch_size_per_gpu"]),
    *(plugin.deepspeed_config["gradient_accumulation_steps"], plugin.deepspeed_config["gradient_clipping"]),
    *(len(accelerator.plan.fp8_names), next(model.parameters()).dtype),
    flush=True,
)
accelerator.end_training()
"""


def test_a_launch_on_the_cpu_trains_with_deepspeed(tmp_path: Path):
    """Accelerate leaves DeepSpeed out there, and trains each process alone, without a word."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    flags = "--use_deepspeed --zero_stage 3 --use_cpu --num_processes 2 --mixed_precision fp8"
    more = "--gradient_accumulation_steps 2 --gradient_clipping 1.0"
    command = [sys.executable, "-m", "acceler8", "launch", *flags.split(), *more.split(), str(script)]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    said = sorted(line.split("trained ")[1] for line in done.stdout.splitlines() if "trained " in line)
    assert said == [f"DEEPSPEED 2 {rank} DeepSpeedEngine 3 8 2 1.0 2 torch.bfloat16" for rank in (0, 1)]
