"""Folders that others wrote: what they are, why they are not loaded, and how to go on from their weights.

Hugging Face Accelerate's ``save_state`` keeps all but the weights as pickles, which run code when they are opened. No
file is opened here; names are enough to say what a folder is.
"""

from __future__ import annotations

import re
from pathlib import Path

_PICKLES = re.compile(
    r"(optimizer|scheduler|sampler|dl_state_dict|pytorch_model)(_\d+)?\.bin|random_states_\d+\.pkl|scaler\.pt"
    r"|custom_checkpoint_\d+\.pkl"
)
_WEIGHTS = re.compile(r"(model|diffusion_pytorch_model)(_\d+)?\.safetensors")
_SHARDS = re.compile(r"model(_\d+)?\.safetensors\.index\.json")
_PICKLED_WEIGHTS = re.compile(r"pytorch_model(_\d+)?\.bin(\.index\.json)?")


def describe_foreign(folder: Path) -> str | None:
    """What ``folder`` is, if Accelerate wrote it or it holds weights alone, and what to do; None for another folder."""
    names = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
    weights = [name for name in names if _WEIGHTS.fullmatch(name)]
    sharded = [name for name in names if _SHARDS.fullmatch(name)]
    pickled = [name for name in names if _PICKLED_WEIGHTS.fullmatch(name)]
    state = [name for name in names if _PICKLES.fullmatch(name) and name not in pickled]
    if not state and not weights and not sharded and not pickled:
        return None
    if state:
        what = (
            f"it is a folder of Hugging Face Accelerate's save_state ({_some(state)}), whose states are pickles, which"
            " run code when they are loaded, so they are not read"
        )
    else:
        what = f"it holds weights only ({_some(weights + sharded + pickled)}), and nothing to resume from"
    return f"{what}; {_advice(folder, weights, sharded, pickled)}"


def _advice(folder: Path, weights: list[str], sharded: list[str], pickled: list[str]) -> str:
    if weights:
        load = f"safetensors.torch.load_model(model, {str(folder / weights[0])!r})"
    elif sharded:
        load = (
            "model.load_state_dict(safetensors.torch.load_file(shard), strict=False) for each shard that"
            f" {sharded[0]} lists"
        )
    elif pickled:
        load = (
            "if you trust who wrote it, model.load_state_dict(torch.load("
            f"{str(folder / pickled[0])!r}, weights_only=True))"
        )
    else:
        return "it holds no weights that can be loaded here; load it with Accelerate, and save_model there"
    return (
        f"to go on from its weights load them into the plain model before prepare: {load}; then save_state writes a"
        " folder that resumes. Optimizers, schedulers and random generators begin afresh"
    )


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
