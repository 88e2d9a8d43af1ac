"""A training that is killed and started again until it is through: ``killed_training.py FOLDER [--kills N]``.

This process imports and forks; it computes nothing itself, so that each training starts clean without importing anew.
Prints what happened as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import time
from pathlib import Path

import torch
import torch._dynamo  # the first optimizer would import it, in every training

from acceler8.checkpoint.project import ProjectConfiguration
from tests.checkpoint.runs import Run


def train(folder: Path, log: Path, until: int, *, saves: bool, die_in_fsync: int | None = None) -> None:
    """Train to micro-batch ``until``, each loss a line in ``log``; resume and save if it ``saves``."""
    torch.set_num_threads(1)
    config = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=2)
    run = Run(seed=0, project_config=config)
    torch.manual_seed(1)
    if (folder / "checkpoints").is_dir():
        run.load()
    if die_in_fsync is not None:
        arm(die_in_fsync)
    with log.open("a") as file:
        while run.counter.seen < until:
            number = run.counter.seen
            file.write(f"{number} {run.micro_batch().hex()}\n")
            file.flush()
            if saves:
                run.accelerator.save_state()


def arm(count: int) -> None:
    """Die in the ``count``-th flush from now on, which is in the middle of a save."""
    flush, left = os.fsync, [count]

    def dying(handle: int) -> None:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        flush(handle)

    os.fsync = dying


def start(*args, **kwargs) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            train(*args, **kwargs)
            os._exit(0)
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
    return pid


def ended(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def losses(log: Path) -> dict[str, set[str]]:
    """Every loss that any of the trainings computed for a micro-batch."""
    found: dict[str, set[str]] = {}
    for line in log.read_text().splitlines():
        number, _, loss = line.partition(" ")
        if number and "p" in loss:  # the kill may have cut a line
            found.setdefault(number, set()).add(loss)
    return found


def half_written(folder: Path) -> bool:
    return any(folder.glob("checkpoints/.checkpoint_*"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=1, help="at random moments, beside one in the middle of a save")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--until", type=int, default=40)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    plain, log, project = options.folder / "plain.log", options.folder / "log", options.folder / "project"
    options.folder.mkdir(parents=True, exist_ok=True)
    assert ended(start(options.folder / "none", plain, options.until, saves=False)) == 0

    codes, in_save = [], 0
    codes.append(ended(start(project, log, options.until, saves=True, die_in_fsync=chance.randint(40, 80))))
    in_save += half_written(project)
    while len(codes) <= options.kills:
        size = log.stat().st_size
        pid = start(project, log, options.until, saves=True)
        while log.stat().st_size == size and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.08))
        os.kill(pid, signal.SIGKILL)
        codes.append(ended(pid))
        in_save += half_written(project)
    codes.append(ended(start(project, log, options.until, saves=True)))
    got, want = losses(log), losses(plain)
    print(
        json.dumps(
            {
                "codes": codes,
                "in_save": in_save,
                "computed": len(got),
                "wanted": options.until,
                "differ": [number for number in want if got.get(number) != want[number]],
                "left": sorted(path.name for path in (project / "checkpoints").iterdir()),
            }
        )
    )


if __name__ == "__main__":
    main()
