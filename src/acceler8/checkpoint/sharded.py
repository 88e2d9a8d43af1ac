"""Tensors that no process holds whole: each writes what it holds, and any number of processes reads what it needs.

    model.shard-00001-of-00004.safetensors     what process 0 of 4 held; its header says where in the whole tensors
    model.shards.json                          every tensor's whole shape and dtype, and how many files there are

The header is the one that PyTorch's distributed checkpoint writes in this case, so ``dcp.load`` with its
``HuggingFaceStorageReader`` reads the folder too. Its writer is not used: it makes a second copy of all that a process
holds in memory before it writes, and stores what is no tensor in a file that nobody can read. Its own format, which is
the default there, is a pickle.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from acceler8.checkpoint.manifest import read_json, write_json
from acceler8.checkpoint.tensorfile import read_with_header, write_tensors
from acceler8.errors import CheckpointError
from acceler8.parallel.fsdp2_whole import plain_local

HEADER, OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"
"""PyTorch's words in a file's header: JSON of ``{tensor: {"saved_offsets": [...]}}``."""
Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and shape of a part of a tensor."""


class Chunk(NamedTuple):
    """A part of a tensor, and where in the whole it begins."""

    offset: tuple[int, ...]
    tensor: Tensor
    path: Path | None = None
    """The file that holds it."""


@dataclass(frozen=True)
class Stored:
    """A tensor as a checkpoint holds it, in one piece or several, which may lie in the files themselves."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]
    was_sharded: bool = False
    """True if it was a DTensor when it was saved."""

    @classmethod
    def whole_of(cls, tensor: Tensor) -> Stored:
        """A tensor in one piece."""
        return cls(tuple(tensor.shape), tensor.dtype, (Chunk((0,) * tensor.ndim, tensor),))

    def whole(self, *, copy: bool = False) -> Tensor:
        """All of it, on the CPU; without ``copy`` it may lie in the file."""
        return self.box((0,) * len(self.shape), self.shape, copy=copy)

    def box(self, offset: tuple[int, ...], shape: tuple[int, ...], *, copy: bool = False) -> Tensor:
        """A part of it, on the CPU; without ``copy`` it may lie in the file."""
        if len(self.chunks) == 1 and self.chunks[0].tensor.shape == self.shape:
            part = _cut(self.chunks[0].tensor, offset, shape)
            return part.clone() if copy else part
        made = torch.empty(shape, dtype=self.dtype)
        for begin, tensor, _ in self.chunks:
            low = tuple(map(max, begin, offset))
            high = tuple(min(b + n, o + m) for b, n, o, m in zip(begin, tensor.shape, offset, shape, strict=True))
            size = tuple(h - at for h, at in zip(high, low, strict=True))
            if all(n > 0 for n in size):
                _cut(made, _minus(low, offset), size).copy_(_cut(tensor, _minus(low, begin), size))
        return made

    def like(self, other: Tensor) -> Tensor:
        """It in the layout of ``other``: this process's shard of a DTensor of that shape, else all of it."""
        if not isinstance(other, DTensor) or self.shape != tuple(other.shape):
            return self.whole()
        return self.placed(other, other.placements)

    def placed(self, other: DTensor, placements: tuple[Any, ...], *, copy: bool = False) -> DTensor:
        """This process's shard, on the mesh and the device of ``other``."""
        shape, offset = compute_local_shape_and_global_offset(torch.Size(self.shape), other.device_mesh, placements)
        local = self.box(tuple(offset), tuple(shape), copy=copy).to(other.device)
        stride = torch.empty(self.shape, device="meta").stride()
        return DTensor.from_local(
            local, other.device_mesh, placements, run_check=False, shape=torch.Size(self.shape), stride=stride
        )


def is_sharded(tensors: Mapping[str, Any]) -> bool:
    """True if there is a DTensor among them."""
    return any(isinstance(tensor, DTensor) for tensor in tensors.values())


