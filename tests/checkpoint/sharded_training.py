"""Trainings in several forms that save and resume each other's checkpoints: ``sharded_training.py FOLDER quick|slow``.

This process imports and forks; ``FOLDER/facts.pt`` then holds what each process saw, for the tests to judge.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first optimizer would import it, in every training
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from acceler8.accelerator.processes import join_processes
from acceler8.checkpoint import load
from acceler8.checkpoint.manifest import file_entry
from acceler8.checkpoint.sharded import read_shards, write_index, write_shard
from acceler8.errors import CheckpointError
from tests.checkpoint.forks import run
from tests.checkpoint.sharded_runs import Sharded
from tests.checkpoint.support import assert_same

STEPS, MORE = 3, 2
Kind = tuple[str, int, str]  # form, processes, optimizer
SAVED: tuple[Kind, ...] = (
    ("shards", 4, "fp8"),
    ("whole", 2, "adamw"),
    ("ddp", 2, "fp8"),
    ("single", 1, "adamw"),
)
RESUMED: tuple[tuple[Kind, tuple[str, int]], ...] = (
    (("shards", 4, "fp8"), ("shards", 4)),
    (("shards", 4, "fp8"), ("shards", 2)),
    (("shards", 4, "fp8"), ("single", 1)),
    (("ddp", 2, "fp8"), ("shards", 4)),
    (("single", 1, "adamw"), ("shards", 2)),
)
SLOW_SAVED: tuple[Kind, ...] = (("shards", 4, "adamw"), ("shards", 2, "fp8"), ("whole", 4, "fp8"), ("single", 1, "fp8"))
SLOW_RESUMED: tuple[tuple[Kind, tuple[str, int]], ...] = (
    (("shards", 4, "adamw"), ("shards", 4)),
    (("shards", 4, "adamw"), ("shards", 2)),
    (("shards", 4, "adamw"), ("single", 1)),
    (("shards", 2, "fp8"), ("shards", 4)),
    (("shards", 2, "fp8"), ("ddp", 2)),
    (("whole", 4, "fp8"), ("whole", 4)),
    (("whole", 4, "fp8"), ("shards", 2)),
    (("whole", 4, "fp8"), ("single", 1)),
    (("single", 1, "fp8"), ("shards", 4)),
)


def folder_of(folder: Path, form: str, count: int, optimizer: str) -> Path:
    return folder / f"{form}-{count}-{optimizer}"


def saves(folder: Path, form: str, optimizer: str) -> dict[str, Any]:
    training = Sharded(form, optimizer)
    training.train(0, STEPS)
    training.save(folder_of(folder, form, training.count, optimizer))
    facts = {"state": training.everything(), "moments": training.moments()}
    facts["losses"] = training.train(STEPS, STEPS + MORE)
    exported = training.accelerator.get_state_dict(training.model)
    facts["exported"] = sorted(exported)
    training.accelerator.save_model(training.model, folder / "exports" / f"{form}-{training.count}-{optimizer}")
    facts["last"] = training.everything()["model"]
    training.accelerator.end_training()
    return facts


def resumes(source: Path, form: str, optimizer: str) -> dict[str, Any]:
    training = Sharded(form, optimizer, seed=7)
    training.train(50, 51)  # state to load over
    report = training.accelerator.load_state(source)
    facts = {"state": training.everything(), "moments": training.moments(), "reset": report.reset}
    facts["losses"] = training.train(STEPS, STEPS + MORE)
    facts["last"] = training.everything()["model"]
    training.accelerator.end_training()
    return facts


def windows(folder: Path) -> dict[str, Any]:
    """A save between two micro-batches, whose gradients the engine keeps."""
    training = Sharded("shards", window=2)
    training.train(0, 3)
    training.save(folder)
    again = Sharded("shards", window=2)
    report = again.accelerator.load_state(folder)
    facts = {"reset": report.reset, "window": again.accelerator.gradients.micro_batch}
    again.train(3, 5)
    facts["steps"] = again.accelerator.clock.ticks
    training.accelerator.end_training()
    return facts


def damages(source: Path, folder: Path) -> dict[str, Any]:
    """What each process says of a damaged checkpoint, and whether its objects stayed as they were."""
    training = Sharded("shards", seed=3)
    training.train(0, 1)
    before, facts = training.everything(), {}
    for name in DAMAGES:
        target = folder / name
        if training.rank == 0:
            shutil.copytree(source, target)
            DAMAGES[name](target)
        dist.barrier()
        facts[name] = error_of(lambda target=target: training.accelerator.load_state(target))
        assert_same(training.everything(), before)
    training.accelerator.end_training()
    return facts


def _flip(target: Path) -> None:
    path = target / "model.shard-00003-of-00004.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def _rewrite_index(target: Path, change: Any) -> None:
    """Change an index and its entry in the manifest, as no accident does."""
    path, manifest = target / "optimizer.shards.json", target / "checkpoint.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    listed = json.loads(manifest.read_text())
    listed["files"][path.name] = file_entry(path)
    manifest.write_text(json.dumps(listed))


DAMAGES = {
    "missing": lambda target: (target / "optimizer.shard-00002-of-00004.safetensors").unlink(),
    "flipped": _flip,
    "fewer": lambda target: _rewrite_index(target, lambda index: index.update(processes=3)),
    "larger": lambda target: _rewrite_index(
        target, lambda index: index["tensors"]["state.up.weight.exp_avg"].update(shape=[101, 128])
    ),
    "nameless": lambda target: _rewrite_index(target, lambda index: index["tensors"].pop("state.up.bias.exp_avg")),
}


def is_killed(folder: Path, victim: int, flushes: int) -> str:
    """Save over an older checkpoint; one process dies in a flush. What the others raise, in words."""
    training = Sharded("shards")
    training.train(0, 1)
    training.save(folder)
    training.train(1, 2)
    if training.rank == victim:
        _arm(flushes)
    try:
        training.save(folder)
    except (RuntimeError, CheckpointError) as error:
        return f"{type(error).__name__}"
    return ""


def _arm(count: int) -> None:
    flush, left = os.fsync, [count]

    def dying(handle: int) -> None:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        flush(handle)

    os.fsync = dying


def layouts(folder: Path) -> dict[str, Any]:
    """Whole tensors through every kind of placement on a mesh of 2 x 2, and back in each other kind."""
    processes = join_processes(os.environ, "cpu", True)
    mesh = init_device_mesh("cpu", (2, 2))
    kinds = {
        "rows": (Shard(0), Shard(0)),
        "hybrid": (Replicate(), Shard(0)),
        "both": (Shard(0), Shard(1)),
        "columns": (Replicate(), Shard(1)),
        "replicas": (Replicate(), Replicate()),
    }
    tensors = {f"t{rows}x{cols}": torch.randn(rows, cols) for rows in (8, 5, 1) for cols in (6, 1)}
    tensors = {name: t.contiguous() for name, t in tensors.items()} | {"empty": torch.empty(0, 3)}
    for tensor in tensors.values():
        dist.broadcast(tensor, 0)
    tensors["codes"] = tensors["t8x6"].to(torch.float8_e4m3fn)
    facts = {}
    for kind, placements in kinds.items():
        held = {name: spread(tensor, mesh, placements) for name, tensor in tensors.items()}
        held["plain"] = torch.arange(3.0)
        write_shard(folder, kind, held, processes.process_index, 4)
        if processes.process_index == 0:
            write_index(folder, kind, held, 4)
        dist.barrier()
        stored = read_shards([path.name for path in folder.iterdir()], folder.joinpath, kind)
        assert_same({name: piece.whole(copy=True) for name, piece in stored.items() if name != "plain"}, tensors)
        for other in kinds.values():
            for name, tensor in tensors.items():
                like = spread(tensor, mesh, other)
                assert_same(stored[name].like(like)._local_tensor, like._local_tensor)
        files = [load_file(folder / f"{kind}.shard-0000{i}-of-00004.safetensors") for i in (1, 2, 3, 4)]
        facts[kind] = sum(t.numel() for file in files for t in file.values())
        dist.barrier()
    summed = DTensor.from_local(torch.ones(2), mesh, (Partial(), Replicate()))
    facts["partial"] = error_of(lambda: write_shard(folder, "partial", {"x": summed}, 0, 4))
    facts["expected"] = sum(t.numel() for t in tensors.values()) + 3
    processes.end()
    return facts


def spread(tensor: torch.Tensor, mesh: Any, placements: Any) -> DTensor:
    """A DTensor made without a collective, for gloo carries no FP8."""
    part = tensor
    for size, at, placement in zip(mesh.shape, mesh.get_coordinate(), placements, strict=True):
        if isinstance(placement, Shard):
            step = -(-part.shape[placement.dim] // size)
            begin = min(step * at, part.shape[placement.dim])
            part = part.narrow(placement.dim, begin, min(step, part.shape[placement.dim] - begin))
    part = part.contiguous().clone()
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride())


def error_of(call: Any) -> str:
    try:
        call()
    except CheckpointError as error:
        return str(error)
    return ""


def gathers(folder: Path) -> dict[str, Any]:
    """Weights that travel in FP8, by each backend: their shards are in a library's subclass, or carry hooks."""
    facts = {}
    for backend in ("native", "torchao"):
        training = Sharded("shards", gathers=backend)
        training.train(0, STEPS)
        training.save(folder / backend)
        state, losses = training.everything(), training.train(STEPS, STEPS + MORE)
        again = Sharded("shards", gathers=backend, seed=7)
        again.train(50, 51)
        again.accelerator.load_state(folder / backend)
        assert_same(again.everything(), state)
        facts[backend] = (losses, again.train(STEPS, STEPS + MORE))
    training.accelerator.end_training()
    return facts


