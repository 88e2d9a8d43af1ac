"""The worker processes of one machine: start, watch, stop, and leave none behind.

Each worker is a session, and so a process group, of its own. A terminal's Ctrl-C therefore reaches the launcher
alone, which passes on exactly one signal: were workers in the terminal's group, they would get two, and the
second may break the saving that the first began. A worker still reads the terminal if it has it as stdin.

A signal to stop goes to the worker process only, not to what it started: a data-loader worker ended by SIGTERM
makes torch raise in the worker that is just saving. A program (``is_program``) may be a shell that runs the
training, and shells pass nothing on, so there the whole group gets the signal. SIGKILL always goes to the group.

A thread for each worker waits for its end without reaping it (waitid, WNOWAIT): ends are ordered to the
microsecond, so the worker that failed first is known although the others follow it at once, and the process
id stays taken, so that no signal can hit a stranger.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from acceler8.errors import LaunchError
from acceler8.launch.guardian import MARK, kill_group, kill_marked

BOOTSTRAP = Path(__file__).with_name("bootstrap.py")

KILL_LIMIT_S = 10.0
"""How long to wait for a killed process; one in an uninterruptible sleep (a wedged driver) is given up."""


UNKNOWN_STATUS = 255
"""Status of a worker that the system reaped before anybody could ask."""


@dataclass
class Worker:
    """One worker process; ``code`` is its exit status, or minus the signal that ended it; ``is_asked``: to end."""

    rank: int
    local_rank: int
    process: subprocess.Popen[bytes]
    code: int | None = None
    ended_at: float = field(default=float("inf"))
    is_asked: bool = False

    @property
    def pid(self) -> int:
        """Process id, kept across the exec from the bootstrap to the script."""
        return self.process.pid

    @property
    def exit_status(self) -> int:
        """What a shell would call it: the exit status, or 128 + N after signal N."""
        assert self.code is not None
        return self.code if self.code >= 0 else 128 - self.code


def _wait_without_reaping(process: subprocess.Popen[bytes]) -> int:
    """Exit status of ``process``, or minus its signal; the process stays a zombie where the system can do that."""
    if not hasattr(os, "waitid"):  # macOS before Python 3.13
        return process.wait()
    try:
        end = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:  # whoever started us ignores SIGCHLD, and the status is gone
        return UNKNOWN_STATUS
    assert end is not None
    return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status


def _has_members(groups: set[int]) -> bool:
    """Whether a process of one of ``groups`` runs; zombies do not. Without /proc nobody is seen."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, group = path.read_text(errors="replace").rpartition(")")[2].split()[:3]
            if state != "Z" and int(group) in groups:
                return True
    return False


