"""A folder that is written whole or not at all.

The new content is built in a hidden sibling, ``.NAME.writing-*``; each file and the folder are flushed to the
disk; then the sibling takes the name. A folder cannot be renamed onto one that has files, so the one it
replaces steps aside first, as ``.NAME.previous``. Whenever the writer dies, a reader finds the old content or
the new: between the two renames NAME is missing for a moment and ``readable`` answers with the sibling. A
folder has one writer, which holds ``.NAME.lock`` where the system has such locks; a reader that meets a swap
half-way gets an error, never a mix, since every file is hashed.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from acceler8.errors import CheckpointError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL})
MANIFEST = "checkpoint.json"
"""The file that makes a folder a checkpoint; written last."""
LEAVING = ".leaving"
"""How the name of a folder ends while it is removed."""


def named_folder(name: object, argument: str) -> Path:
    """The path that ``name`` gives, ``~`` filled in; ``argument`` names it in errors.

    Raises: CheckpointError for what is no path, or an empty one, which would be the current directory.
    """
    text = os.fspath(name) if isinstance(name, str | os.PathLike) else None
    if not isinstance(text, str) or not text or "\0" in text:
        raise CheckpointError(f"{argument} is {name!r}; allowed: the path of a folder, as text or a Path; give one")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise CheckpointError(f"{argument} is {name!r}: {error}; give the whole path") from None


def target_folder(name: object, argument: str) -> Path:
    """The absolute path that a save to ``name`` takes, links followed.

    Raises: CheckpointError for what is no path, and for a folder that cannot be renamed: the root, the current one.
    """
    target = Path(os.path.realpath(named_folder(name, argument)))
    if target == target.parent or target == Path(os.path.realpath(os.curdir)):
        which = "the root" if target == target.parent else "the current directory"
        raise CheckpointError(
            f"{argument} is {name!r}, {which}, which a checkpoint cannot take the place of; name a folder inside it"
        )
    return target


def readable(folder: Path) -> Path:
    """``folder``, or the sibling that holds its content because a writer died between the two renames."""
    previous = _previous(folder)
    return previous if not (folder / MANIFEST).is_file() and (previous / MANIFEST).is_file() else folder


def building_path(folder: Path, token: str) -> Path:
    """Where ``whole_folder`` with this ``token`` builds; other processes that write into it know it by this."""
    return folder.with_name(f".{folder.name}.writing-{token}")


@contextmanager
def whole_folder(folder: Path, owned: Container[str], token: str | None = None) -> Iterator[Path]:
    """An empty folder to fill; a clean exit makes it ``folder``, an exception removes it and changes nothing.

    Files in the replaced folder that are not in ``owned``, nor listed as its own, belong to someone else and are
    carried over.
    Raises: CheckpointError if ``folder`` is something else than a checkpoint or an empty folder, or another process
        is writing it.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _only_writer(folder):
        _settle(folder)
        _check_target(folder)
        building = building_path(folder, token or secrets.token_hex(4))
        building.mkdir()
        try:
            yield building
            if folder.is_dir():
                _carry_over(folder, building, owned)
            _sync_tree(building, owned)
            _swap_in(building, folder)
        except BaseException:
            shutil.rmtree(building, ignore_errors=True)
            raise


@contextmanager
def _only_writer(folder: Path) -> Iterator[None]:
    """Hold the lock beside ``folder``; it goes with the process, and its file with the save.

    A file system that knows no locks is written without, and so is one on Windows.
    Raises: CheckpointError if another has it.
    """
    if fcntl is None:
        yield
        return
    path = folder.with_name(f".{folder.name}.lock")
    handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_ours = _is_same_file(handle, path)  # else its owner removed it while we opened it
        except BlockingIOError:
            is_ours = False
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            is_ours = True
        if not is_ours:
            raise CheckpointError(
                f"another process is saving to {folder}; give each its own folder, or wait until it is through"
            )
        try:
            yield
        finally:
            path.unlink(missing_ok=True)  # while it is locked, so that nobody's lock is removed
    finally:
        os.close(handle)


def _is_same_file(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def sync_file(path: Path) -> None:
    """Wait until the content of ``path`` is on the disk."""
    with path.open("r+b") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Wait until the names in ``path`` are on the disk; Windows cannot open a folder and needs no asking."""
    if os.name == "nt":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sync_tree(folder: Path, owned: Container[str]) -> None:
    """Wait for all of it: files that are not ``owned``, say a hook's, come without a flush of their own."""
    for path in folder.rglob("*"):
        if path.is_symlink() or (path.parent == folder and path.name in owned):
            continue
        (sync_folder if path.is_dir() else sync_file)(path)
    sync_folder(folder)


def remove_folder(folder: Path) -> None:
    """Remove ``folder`` so that a death on the way leaves nothing under its name that looks whole, or is half.

    What writers of it that were killed left beside it goes first: nobody may ever save under this name again.
    Raises: CheckpointError if another process is writing it.
    """
    with _only_writer(folder):
        _settle(folder)
    leaving = folder.with_name(f".{folder.name}{LEAVING}")
    if leaving.is_dir():
        shutil.rmtree(leaving)
    folder.rename(leaving)
    shutil.rmtree(leaving)


def _previous(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.previous")


def _settle(folder: Path) -> None:
    """Clear up after a killed writer: half-built siblings go, a stranded old folder gets its name back."""
    for left in folder.parent.glob(f".{_escape(folder.name)}.writing-*"):
        shutil.rmtree(left)
    previous = _previous(folder)
    if readable(folder) == previous:
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
        if not folder.exists():
            previous.rename(folder)
    elif (folder / MANIFEST).is_file() and previous.is_dir():
        shutil.rmtree(previous)


def _escape(name: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def _check_target(folder: Path) -> None:
    if not folder.exists():
        return
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is a file; a checkpoint is a folder: choose another name")
    if any(folder.iterdir()) and not (folder / MANIFEST).is_file():
        raise CheckpointError(
            f"{folder} holds files but no checkpoint, so it is not overwritten; choose another folder, or empty it"
        )


def _carry_over(old: Path, new: Path, owned: Container[str]) -> None:
    listed = _listed(old)
    for entry in old.iterdir():
        if entry.name in owned or entry.name in listed or (new / entry.name).exists():
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.copytree(entry, new / entry.name, symlinks=True)
        else:
            shutil.copy2(entry, new / entry.name, follow_symlinks=False)


def _listed(folder: Path) -> set[str]:
    """First parts of the names that a checkpoint lists as its own."""
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        return {PurePosixPath(name).parts[0] for name in files if name}
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return set()


def _swap_in(building: Path, folder: Path) -> None:
    previous = _previous(folder)
    replaces = folder.is_dir()
    if replaces:
        folder.rename(previous)
    try:
        building.rename(folder)
    except BaseException:
        if replaces:
            previous.rename(folder)
        raise
    sync_folder(folder.parent)
    if replaces:
        shutil.rmtree(previous)
