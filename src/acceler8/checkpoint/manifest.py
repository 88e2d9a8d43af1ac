"""``checkpoint.json``: what a checkpoint holds, file by file, and who wrote it. Written last, read first."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

import torch

from acceler8 import __version__
from acceler8.checkpoint.folder import MANIFEST, sync_file
from acceler8.checkpoint.foreign import describe_foreign
from acceler8.errors import CheckpointError

FORMAT = "acceler8-checkpoint"
FORMAT_VERSION = 1
"""Raised when a reader of the old version could misread what the new one writes."""
MAX_JSON_BYTES = 256 * 2**20
"""No JSON file of a checkpoint is larger; reading a larger one would only fill memory."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of ``checkpoint.json``; ``progress`` and ``config`` are in their encoded form."""

    acceler8: str
    """Version of this package that wrote it."""
    torch: str
    """Version of torch that wrote it."""
    files: Mapping[str, Mapping[str, Any]]
    """File name -> ``size`` in bytes and ``sha256`` in hex."""
    tied: Mapping[str, str]
    """Further name of a tied tensor -> the name that holds its bytes in ``model.safetensors``."""
    progress: Any
    """How far the run was, as the caller tells it."""
    config: Any
    """Recipe, plan and settings of the run, as the caller tells them."""


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as strict JSON (no NaN) and flush it."""
    path.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n", encoding="ascii")
    sync_file(path)


def file_entry(path: Path) -> dict[str, Any]:
    """What ``checkpoint.json`` says of a file."""
    return {"size": path.stat().st_size, "sha256": file_sha256(path)}


def write_manifest(
    folder: Path,
    *,
    tied: Mapping[str, str],
    progress: Any,
    config: Any,
    known: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Describe every file in ``folder`` and in folders inside it; from here on it is a checkpoint.

    ``known`` are the entries of files that other processes wrote, and hashed then.

    Raises: CheckpointError for a link, which may point at what no checkpoint holds.
    """
    paths = [path for path in sorted(folder.rglob("*")) if path.is_symlink() or not path.is_dir()]
    if link := next((path for path in paths if path.is_symlink() or not path.is_file()), None):
        raise CheckpointError(f"{link} is no plain file; a checkpoint holds plain files only: let the hook write one")
    names = {path.relative_to(folder).as_posix(): path for path in paths}
    files = {name: (known or {}).get(name) or file_entry(path) for name, path in names.items()}
    content = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "acceler8": __version__,
        "torch": torch.__version__,
        "progress": progress,
        "config": config,
        "files": files,
        "tied": dict(tied),
    }
    write_json(folder / MANIFEST, content)


def read_manifest(folder: Path) -> Manifest:
    """Read and check ``checkpoint.json``, and that its files are there in full size; hashes are for later.

    Raises: CheckpointError for no checkpoint, one that is damaged, or one of a newer format.
    """
    content = _read_content(folder)
    version = content.get("format_version")
    if not isinstance(version, int) or version < 1:
        raise CheckpointError(
            f"{folder / MANIFEST} has format_version {version!r}; the file is damaged: use another checkpoint"
        )
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"{folder} has format_version {version}, this acceler8 reads up to {FORMAT_VERSION}; it was "
            f"written by acceler8 {content.get('acceler8')}: install that or a newer one"
        )
    try:
        manifest = Manifest(**{name: content[name] for name in Manifest.__dataclass_fields__})
        sizes = {name: int(entry["size"]) for name, entry in manifest.files.items() if entry["sha256"]}
        if not all(isinstance(name, str) for pair in dict(manifest.tied).items() for name in pair):
            raise TypeError("tied maps names to names")
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"{folder / MANIFEST} is damaged ({error!r}); use another checkpoint") from error
    for name, size in sizes.items():
        _check_name(folder, name)
        _check_size(folder / name, size)
    return manifest


def read_json(path: Path) -> Any:
    """The value in a JSON file, read strictly: no NaN, no key twice, no absurd size or depth.

    Raises: CheckpointError naming the file.
    """
    try:
        if (size := path.stat().st_size) > MAX_JSON_BYTES:
            raise ValueError(f"{size} bytes, allowed are {MAX_JSON_BYTES}")
        return json.loads(
            path.read_text(encoding="utf-8"), parse_constant=_refuse_constant, object_pairs_hook=_refuse_double
        )
    except RecursionError:
        raise CheckpointError(f"{path} cannot be read (nested too deeply); use another checkpoint") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); use another checkpoint") from error


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON")


def _refuse_double(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key {next(name for name in names if names.count(name) > 1)!r} stands twice")
    return found


def is_checkpoint_folder(folder: Path) -> bool:
    """True if ``checkpoint.json`` is there and names this format, of whatever version."""
    try:
        _read_content(folder)
    except CheckpointError:
        return False
    return True


def check_hash(path: Path, expected: str) -> None:
    """Raise CheckpointError unless the bytes of ``path`` are those that were written."""
    got = file_sha256(path)
    if got != expected:
        raise CheckpointError(
            f"{path} has sha256 {got[:12]}..., saved was {str(expected)[:12]}...: it was changed or damaged "
            "after it was written; use another checkpoint"
        )


def file_sha256(path: Path) -> str:
    """SHA-256 of the file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_content(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if not path.is_file():
        if foreign := describe_foreign(folder):
            raise CheckpointError(f"{folder} is not a checkpoint of acceler8 (it has no {MANIFEST}): {foreign}")
        state = (
            "is a folder without one" if folder.is_dir() else "is no folder" if folder.exists() else "does not exist"
        )
        raise CheckpointError(f"{folder} is not a checkpoint: a checkpoint is a folder with a {MANIFEST}, this {state}")
    content = read_json(path)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not from acceler8: it lacks 'format': '{FORMAT}'; name a checkpoint's folder")
    return content


def _check_name(folder: Path, name: str) -> None:
    """Refuse a name that leads out of the folder, and a link on the way."""
    pure = PurePosixPath(name)
    is_inside = bool(name) and not pure.is_absolute() and not {"..", ""} & set(name.split("/"))
    if not is_inside or "\\" in name or "\0" in name or ":" in name:
        raise CheckpointError(
            f"{folder / MANIFEST} lists {name[:80]!r}; allowed are names of files inside the folder; it is damaged or"
            " hostile: use another checkpoint"
        )
    for part in (pure, *pure.parents[:-1]):
        if (folder / part).is_symlink():
            raise CheckpointError(
                f"{folder / part} is a link; a checkpoint holds plain files only: copy the file itself, or use another"
                " checkpoint"
            )


def _check_size(path: Path, size: int) -> None:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing, {MANIFEST} lists it with {size} bytes; use another checkpoint")
    if (got := path.stat().st_size) != size:
        raise CheckpointError(f"{path} has {got} bytes, {MANIFEST} says {size}: it is damaged; use another checkpoint")
