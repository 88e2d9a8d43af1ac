"""One part of a training on a GPU in a process of its own: ``resumed_on_gpu.py RECIPE FOLDER whole|first|second``.

Prints the losses to the bit, and a digest of the parameters and of the optimizer's state.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import torch

from tests.checkpoint.runs import Run

STEPS, STOP = 12, 5


def digest(tree: object, into: hashlib._Hash) -> hashlib._Hash:
    if isinstance(tree, torch.Tensor):
        into.update(
            tree.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes() if tree.numel() else b""
        )
    elif isinstance(tree, dict):
        for key in tree:
            into.update(repr(key).encode())
            digest(tree[key], into)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            digest(value, into)
    else:
        into.update(repr(tree).encode())
    return into


def main(recipe: str, folder: Path, part: str, device: str = "cuda") -> None:
    run = Run(
        seed=3 if part == "second" else 0, recipe=recipe, width=128, cpu=(device == "cpu"), window=1, deterministic=True
    )
    if part == "second":
        run.load(folder)
    for _ in range({"whole": STEPS, "first": STOP, "second": STEPS - STOP}[part]):
        print("loss", run.micro_batch().hex())
    if part == "first":
        run.save(folder)
    state = {name: value for name, value in run.everything().items() if name != "random"}
    print("state", digest(state, hashlib.sha256()).hexdigest(), run.accelerator.device)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
