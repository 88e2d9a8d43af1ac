"""One definition of "a step is over".

Delayed scaling, weight-code windows, schedules and health all need the moment between two optimizer steps.
They subscribe to one clock; whoever knows the moment ticks it: ``Accelerator``, ``attach(model, optimizer)``
(a hook behind the optimizer's own step), or ``acceler8.step(model)`` in a hand-written loop.
"""

from __future__ import annotations

from collections.abc import Callable


class StepClock:
    """Counts step boundaries and calls its subscribers at each, in the order in which they subscribed.

    Of several optimizers, each ``optimizer_stepped``, all that step before one of them does so again belong to one
    step: the boundary is at the first of them. So a training step with an optimizer for each part of a model counts
    once, a round of two models in turn counts once, and five steps of one beside one of the other count five times.
    """

    def __init__(self) -> None:
        self._ticks = 0
        self._subscribers: list[Callable[[], None]] = []
        self._followers: list[Callable[[], None]] = []
        self._led: list[StepClock] = []
        self._on_weights: list[Callable[[], None]] = []
        self.stepped: set[int] = set()
        """Numbers of the optimizers that stepped at the last boundary or since. A resume sets it."""

    @property
    def ticks(self) -> int:
        """Step boundaries so far, which is the number of the step that runs now. A resume sets it."""
        return self._ticks

    @ticks.setter
    def ticks(self, ticks: int) -> None:
        moved, self._ticks = ticks - self._ticks, ticks
        for on_change in self._followers:
            on_change()
        for clock in self._led:
            clock.ticks += moved

    def subscribe(self, on_tick: Callable[[], None]) -> None:
        """Call ``on_tick()`` at every boundary from now on. Bound methods keep deep copies apart: a copied
        clock calls the copied object.
        """
        self._subscribers.append(on_tick)

    def unsubscribe(self, on_tick: Callable[[], None]) -> None:
        """Undo ``subscribe``; raises ValueError if ``on_tick`` is not subscribed."""
        self._subscribers.remove(on_tick)

    def watch_weights(self, on_weights: Callable[[], None]) -> None:
        """Call ``on_weights()`` whenever an optimizer stepped without a boundary; at a boundary subscribers hear."""
        self._on_weights.append(on_weights)

    def unwatch_weights(self, on_weights: Callable[[], None]) -> None:
        """Undo ``watch_weights``; raises ValueError if ``on_weights`` does not watch."""
        self._on_weights.remove(on_weights)

    def follow(self, on_change: Callable[[], None]) -> None:
        """Call ``on_change()`` whenever ``ticks`` changed: behind the subscribers of a boundary, and when it is set."""
        self._followers.append(on_change)

    def unfollow(self, on_change: Callable[[], None]) -> None:
        """Undo ``follow``; raises ValueError if ``on_change`` does not follow."""
        self._followers.remove(on_change)

    def lead(self, clock: StepClock) -> None:
        """Tick another clock at every boundary from now on, and set it by as many steps as this one is set."""
        self.subscribe(clock.tick)
        self._led.append(clock)

    def optimizer_stepped(self, number: int) -> None:
        """Note that optimizer ``number`` stepped, and tick if that begins another round of them."""
        if self.stepped and number not in self.stepped:
            self.stepped.add(number)
            self._weights_moved()
        else:
            self.stepped = {number}
            self.tick()

    def _weights_moved(self) -> None:
        for on_weights in self._on_weights:
            on_weights()
        for clock in self._led:
            clock._weights_moved()

    def tick(self) -> None:
        """Mark a step boundary: weights have their new values, no backward is pending."""
        self._ticks += 1
        for on_tick in self._subscribers:
            on_tick()
        for on_change in self._followers:
            on_change()
