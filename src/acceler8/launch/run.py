"""``launch``: one call that starts workers, waits for them, and returns what a shell should see."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from types import TracebackType

from acceler8.config.environment import set_meanwhile
from acceler8.errors import LaunchError
from acceler8.launch.command import resolve_command
from acceler8.launch.guardian import MARK
from acceler8.launch.report import describe_failure, describe_stop, say, show_log_end
from acceler8.launch.signals import SignalRelay
from acceler8.launch.spec import LaunchSpec
from acceler8.launch.stopping import Stopping
from acceler8.launch.worker_environment import (
    MakeEnvironment,
    child_environment,
    default_threads,
    elastic_variables,
    worker_variables,
)
from acceler8.launch.workers import KILL_LIMIT_S, Workers

RunElastic = Callable[[LaunchSpec, Workers, Stopping, MakeEnvironment], str | None]

GUARDIAN = Path(__file__).with_name("guardian.py")


class Guardian:
    """The process that cleans up should this one be killed; see ``guardian``."""

    def __init__(self, mark: str, parent: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            (sys.executable, "-I", "-S", str(GUARDIAN), mark),
            env={name: value for name, value in parent.items() if name != MARK},  # an outer launch must not sweep it
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def tell(self, line: str) -> None:
        """Send one line; a guardian that was killed is missed by nobody but the next accident."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()

    def __enter__(self) -> Guardian:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.tell("done")
        with suppress(BrokenPipeError, subprocess.TimeoutExpired):
            self._process.communicate(timeout=KILL_LIMIT_S)


def launch(spec: LaunchSpec, *, parent: Mapping[str, str]) -> int:
    """Run the workers of ``spec`` on this machine to their end; returns the exit status for this process.

    parent: the environment to start from, usually ``os.environ``; workers get it with ``spec.environment``, their
        ranks (torchrun's variables) and, if nobody chose, a share of the cores as ``OMP_NUM_THREADS``.
    Returns: 0 if every worker returned 0; else the status of the worker that failed first: its own exit code, or
        128 + N if signal N killed it. 128 + N too if this process got the stop signal N (130 for Ctrl-C).
    Failure: the others get SIGTERM, ``grace_period_s`` to save, then SIGKILL. Signals: see ``stopping``. In both
        cases, and if this process is killed by SIGKILL, whatever the workers had started ends too (on Linux; see
        ``guardian``). After success, what a worker left running on purpose goes on.
    Streams: workers write to this process's stdout and stderr (or to ``log_dir``). Several do it unbuffered
        (``python -u``), as torchrun has it: nothing is lost when one is killed, but a ``print`` is two writes, so
        two workers' lines may run together. Rank 0 reads this process's stdin, the others an empty one.
    One process on one machine is a plain child, which starts without torch; several, machines or restarts go
        through torch's elastic agent.
    Raises: LaunchError, before anything starts, for a command that cannot run; later, if machines do not meet.
    """
    if os.name != "posix":
        raise LaunchError("launch needs Linux or macOS, got another system; start the script with python itself")
    command = resolve_command(
        spec.command,
        is_module=spec.is_module,
        is_program=spec.is_program,
        is_unbuffered=spec.local_processes > 1,
        search_path=parent.get("PATH"),
    )
    environment = _environment_maker(spec, parent)
    mark = uuid.uuid4().hex
    with Guardian(mark, parent) as guardian:
        workers = Workers(command, mark=mark, is_program=spec.is_program, log_dir=spec.log_dir, announce=guardian.tell)
        stopping = Stopping(workers, spec.grace_period_s)
        with SignalRelay(stopping.handle):
            is_success = False
            try:
                reason = _run(spec, workers, stopping, environment)
                status = _report(spec, workers, stopping, reason)
                is_success = status == 0
            finally:
                stopping.is_returning.set()
                workers.close()
                workers.stop(spec.grace_period_s)
                workers.wait_for_groups(spec.grace_period_s)
                workers.reap(kill_leftovers=not is_success)
    return status


def _environment_maker(spec: LaunchSpec, parent: Mapping[str, str]) -> MakeEnvironment:
    """What makes each worker's environment."""
    added = dict(spec.environment)
    if spec.use_cpu:
        added["ACCELERATE_USE_CPU"] = "true"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = default_threads(parent, added, cores, spec.local_processes)
    if threads and not spec.is_quiet:
        say(
            f"OMP_NUM_THREADS={threads['OMP_NUM_THREADS']} for each of {spec.local_processes} processes on {cores} "
            "cores; set the variable to choose"
        )
    return lambda own, suggested: child_environment({**suggested, **parent}, {**added, **threads, **own})


def _run(spec: LaunchSpec, workers: Workers, stopping: Stopping, environment: MakeEnvironment) -> str | None:
    """Start the workers and wait until all have ended, or one has failed and the others were stopped.

    Returns: why the run ended, where another machine was the cause; else None.
    """
    if spec.num_processes > 1 or spec.max_restarts:
        return load_elastic(is_quiet=not spec.is_verbose)(spec, workers, stopping, environment)
    place = worker_variables(
        rank=0,
        local_rank=0,
        world_size=1,
        local_world_size=1,
        machine_rank=0,
        address=spec.address,
        port=spec.main_process_port or _free_port(),
    )
    elastic = elastic_variables(run_id=spec.run_id, restarts=0, max_restarts=0, is_store_shared=False)
    workers.start([environment({**place, **elastic}, {})])
    workers.wait()
    return None


def load_elastic(*, is_quiet: bool) -> RunElastic:
    """``agent.run_elastic``, with torch loaded.

    is_quiet: torch's C++ keeps its warnings to itself, in this process. It reads its level once, as torch is
        loaded; where that has happened already, a store whose host is killed in the middle of an answer is heard of.
    """
    with set_meanwhile("TORCH_CPP_LOG_LEVEL", "ERROR") if is_quiet else nullcontext():
        from acceler8.launch.agent import run_elastic
    return run_elastic


def _free_port() -> int:
    """A port of the loopback interface that was free a moment ago; a single worker may open a store there."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _report(spec: LaunchSpec, workers: Workers, stopping: Stopping, reason: str | None) -> int:
    """Say how the launch ended, unless well; returns its exit status. ``reason``: what ended it elsewhere."""
    stopping.is_returning.set()
    if stopping.signum is not None:
        say(describe_stop(stopping.signum, stopping.killed, spec.grace_period_s))
        return 128 + stopping.signum
    if reason:
        say(reason)
    failed = [worker for worker in workers.failed if not (reason and worker.is_asked)]
    if not failed:
        return 1 if reason else 0
    if spec.log_dir is not None:
        show_log_end(workers.log_path(failed[0].rank, "stderr"))
    say(describe_failure(failed, spec.local_processes))
    return failed[0].exit_status
