"""Where a project keeps its checkpoints: ``PROJECT/checkpoints/checkpoint_N``; the newest whole, the oldest to go."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path

from acceler8.checkpoint.folder import LEAVING, remove_folder
from acceler8.checkpoint.load import load
from acceler8.errors import CheckpointError, ConfigError

_log = logging.getLogger("acceler8")
_NAME = re.compile(r"checkpoint_(0|[1-9]\d{0,17})", re.ASCII)


@dataclass
class ProjectConfiguration:
    """Where a project's files go; names and meaning are Hugging Face Accelerate's."""

    project_dir: str | None = None
    """The project's folder."""
    logging_dir: str | None = None
    """Where trackers write; default ``project_dir``."""
    automatic_checkpoint_naming: bool = False
    """Save as ``PROJECT_DIR/checkpoints/checkpoint_N`` and resume from the newest whole one."""
    total_limit: int | None = None
    """Whole checkpoints to keep; the oldest goes once a new one is whole. None keeps all."""
    iteration: int = 0
    """N of the next checkpoint."""
    save_on_each_node: bool = False
    """Write on each machine, for machines that share no file system."""

    def __post_init__(self) -> None:
        if self.total_limit is not None and (type(self.total_limit) is not int or self.total_limit < 1):
            raise ConfigError(f"total_limit={self.total_limit!r}; allowed: an integer from 1, or None to keep all")
        self.set_directories(self.project_dir)

    def set_directories(self, project_dir: str | None = None) -> None:
        """Set ``project_dir``, and ``logging_dir`` where it is not set yet."""
        self.project_dir = project_dir
        if self.logging_dir is None:
            self.logging_dir = project_dir

    def checkpoints(self) -> Path:
        """The folder that holds the checkpoints. Raises ConfigError without a ``project_dir``."""
        if self.project_dir is None:
            raise ConfigError("automatic_checkpoint_naming needs a project_dir; give project_dir, or name a folder")
        return Path(self.project_dir).expanduser() / "checkpoints"


def numbered(folder: Path) -> dict[int, Path]:
    """Every ``checkpoint_N`` in ``folder`` by number, oldest first, whole or not, and those that a swap hides."""
    if not folder.is_dir():
        return {}
    names = {entry.name.removeprefix(".").removesuffix(".previous") for entry in folder.iterdir() if entry.is_dir()}
    found = {int(match[1]): folder / name for name in names if (match := _NAME.fullmatch(name))}
    return dict(sorted(found.items()))


def free_number(folder: Path, number: int) -> int:
    """The number of the next ``checkpoint_N``: ``number``, or one above all that are not whole, with a warning.

    Raises: CheckpointError if a whole one has it or a higher one: the highest is what a resume takes for the newest.
    """
    taken = {n: path for n, path in numbered(folder).items() if n >= number}
    if whole := [path for path in taken.values() if _has_all_files(path)]:
        raise CheckpointError(
            f"{whole[-1]} exists already, and the next number is {number}; load_state() first, which continues its"
            " numbers, or set project_configuration.iteration above it, or give this run its own project_dir"
        )
    free = max(taken, default=number - 1) + 1
    while (folder / f"checkpoint_{free}").exists():  # a file, say
        free += 1
    if free != number:
        _log.warning("%s: saving goes on with checkpoint_%d, above what is there and no whole checkpoint", folder, free)
    return free


def newest_whole(folder: Path, damaged: set[Path] | None = None) -> int:
    """The highest N whose checkpoint is whole, hashes included; a warning for each newer one that is not, which is put
    into ``damaged``.

    What a killed run left half-removed is named and stays: nothing is deleted before a new checkpoint is whole.
    Raises: CheckpointError if there is none.
    """
    left = half_removed(folder)
    for number, path in reversed(numbered(folder).items()):
        try:
            load(path).verify()
        except CheckpointError as error:
            _log.warning("skipping %s, which is not whole: %s", path.name, error)
            if damaged is not None:
                damaged.add(path)
            continue
        if left:
            _log.warning(
                "%s: a run that was killed had begun to remove %s; the next save with a total_limit does, or delete it",
                folder,
                ", ".join(path.name for path in left),
            )
        return number
    if rest := next((path for path in reversed(left) if _is_whole(path)), None):
        name = rest.name.removeprefix(".").removesuffix(LEAVING)
        raise CheckpointError(
            f"{folder} holds no whole checkpoint_N, but {rest.name}, which was about to be removed and is still whole;"
            f" rename it to {name} to resume from it, or name a folder: load_state(folder)"
        )
    raise CheckpointError(f"{folder} holds no whole checkpoint_N; save one first, or name a folder: load_state(folder)")


def half_removed(folder: Path) -> list[Path]:
    """What a run that was killed while it removed old checkpoints left, oldest first."""
    if not folder.is_dir():
        return []
    found = {}
    for path in folder.glob(f".checkpoint_*{LEAVING}"):
        if match := _NAME.fullmatch(path.name.removeprefix(".").removesuffix(LEAVING)):
            found[int(match[1])] = path
    return [path for _, path in sorted(found.items())]


def drop_oldest(folder: Path, keep: int, written: Path | None = None, damaged: Container[Path] = ()) -> list[Path]:
    """Remove whole checkpoints until ``keep`` are left; what is no checkpoint stays. Returns those removed.

    ``written`` is the newest whatever its number, and stays. ``damaged`` ones do not count, though they have all their
    files. What a killed run left half-removed goes too, if a checkpoint stays.
    """
    whole = [path for path in numbered(folder).values() if path.is_dir() and _has_all_files(path)]
    whole = [path for path in whole if path not in damaged]
    if whole:
        for path in half_removed(folder):
            shutil.rmtree(path)
    oldest_first = [path for path in whole if path != written] + [path for path in whole if path == written]
    leaving = oldest_first[:-keep]
    for path in leaving:
        remove_folder(path)
    return leaving


def _is_whole(path: Path) -> bool:
    try:
        load(path).verify()
    except CheckpointError:
        return False
    return True


def _has_all_files(path: Path) -> bool:
    try:
        load(path)
    except CheckpointError:
        return False
    return True
