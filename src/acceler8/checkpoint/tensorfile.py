"""Named tensors in one safetensors file: bits of every dtype, no pickle, readable by other tools."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from acceler8.checkpoint.folder import sync_file
from acceler8.errors import CheckpointError

# Dtypes of one byte that the format, or versions of it still in use, has no word for: stored as uint8, named
# in the header.
_AS_BYTES = {
    name: dtype for name in ("float8_e8m0fnu", "float4_e2m1fn_x2") if (dtype := getattr(torch, name, None)) is not None
}
_NONE: Mapping[str, str] = {}
_STORABLE = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.bool),
        *(torch.int64, torch.int32, torch.int16, torch.int8),
        *(torch.uint64, torch.uint32, torch.uint16, torch.uint8),
        *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
        *_AS_BYTES.values(),
    }
)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], where: str, header: Mapping[str, str] = _NONE) -> None:
    """Write ``tensors`` to ``path`` and flush it; each name gets its own bytes, also where memory is shared.

    ``header`` holds further text for the file's own.

    Shape: any; any layout of strides, any device. Names and shapes come back as they are, strides contiguous,
    on the CPU.
    Raises: CheckpointError, with ``where`` before the name, for a tensor without dense data of its own: meta,
    sparse, a
        shard of a distributed tensor or another subclass, or a dtype that the format has no word for.
    """
    flat: dict[str, Tensor] = {}
    viewed: dict[str, str] = {}
    seen: set[tuple[torch.device, int]] = set()
    for name, tensor in tensors.items():
        plain = _plain(tensor, f"{where}.{name}")
        storage = (plain.device, plain.untyped_storage().data_ptr())
        if storage in seen:
            plain = plain.clone()
        seen.add(storage)
        if tensor.dtype in _AS_BYTES.values():
            viewed[name] = str(tensor.dtype).removeprefix("torch.")
            plain = plain.view(torch.uint8)
        flat[name] = plain
    metadata = {"format": "pt"} | ({"dtypes": json.dumps(viewed)} if viewed else {}) | dict(header)
    try:
        save_file(flat, path, metadata=metadata)
    except SafetensorError as error:
        raise CheckpointError(f"could not write {path.name}: {error}; is the disk full?") from error
    sync_file(path)


def read_tensors(path: Path, *, mapped: bool = False) -> dict[str, Tensor]:
    """The tensors in ``path``, on the CPU.

    With ``mapped`` they may lie in the file itself, for a reader that copies them on at once; else in memory
    of their own.
    Raises: CheckpointError if it is not a whole safetensors file.
    """
    tensors, _ = read_with_header(path)
    return tensors if mapped else {name: tensor.clone() for name, tensor in tensors.items()}


def read_with_header(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors in ``path``, which may lie in the file itself, and the text in its header.

    Raises: CheckpointError if it is not a whole safetensors file.
    """
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            header = dict(file.metadata() or {})
            viewed = json.loads(header.get("dtypes", "{}"))
        for name, dtype in viewed.items():
            tensors[name] = tensors[name].view(_AS_BYTES[dtype])
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"{path} is not a whole safetensors file ({error}); use another checkpoint") from error
    return tensors, header


def read_one(path: Path, name: str) -> Tensor:
    """One tensor of a file that was read before; it may lie in the file, which stays open as long as it lives."""
    with safe_open(path, framework="pt") as file:
        tensor: Tensor = file.get_tensor(name)
    return tensor


def _plain(tensor: Tensor, key: str) -> Tensor:
    plain = tensor.detach()
    problem = None
    if type(plain) is not Tensor:
        problem = f"is a {type(plain).__qualname__}, not a plain tensor; gather the full tensor first"
    elif plain.is_meta:
        problem = "is on the meta device and holds no data; materialise the model first"
    elif plain.layout is not torch.strided:
        problem = f"has layout {plain.layout}, allowed is torch.strided; make it dense first"
    elif plain.dtype not in _STORABLE:
        problem = f"has dtype {plain.dtype}, which safetensors cannot hold; cast it first"
    if problem:
        raise CheckpointError(f"{key} {problem}")
    return plain.resolve_conj().resolve_neg().contiguous()
