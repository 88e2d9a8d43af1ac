"""One definition of "a step is over".

Delayed scaling, weight-code windows, schedules and health all need the moment between two optimizer steps.
They subscribe to one clock; whoever knows the moment ticks it: ``Accelerator``, ``attach(model, optimizer)``
(a hook behind the optimizer's own step), or ``acceler8.step(model)`` in a hand-written loop.
"""

from __future__ import annotations

from collections.abc import Callable


class StepClock:
    """Counts step boundaries and calls its subscribers at each, in the order in which they subscribed."""

    def __init__(self) -> None:
        self.ticks = 0
        self._subscribers: list[Callable[[], None]] = []

    def subscribe(self, on_tick: Callable[[], None]) -> None:
        """Call ``on_tick()`` at every boundary from now on. Bound methods keep deep copies apart: a copied
        clock calls the copied object.
        """
        self._subscribers.append(on_tick)

    def unsubscribe(self, on_tick: Callable[[], None]) -> None:
        """Undo ``subscribe``; raises ValueError if ``on_tick`` is not subscribed."""
        self._subscribers.remove(on_tick)

    def tick(self) -> None:
        """Mark a step boundary: weights have their new values, no backward is pending."""
        self.ticks += 1
        for on_tick in self._subscribers:
            on_tick()
