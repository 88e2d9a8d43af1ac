"""Real text for the demo, as bytes, split by file into training and held-out text, and cut into windows.

Everything is decided by names, contents and numbers, never by the clock or the file system's order: files are
ordered by their relative path, a file is held out by the hash of that path, and the windows of a batch depend
on (seed, step) alone, so a run that is stopped and resumed sees the batches that it would have seen.
"""

from __future__ import annotations

import hashlib
import os
import stat
import sysconfig
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from acceler8.demo.settings import STANDARD_LIBRARY
from acceler8.errors import RunError

HELD_OUT_SHARE = 0.1
MAX_BYTES = 1 << 30
"""Text is held in memory; more than this is refused, because it would be no demo."""

# Tests repeat themselves, site-packages differ from machine to machine, encodings/ is character tables and pydoc_data/
# one generated file, which would be a tenth of all.
_SKIPPED_FOLDERS = {
    "site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"
}  # fmt: skip

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Text of one run: training and held-out bytes, and what they were made of."""

    train: Bytes
    held_out: Bytes
    train_files: int
    held_out_files: int
    source: str
    """Where the text is from, for people."""
    split: str
    """How it was split, for people."""

    @property
    def digest(self) -> str:
        """SHA-256 of both parts, which tells whether a resumed run reads the same text."""
        digest = hashlib.sha256(f"{len(self.train)} {len(self.held_out)} ".encode())
        digest.update(self.train.tobytes())
        digest.update(self.held_out.tobytes())
        return digest.hexdigest()


def load_corpus(text: str, seq: int) -> Corpus:
    """Read and split the text for windows of ``seq`` + 1 bytes.

    ``text`` is ``STANDARD_LIBRARY`` or the path of a file or of a folder; a folder is read with all below it, but for
    hidden files and ``__pycache__``. Bytes are taken as they are: any encoding, and binary files, work.
    Raises: RunError when the path cannot be read, or holds less than one window to train on and one to hold out.
    """
    if text == STANDARD_LIBRARY:
        root = Path(sysconfig.get_paths()["stdlib"])
        source = f"source of the Python {sysconfig.get_python_version()} standard library"
        names = _library_files(root)
    else:
        root = Path(text)
        source = os.fsencode(root).decode(errors="replace")  # a name need not be Unicode
        names = _files_below(root)
        root = root if root.is_dir() else root.parent
    contents = _read(root, names)
    total = sum(map(len, contents.values()))
    needed = 2 * (seq + 1)
    if total < needed:
        what = "no text at all" if total == 0 else f"{total} bytes of text"
        raise RunError(
            f"{source} has {what}; seq={seq} needs at least {needed}, for one window to train on and one "
            "to hold out; name a longer text with --text or lower --seq"
        )
    return _split(contents, source, seq)


def _library_files(root: Path) -> list[str]:
    names = sorted(name for name in _walk(root, _SKIPPED_FOLDERS) if name.endswith(".py"))
    if not names:
        raise RunError(
            f"{root} holds no *.py files, so this Python came without the source of its standard library; "
            "name a file or folder with --text"
        )
    return names


def _files_below(root: Path) -> list[str]:
    """List the regular files at or below ``root``, relative to it or its folder, in order of names."""
    try:
        mode = root.stat().st_mode
    except FileNotFoundError:
        raise RunError(f"text {str(root)!r} does not exist; --text takes a file or a folder") from None
    except OSError as error:
        raise RunError(_unreadable(root, error)) from error
    if stat.S_ISREG(mode):
        return [root.name]
    if not stat.S_ISDIR(mode):
        raise RunError(f"text {str(root)!r} is neither a file nor a folder; --text takes one of these")
    return sorted(_walk(root))


def _walk(root: Path, skipped: Set[str] = frozenset()) -> list[str]:
    def refuse(error: OSError) -> None:  # os.walk skips what it cannot list, unless told
        raise RunError(_unreadable(Path(error.filename or root), error)) from error

    names: list[str] = []
    for folder, below, files in os.walk(root, onerror=refuse):
        below[:] = [name for name in below if not name.startswith(".") and name not in {"__pycache__", *skipped}]
        paths = (Path(folder, name) for name in files if not name.startswith("."))
        names += [path.relative_to(root).as_posix() for path in paths if path.is_file()]
    return names


def _read(root: Path, names: list[str]) -> dict[str, bytes]:
    contents: dict[str, bytes] = {}
    total = 0
    for name in names:
        path = root / name
        try:
            total += path.stat().st_size
            if total > MAX_BYTES:
                raise RunError(
                    f"the text is larger than {MAX_BYTES >> 20} MiB, which is held in memory; name a part of "
                    "it with --text"
                )
            contents[name] = path.read_bytes()
        except OSError as error:
            raise RunError(_unreadable(path, error)) from error
    return contents


def _unreadable(path: Path, error: OSError) -> str:
    return f"cannot read text {str(path)!r}: {error.strerror}; check the path and its permissions"


def _split(contents: dict[str, bytes], source: str, seq: int) -> Corpus:
    """Hold out whole files, a tenth of the bytes; the last tenth where files are too few or uneven."""
    total = sum(map(len, contents.values()))
    held_out = _held_out_names(contents, total)
    split = "whole files, chosen by the hash of their path"
    if held_out:
        train_part = b"".join(data for name, data in contents.items() if name not in held_out)
        held_out_part = b"".join(data for name, data in contents.items() if name in held_out)
    if not held_out or min(len(train_part), len(held_out_part)) <= seq:
        joined = b"".join(contents.values())
        cut = total - max(int(total * HELD_OUT_SHARE), seq + 1)
        train_part, held_out_part = joined[:cut], joined[cut:]
        split = "last tenth of the bytes, for lack of files of even size"
    files = len(held_out) or 1
    return Corpus(
        train=np.frombuffer(train_part, dtype=np.uint8),
        held_out=np.frombuffer(held_out_part, dtype=np.uint8),
        train_files=max(len(contents) - len(held_out), 1),
        held_out_files=files,
        source=source,
        split=split,
    )


def _held_out_names(contents: dict[str, bytes], total: int) -> set[str]:
    """Choose the files to hold out: small ones, so that no single file decides the loss; larger ones if need be."""
    target = total * HELD_OUT_SHARE
    for largest in (target / 8, target):
        names = [name for name, data in contents.items() if 0 < len(data) <= largest]
        chosen = _take(names, contents, target)
        if sum(len(contents[name]) for name in chosen) >= target / 2:
            return chosen
    return set()


def _take(names: list[str], contents: dict[str, bytes], target: float) -> set[str]:
    """Take files in the order of their names' hashes until ``target`` bytes are reached."""
    chosen: set[str] = set()
    size = 0
    for name in sorted(names, key=lambda name: hashlib.sha256(name.encode(errors="surrogateescape")).digest()):
        if size >= target:
            break
        chosen.add(name)
        size += len(contents[name])
    return chosen


def training_windows(train: Bytes, *, seed: int, step: int, batch: int, seq: int) -> Tensor:
    """Return the windows of one step, [batch, seq + 1] int64, from text, ``seed`` and ``step`` alone."""
    starts = np.random.default_rng((seed, step)).integers(0, len(train) - seq, size=batch)
    return _gather(train, starts, seq)


def held_out_windows(held_out: Bytes, *, batch: int, seq: int, tokens: int) -> list[Tensor]:
    """Return up to ``tokens`` held-out bytes as batches of windows that do not overlap in what they predict.

    Shape: each [<= batch, seq + 1] int64; spread evenly over the held-out text when that is longer than
    ``tokens``.
    """
    available = (len(held_out) - 1) // seq
    wanted = max(min(available, tokens // seq), 1)
    starts = np.arange(wanted) * (available // wanted) * seq
    return [_gather(held_out, starts[i : i + batch], seq) for i in range(0, wanted, batch)]


def _gather(data: Bytes, starts: NDArray[np.int64], seq: int) -> Tensor:
    return torch.from_numpy(data[starts[:, None] + np.arange(seq + 1)].astype(np.int64))
