"""Signals to a real launcher: what workers get, what is returned, and that nothing is left behind."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.launch.support import Launcher, free_port, launcher, needs_linux, wait_until, write

WORKER = """
import os, signal, subprocess, sys, time
from pathlib import Path

rank, mode = os.environ["RANK"], sys.argv[1]
count = {"SIGINT": 0, "SIGTERM": 0}


def save(signum, frame):
    name = signal.Signals(signum).name
    count[name] += 1
    Path(f"saved-{rank}-{name}").write_text(str(count[name]))


for signum in (signal.SIGINT, signal.SIGTERM):
    if mode != "plain":
        signal.signal(signum, save)
quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
subprocess.Popen(["sleep", "600"], **quiet)
subprocess.Popen(["sleep", "600"], start_new_session=True, **quiet)
Path(f"ready-{rank}").write_text(str(os.getpid()))
while mode == "stubborn" or not sum(count.values()):
    time.sleep(0.02)
time.sleep(0.5)  # saving: a second signal would be counted
"""
pytestmark = needs_linux


def wait_for_workers(folder: Path, started: Launcher, workers: int = 1) -> None:
    """Wait until all workers, and the two processes that each starts, run; launcher and guardian make two more."""
    wait_until(lambda: all((folder / f"ready-{rank}").exists() for rank in range(workers)))
    wait_until(lambda: len(started.processes()) == 2 + 3 * workers, lambda: str(started.processes()))


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize(("name", "status"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_workers_get_one_signal_and_time_to_save(tmp_path: Path, name: str, status: int, processes: int):
    write(tmp_path, "train.py", WORKER)
    with launcher(tmp_path, command=["train.py", "saves"], num_processes=processes) as started:
        wait_for_workers(tmp_path, started, processes)
        started.process.send_signal(getattr(signal, name))
        done = started.finish()
        assert done.returncode == status
        assert done.stderr == f"acceler8 launch: stopped by {name}\n"
        assert {path.name: path.read_text() for path in tmp_path.glob("saved-*")} == {
            f"saved-{rank}-{name}": "1" for rank in range(processes)
        }
        started.assert_nothing_left()


@pytest.mark.parametrize(("processes", "mode"), [(1, "plain"), (1, "stubborn"), (2, "stubborn")])
def test_a_killed_launcher_takes_everything_along(tmp_path: Path, processes: int, mode: str):
    write(tmp_path, "train.py", WORKER)
    with launcher(tmp_path, command=["train.py", mode], num_processes=processes) as started:
        wait_for_workers(tmp_path, started, processes)
        started.process.kill()
        assert started.finish().returncode == -signal.SIGKILL
        started.assert_nothing_left()


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("processes", [1, 2])
def test_nothing_is_left_whenever_the_signal_comes(tmp_path: Path, processes: int, signum: signal.Signals):
    """From before the first line of the launcher to running workers, in steps that meet the starts in between."""
    write(tmp_path, "train.py", WORKER)
    for step in range(24):
        with launcher(tmp_path, command=["train.py", "stubborn"], num_processes=processes, grace_period_s=0) as started:
            time.sleep(step * (0.01 if processes == 1 else 0.1))
            started.process.send_signal(signum)
            started.finish()
            started.assert_nothing_left()


def test_workers_of_a_killed_launcher_end_even_without_the_guardian(tmp_path: Path):
    write(tmp_path, "train.py", WORKER)
    with launcher(tmp_path, command=["train.py", "stubborn"]) as started:
        wait_for_workers(tmp_path, started)
        worker = int((tmp_path / "ready-0").read_text())
        [guardian] = [pid for pid in started.processes() if b"guardian.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        os.kill(guardian, signal.SIGKILL)
        started.process.kill()
        wait_until(lambda: worker not in started.processes())


@pytest.mark.parametrize("signum", [signal.SIGHUP, signal.SIGQUIT])
def test_other_stop_signals_ask_with_sigterm(tmp_path: Path, signum: signal.Signals):
    write(tmp_path, "train.py", WORKER)
    with launcher(tmp_path, command=["train.py", "saves"]) as started:
        wait_for_workers(tmp_path, started)
        started.process.send_signal(signum)
        assert started.finish().returncode == 128 + signum
        assert (tmp_path / "saved-0-SIGTERM").exists()
        started.assert_nothing_left()


def test_who_ignores_the_signal_is_killed_after_the_grace_period(tmp_path: Path):
    write(tmp_path, "train.py", WORKER)
    with launcher(tmp_path, command=["train.py", "stubborn"], grace_period_s=0.3) as started:
        wait_for_workers(tmp_path, started)
        started.process.terminate()
        done = started.finish()
        assert done.returncode == 143
        assert "1 worker(s) were killed" in done.stderr
        started.assert_nothing_left()


def test_a_second_ctrl_c_ends_at_once_but_an_echo_of_the_first_does_not(tmp_path: Path):
    write(tmp_path, "train.py", WORKER)
    with launcher(tmp_path, command=["train.py", "stubborn"], grace_period_s=600) as started:
        wait_for_workers(tmp_path, started)
        started.process.send_signal(signal.SIGINT)
        wait_until((tmp_path / "saved-0-SIGINT").exists)
        # Signals closer than 0.3 s are one press; on a slow machine this one may already be the second.
        time.sleep(0.5)
        started.process.send_signal(signal.SIGINT)
        assert started.finish().returncode == 130
        started.assert_nothing_left()
        assert (tmp_path / "saved-0-SIGINT").read_text() == "1"


def test_ctrl_c_in_a_terminal_reaches_a_worker_once(tmp_path: Path):
    write(tmp_path, "train.py", "import sys\nassert sys.stdin.isatty()\n" + WORKER)
    ours, theirs = pty.openpty()
    # script(1)'s work, in Python: a session whose controlling terminal is the pty, and the launcher in it.
    write(
        tmp_path,
        "in_terminal.py",
        "import fcntl, os, sys, termios\nos.setsid()\nfcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
        "os.execv(sys.argv[1], sys.argv[1:])\n",
    )
    popen = {"stdin": theirs, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    try:
        with launcher(tmp_path, {**popen, "wrapper": "in_terminal.py"}, command=["train.py", "saves"]) as started:
            wait_for_workers(tmp_path, started)
            os.write(ours, b"\x03")
            done = started.finish()
            assert done.returncode == 130, done.stderr
            assert (tmp_path / "saved-0-SIGINT").read_text() == "1"
            started.assert_nothing_left()
    finally:
        os.close(ours)
        os.close(theirs)


def test_a_signal_ends_a_launcher_that_waits_for_other_machines(tmp_path: Path):
    write(tmp_path, "train.py", WORKER)
    port = free_port()
    fields = {"num_processes": 2, "num_machines": 2, "main_process_ip": "127.0.0.1", "main_process_port": port}
    with launcher(tmp_path, command=["train.py", "plain"], **fields) as started:
        # It waits once its store listens; ports are hexadecimal in /proc.
        tables = [Path("/proc/net/tcp"), Path("/proc/net/tcp6")]
        wait_until(lambda: any(f":{port:04X} " in table.read_text() for table in tables if table.exists()))
        started.process.terminate()
        done = started.finish()
        assert done.returncode == 143
        assert done.stderr == "acceler8 launch: stopped by SIGTERM\n"
        started.assert_nothing_left()
        assert not list(tmp_path.glob("ready-*"))


def test_a_program_s_whole_group_is_asked(tmp_path: Path):
    write(tmp_path, "train.py", WORKER)
    tool = write(tmp_path, "tool", '#!/bin/sh\n"$1" train.py saves\nexit $?\n')
    tool.chmod(0o755)
    with launcher(tmp_path, command=["./tool", sys.executable], is_program=True) as started:
        wait_until((tmp_path / "ready-0").exists)
        started.process.terminate()
        assert started.finish().returncode == 143
        started.assert_nothing_left()
        assert (tmp_path / "saved-0-SIGTERM").exists()
