"""A small process that outlives a killed launcher for a moment, to kill what the launcher left.

PR_SET_PDEATHSIG (see ``bootstrap``) ends the workers of a killed launcher, but not what the workers started:
data-loader workers, a compiler, a shell. So the launcher starts this guardian with a pipe as its standard input
and tells it, a line each, ``start PID``, ``end PID`` (process groups of workers) and, before it ends itself,
``done``. End of file without ``done`` means that the launcher died: the guardian kills every group still
running, and then every process that carries the launch's mark.

The mark is an environment variable with a value of its own for each launch. Children inherit it whatever
session or group they move to, and ``/proc/PID/environ`` shows it: the way build servers clean up after jobs.
Elsewhere than on Linux there is no such file and the groups are all that is killed: a grandchild that moved to
a group of its own stays. A process that clears its environment escapes too.

Run as a program (``python -I -S guardian.py MARK``), with the standard library only.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

MARK = "ACCELER8_LAUNCH_ID"
"""Name of the variable that marks the processes of a launch."""

SWEEP_LIMIT_S = 10.0
"""How long ``kill_marked`` insists: a process in an uninterruptible sleep ends when it wakes."""


def kill_group(pid: int) -> None:
    """Kill the process group ``pid``, if it still has members."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def marked_processes(mark: str) -> list[int]:
    """Ids of the running processes whose environment at their start held ``MARK=mark``; empty without /proc."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            variables = (entry / "environ").read_bytes().split(b"\0")
        except OSError:  # ended meanwhile, or another user's
            continue
        if wanted in variables and int(entry.name) != os.getpid():
            found.append(int(entry.name))
    return found


def kill_marked(mark: str) -> int:
    """Kill all processes of a launch, again until none is left; returns how many different ones were met."""
    met: set[int] = set()
    deadline = time.monotonic() + SWEEP_LIMIT_S
    while (found := marked_processes(mark)) and time.monotonic() < deadline:
        met.update(found)
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return len(met)


def watch(lines: Iterable[str]) -> set[int] | None:
    """Follow the launcher's ``lines`` to their end: the groups that it left running, None after ``done``."""
    running: set[int] = set()
    for line in lines:
        word, _, pid = line.strip().partition(" ")
        if word == "done":
            return None
        (running.add if word == "start" else running.discard)(int(pid))
    return running


def main() -> None:
    """Wait for the end of the launcher of the mark on the command line, and clean up if it died."""
    # Signals for the launcher are its business; this process ends when the launcher does.
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(signum, signal.SIG_IGN)
    left = watch(sys.stdin)
    if left is None:
        return
    for pid in left:
        kill_group(pid)
    kill_marked(sys.argv[1])


if __name__ == "__main__":
    main()