class Workers:
    """All workers of this machine, through restarts. Methods may be called from any thread.

    ``mark`` goes into every worker's environment, by which what the workers leave behind is found (see
    ``guardian``). ``announce`` is told of each process group as it begins ("start PID") and ends ("end PID").
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        mark: str,
        is_program: bool = False,
        log_dir: Path | None = None,
        announce: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.command = tuple(command)
        self._mark = mark
        self._signals_group = is_program
        self._log_dir = log_dir
        self._announce = announce
        self._changed = threading.Condition()
        self._workers: list[Worker] = []
        self._is_closed = False

    # Starting

    def start(self, environments: Sequence[Mapping[str, str]]) -> list[Worker]:
        """Start a worker for each environment (RANK and LOCAL_RANK are read there); the last ones must be reaped.

        After ``close`` it starts none. Raises: LaunchError if a process or a log file cannot be made.
        """
        with self._changed:
            assert not self._workers, "workers of before were not reaped"
            for environment in environments:
                if not self._is_closed:
                    self._workers.append(self._start_one(environment))
            return list(self._workers)

    def _start_one(self, environment: Mapping[str, str]) -> Worker:
        rank, local_rank = int(environment["RANK"]), int(environment["LOCAL_RANK"])
        python = (sys.executable, "-I", "-S", str(BOOTSTRAP), str(os.getpid()))
        try:
            with ExitStack() as files:
                process = subprocess.Popen(
                    (*python, *self.command),
                    env={**environment, MARK: self._mark},
                    stdin=None if rank == 0 else subprocess.DEVNULL,
                    stdout=self._log(rank, "stdout", files),
                    stderr=self._log(rank, "stderr", files),
                    start_new_session=True,
                )
        except OSError as error:
            raise LaunchError(
                f"cannot start the worker of rank {rank}: {error}; check its log folder and the limits "
                "on processes and memory (ulimit -a)"
            ) from error
        self._announce(f"start {process.pid}")
        worker = Worker(rank, local_rank, process)
        threading.Thread(target=self._watch, args=(worker,), name=f"worker-{rank}", daemon=True).start()
        return worker

    def _log(self, rank: int, stream: str, files: ExitStack) -> IO[bytes] | None:
        if self._log_dir is None:
            return None
        self._log_dir.mkdir(parents=True, exist_ok=True)
        return files.enter_context(self.log_path(rank, stream).open("ab"))

    def log_path(self, rank: int, stream: str) -> Path:
        """File that takes ``stream`` (stdout or stderr) of the worker with this rank."""
        assert self._log_dir is not None
        return self._log_dir / f"rank_{rank}.{stream}.log"

    def _watch(self, worker: Worker) -> None:
        code = _wait_without_reaping(worker.process)
        with self._changed:
            worker.code, worker.ended_at = code, time.monotonic()
            self._changed.notify_all()

    # Watching

    @property
    def running(self) -> list[Worker]:
        """Workers that have not ended."""
        with self._changed:
            return [worker for worker in self._workers if worker.code is None]

    @property
    def failed(self) -> list[Worker]:
        """Workers that ended with a status other than 0, the first to end first."""
        with self._changed:
            ended = [worker for worker in self._workers if worker.code]
        return sorted(ended, key=lambda worker: worker.ended_at)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all have ended; False if ``timeout_s`` passed before."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.running, timeout_s)

    # Stopping

    def close(self) -> None:
        """Start no more workers."""
        with self._changed:
            self._is_closed = True

    def send(self, signum: int) -> None:
        """Send ``signum`` to every running worker: to the process, or to its group where it is a program."""
        with self._changed:
            for worker in self.running:
                worker.is_asked = True
                with suppress(ProcessLookupError, PermissionError):
                    (os.killpg if self._signals_group else os.kill)(worker.pid, signum)

    def kill(self) -> None:
        """Kill what is running, groups included; a program that was asked to end may have left its group."""
        with self._changed:
            for worker in self._workers:
                if worker.code is None or worker.is_asked:
                    kill_group(worker.pid)

    def stop(self, grace_s: float) -> int:
        """Ask all running workers to end (SIGTERM), kill those that have not after ``grace_s``; how many those
        were.
        """
        self.send(signal.SIGTERM)
        if self.wait(grace_s):
            return 0
        late = len(self.running)
        self.kill()
        self.wait(KILL_LIMIT_S)
        return late

    def wait_for_groups(self, timeout_s: float) -> None:
        """Wait for what programs that were asked to end have started: a shell ends first, the training saves."""
        deadline = time.monotonic() + timeout_s
        while self._signals_group and time.monotonic() < deadline:
            with self._changed:
                groups = {worker.pid for worker in self._workers if worker.is_asked}
            if not groups or not _has_members(groups):
                return
            time.sleep(0.02)

    def reap(self, *, kill_leftovers: bool) -> None:
        """Forget the ended workers; with ``kill_leftovers``, what they left running is killed."""
        with self._changed:
            for worker in self._workers:
                if kill_leftovers:
                    kill_group(worker.pid)
                with suppress(subprocess.TimeoutExpired):
                    worker.process.wait(KILL_LIMIT_S)
                self._announce(f"end {worker.pid}")
            self._workers = []
        if kill_leftovers:
            kill_marked(self._mark)
