"""Where the machines of a launch meet: one store, hosted by one of them, and an order in which to leave it.

torch's store speaks TCP, and its C++ side writes a page of warnings to standard error whenever the other end of a
connection is gone. An end of a launch must not look like that, so nobody touches the store of a host that is gone,
and the host goes last:

- every other machine also holds a plain connection to the store's port, on which nothing is ever sent. Its end
  says that the host is gone, whatever ended it. A host that is frozen or unplugged ends nothing: a thread asks the
  store every few seconds, and ends the connections of a host that does not answer (see ``pulse``);
- who ends the run before its time says so in the store, with the reason; the others look there as they wait;
  In the moments in which a killed host's sockets are still open, torch's warnings are all that happens: the launcher
  loads torch with those turned off (see ``run.load_elastic``);
- who will not use the store any more says that too, with a ``set``, which is not answered; the host waits for it.
  (A barrier alone does not do it: its last answer may still be on the way when the host has read its own.)
"""

from __future__ import annotations

import errno
import ipaddress
import select
import socket
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import DistError
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from acceler8.errors import LaunchError
from acceler8.launch.pulse import Pulse

LEAVE_LIMIT_S = 30.0
"""How long the host waits for the others to leave, at the end of a run that succeeded; only a machine that was lost
takes this long."""

ANSWER_LIMIT_S = 60.0
"""How long one read of the store may wait for what another machine is about to write."""

RETRY_S = 0.2
"""Between two attempts to reach a host that has not started yet."""

POLL_S = 0.02
"""Between two looks of the host, at the end, at who has left."""

CLOSE_LIMIT_S = 1.0
"""Between the ends of two connections to a host that is gone."""

ENDED = "acceler8/ended"
LEFT = "acceler8/left"


def listen(address: str, port: int) -> socket.socket:
    """Socket that listens at ``address`` and ``port`` (0: a free one). Raises: LaunchError if that cannot be."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise LaunchError(f"main_process_ip={address!r} cannot be resolved: {error}; correct it") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(4096)
    except OSError as error:
        listener.close()
        raise LaunchError(
            f"cannot listen on main_process_ip={address!r}, main_process_port={port}: {error.strerror}; on one machine "
            "leave both out, for a free port on the loopback interface"
        ) from error
    return listener


def open_store(address: str, listener: socket.socket) -> Any:
    """Store that listens on ``listener``, and nowhere else; torch's own choice is every interface.

    A TCPStore, which torch's types do not export. Shape of its keys: none is taken.
    """
    port = int(listener.getsockname()[1])
    return dist.TCPStore(  # type: ignore[attr-defined]
        address,
        port,
        is_master=True,
        timeout=timedelta(seconds=ANSWER_LIMIT_S),
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
    )


def is_own(address: str) -> bool:
    """Whether ``address``, a name or a number, is one of this machine's."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(place)
    except OSError:
        return False
    return True


def listening_address(address: str) -> str:
    """Where machine 0 listens so that others reach it under ``address``.

    At that address only, where it is this machine's own. On every interface, where it is not (a forwarded one, as
    of a Kubernetes service), or where it is a name that this machine's hosts file takes for loopback.
    """
    every = "0.0.0.0"
    try:
        ipaddress.ip_address(address)
    except ValueError:
        with suppress(OSError):
            address = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][4][0]  # type: ignore[assignment]
            if ipaddress.ip_address(address).is_loopback:
                return every
    return address if is_own(address) else every


def _listen_if_free(address: str, port: int) -> socket.socket | None:
    """Listening socket, or None if another process of this machine already listens there."""
    try:
        return listen(address, port)
    except LaunchError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EADDRINUSE:
            return None
        raise


