"""When a layer is in FP8: in a window of steps, and from which step on by its depth in the model.

A window is ``"START:STOP"``, steps counted from 0 by the step clock, STOP not in it, either end open: ``"100:"`` is a
BF16 start of 100 steps, ``":900"`` a BF16 end from the 900th on, ``":10"`` a trial of ten steps. Outside of it a layer
multiplies as ``nn.Linear`` does, forward and backward. It changes at the boundary between two steps, never inside one,
and a backward is that of its forward. The clock is in checkpoints, so a resumed training goes on where it was.

Stages ``"STEP:K,..."`` put the last K layers in FP8 first, and more of them later: ``"0:4,1000:8,2000:all"``. Since
they only widen, each layer has one first step, and what both settings allow it is again one window.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from acceler8.errors import RecipeError
from acceler8.scaling.clock import StepClock

_FORM = re.compile(r"(0|[1-9][0-9]{0,17})?\s*:\s*(0|[1-9][0-9]{0,17})?", re.ASCII)
_STAGE = re.compile(r"(0|[1-9][0-9]{0,17})\s*:\s*([1-9][0-9]{0,8}|all)", re.ASCII | re.IGNORECASE)


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

    def since(self, step: int) -> StepWindow | None:
        """The part of it from ``step`` on; None if no step is left."""
        start = max(self.start or 0, step)
        return None if self.stop is not None and start >= self.stop else StepWindow(start or None, self.stop)


@dataclass(frozen=True)
class LastLayers:
    """``(step, K)`` in order: from ``step`` on the last K layers are in FP8, K None all; none before the first step.

    A layer is a block of the model, as the plan lists them. All is all: what is in no block too.
    Raises: RecipeError for no stage, and steps or K that do not grow.
    """

    stages: tuple[tuple[int, int | None], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "stages", tuple((step, count) for step, count in self.stages))
        if not self.stages:
            raise RecipeError(f"fp8_last_layers got no stage; {self.allowed()}")
        for step, count in self.stages:
            if type(step) is not int or step < 0 or (count is not None and (type(count) is not int or count < 1)):
                raise RecipeError(f"fp8_last_layers got the stage {step!r}:{count!r}; {self.allowed()}")
        for (step, count), (later, wider) in pairwise(self.stages):
            if later == step:
                raise RecipeError(f"fp8_last_layers got step {step} twice; leave one out; {self.allowed()}")
            if later < step or count is None or (wider is not None and wider <= count):
                raise RecipeError(
                    f"fp8_last_layers got {self}, where step {later} does not widen what step {step} has;"
                    f" {self.allowed()}; fp8_steps ends FP8"
                )

    @staticmethod
    def allowed() -> str:
        """The form, for errors."""
        return (
            "allowed: STEP:K with commas between them, or a mapping of steps to K; steps from 0, K a number of layers"
            " from 1, or all; K grows with the steps, such as 0:4,1000:8,2000:all"
        )

    @classmethod
    def of(cls, stages: str | Mapping[Any, Any] | LastLayers) -> LastLayers:
        """The stages that ``"0:4,1000:8,2000:all"`` spells, or ``{0: 4, 1000: 8, 2000: "all"}``, in any order.

        Raises: RecipeError.
        """
        if isinstance(stages, LastLayers):
            return stages
        if isinstance(stages, Mapping):
            texts = [
                f"{step}:{count}" if type(step) in (int, str) and type(count) in (int, str) else ""
                for step, count in stages.items()
            ]
        else:
            texts = stages.split(",") if isinstance(stages, str) else [""]
        found = [_STAGE.fullmatch(text.strip()) for text in texts]
        parsed = [(int(m[1]), None if m[2].lower() == "all" else int(m[2])) for m in found if m is not None]
        if len(parsed) < len(found) or not parsed:
            raise RecipeError(f"fp8_last_layers got {stages!r:.80}; {cls.allowed()}")
        return cls(tuple(sorted(parsed, key=lambda stage: stage[0])))

    def __str__(self) -> str:
        return ",".join(f"{step}:{'all' if count is None else count}" for step, count in self.stages)

    @property
    def is_all(self) -> bool:
        """True if every layer is in FP8 from the first step on."""
        return self.stages == ((0, None),)

    def first_step(self, behind: int | None) -> int | None:
        """From which step on a block with ``behind`` blocks behind it is in FP8; None if never.

        ``behind`` None is what lies in no block.
        """
        for step, count in self.stages:
            if count is None or (behind is not None and behind < count):
                return step
        return None


def check_schedule(window: StepWindow | None, last_layers: LastLayers | None) -> None:
    """Raise RecipeError if the two never allow the same step."""
    if window is None or last_layers is None:
        return
    first = last_layers.stages[0][0]
    if window.since(first) is None:
        raise RecipeError(
            f"fp8_steps {window} ends before fp8_last_layers {last_layers} begins, at step {first}, so no step would be"
            f" in FP8; allowed: a STOP above {first}, or a first stage before step {window.stop}"
        )


class Schedule:
    """Whether layers are in FP8 in the step that runs now: read by each forward, set between steps.

    One is shared by all layers of a model that have the same window; None is none at all. ``setting`` is what the
    user said, for messages.
    """

    def __init__(self, window: StepWindow | None, clock: StepClock, setting: str = "") -> None:
        self.window, self.clock, self.setting = window, clock, setting
        self.is_on = False
        self.follow()

    def follow(self) -> None:
        """The clock was ticked or set."""
        self.is_on = self.window is not None and self.window.holds(self.clock.ticks)
