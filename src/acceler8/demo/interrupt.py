"""Stopping politely: the first Ctrl-C or SIGTERM asks, the training loop answers at a step boundary.

A signal handler that raised at once could leave an optimizer step half done or a file half written. So the
first signal only sets a flag, which the loop reads between steps; a second one raises KeyboardInterrupt for
those who cannot wait, and then the last checkpoint on disk is what a resume starts from.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class RunInterruptedError(Exception):
    """The run was asked to stop by ``signum`` and its state is on disk."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.signum = signum


class StopRequest:
    """Catches stop signals while it is entered; outside the main thread it catches none, as Python demands.
    The handler prints nothing: a signal may arrive in the middle of another print, which cannot be
    re-entered.
    """

    def __init__(self) -> None:
        self._signum: int | None = None
        self._previous: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._previous = {signum: signal.signal(signum, self._handle) for signum in STOP_SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self._signum is not None:
            raise KeyboardInterrupt
        self._signum = signum

    @property
    def is_requested(self) -> bool:
        """Whether a stop signal has come."""
        return self._signum is not None

    def check(self) -> None:
        """Raise RunInterruptedError if a stop signal has come; call where the state on disk is good to resume
        from.
        """
        if self._signum is not None:
            raise RunInterruptedError(self._signum)