def local(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor, in plain form."""
    return plain_local(tensor) if isinstance(tensor, DTensor) else tensor


def shard_file(stem: str, number: int, count: int) -> str:
    """The name of the file of process ``number``, from 0."""
    return f"{stem}.shard-{number + 1:05d}-of-{count:05d}.safetensors"


def index_file(stem: str) -> str:
    """The name of the file that says what the shards make up."""
    return f"{stem}.shards.json"


SHARDS = re.compile(r"(?P<stem>.+)\.(shard-\d{5,}-of-\d{5,}\.safetensors|shards\.json)", re.ASCII)
"""Names of both kinds."""


def write_shard(folder: Path, stem: str, tensors: Mapping[str, Tensor], number: int, count: int) -> str:
    """Write what process ``number`` holds, and, where it is 0, tensors that all hold whole; returns the file's name.

    Of a DTensor whose parts several processes hold, the first writes.
    Raises: CheckpointError for a DTensor that still has to be summed over processes.
    """
    own = {name: part for name, tensor in tensors.items() if (part := _own_part(name, tensor, number)) is not None}
    header = json.dumps({name: {OFFSETS: list(part.offset)} for name, part in own.items()})
    name = shard_file(stem, number, count)
    write_tensors(folder / name, {key: part.tensor for key, part in own.items()}, stem, {HEADER: header})
    return name


def write_index(folder: Path, stem: str, tensors: Mapping[str, Tensor], count: int) -> None:
    """Write what the shards of ``count`` processes make up."""
    known = {
        name: {
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "sharded": isinstance(tensor, DTensor),
        }
        for name, tensor in tensors.items()
    }
    write_json(folder / index_file(stem), {"processes": count, "tensors": known})


def read_shards(files: Container[str], path_of: Callable[[str], Path], stem: str) -> dict[str, Stored]:
    """What the shards of ``stem`` hold; ``path_of`` gives a listed file's path once its bytes are known to be right.

    Raises: CheckpointError naming the file that is missing, or that fits the others badly.
    """
    path = path_of(index_file(stem))
    count, known = _read_index(path)
    chunks: dict[str, list[Chunk]] = {name: [] for name in known}
    for number in range(count):
        if (file := shard_file(stem, number, count)) not in files:
            raise CheckpointError(f"{path.parent} holds no {file}, which {path.name} needs; use another checkpoint")
        for name, chunk in _read_chunks(path_of(file)).items():
            if name not in known or chunk.tensor.dtype != known[name].dtype:
                raise CheckpointError(f"{path.parent / file} holds {name[:80]!r}, which {path.name} has not so")
            chunks[name].append(chunk)
    found = {}
    for name, stored in known.items():
        if not _fill(stored.shape, chunks[name]):
            raise CheckpointError(
                f"{path.parent}: the shards do not make up {name[:80]!r}, {list(stored.shape)}; use another checkpoint"
            )
        found[name] = Stored(stored.shape, stored.dtype, tuple(chunks[name]), stored.was_sharded)
    return found


def _own_part(name: str, tensor: Tensor, number: int) -> Chunk | None:
    """What this process writes of a tensor; None if that is nothing."""
    if not isinstance(tensor, DTensor):
        return Chunk((0,) * tensor.ndim, tensor) if number == 0 else None
    place = tensor.device_mesh.get_coordinate()
    if any(placement.is_partial() for placement in tensor.placements):
        raise CheckpointError(f"{name} is placed as {tensor.placements}; allowed: shards and replicas; reduce it first")
    if place is None or any(p.is_replicate() and at for p, at in zip(tensor.placements, place, strict=True)):
        return None
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    part = local(tensor).detach()
    if tuple(part.shape) != tuple(shape):
        raise CheckpointError(f"{name}: this process holds {list(part.shape)}, its placement says {list(shape)}")
    return Chunk(tuple(offset), part) if part.numel() or (not tensor.numel() and number == 0) else None


def _read_index(path: Path) -> tuple[int, dict[str, Stored]]:
    content = read_json(path)
    try:
        count, known = content["processes"], {}
        if type(count) is not int or not 1 <= count <= 2**20:
            raise ValueError(f"processes is {count!r}")
        for name, entry in content["tensors"].items():
            shape, dtype = tuple(entry["shape"]), getattr(torch, entry["dtype"])
            if not all(type(n) is int and 0 <= n < 2**53 for n in shape) or not isinstance(dtype, torch.dtype):
                raise ValueError(f"{name[:80]!r} is no tensor")
            known[name] = Stored(shape, dtype, (), entry["sharded"] is True)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged ({error!r}); use another checkpoint") from error
    return count, known


def _read_chunks(path: Path) -> dict[str, Chunk]:
    tensors, header = read_with_header(path)
    try:
        placed = json.loads(header.get(HEADER, "{}"))
        found = {name: Chunk(tuple(placed[name][OFFSETS]), tensor, path) for name, tensor in tensors.items()}
        if not all(type(at) is int and at >= 0 for chunk in found.values() for at in chunk.offset):
            raise ValueError("an offset is no number from 0")
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} does not say where its tensors belong ({error!r}); use another one") from error
    return found


def _fill(shape: tuple[int, ...], chunks: list[Chunk]) -> bool:
    """True if the chunks make up the shape, each element once."""
    for offset, tensor, _ in chunks:
        if len(offset) != len(shape) or tensor.ndim != len(shape):
            return False
        if any(at + n > size for at, n, size in zip(offset, tensor.shape, shape, strict=True)):
            return False
    if sum(chunk.tensor.numel() for chunk in chunks) != math.prod(shape) or not chunks:
        return False
    dims = {d for a, b in pairwise(chunks) for d, (x, y) in enumerate(zip(a.offset, b.offset, strict=True)) if x != y}
    if len(dims) == 1:  # rows, mostly: with the sum that is right, neighbours that do not overlap leave no gap
        (dim,) = dims
        ordered = sorted((chunk.offset[dim], chunk.tensor.shape[dim]) for chunk in chunks)
        return all(at + n <= following for (at, n), (following, _) in pairwise(ordered))
    return not any(_overlap(a, b) for i, a in enumerate(chunks) for b in chunks[:i])


def _overlap(one: Chunk, other: Chunk) -> bool:
    return all(
        a < b + m and b < a + n
        for a, n, b, m in zip(one.offset, one.tensor.shape, other.offset, other.tensor.shape, strict=True)
    )


def _cut(tensor: Tensor, offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    return tensor[tuple(slice(at, at + n) for at, n in zip(offset, shape, strict=True))] if shape else tensor


def _minus(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(a - b for a, b in zip(one, other, strict=True))
