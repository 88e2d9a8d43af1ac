"""The few lines that a launch says itself, all to standard error."""

from __future__ import annotations

import signal
import sys
from collections import deque
from contextlib import suppress
from pathlib import Path

from acceler8.launch.workers import Worker

LAST_LINES = 20
"""Lines of a failed worker's error log that are shown; a traceback is usually shorter."""


def say(message: str) -> None:
    """Print one line; a closed standard error is no reason to fail."""
    with suppress(OSError, ValueError, AttributeError):
        print(f"acceler8 launch: {message}", file=sys.stderr, flush=True)


def _signal_name(signum: int) -> str:
    with suppress(ValueError):
        return signal.Signals(signum).name
    return f"signal {signum}"


def describe_end(worker: Worker) -> str:
    """How a failed worker ended, with all that finds it again: ranks, pid, exit code."""
    assert worker.code
    who = f"rank {worker.rank} (local rank {worker.local_rank}, pid {worker.pid})"
    if worker.code > 0:
        return f"{who} failed with exit code {worker.code}"
    hint = ", as the kernel does when memory runs out" if worker.code == -signal.SIGKILL else ""
    return f"{who} was killed by {_signal_name(-worker.code)} (exit status {worker.exit_status}){hint}"


def describe_failure(failed: list[Worker], workers: int) -> str:
    """Last line of a failed launch. ``failed``: first to fail first; ``workers``: all of this machine."""
    first = describe_end(failed[0])
    return first if workers == 1 else f"{first}. It was the first of {workers} workers to fail; the others were stopped"


def describe_stop(signum: int, killed: int, grace_s: float) -> str:
    """Last line of a launch that a signal stopped."""
    late = f"; {killed} worker(s) were killed, running after {grace_s:g} s or a second Ctrl-C" if killed else ""
    return f"stopped by {_signal_name(signum)}{late}"


def show_log_end(path: Path) -> None:
    """Show the last lines of a failed worker's log of standard error."""
    with suppress(OSError), path.open(errors="replace") as file:
        lines = deque(file, maxlen=LAST_LINES)
        say(f"the last lines of {path}:")
        print("".join(lines).rstrip("\n"), file=sys.stderr, flush=True)
