"""The folder of one demo run: what lies in it, and how it is written and read back.

``config.json`` makes a folder a run and is written first, so a run can be resumed from the moment that it
exists. ``metrics.jsonl`` has one line a step; ``checkpoint/`` is the state of the training in progress and
goes away when that training's ``result-<precision>.json`` is there. JSON files are replaced whole. A disk
that is full or cannot be written is an error that names the file, never a gap in the record.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from acceler8.demo.settings import DemoSettings
from acceler8.errors import RunError

KIND = "acceler8 demo run"
FORMAT_VERSION = 1

Record = dict[str, Any]


@contextlib.contextmanager
def disk_errors(action: str, path: Path) -> Iterator[None]:
    """Turn an OSError into a RunError that says which file could not be written or read, and why."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"cannot {action} {str(path)!r}: {error.strerror or error}; "
            "check the path, its permissions and the free space, or name another folder with --out"
        ) from error


class RunFolder:
    """Reads and writes the files of one run. Make one with ``create`` or ``open``."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, parent: Path, config: Mapping[str, Any]) -> RunFolder:
        """Make a new folder named by the time below ``parent`` and write its ``config.json``.

        Raises: RunError when ``parent`` cannot be written.
        """
        stamp = time.strftime("%Y%m%d-%H%M%S")
        with disk_errors("make a run folder in", parent):
            parent.mkdir(parents=True, exist_ok=True)
            for attempt in range(1, 1000):
                path = parent / (stamp if attempt == 1 else f"{stamp}-{attempt}")
                with contextlib.suppress(FileExistsError):  # two runs may start in the same second
                    path.mkdir()
                    break
            else:
                raise RunError(f"{str(parent)!r} already holds 999 runs of this second; name another --out")
        folder = cls(path)
        folder.write_json("config.json", {"kind": KIND, "format_version": FORMAT_VERSION, **config})
        return folder

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Open an existing run; RunError when ``path`` is not the folder of a run of this format."""
        hint = "--resume takes the folder that a run named when it started, such as runs/20260131-235959"
        if not path.is_dir():
            raise RunError(f"{str(path)!r} is not a folder; {hint}")
        folder = cls(path)
        if not (path / "config.json").is_file():
            raise RunError(f"{str(path)!r} is not a run: it has no config.json; {hint}")
        config = folder.read_json("config.json")
        if not isinstance(config, dict) or config.get("kind") != KIND:
            raise RunError(f"{str(path)!r} is not a run: its config.json does not say kind {KIND!r}; {hint}")
        if config.get("format_version") != FORMAT_VERSION:
            raise RunError(
                f"{str(path)!r} has format_version {config.get('format_version')!r}, this version reads "
                f"{FORMAT_VERSION}; resume with the acceler8 version that started the run"
            )
        return folder

    @property
    def settings(self) -> DemoSettings:
        """The settings that the run was started with."""
        saved = self.read_json("config.json").get("settings")
        if not isinstance(saved, dict):
            raise RunError(f"{str(self.path / 'config.json')!r} has no settings; start the run anew")
        return DemoSettings.from_dict(saved)

    def checkpoint_path(self, precision: str) -> Path:
        """Where the training in ``precision`` keeps its state while it goes on."""
        return self.path / "checkpoint" / precision

    def drop_checkpoint(self, precision: str) -> None:
        """Delete the state of a training whose result is written, and what a killed writer left beside it."""
        path = self.checkpoint_path(precision)
        if not path.parent.exists():
            return
        with disk_errors("delete", path):
            for state in (path, *path.parent.glob(f".{path.name}.*")):
                if state.exists():
                    shutil.rmtree(state)
            if not any(path.parent.iterdir()):
                path.parent.rmdir()

    def result(self, precision: str) -> Record | None:
        """Result of the finished training in ``precision``; None while it is unfinished."""
        name = f"result-{precision}.json"
        return self.read_json(name) if (self.path / name).exists() else None

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Write ``content`` to the file ``name``, whole or not at all."""
        self.write_text(name, json.dumps(content, indent=2, allow_nan=False) + "\n")

    def write_text(self, name: str, content: str) -> None:
        """Write UTF-8 ``content`` to the file ``name``, whole or not at all."""
        path = self.path / name
        partial = path.with_name(f"{name}.partial")
        with disk_errors("write", path):
            with partial.open("w", encoding="utf-8", errors="replace") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)

    def read_json(self, name: str) -> Record:
        """Read the file ``name``; RunError when it is missing or damaged."""
        path = self.path / name
        try:
            with disk_errors("read", path):
                content: Record = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            if isinstance(error, RunError):
                raise
            raise RunError(f"{str(path)!r} is damaged: {error}; start the run anew") from error
        return content

    def read_metrics(self) -> list[Record]:
        """Return the lines of ``metrics.jsonl``; a last line that a kill cut short is left out."""
        path = self.path / "metrics.jsonl"
        if not path.exists():
            return []
        with disk_errors("read", path):
            lines = path.read_text(encoding="utf-8").splitlines()
        records: list[Record] = []
        for number, line in enumerate(lines, start=1):
            try:
                records.append(json.loads(line))
            except ValueError as error:
                if number < len(lines):
                    raise RunError(f"{str(path)!r} line {number} is damaged: {error}; start the run anew") from error
        return records

    def forget_after(self, precision: str, step: int) -> None:
        """Drop the metrics of ``precision`` after ``step``, which a resumed training will make again."""
        kept = [r for r in self.read_metrics() if r["precision"] != precision or r["step"] <= step]
        self.write_text("metrics.jsonl", "".join(map(_line, kept)))

    def append_metrics(self, record: Mapping[str, Any]) -> None:
        """Add one line to ``metrics.jsonl``; it is on its way to the disk when this returns."""
        path = self.path / "metrics.jsonl"
        with disk_errors("write", path), path.open("a", encoding="utf-8") as file:
            file.write(_line(record))


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, allow_nan=False) + "\n"
