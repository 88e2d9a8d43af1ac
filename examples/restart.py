"""A training that goes on after a crash: launch starts it again, and it resumes from its last whole checkpoint.

acceler8 launch --num_processes 2 --max_restarts 3 examples/restart.py
acceler8 launch --num_processes 2 --max_restarts 3 examples/restart.py --crash_at 7     # crashes once, ends the same

On SIGTERM, as a cluster sends it before it takes a node away, all processes save behind the same step and end; the next
start goes on there. Behind the last step a start has nothing to do.

The same line works on several machines (docs/multi_node.md); the project folder must then be on a disk that all share.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from acceler8 import Accelerator
from acceler8.utils import NativeRecipeKwargs, ProjectConfiguration


def make_data(batch: int) -> DataLoader:
    """Numbers whose sines are to be found; shuffled, in an order that a checkpoint keeps."""
    chance = torch.Generator().manual_seed(0)
    x = torch.randn(512, 32, generator=chance)
    return DataLoader(TensorDataset(x, torch.sin(3 * x)), batch, shuffle=True, drop_last=True)


def train(args: argparse.Namespace) -> None:
    project = ProjectConfiguration(args.project, automatic_checkpoint_naming=True, total_limit=2)
    fp8 = NativeRecipeKwargs(recipe=args.recipe)
    accelerator = Accelerator(mixed_precision="fp8", cpu=args.cpu, project_config=project, kwargs_handlers=[fp8])
    signal.signal(signal.SIGTERM, lambda *_: accelerator.set_trigger())  # a step is never broken off in the middle
    torch.manual_seed(args.seed)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, make_data(args.batch))

    step = 0
    if any(Path(args.project, "checkpoints").glob("checkpoint_[0-9]*")):  # a start after a crash, or by hand
        step = accelerator.load_state().progress["step"]  # weights, optimizer, scales, place in the data, dice
        accelerator.print(f"resumed at step {step}")
        if step >= args.steps:  # a job that is requeued behind its end
            accelerator.print("nothing is left to train")
            accelerator.end_training()
            return
    while step < args.steps:
        for x, y in loader:
            loss = mse_loss(model(x), y)
            crash_once(step, args)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            stop = accelerator.check_trigger()  # in any process: all save behind the same step
            if step % args.save_every == 0 or stop:
                accelerator.save_state(progress={"step": step})
            if stop:
                accelerator.print(f"stopped behind step {step}, which is saved")
                sys.exit(128 + signal.SIGTERM)
            if step == args.steps:
                break
    weights = b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())
    name = hashlib.sha256(weights).hexdigest()[:16]
    accelerator.print(f"step {step}: loss {loss.item().hex()}, weights {name}")
    accelerator.end_training()


def crash_once(step: int, args: argparse.Namespace) -> None:
    """Stand in for a machine's accident: the last rank ends in the middle of a step, at the first attempt."""
    attempt, rank, ranks = (int(os.environ[n]) for n in ("TORCHELASTIC_RESTART_COUNT", "RANK", "WORLD_SIZE"))
    if step == args.crash_at and attempt == 0 and rank == ranks - 1:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--project", default="runs/restart", help="folder for the checkpoints")
    parser.add_argument("--recipe", default="rowwise", help="a recipe of the native backend")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--crash_at", type=int, default=-1, help="step in which the last rank is killed, once")
    for name, value in {"steps": 20, "batch": 32, "save_every": 5, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    train(parser.parse_args())
