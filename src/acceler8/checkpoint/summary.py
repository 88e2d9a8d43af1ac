"""What is inside of a checkpoint, for people: from its JSON files alone, none of the tensors is read."""

from __future__ import annotations

import os
from typing import Any

from acceler8.checkpoint.load import Checkpoint, load
from acceler8.checkpoint.state_file import read_state
from acceler8.checkpoint.training import STATE


def describe_checkpoint(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Plain values: who wrote it, how far the run was, in which precision, by how many processes, how many bytes.

    Raises: CheckpointError if ``folder`` is no checkpoint, or is damaged; hashes are ``Checkpoint.verify``'s.
    """
    checkpoint = load(folder)
    found: dict[str, Any] = {
        "folder": str(checkpoint.folder),
        "versions": checkpoint.versions,
        "progress": checkpoint.progress,
        "parts": _parts(checkpoint),
    }
    if STATE not in checkpoint.files:
        return found
    state = read_state(checkpoint)
    window = state["window"]
    inside = 0 if window["sync_gradients"] else window["micro_batch"] % window["num_steps"]
    return found | {
        "steps": state["steps"],
        "micro_batches_of_an_unfinished_step": inside,
        "mixed_precision": state["mixed_precision"],
        "processes": state["num_processes"],
        "models": [
            {
                "type": entry["type"],
                "fp8_layers": sum(len(part["layers"]) for part in entry["fp8"]),
                "recipes": [part["recipe"].get("name") for part in entry["fp8"]],
                "backends": [part["backend"] for part in entry["fp8"]],
                "tied": entry["tied"],
            }
            for entry in state["models"]
        ],
        "optimizers": state["optimizers"],
        "schedulers": state["schedulers"],
        "loaders": state["loaders"],
    }


def _parts(checkpoint: Checkpoint) -> dict[str, dict[str, int]]:
    """Files and bytes of each part; those of the processes together."""
    parts: dict[str, dict[str, int]] = {}
    for name in checkpoint.files:
        part = name.split(".")[0]
        part = "process" if part.removeprefix("process_").isdecimal() else part.split("-")[0]
        entry = parts.setdefault(part, {"files": 0, "bytes": 0})
        entry["files"] += 1
        entry["bytes"] += (checkpoint.folder / name).stat().st_size
    return parts
