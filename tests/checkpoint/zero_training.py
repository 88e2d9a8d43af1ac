"""Trainings under DeepSpeed's ZeRO that save and resume: ``zero_training.py FOLDER FROM:COUNT TO:COUNT,TO:COUNT ...``.

This process imports and forks; ``FOLDER/facts.pt`` then holds what each process saw.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import deepspeed  # noqa: F401 (once, ahead of the forks)
import torch
import torch._dynamo  # the first optimizer would import it, in every training

from acceler8.errors import CheckpointError
from tests.checkpoint.forks import run
from tests.checkpoint.sharded_runs import Sharded
from tests.checkpoint.support import assert_same

STEPS, MORE = 3, 2


def saves(folder: Path, form: str) -> dict[str, Any]:
    training = Sharded(form)
    training.train(0, STEPS)
    training.save(folder)
    facts = {"state": training.everything(), "losses": training.train(STEPS, STEPS + MORE)}
    facts["last"] = training.everything()["model"]
    training.accelerator.save_model(training.model, folder.with_name(folder.name + "-export"))
    return facts


def resumes(folder: Path, form: str) -> dict[str, Any]:
    training = Sharded(form, seed=7)
    training.train(50, 51)  # state to load over
    report = training.accelerator.load_state(folder)
    facts = {"state": training.everything(), "reset": report.reset}
    facts["losses"] = training.train(STEPS, STEPS + MORE)
    facts["last"] = training.everything()["model"]
    if training.accelerator.strategy.is_engine and training.count > 1:
        facts["told"] = one_fails(training, folder)
    return facts


def one_fails(training: Sharded, folder: Path) -> str:
    """What each process says where the last one cannot load a model that the engine has sent it."""

    def fails(*args: Any, **kwargs: Any) -> None:
        raise ValueError("planted")

    if training.rank == training.count - 1:
        training.accelerator.strategy.unwrap(training.model).load_state_dict = fails
    try:
        training.accelerator.load_state(folder)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def is_damaged(folder: Path, form: str) -> str:
    training = Sharded(form, seed=3)
    training.train(0, 1)
    before = training.everything()
    try:
        training.accelerator.load_state(folder)
    except CheckpointError as error:
        assert_same(training.everything(), before)
        return str(error)
    return ""


def main(folder: Path, *pairs: str) -> None:
    facts: dict[str, Any] = {"saved": {}, "resumed": {}}
    for source, targets in zip(pairs[::2], pairs[1::2], strict=True):
        form, _, count = source.partition(":")
        saved = folder / source.replace(":", "-")
        facts["saved"][source] = run(int(count), saves, saved, form)
        for target in targets.split(","):
            now, _, number = target.partition(":")
            facts["resumed"][source, target] = run(int(number), resumes, saved, now)
        path = saved / "optimizer.safetensors"
        if path.exists():
            content = bytearray(path.read_bytes())
            content[-1] ^= 1
            path.write_bytes(content)
            facts["damaged", source] = run(2, is_damaged, saved, form if form.startswith("zero") else "zero2")
    torch.save(facts, folder / "facts.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
