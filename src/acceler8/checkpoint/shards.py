"""A model's weights in one safetensors file, or in several with an index, as ``transformers`` names and reads them.

model.safetensors                                   up to the size limit
model-00001-of-00003.safetensors, ...               above it
model.safetensors.index.json                        {"metadata": {"total_size"}, "weight_map": {tensor: file}}
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from acceler8.checkpoint.manifest import read_json, write_json
from acceler8.checkpoint.tensorfile import read_tensors, write_tensors
from acceler8.errors import CheckpointError

DEFAULT_SHARD_SIZE = "10GB"
_UNITS = {"": 1, "B": 1} | {
    f"{letter}{kind}": base**power
    for power, letter in enumerate("KMGT", start=1)
    for kind, base in (("B", 1000), ("IB", 1024))
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Z]*)", re.ASCII)


def parse_size(size: int | str) -> int:
    """Bytes of ``"10GB"`` (powers of 1000), ``"5MiB"`` (of 1024) or a number. Raises CheckpointError."""
    found = _SIZE.fullmatch(str(size).strip().upper())
    in_bytes = int(float(found[1]) * _UNITS[found[2]]) if found and found[2] in _UNITS else 0
    if in_bytes < 1:
        raise CheckpointError(f"max_shard_size={size!r}; allowed: bytes above 0, or text such as '10GB' or '500MiB'")
    return in_bytes


def shard_names(stem: str) -> re.Pattern[str]:
    """The file names that one model may have, index included."""
    return re.compile(rf"{re.escape(stem)}(-\d{{5}}-of-\d{{5}}\.safetensors|\.safetensors(\.index\.json)?)", re.ASCII)


def write_model(folder: Path, stem: str, tensors: Mapping[str, Tensor], max_shard_size: int | str) -> list[str]:
    """Write ``tensors`` (each tied one once) under ``stem``; returns the names of the files, the index last.

    A tensor larger than the limit gets a file of its own.
    """
    shards = split_by_size({name: _bytes(tensor) for name, tensor in tensors.items()}, parse_size(max_shard_size))
    names = weight_files(stem, len(shards))
    for name, shard in zip(names, shards, strict=True):
        write_tensors(folder / name, {key: tensors[key] for key in shard}, stem)
    if len(shards) == 1:
        return names
    write_weight_index(folder, stem, dict(zip(names, shards, strict=True)), sum(map(_bytes, tensors.values())))
    return [*names, f"{stem}.safetensors.index.json"]


def weight_files(stem: str, count: int) -> list[str]:
    """Names of the ``count`` files of one model."""
    if count == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def write_weight_index(folder: Path, stem: str, tensors_of: Mapping[str, list[str]], total_size: int) -> None:
    """Write the index of several files: which tensors each holds, and the bytes of all."""
    index = {
        "metadata": {"total_size": total_size},
        "weight_map": {key: name for name, shard in tensors_of.items() for key in shard},
    }
    write_json(folder / f"{stem}.safetensors.index.json", index)


def has_model(files: Container[str], stem: str) -> bool:
    """True if ``files`` name the weights of ``stem``, in whatever form."""
    return any(f"{stem}.{end}" in files for end in ("safetensors", "safetensors.index.json", "shards.json"))


def read_model(files: Container[str], path_of: Callable[[str], Path], stem: str, *, mapped: bool) -> dict[str, Tensor]:
    """What ``write_model`` wrote; ``path_of`` gives a listed file's path once its bytes are known to be right.

    Raises: CheckpointError if there is none, or index and files disagree.
    """
    if f"{stem}.safetensors.index.json" not in files:
        return read_tensors(path_of(f"{stem}.safetensors"), mapped=mapped)
    index = path_of(f"{stem}.safetensors.index.json")
    if f"{stem}.safetensors" in files:
        raise CheckpointError(f"{index.parent} holds {stem}.safetensors and its index; use another checkpoint")
    wanted: dict[str, set[str]] = {}
    for tensor, name in _weight_map(index).items():
        wanted.setdefault(name, set()).add(tensor)
    state: dict[str, Tensor] = {}
    if wrong := next((name for name in wanted if not shard_names(stem).fullmatch(name)), None):
        raise CheckpointError(f"{index} names {wrong[:80]!r}, no shard of {stem}; use another checkpoint")
    for name, tensors in wanted.items():
        shard = read_tensors(path_of(name), mapped=mapped)
        if differ := sorted(tensors ^ shard.keys()):
            raise CheckpointError(
                f"{index} and {name} disagree about {len(differ)} tensors, such as {differ[0]!r}; use another"
                " checkpoint"
            )
        state |= shard
    return {tensor: state[tensor] for tensor in _weight_map(index)}


def _weight_map(index: Path) -> dict[str, str]:
    content: Any = read_json(index)
    found = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
        raise CheckpointError(f"{index} has no 'weight_map' of tensor names to files; use another checkpoint")
    return found


def split_by_size(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Names of tensors in their order, file by file; ``sizes`` in bytes, a file up to ``limit``."""
    shards: list[list[str]] = [[]]
    room = limit
    for name, size in sizes.items():
        if shards[-1] and size > room:
            shards.append([])
            room = limit
        shards[-1].append(name)
        room -= size
    return shards


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
