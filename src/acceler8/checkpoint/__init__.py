"""One on-disk format for a training run: a folder, whole or absent, verified on reading, free of pickle.

    checkpoint.json                  what is inside: sizes, hashes, versions, ties, progress, settings; written last
    model.safetensors                the plain state_dict, which any safetensors reader opens
    acceler8_state.safetensors       FP8 state beside it (amax histories); absent if there is none
    optimizer.json, .safetensors     optimizer state under parameter names
    extra.json, .safetensors         schedulers, loaders and other objects with a state_dict
    rng.json, .safetensors           random generators
    model.shards.json, model.shard-00001-of-00004.safetensors, ...    weights (and optimizer state) in shards

``save`` and ``load`` are for a loop that owns its objects, one model and one optimizer. ``Accelerator.save_state``
writes the same format for any number of them and of processes (``checkpoint.training`` lists its files).

Hashes cost one more read of each file and catch what a size cannot: a flipped bit, a file swapped in from
another step.
"""

from __future__ import annotations

from acceler8.checkpoint.compare import Difference, compare_config
from acceler8.checkpoint.consolidate import consolidate
from acceler8.checkpoint.load import Checkpoint, is_checkpoint, load
from acceler8.checkpoint.manifest import FORMAT_VERSION
from acceler8.checkpoint.project import ProjectConfiguration
from acceler8.checkpoint.resume import LoadReport
from acceler8.checkpoint.save import Stateful, save

__all__ = [
    "FORMAT_VERSION",
    "Checkpoint",
    "Difference",
    "LoadReport",
    "ProjectConfiguration",
    "Stateful",
    "compare_config",
    "consolidate",
    "is_checkpoint",
    "load",
    "save",
]
