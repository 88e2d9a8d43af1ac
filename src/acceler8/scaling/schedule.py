"""FP8 only in a window of steps: the first or the last steps of a training in high precision, or a short trial.

A window is ``"START:STOP"``, steps counted from 0 by the step clock, STOP not in it, either end open: ``"100:"`` is a
BF16 start of 100 steps, ``":900"`` a BF16 end from the 900th on, ``":10"`` a trial of ten steps. Outside of it a layer
multiplies as ``nn.Linear`` does, forward and backward. It changes at the boundary between two steps, never inside one,
and a backward is that of its forward. The clock is in checkpoints, so a resumed training goes on where it was.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from acceler8.errors import RecipeError
from acceler8.scaling.clock import StepClock

_FORM = re.compile(r"(0|[1-9][0-9]{0,17})?\s*:\s*(0|[1-9][0-9]{0,17})?", re.ASCII)


@dataclass(frozen=True)
class StepWindow:
    """Steps from ``start`` on, up to and without ``stop``; None is an open end."""

    start: int | None = None
    stop: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("start", 0), ("stop", 1)):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < least):
                raise RecipeError(f"fp8_steps: {name} got {value!r}; allowed: an integer of {least} or more, or None")
        if self.start is not None and self.stop is not None and self.start >= self.stop:
            raise RecipeError(f"fp8_steps got {self}, which holds no step; allowed: START below STOP; leave FP8 off")

    @classmethod
    def of(cls, text: str | StepWindow) -> StepWindow:
        """The window that ``"START:STOP"`` spells. Raises RecipeError."""
        if isinstance(text, StepWindow):
            return text
        found = _FORM.fullmatch(text.strip()) if isinstance(text, str) else None
        if found is None:
            raise RecipeError(
                f"fp8_steps got {text!r:.80}; allowed: START:STOP, steps from 0, STOP not in it, either end open, such"
                " as 100: or :10"
            )
        start, stop = (None if part is None else int(part) for part in found.groups())
        return cls(start or None, stop)

    def __str__(self) -> str:
        return ":".join("" if end is None else str(end) for end in (self.start, self.stop))

    @property
    def is_all(self) -> bool:
        """True if every step is in it."""
        return not self.start and self.stop is None

    @property
    def said(self) -> str:
        """``steps 100 to 199``, ``the first 10 steps``, ``steps from 100 on``, ``every step``."""
        if self.is_all:
            return "every step"
        if self.stop is None:
            return f"steps from {self.start} on"
        return f"steps {self.start} to {self.stop - 1}" if self.start else f"the first {self.stop} steps"

    def holds(self, step: int) -> bool:
        """True if ``step`` is in the window."""
        return (self.start or 0) <= step and (self.stop is None or step < self.stop)


class Schedule:
    """Whether the layers of a model are in FP8 in the step that runs now: read by each forward, set between steps."""

    def __init__(self, window: StepWindow, clock: StepClock) -> None:
        self.window, self.clock = window, clock
        self.is_on = window.holds(clock.ticks)

    def follow(self) -> None:
        """The clock was ticked or set."""
        self.is_on = self.window.holds(self.clock.ticks)
