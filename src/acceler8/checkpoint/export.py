"""Single files and plain weights outside of a checkpoint folder: each file appears whole."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from acceler8.checkpoint.folder import sync_file, sync_folder
from acceler8.checkpoint.model import split_state
from acceler8.checkpoint.shards import shard_names, write_model
from acceler8.checkpoint.tensorfile import write_tensors
from acceler8.errors import CheckpointError


def export_model(
    folder: Path, state: Mapping[str, Any], aliases: Iterable[str] | None, max_shard_size: int | str
) -> None:
    """Write a state_dict into ``folder`` beside what is there, replacing the weights of an earlier export.

    Each file appears whole, the index last; the files together are no transaction, as a checkpoint's are.
    Raises: CheckpointError for a state that is no plain tensor, and a disk that fails.
    """
    tensors, _, rest = split_state(state, aliases)
    if rest:
        raise CheckpointError(f"{min(rest)} is a {type(rest[min(rest)]).__qualname__}; weights are tensors only")
    replace_weights(folder, "model", lambda building: write_model(building, "model", tensors, max_shard_size))


def replace_weights(folder: Path, stem: str, write: Callable[[Path], list[str]]) -> list[str]:
    """Let what ``write`` makes in an empty folder, and names, take the place of the weights of ``stem``.

    Raises: CheckpointError for a disk that fails.
    """
    building = folder / f".{stem}.writing-{secrets.token_hex(4)}"
    try:
        building.mkdir(parents=True)
        names = write(building)
        for name in names:
            (building / name).replace(folder / name)
        for path in folder.iterdir():
            if path.name not in names and shard_names(stem).fullmatch(path.name):
                path.unlink()
        sync_folder(folder)
        return names
    except OSError as error:
        raise CheckpointError(f"could not write {folder}: {error}; check space and permissions") from error
    finally:
        shutil.rmtree(building, ignore_errors=True)


def replace_file(path: Path, obj: Any, *, as_tensors: bool) -> None:
    """Write ``obj`` to a sibling, flush it, then let it take the name."""
    building = path.with_name(f".{path.name}.writing-{secrets.token_hex(4)}")
    try:
        if as_tensors:
            write_tensors(building, obj, path.name)
        else:
            try:
                torch.save(obj, building)
            except RuntimeError as error:  # torch's own writer says so what others say as OSError
                raise OSError(error) from error
            sync_file(building)
        building.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        raise CheckpointError(f"could not write {path}: {error}; check space and permissions") from error
    finally:
        building.unlink(missing_ok=True)
