"""What a signal to the launcher means for its workers.

The first signal asks: workers get SIGINT for Ctrl-C, SIGTERM for any other, and time to save. Ctrl-C again ends
them at once. Whoever is left after the time is killed. The launch then returns 128 + the first signal, whatever
the workers returned. Ctrl-Z stops the launcher only; the workers go on.
"""

from __future__ import annotations

import os
import signal
import threading
import time

from acceler8.launch.report import describe_stop, say
from acceler8.launch.workers import KILL_LIMIT_S, Workers

SAME_PRESS_S = 0.3
"""Two SIGINTs this close are one press: wrappers (make, uv) may pass on what the terminal has already sent."""

RELEASE_S = 2.0
"""How long the main thread may take to notice that all workers have ended, before the process ends without it."""


class StoppedBySignalError(Exception):
    """Leaves the elastic agent's loop; never leaves the package."""


class Stopping:
    """Passes stop signals on to ``workers`` and sees to it that they, and the launcher, end."""

    def __init__(self, workers: Workers, grace_s: float) -> None:
        self._workers = workers
        self._grace_s = grace_s
        self._heard_at = 0.0
        self.signum: int | None = None
        """The first stop signal; None while there was none."""
        self.killed = 0
        """Workers that had to be killed."""
        self.is_returning = threading.Event()
        """Set by the main thread once nothing that it does can block for long."""

    def handle(self, signum: int) -> None:
        """Act on a stop signal; runs in the thread of the signal relay."""
        now = time.monotonic()
        before, self._heard_at = self._heard_at, now
        if self.signum is None:
            self.signum = signum
            self._workers.close()
            self._pass_on(signum)
            threading.Thread(target=self._see_to_the_end, name="stopping", daemon=True).start()
        elif signum != signal.SIGINT:
            self._pass_on(signum)
        elif now - before > SAME_PRESS_S:
            self._kill()

    def _pass_on(self, signum: int) -> None:
        self._workers.send(signal.SIGINT if signum == signal.SIGINT else signal.SIGTERM)

    def _kill(self) -> None:
        self.killed = max(self.killed, len(self._workers.running))
        self._workers.kill()

    def _see_to_the_end(self) -> None:
        """Kill late workers; end the process if the main thread hangs, as it does while it waits for machines."""
        if not self._workers.wait(self._grace_s):
            self._kill()
            self._workers.wait(KILL_LIMIT_S)
        if not self.is_returning.wait(RELEASE_S):
            assert self.signum is not None
            say(describe_stop(self.signum, self.killed, self._grace_s))
            os._exit(128 + self.signum)  # the guardian hears of it and cleans up
