"""Short real runs of the demo: what they are asked, who listens, and what must repeat."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from acceler8.demo.run_folder import Record, RunFolder

STEPS = 6
WISHES: dict[str, Any] = {"device": "cpu", "size": "tiny", "steps": STEPS, "batch": 2, "seq": 32, "seed": 3}


class Recorder:
    """A listener that remembers, and tells ``on_event`` of each event: (precision or message, step)."""

    def __init__(self, on_event: Callable[[str, int], None] | None = None) -> None:
        self.records: list[Record] = []
        self.notes: list[str] = []
        self.started: list[tuple[str, int, int]] = []
        self.ended: list[str] = []
        self._on_event = on_event or (lambda what, step: None)

    def note(self, message: str) -> None:
        self.notes.append(message)
        self._on_event(message, 0)

    def training_started(self, precision: str, step: int, steps: int) -> None:
        self.started.append((precision, step, steps))

    def step_done(self, record: Record) -> None:
        self.records.append(record)
        self._on_event(record["precision"], record["step"])

    def training_ended(self, precision: str) -> None:
        self.ended.append(precision)


def curves(folder: RunFolder) -> list[tuple[str, int, float, float]]:
    """What a resumed run must repeat to the last bit."""
    return [(r["precision"], r["step"], r["loss"], r["grad_norm"]) for r in folder.read_metrics()]
