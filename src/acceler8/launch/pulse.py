"""Whether the host of a store still answers: a host that is frozen, unplugged or without power closes nothing.

torch's store has no limit for most of its calls, and a thread inside of one waits until the connection ends. So another
thread asks, over a connection of its own, and one answer too late ends all connections of this process to the host:
whoever waits inside a call gets torch's error at once, and a look at the watched connection says that the host is gone.
"""

from __future__ import annotations

import os
import socket
import stat
import threading
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import DistError

PULSES = 3
"""Questions in the time after which a host is lost; the answer to one may take the time of the others."""

LATE_S = 1.0
"""A last look, some time after an answer was due: this process may have been stopped itself, with the answer here."""


class Pulse:
    """Asks the store at ``address`` and ``port`` until it is stopped; a host silent for ``lost_after_s`` is cut off.

    Raises: torch's DistError if nobody answers.
    """

    def __init__(self, address: str, port: int, lost_after_s: float) -> None:
        self._interval_s = lost_after_s / PULSES
        self._limit_s = lost_after_s - self._interval_s
        self.was_late = False
        """Whether the host was cut off."""
        self._is_stopped = threading.Event()
        self._peers = {
            (str(info[4][0]), int(info[4][1])) for info in socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
        }
        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            address, port, is_master=False, timeout=timedelta(seconds=lost_after_s)
        )
        self._thread = threading.Thread(target=self._ask, name="pulse", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ask no more. Returns when no question is open: after an answer, or once the host was cut off."""
        self._is_stopped.set()
        self._thread.join()

    def _ask(self) -> None:
        while not self._is_stopped.wait(self._interval_s):
            is_answered = threading.Event()
            threading.Thread(target=self._watch, args=(is_answered,), name="pulse limit", daemon=True).start()
            try:
                self._store.check(["acceler8/pulse"])
            except (DistError, RuntimeError):
                return  # cut off, or closed by the host, which the watched connection shows
            finally:
                is_answered.set()

    def _watch(self, is_answered: threading.Event) -> None:
        if not is_answered.wait(self._limit_s) and not is_answered.wait(LATE_S):
            self.was_late = True
            cut_off(self._peers)


def cut_off(peers: set[tuple[str, int]]) -> None:
    """Shut down every TCP connection of this process to one of ``peers``, (address, port); torch shows no handles."""
    for number in os.listdir("/dev/fd"):
        with suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(number)).st_mode):
                with socket.socket(fileno=os.dup(int(number))) as connection:
                    if connection.type == socket.SOCK_STREAM and _same(connection.getpeername(), peers):
                        connection.shutdown(socket.SHUT_RDWR)


def _same(peer: object, peers: set[tuple[str, int]]) -> bool:
    """Whether ``peer`` is one of ``peers``; torch's sockets speak IPv6 where they can, also to IPv4 addresses."""
    if not isinstance(peer, tuple):
        return False  # a Unix socket
    return (str(peer[0]).removeprefix("::ffff:"), peer[1]) in peers
