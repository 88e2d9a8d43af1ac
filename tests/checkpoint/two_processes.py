"""One of two processes that train together and save: ``two_processes.py FOLDER``; prints what it saw as JSON."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import torch
from torch import distributed, nn

from acceler8 import Accelerator
from acceler8.checkpoint.project import ProjectConfiguration
from acceler8.errors import CheckpointError
from tests.checkpoint.runs import Counter


class Fails:
    """Cannot be saved, in one process only."""

    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def state_dict(self):
        return {"value": object() if self.fails else 1}

    def load_state_dict(self, state):
        if self.fails:
            raise ValueError("rejected")


def make(folder: Path, seed: int):
    torch.manual_seed(seed)
    config = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(mixed_precision="fp8", recipe="delayed", cpu=True, project_config=config)
    model = nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    return accelerator, model, optimizer, counter


def train(accelerator, model, optimizer, counter, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        x = torch.randn(16, 32) + random.random()  # each process draws its own
        loss = (model(x) - x).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        counter.add(1.0)
        losses.append(loss.item())
    return losses


def error_of(call) -> str:
    try:
        call()
    except CheckpointError as error:
        return str(error)
    return ""


def main(folder: Path) -> None:
    run = make(folder, 0)
    accelerator = run[0]
    rank = accelerator.process_index
    torch.manual_seed(100 + rank)
    random.seed(100 + rank)
    train(*run, 2)
    accelerator.save_state()
    expected = train(*run, 2)
    accelerator.save_state(progress={"second": True})
    found = {"expected": expected}

    again = make(folder, 1)
    found["resumed_at"] = again[0].load_state(folder / "checkpoints" / "checkpoint_0").steps
    found["resumed"] = train(*again, 2)
    found["newest"] = again[0].load_state().progress
    found["next"] = again[0].save_iteration

    broken = make(folder, 2)
    broken[0].register_for_checkpointing(Fails(rank == 0))
    broken[0].project_configuration.iteration = 7
    found["save_error"] = error_of(broken[0].save_state)

    kind = make(folder, 3)
    kind[0].project_configuration.iteration = 8
    kind[0].register_for_checkpointing(Fails(False))
    kind[0].save_state()
    kind[0]._custom_objects[-1].fails = rank == 1
    found["load_error"] = error_of(kind[0].load_state)
    distributed.barrier()
    found["left"] = sorted(path.name for path in (folder / "checkpoints").iterdir())
    accelerator.save_model(run[1], folder / "export")
    accelerator.end_training()
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
