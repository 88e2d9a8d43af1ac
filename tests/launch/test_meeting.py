"""The store of a launch: who leaves when, and how the end of its host is noticed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from acceler8.launch.meeting import Meeting, listening_address
from tests.launch.support import SOURCE, free_port, wait_until

HOST = """
import sys, time
from acceler8.launch.meeting import Meeting
meeting = Meeting("127.0.0.1", int(sys.argv[1]), is_host=True, timeout_s=30)
time.sleep(600)
"""


@contextmanager
def frozen_host(port: int) -> Iterator[Callable[..., None]]:
    """A host in a process of its own, and a function that sends it a signal, SIGSTOP unless told otherwise."""
    with subprocess.Popen([sys.executable, "-c", HOST, str(port)], env={"PYTHONPATH": str(SOURCE)}) as host:

        def send(signum: int = signal.SIGSTOP) -> None:
            host.send_signal(signum)
            if signum == signal.SIGSTOP:  # until all its threads stand still it may answer once more
                wait_until(lambda: all(map(stands_still, Path(f"/proc/{host.pid}/task").iterdir())))

        try:
            yield send
        finally:
            host.kill()


def stands_still(thread: Path) -> bool:
    return (thread / "stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_the_machine_with_the_store_leaves_last():
    port = free_port()
    host = Meeting("127.0.0.1", port, is_host=None, timeout_s=30)
    others = [Meeting("127.0.0.1", port, is_host=None, timeout_s=30) for _ in range(2)]
    assert (host.is_host, others[0].is_host) == (True, False)
    first = threading.Thread(target=host.leave, args=(0, 0, 3), daemon=True)
    first.start()
    for rank, other in enumerate(others, start=1):
        first.join(0.2)
        assert first.is_alive(), f"machine 0 left while machine {rank} could still use its store"
        other.leave(0, rank, 3)
    first.join(20)
    assert not first.is_alive(), "machine 0 did not see the others leave"


def test_the_end_of_the_host_is_noticed_without_a_word_from_torch(capfd: pytest.CaptureFixture[str]):
    port = free_port()
    command = [sys.executable, "-c", HOST, str(port)]
    with subprocess.Popen(command, env={"PYTHONPATH": str(SOURCE)}) as host:
        try:
            other = Meeting("127.0.0.1", port, is_host=False, timeout_s=60)
            assert not other.is_lost()
            assert other.end() is None
        finally:
            host.kill()
    wait_until(other.is_lost)
    assert other.end() == f"the launcher at 127.0.0.1:{port}, machine 0, is gone"
    other.announce_end("too late")
    other.leave(0, 1, 2)
    assert capfd.readouterr().err == ""


def test_a_host_that_is_frozen_is_noticed_in_time_also_inside_a_call(capfd: pytest.CaptureFixture[str]):
    """As one without power, or behind a cut network: no connection ends, and no call returns."""
    port = free_port()
    with frozen_host(port) as freeze:
        other = Meeting("127.0.0.1", port, is_host=False, timeout_s=60, lost_after_s=3.0)
        time.sleep(4.5)
        assert not other.is_lost(), "a host that answers was given up"
        assert other.end() is None
        before = len(os.listdir("/dev/fd"))
        freeze()
        start = time.monotonic()
        assert not other.is_lost()
        caller = threading.Thread(target=lambda: ends.append(other.end()), daemon=True)
        ends: list[str | None] = []
        caller.start()
        caller.join(30)
        took = time.monotonic() - start
        assert ends == [f"the launcher at 127.0.0.1:{port}, machine 0, has not answered for 3 s"]
        assert took < 15
        assert len(os.listdir("/dev/fd")) <= before, "handles were left open"
        assert other.is_lost()
        assert other.end() == ends[0]
        other.announce_end("too late")
        other.leave(0, 1, 2)
    assert "Traceback" not in capfd.readouterr().err


def test_a_host_that_leaves_in_between_is_no_failure():
    port = free_port()
    with frozen_host(port) as freeze:
        other = Meeting("127.0.0.1", port, is_host=False, timeout_s=60)
        freeze(signal.SIGKILL)
        wait_until(other.is_lost)
        other.store.set("key", "")  # is sent; the answer to it is that the connection is gone
        time.sleep(0.5)
        other.is_lost = lambda: False  # type: ignore[method-assign]  # the look came a moment before
        other.leave(0, 1, 2)


def test_who_ends_the_run_says_why():
    port = free_port()
    host = Meeting("127.0.0.1", port, is_host=True, timeout_s=30)
    other = Meeting("127.0.0.1", port, is_host=False, timeout_s=30)
    other.announce_end("machine 1 ended the run: no disk")
    assert host.end() == other.end() == "machine 1 ended the run: no disk"
    other.leave(0, 1, 2)


def test_nobody_there_is_an_error_after_the_time():
    with pytest.raises(RendezvousConnectionError, match="nobody answers there"):
        Meeting("127.0.0.1", free_port(), is_host=False, timeout_s=0)


def test_machine_0_listens_where_others_can_reach_it():
    assert listening_address("127.0.0.1") == "127.0.0.1"
    assert listening_address("192.0.2.1") == "0.0.0.0", "a forwarded address, not this machine's own (RFC 5737)"
    assert listening_address("localhost") == "0.0.0.0", "a name that this machine takes for loopback"
