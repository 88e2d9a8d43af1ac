"""Loaders that some processes leave in the middle of an epoch and others go on with: ``resume_data.py FOLDER``.

This process imports and forks; ``FOLDER/facts.pt`` then holds the samples that each process saw.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first optimizer would import it, in every process
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from acceler8 import Accelerator
from acceler8.utils import DataLoaderConfiguration
from tests.checkpoint.forks import run

SAMPLES, ROUNDS = 101, 3


class Stream(IterableDataset):
    def __init__(self, count: int = SAMPLES) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))

    def __len__(self) -> int:
        return self.count


class AnySize:
    """Batches of 1 to 5 samples, which has no ``batch_size``."""

    def __iter__(self) -> Iterator[list[int]]:
        at = 0
        for i in range(len(self)):
            yield list(range(at, min(at + 1 + i % 5, SAMPLES)))
            at += 1 + i % 5

    def __len__(self) -> int:
        return 35  # 15 samples in 5 batches: 90 in 30, 10 in 4, and the last one


Options = dict[str, Any]
# name -> what the loader is made of, and how it is spread
LOADERS: dict[str, tuple[Options, Options]] = {
    "in order": ({}, {}),
    "shuffled": ({"shuffle": True}, {}),
    "by seed": ({"shuffle": True}, {"use_seedable_sampler": True, "data_seed": 5}),
    "stateful": ({"kind": StatefulDataLoader, "shuffle": True}, {}),
    "split": ({"batch_size": 8, "shuffle": True}, {"split_batches": True}),
    "not even": ({"shuffle": True}, {"even_batches": False}),
    "drop last": ({"drop_last": True}, {}),
    "two workers": ({"num_workers": 2, "shuffle": True}, {}),
    "dispatched": ({"shuffle": True}, {"dispatch_batches": True}),
    "dispatched in parts": ({"batch_size": 8}, {"dispatch_batches": True, "split_batches": True}),
    "any size": ({"batch_sampler": AnySize}, {}),
    "subset": ({"sampler": lambda: SubsetRandomSampler(range(SAMPLES))}, {}),
    "stream": ({"stream": True}, {}),
    "stream of each": ({"stream": True}, {"dispatch_batches": False}),
    "stream of a worker": ({"stream": True, "num_workers": 1}, {"dispatch_batches": False}),
    "windows": ({"shuffle": True, "window": 2}, {}),
    "same total": ({"shuffle": True, "total": 8}, {}),
}
CHANGES = ((4, 2), (2, 4), (4, 1), (1, 4), (2, 1), (1, 2))


def start(name: str, count: int, seed: int) -> tuple[Accelerator, Any]:
    torch.manual_seed(seed)
    made, spread = dict(LOADERS[name][0]), LOADERS[name][1]
    window, total = made.pop("window", 1), made.pop("total", None)
    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(**spread), gradient_accumulation_steps=window
    )
    kind = made.pop("kind", DataLoader)
    dataset = Stream() if made.pop("stream", False) else range(SAMPLES)
    options: Options = {"batch_size": total // count if total else 4} | made
    for key in ("sampler", "batch_sampler"):
        if key in options:
            options[key] = options[key]()
    if "batch_sampler" in options:
        del options["batch_size"]
    model = torch.nn.Linear(1, 1)
    model, _, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), 0.0), kind(dataset, collate_fn=torch.tensor, **options)
    )
    return accelerator, (model, loader)


def leave(folder: Path, count: int, epochs: int) -> dict[str, Any]:
    """What each loader gave in an epoch that is left behind some rounds."""
    logging.disable(logging.WARNING)
    facts = {}
    for name in LOADERS:
        accelerator, (model, loader) = start(name, count, seed=accelerator_seed(count))
        for _ in range(epochs):
            list(loader)
        used = read(accelerator, model, loader, ROUNDS)
        accelerator.save_state(folder / name)
        facts[name] = used
    accelerator.end_training()
    return facts


def go_on(folder: Path, count: int, again: Path | None = None) -> dict[str, Any]:
    """What each loader gives then: the rest of the epoch, and the next one."""
    logging.disable(logging.WARNING)
    facts = {}
    for name in LOADERS:
        accelerator, (model, loader) = start(name, count, seed=100 + accelerator_seed(count))
        report = accelerator.load_state(folder / name)
        if again is not None:
            rest = read(accelerator, model, loader, 2)
            accelerator.save_state(again / name)
        else:
            rest = [batch.tolist() for batch in loader]
        remainder = loader.remainder
        following = [] if again else [batch.tolist() for batch in loader]
        facts[name] = {"rest": rest, "next": following, "reset": report.reset, "remainder": remainder}
    accelerator.end_training()
    return facts


def accelerator_seed(count: int) -> int:
    """Each process its own: what must be alike is for the loaders to see to."""
    import os

    return 10 * count + int(os.environ.get("RANK", 0))


def read(accelerator: Accelerator, model: Any, loader: Any, rounds: int) -> list[list[int]]:
    """The next batches, each a micro-batch of the loop."""
    batches, found = iter(loader), []
    for _ in range(rounds):
        batch = next(batches)
        with accelerator.accumulate(model):
            accelerator.backward(model(batch[:, None].float()).sum())
        found.append(batch.tolist())
    return found


def main(folder: Path) -> None:
    facts: dict[str, Any] = {"used": {}, "rest": {}}
    for count in (1, 2, 4):
        facts["used"][count] = run(count, leave, folder / str(count), count, int(count == 2))
    for was, now in CHANGES:
        facts["rest"][was, now] = run(now, go_on, folder / str(was), now)
    facts["middle"] = run(2, go_on, folder / "4", 2, folder / "again")  # two rounds, and saved
    facts["end"] = {count: run(count, go_on, folder / "again", count) for count in (2, 1)}
    torch.save(facts, folder / "facts.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
