"""Writing a checkpoint."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from acceler8.checkpoint.folder import target_folder, whole_folder
from acceler8.checkpoint.manifest import write_json, write_manifest
from acceler8.checkpoint.model import split_state
from acceler8.checkpoint.optimizer import named_state
from acceler8.checkpoint.rng import capture_rng
from acceler8.checkpoint.sharded import is_sharded, write_index
from acceler8.checkpoint.tensorfile import write_tensors
from acceler8.checkpoint.tree import encode
from acceler8.errors import CheckpointError

MODEL = "model.safetensors"
FP8 = "acceler8_state.safetensors"
_OWN_NAME = re.compile(
    r"checkpoint\.json"
    r"|model(_\d+)?(-\d{5}-of-\d{5})?\.safetensors|model(_\d+)?\.safetensors\.index\.json"
    r"|(model|optimizer)(_\d+)?\.(shard-\d{5,}-of-\d{5,}\.safetensors|shards\.json)"
    r"|((optimizer|process)(_\d+)?|acceler8_state|extra|module_extra|rng)\.(json|safetensors)"
)


class _OwnNames:
    """Every file name that a checkpoint of ours may use."""

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and _OWN_NAME.fullmatch(name) is not None


OWNED = _OwnNames()
"""Names that a new checkpoint does not carry over from the one that it replaces."""


class Stateful(Protocol):
    """Anything whose state can be taken and given back: a scheduler, a loader, an object of the user's."""

    def state_dict(self) -> Any:
        """The state, of JSON-able values and tensors."""

    def load_state_dict(self, state_dict: Any, /) -> object:
        """Take the state back."""


def save(
    folder: str | os.PathLike[str],
    *,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    fp8_state: Mapping[str, Tensor] | None = None,
    extra: Mapping[str, Stateful] | None = None,
    progress: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
    rng: bool = True,
) -> Path:
    """Write one checkpoint folder, whole or not at all; the one that it replaces stays until then.

    Tensors keep shape, dtype and bits, on any device; tied weights are written once. ``fp8_state`` is what
    the model's FP8 layers keep outside state_dict; ``extra`` names objects with a state_dict; ``progress``
    and ``config`` are plain values (no tensors) that come back as they were. ``rng`` adds every random
    generator, taken last, after the state_dicts above have drawn what they draw. Returns the folder's
    absolute path. Nothing in it needs pickle.
    Raises: CheckpointError naming what cannot be stored, a folder that is something else, or a disk that
    fails.
    """
    target = target_folder(folder, "save: folder")
    try:
        with whole_folder(target, OWNED) as building:
            tensors, tied, module_extra = split_state(model.state_dict())
            write_tensors(building / MODEL, tensors, "model")
            if fp8_state:
                write_tensors(building / FP8, fp8_state, "fp8_state")
            if module_extra:
                write_part(building, "module_extra", module_extra)
            if optimizer is not None:
                write_part(building, "optimizer", named_state(model, optimizer))
            if extra:
                write_part(building, "extra", {name: _state_of(name, owner) for name, owner in extra.items()})
            if rng:
                write_part(building, "rng", capture_rng())
            write_manifest(
                building, tied=tied, progress=plain_values(progress, "progress"), config=plain_values(config, "config")
            )
    except OSError as error:
        raise CheckpointError(
            f"could not write {target}: {error}; what was there before is untouched; check space and permissions"
        ) from error
    return target


def write_part(folder: Path, part: str, tree: object, processes: int = 0) -> None:
    """Write a tree: ``PART.json``, and ``PART.safetensors`` where the tree holds tensors.

    Of DTensors only the index is written, where the number of ``processes`` is given; each writes its own shards.
    """
    value, tensors = encode(tree, part)
    write_json(folder / f"{part}.json", value)
    if processes and is_sharded(tensors):
        write_index(folder, part, tensors, processes)
    elif tensors:
        write_tensors(folder / f"{part}.safetensors", tensors, part)


def _state_of(name: str, owner: object) -> Any:
    if not callable(getattr(owner, "state_dict", None)) or not callable(getattr(owner, "load_state_dict", None)):
        raise CheckpointError(
            f"extra[{name!r}] is a {type(owner).__qualname__} without state_dict() and load_state_dict(); "
            "give it both, or put plain values into progress"
        )
    return owner.state_dict()  # type: ignore[attr-defined]


def plain_values(values: Mapping[str, Any] | None, where: str) -> Any:
    """The JSON of plain values; raises CheckpointError for a tensor among them, and for what is no dict."""
    if values is not None and not isinstance(values, Mapping):
        raise CheckpointError(
            f"{where} is a {type(values).__qualname__}; allowed: a dict of plain values; give one: {where}={{...}}"
        )
    value, tensors = encode(dict(values or {}), where)
    if tensors:
        raise CheckpointError(
            f"{where}.{next(iter(tensors))} is a tensor; {where} holds plain values: use .item() or extra"
        )
    return value