def main(folder: Path, kinds: str) -> None:
    facts: dict[str, Any] = {"saved": {}, "resumed": {}, "killed": {}}
    for form, count, optimizer in SLOW_SAVED if kinds == "slow" else SAVED:
        facts["saved"][form, count, optimizer] = run(count, saves, folder, form, optimizer)
    for source, (form, count) in SLOW_RESUMED if kinds == "slow" else RESUMED:
        facts["resumed"][source, (form, count)] = run(count, resumes, folder_of(folder, *source), form, source[2])
    if kinds == "slow":
        facts["gathers"] = run(2, gathers, folder / "gathers")
    else:
        _more(folder, facts)
    torch.save(facts, folder / "facts.pt")


def _more(folder: Path, facts: dict[str, Any]) -> None:
    facts["windows"] = run(2, windows, folder / "window")
    facts["damaged"] = run(2, damages, folder_of(folder, "shards", 4, "fp8"), folder / "damaged")
    (folder / "layouts").mkdir()
    facts["layouts"] = run(4, layouts, folder / "layouts")
    for victim, flushes in ((0, 3), (2, 2)):
        target = folder / f"killed-{victim}"
        told = run(4, is_killed, target, victim, flushes, dies=(victim,))
        checkpoint = load(target)
        checkpoint.verify()
        steps = checkpoint.part("acceler8_state")["steps"]
        (resumed,) = {tuple(each["losses"]) for each in run(1, resumes, target, "single", "adamw")}
        facts["killed"][victim, flushes] = {"told": told, "steps": steps, "resumed": resumed}


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