class Meeting:
    """One machine's hold on the store of the run at ``address`` and ``port``.

    is_host: whether this machine hosts the store. None: it does if the address is its own and the port is free.
    lost_after_s: a host that answers nothing for as many seconds is gone.
    Raises: RendezvousConnectionError if nobody hosts one within ``timeout_s``; LaunchError if it cannot listen.
    """

    def __init__(
        self, address: str, port: int, *, is_host: bool | None, timeout_s: float, lost_after_s: float = 15.0
    ) -> None:
        self.address, self.port = address, port
        self._watched: socket.socket | None = None
        self._worker_store: Any = None
        self._has_left = False
        self._lost_after_s = lost_after_s
        self._pulse: Pulse | None = None
        listener = self._listener(is_host)
        self.is_host = listener is not None
        if listener is not None:
            self._listens_at = str(listener.getsockname()[0])
            self.own_address = None if self._listens_at == "0.0.0.0" else self._listens_at
            self.store = open_store(address, listener)
            return
        self._watched = self._connect(time.monotonic() + timeout_s)
        self.own_address = str(self._watched.getsockname()[0])
        self.store = dist.TCPStore(  # type: ignore[attr-defined]
            address, port, is_master=False, timeout=timedelta(seconds=ANSWER_LIMIT_S)
        )
        self._pulse = Pulse(address, port, lost_after_s)

    def _listener(self, is_host: bool | None) -> socket.socket | None:
        if is_host:
            return listen(listening_address(self.address), self.port)
        if is_host is None and is_own(self.address):
            return _listen_if_free(listening_address(self.address), self.port)
        return None

    def _connect(self, deadline: float) -> socket.socket:
        while True:
            try:
                return socket.create_connection((self.address, self.port), timeout=5.0)
            except OSError as error:
                if time.monotonic() > deadline:
                    raise RendezvousConnectionError(f"nobody answers there ({error})") from error
            time.sleep(RETRY_S)

    def is_lost(self) -> bool:
        """Whether the host is gone; the store must not be touched then."""
        if self._has_left:
            return True
        if self._watched is None:
            return False
        readable, _, _ = select.select([self._watched], [], [], 0)
        if not readable:
            return False
        try:
            return not self._watched.recv(1)
        except OSError:
            return True

    def open_worker_store(self) -> int:
        """Port of a new store of this host, for one attempt of the workers; the one before is dropped.

        An attempt must not find the keys of the one before: it would connect to addresses of dead processes.
        """
        self._worker_store = open_store(self.address, listen(self._listens_at, 0))
        return int(self._worker_store.port)

    def announce_end(self, reason: str) -> None:
        """Tell the other machines that the run is over before its time."""
        if not self.is_lost():
            with suppress(DistError, RuntimeError):
                self.store.set(ENDED, reason)

    def end(self) -> str | None:
        """Why the run is over before its time, if another machine has said so, or machine 0 is lost."""
        try:
            if not self.is_lost():
                return self.store.get(ENDED).decode() if self.store.check([ENDED]) else None
        except DistError:
            if not self.is_lost_soon():
                raise
        return None if self._has_left else self._how_it_ended()

    def is_lost_soon(self) -> bool:
        """Whether the host is gone, once a call has failed: the watched connection may end a moment later."""
        if self._watched is None or self._has_left:
            return self._has_left
        select.select([self._watched], [], [], CLOSE_LIMIT_S)
        return self.is_lost()

    def _how_it_ended(self) -> str:
        what = "is gone"
        if self._pulse is not None and self._pulse.was_late:
            what = f"has not answered for {self._lost_after_s:g} s"
        return f"the launcher at {self.address}:{self.port}, machine 0, {what}"

    def leave(self, attempt: int, rank: int, machines: int, limit_s: float = LEAVE_LIMIT_S) -> None:
        """Leave, as number ``rank`` of ``machines``; the host waits for the others, at most ``limit_s``."""
        if self._pulse is not None:
            self._pulse.stop()
        if not self.is_lost():
            with suppress(DistError, RuntimeError):  # the host may go at any moment; this machine is done
                self._say_goodbye(attempt, rank, machines, limit_s)
        self._has_left = True
        if self._watched is not None:
            self._watched.close()

    def _say_goodbye(self, attempt: int, rank: int, machines: int, limit_s: float) -> None:
        if not self.is_host:
            self.store.set(f"{LEFT}/{attempt}/{rank}", "")
            return
        others = [f"{LEFT}/{attempt}/{other}" for other in range(machines) if other != rank]
        deadline = time.monotonic() + limit_s  # a machine that died will not say anything
        while others and not self.store.check(others) and time.monotonic() < deadline:
            time.sleep(POLL_S)  # the store's own wait would print warnings at the end of its time
