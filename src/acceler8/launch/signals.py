"""Signals to the launcher, handled at once whatever its main thread is doing.

Python runs signal handlers between two bytecodes of the main thread. That thread may sit for minutes in C++,
waiting for other machines, and Ctrl-C would do nothing. So the handlers here are empty, and the interpreter's C
handler writes each signal's number into a pipe (``signal.set_wakeup_fd``), which a thread reads.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import TracebackType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that end a launch."""


class SignalRelay:
    """Calls ``handle(signum)`` in a thread of its own for each stop signal, while it is entered.

    A signal that the process ignores stays ignored: SIGHUP under nohup, SIGINT in a background job of a shell
    script. Outside the main thread nothing is caught, as Python demands.
    """

    def __init__(self, handle: Callable[[int], None]) -> None:
        self._handle = handle
        self._previous: dict[int, signal._HANDLER] = {}
        self._thread: threading.Thread | None = None

    def __enter__(self) -> SignalRelay:
        if threading.current_thread() is not threading.main_thread():
            return self
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._write_end, False)
        self._thread = threading.Thread(target=self._read, name="signals", daemon=True)
        self._thread.start()
        self._previous_fd = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        for signum in STOP_SIGNALS:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                self._previous[signum] = signal.signal(signum, lambda signum, frame: None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is None:
            return
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(self._previous_fd)
        os.close(self._write_end)
        self._thread.join()
        os.close(self._read_end)

    def _read(self) -> None:
        while numbers := os.read(self._read_end, 64):
            for signum in numbers:
                if signum in STOP_SIGNALS:
                    self._handle(signum)
