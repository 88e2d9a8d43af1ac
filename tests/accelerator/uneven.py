"""Uneven batches under FSDP2, in two processes: ``uneven.py FOLDER``; ``FOLDER/facts.pt`` has what each met."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from torch import nn
from torch.utils.data import DataLoader

from acceler8 import Accelerator
from acceler8.errors import Acceler8Error
from acceler8.utils import DataLoaderConfiguration, FullyShardedDataParallelPlugin
from tests.checkpoint.forks import run

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "short": ({"dataset": 12}, {}),  # three batches of 4
    "even by itself": ({"dataset": 14}, {}),
    "dropped": ({"dataset": 12, "drop_last": True}, {}),
    "copies": ({"dataset": 12}, {"even_batches": True}),
    "split, short": ({"dataset": 10}, {"split_batches": True}),
    "split, a piece for each": ({"dataset": 11}, {"split_batches": True}),
    "no length": ({"batch_sampler": iter([[0, 1], [2]])}, {}),
}


def scenario() -> dict[str, Any]:
    facts = {}
    for name, (made, spread) in CASES.items():
        config = DataLoaderConfiguration(**{"even_batches": False} | spread)
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
        accelerator = Accelerator(cpu=True, dataloader_config=config, fsdp_plugin=plugin)
        options = {"batch_size": 4} | made if "batch_sampler" not in made else dict(made)
        loader = DataLoader(torch.arange(float(options.pop("dataset", 3)))[:, None], **options)
        model, loader = accelerator.prepare(nn.Linear(1, 1), loader)
        try:
            batches = 0
            for batch in loader:
                accelerator.backward(model(batch).sum())
                batches += 1
            facts[name] = batches
        except Acceler8Error as error:
            facts[name] = str(error)
    try:
        with accelerator.join_uneven_inputs([model], even_batches=False):
            pass
    except NotImplementedError as error:
        facts["join"] = str(error)
    with accelerator.join_uneven_inputs([model], even_batches=True):
        facts["join, even"] = True
    accelerator.end_training()
    return facts


if __name__ == "__main__":
    torch.save(run(2, scenario), Path(sys.argv[1]) / "facts.pt")
