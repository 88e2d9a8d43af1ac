"""Shards of a model into the plain file that every reader of safetensors opens, tensor by tensor.

Needs the checkpoint alone: no GPU, no process group, and not the model's code. Memory holds one whole tensor at a time,
for each file of shards is opened anew for each tensor: what a mapping once read stays in memory until it is closed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from acceler8.checkpoint.export import replace_weights
from acceler8.checkpoint.folder import named_folder, sync_file
from acceler8.checkpoint.load import Checkpoint, load
from acceler8.checkpoint.sharded import SHARDS, Stored, index_file
from acceler8.checkpoint.shards import (
    DEFAULT_SHARD_SIZE,
    parse_size,
    shard_names,
    split_by_size,
    weight_files,
    write_weight_index,
)
from acceler8.checkpoint.tensorfile import read_one
from acceler8.errors import CheckpointError

_WORDS = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.bool: "BOOL",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
_MODEL = re.compile(r"(?P<stem>model(_[1-9]\d*)?)\.(shards\.json|safetensors|safetensors\.index\.json)", re.ASCII)
"""The files that say there is a model."""
_BESIDE = ("config.json", "generation_config.json")  # what transformers reads beside weights, if it lies there


def consolidate(
    folder: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    max_shard_size: int | str = DEFAULT_SHARD_SIZE,
) -> list[Path]:
    """Write the weights of a checkpoint of shards whole, as ``transformers`` reads them; returns the files.

    output: a folder; default: beside ``folder``, with ``-consolidated`` behind its name. Each tied tensor is written
        once, under the name that the checkpoint keeps. One file a model, or several with an index above the size. With
        several models those that the checkpoint holds whole are written too.
    Raises: CheckpointError if the checkpoint is damaged, holds whole weights already, or none; nothing is written then.
    """
    checkpoint = load(folder)
    parse_size(max_shard_size)
    stems = _models(checkpoint)
    for name in checkpoint.files:
        match = SHARDS.fullmatch(name)
        if (match and match["stem"] in stems) or any(shard_names(stem).fullmatch(name) for stem in stems):
            checkpoint.verified_path(name)
    target = named_folder(output, "consolidate: output") if output is not None else _beside(checkpoint.folder)
    if target.resolve() == checkpoint.folder.resolve():
        raise CheckpointError(f"output is {target}, the checkpoint itself; allowed: another folder; name one")
    models = {stem: checkpoint.stored(stem, {}) for stem in stems}
    for stored in models.values():
        _check_dtypes(stored)
    written = []
    for stem, stored in models.items():

        def write(building: Path, stem: str = stem, stored: dict[str, Stored] = stored) -> list[str]:
            return _write(building, stem, stored, max_shard_size)

        written += [target / name for name in replace_weights(target, stem, write)]
    for name in _BESIDE:
        if (checkpoint.folder / name).is_file():
            shutil.copyfile(checkpoint.folder / name, target / name)
    return written


def _beside(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}-consolidated")


def _models(checkpoint: Checkpoint) -> list[str]:
    """The stems of its models. Raises CheckpointError if there is nothing to do."""
    found = {name: match["stem"] for name in checkpoint.files if (match := _MODEL.fullmatch(name))}
    if any(name.endswith(".shards.json") for name in found):
        return sorted(set(found.values()))
    if found:
        raise CheckpointError(
            f"{checkpoint.folder} holds whole weights already, in {', '.join(sorted(found)[:3])}; allowed: a checkpoint"
            f" of shards, with a {index_file('model')}; use the file as it is"
        )
    raise CheckpointError(f"{checkpoint.folder} holds no weights, only {', '.join(checkpoint.contents)}; name another")


def _check_dtypes(stored: Mapping[str, Stored]) -> None:
    if wrong := next((name for name, one in stored.items() if one.dtype not in _WORDS), None):
        raise CheckpointError(f"{wrong} is {stored[wrong].dtype}, which a plain safetensors file has no word for")


def _write(folder: Path, stem: str, stored: Mapping[str, Stored], max_shard_size: int | str) -> list[str]:
    files = split_by_size({name: _bytes(one) for name, one in stored.items()}, parse_size(max_shard_size))
    names = weight_files(stem, len(files))
    for name, tensors in zip(names, files, strict=True):
        _write_file(folder / name, {key: stored[key] for key in tensors})
    if len(files) == 1:
        return names
    write_weight_index(folder, stem, dict(zip(names, files, strict=True)), sum(map(_bytes, stored.values())))
    return [*names, f"{stem}.safetensors.index.json"]


def _write_file(path: Path, stored: Mapping[str, Stored]) -> None:
    """One safetensors file, its widest dtypes first so that each tensor is aligned, then read back for its header."""
    order = sorted(stored, key=lambda name: -stored[name].dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        begin, end = end, end + _bytes(stored[name])
        shape = list(stored[name].shape)
        header[name] = {"dtype": _WORDS[stored[name].dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for whole in _wholes(stored, order):
            file.write(whole.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    sync_file(path)
    with safe_open(path, framework="pt") as made:
        if sorted(made.keys()) != sorted(stored):
            raise CheckpointError(f"{path.name} was not written as it should be; report this with the index of shards")


def _wholes(stored: Mapping[str, Stored], order: list[str]) -> Iterator[Tensor]:
    for name in order:
        one = stored[name]
        chunks = tuple(c._replace(tensor=read_one(c.path, name)) if c.path else c for c in one.chunks)
        yield replace(one, chunks=chunks).whole()


def _bytes(stored: Stored) -> int:
    count = stored.dtype.itemsize
    for size in stored.shape:
        count *= size
    return count
