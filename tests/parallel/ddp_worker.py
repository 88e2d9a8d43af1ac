"""One of two processes of ``test_ddp.py``: ``ddp_worker.py FOLDER``; leaves what each scenario gave in FOLDER."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import acceler8
from acceler8.errors import ProcessesDisagreeError
from acceler8.nn import find_states
from acceler8.parallel import ReplicatedProcesses
from acceler8.parallel.disagreement import explained

RECIPES = ("rowwise", "delayed")
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bucket_view": {"gradient_as_bucket_view": True},
    "static_graph": {"static_graph": True},
    "find_unused": {"find_unused_parameters": True},
    "compile": {},
}
STEPS, ROWS, WIDTH = 3, 16, 32
TIMEOUT_S = 2.0


class Branches(nn.Module):
    """Two branches of which a process may run one, or both, before a common head."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        chance = torch.Generator().manual_seed(0)
        for p in self.parameters():
            nn.init.normal_(p, std=WIDTH**-0.5, generator=chance)

    def forward(self, x: Tensor, runs: str = "ab") -> Tensor:
        return self.head(sum(branch(x).relu() for name, branch in (("a", self.a), ("b", self.b)) if name in runs))


class Training:
    """A model of both processes, made by hand, without an Accelerator."""

    def __init__(self, recipe: str, **options: Any) -> None:
        model = Branches()
        model = acceler8.convert(model, acceler8.plan(model, recipe=recipe, backend="native"))
        self.strategy = ReplicatedProcesses(torch.device("cpu"), dist.get_rank(), dist.get_world_size(), options)
        self.model, self.inner = self.strategy.wrap(model), model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        acceler8.attach(model, self.optimizer)
        self.chance = torch.Generator().manual_seed(1 + dist.get_rank())

    def backward(self, *arguments: Any, model: Callable[..., Tensor] | None = None) -> None:
        x = torch.randn(ROWS, WIDTH, generator=self.chance) * (1 + 2 * dist.get_rank())
        loss = (self.model if model is None else model)(x, *arguments).square().mean()
        self.strategy.backward(loss, is_last=True)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def warm_up(self) -> None:
        """DDP orders its buckets anew in the second forward, with a collective; after that they all are in backward."""
        for _ in range(2):
            self.backward()
            self.step()

    def weights(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.inner.parameters()])


def counted(act: Callable[[], None]) -> int:
    """How many collectives Python code starts in ``act``; DDP's own, of gradients, start in C++."""
    plain, calls = dist.all_reduce, []
    dist.all_reduce = lambda *a, **k: (calls.append(a), plain(*a, **k))[1]
    try:
        act()
    finally:
        dist.all_reduce = plain
    return len(calls)


def train(recipe: str, option: str) -> dict[str, Any]:
    training = Training(recipe, **OPTIONS[option])
    model = torch.compile(training.model, backend="aot_eager") if option == "compile" else None
    collectives = []
    for _ in range(STEPS):
        training.backward(model=model)
        collectives.append(counted(training.step))
    return {"weights": training.weights(), "collectives": collectives}


def accumulate(recipe: str, *, syncs_once: bool) -> dict[str, Any]:
    """Two micro-batches a step; the gradients of both are averaged, or only their sum."""
    training = Training(recipe)
    for _ in range(STEPS):
        if syncs_once:
            with training.strategy.no_sync(training.model):
                training.backward()
        else:
            training.backward()
        training.backward()
        training.step()
    return {"weights": training.weights()}


def different_branches(recipe: str) -> dict[str, Any]:
    training = Training(recipe, find_unused_parameters=True)
    for _ in range(STEPS):
        training.backward("ab"[dist.get_rank()])
        training.step()
    amax = find_states(training.inner)[0].amax
    return {"weights": training.weights(), "amax": None if amax is None else amax.data}


def error_of(act: Callable[[], None]) -> dict[str, Any]:
    """How ``act`` failed, and when."""
    start = time.monotonic()
    try:
        act()
    except RuntimeError as error:
        return {
            "error": str(error),
            "is_ours": isinstance(error, ProcessesDisagreeError),
            "after_s": time.monotonic() - start,
        }
    return {"error": None}


def in_rank_0(act: Callable[[], None], done: Path) -> dict[str, Any]:
    """How ``act`` fails in rank 0, while rank 1 is busy with something else, until ``done`` exists."""
    if dist.get_rank() == 0:
        found = error_of(act)
        done.touch()
        return found
    while not done.exists():
        time.sleep(0.02)
    return {"error": None}


def more_steps(recipe: str, folder: Path) -> dict[str, Any]:
    """Rank 0 makes a step more than rank 1, which is busy with something else then."""
    training = Training(recipe)
    training.warm_up()
    return in_rank_0(training.backward, folder / f"done-{recipe}")


def branches_unannounced(recipe: str) -> dict[str, Any]:
    """Each process runs another branch, of which DDP has not been told."""
    training = Training(recipe)

    def go_on() -> None:
        for _ in range(4):
            training.backward("ab"[dist.get_rank()])
            training.step()

    return error_of(go_on)


def step_without_the_other(folder: Path) -> dict[str, Any]:
    """Gradients are averaged, but only rank 0 makes the step, and so exchanges amaxes."""
    training = Training("delayed")
    training.warm_up()
    training.backward()
    return in_rank_0(training.step, folder / "done-step")


def both_wait() -> dict[str, Any]:
    """Each waits for a word of the other, a step apart and behind another branch."""
    rank = dist.get_rank()

    def wait() -> None:
        with explained("backward", lambda: 7 + rank, lambda: {"FP8 operands": [f"{'ab'[rank]}.x", "head.x"]}):
            dist.recv(torch.zeros(1), 1 - rank)

    return error_of(wait)


def scenarios(folder: Path) -> dict[str, Callable[[], dict[str, Any]]]:
    """Those that fail come last; each of them needs a new process group afterwards."""
    found: dict[str, Callable[[], dict[str, Any]]] = {}
    for recipe in RECIPES:
        found |= {f"{recipe}-{option}": partial(train, recipe, option) for option in OPTIONS}
        found[f"{recipe}-synced_twice"] = partial(accumulate, recipe, syncs_once=False)
        found[f"{recipe}-no_sync"] = partial(accumulate, recipe, syncs_once=True)
        found[f"{recipe}-different_branches"] = partial(different_branches, recipe)
    for recipe in RECIPES:
        found[f"fails-{recipe}-branches_unannounced"] = partial(branches_unannounced, recipe)
    found["fails-rowwise-more_steps"] = partial(more_steps, "rowwise", folder)
    found["fails-delayed-step_without_the_other"] = partial(step_without_the_other, folder)
    found["fails-both_wait"] = both_wait
    return found


def main(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    group = 0
    for name, act in scenarios(folder).items():
        if name.startswith("fails-") or not dist.is_initialized():
            if dist.is_initialized():
                dist.destroy_process_group()
            group += 1
            store = dist.FileStore(str(folder / f"store-{group}"), 2)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
            if name.startswith("fails-"):
                dist.barrier()
                dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))._set_default_timeout(
                    timedelta(seconds=TIMEOUT_S)
                )
        try:
            torch.save(act(), folder / f"{name}.{rank}.pt")
        except Exception:
            (folder / f"{name}.{rank}.txt").write_text(traceback.format_exc())
            raise
        print(name, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
