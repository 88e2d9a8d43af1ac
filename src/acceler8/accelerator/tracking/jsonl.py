"""acceler8's own record of a run: lines of JSON that need no SDK, no network and no reader of their own."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from acceler8.accelerator.tracking.base import GeneralTracker
from acceler8.accelerator.tracking.values import json_ready, plain
from acceler8.errors import ConfigError

METRICS, CONFIGURATION = "metrics.jsonl", "metrics_config.json"


class JsonlTracker(GeneralTracker):
    """``LOGGING_DIR/metrics.jsonl``: ``{"step": 3, "time": 1767225600.0, "values": {"loss": 0.5}}``, a line a call.

    ``time`` is in seconds since 1970. A line is on its way to the disk when ``log`` returns. Every line is strict JSON:
    NaN and infinities are the strings NaN, Infinity and -Infinity; what JSON cannot hold is its text. A run that
    resumes goes on behind the lines that are there, on a new line if a kill cut the last one short. The configuration
    goes into ``metrics_config.json`` beside it.
    """

    name = "jsonl"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str]) -> None:
        super().__init__()
        self.run_name, self.folder = run_name, Path(logging_dir).expanduser()
        self._file: TextIO | None = None

    @property
    def path(self) -> Path:
        """The file of lines."""
        return self.folder / METRICS

    @property
    def tracker(self) -> TextIO:
        """The open file. Raises ConfigError before ``init_trackers`` and after ``end_training``."""
        if self._file is None:
            raise ConfigError(f"{self.path} is not open; allowed: between init_trackers and end_training")
        return self._file

    def start(self) -> None:
        """Open the file behind its last line."""
        self.folder.mkdir(parents=True, exist_ok=True)
        is_cut = _is_cut_short(self.path)
        self._file = self.path.open("a", encoding="utf-8")
        if is_cut:
            self._file.write("\n")

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Write project, time and hyperparameters into the file beside."""
        content = {"project": self.run_name, "time": time.time(), "config": json_ready(plain(values))}
        text = json.dumps(content, allow_nan=False, indent=2)
        (self.folder / CONFIGURATION).write_text(text + "\n", encoding="utf-8")

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write one line. ``kwargs`` are taken and not used."""
        line = {"step": json_ready(plain(step)), "time": time.time(), "values": json_ready(plain(values))}
        self.tracker.write(json.dumps(line, allow_nan=False) + "\n")
        self.tracker.flush()

    def finish(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _is_cut_short(path: Path) -> bool:
    if not path.exists() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"
