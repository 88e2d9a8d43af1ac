"""The elastic agent: torch's rendezvous, ranks, restarts and exit barrier, around workers of our own.

``torch.distributed.elastic`` splits a launch in two: ``SimpleElasticAgent`` decides when workers start and stop,
and its subclasses, by four methods, say how. torchrun's subclass starts the workers with the launcher's own
environment, substitutes ``$`` in their arguments, turns the first exit code into 1 and, killed itself, leaves the
workers running; hence this one. Imports torch, so import it on use.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError

from acceler8.errors import LaunchError
from acceler8.launch.meeting import LEAVE_LIMIT_S
from acceler8.launch.network import interface_of
from acceler8.launch.rendezvous import ElasticRendezvous, Rendezvous, make_rendezvous
from acceler8.launch.report import describe_end, describe_stop, say
from acceler8.launch.spec import DEFAULT_PORT, LaunchSpec
from acceler8.launch.stopping import StoppedBySignalError, Stopping
from acceler8.launch.worker_environment import MakeEnvironment, elastic_variables, worker_variables
from acceler8.launch.workers import KILL_LIMIT_S, Workers

FAILED_LEAVE_LIMIT_S = 5.0
"""How long the host of the store waits for the others to leave, after a failure."""

STOPPED_LEAVE_LIMIT_S = 1.0
"""The same after a signal, which nobody wants to wait for."""


class EndedElsewhereError(Exception):
    """Leaves the elastic agent's loop when another machine has ended the run; never leaves the package."""


class LaunchAgent(SimpleElasticAgent):
    """Runs ``workers`` as torch's elastic training asks."""

    def __init__(
        self,
        spec: LaunchSpec,
        rendezvous: Rendezvous,
        workers: Workers,
        stopping: Stopping,
        environment: MakeEnvironment,
    ) -> None:
        super().__init__(
            WorkerSpec(
                role="default",
                local_world_size=spec.local_processes,
                rdzv_handler=rendezvous,
                entrypoint=spec.command[0],
                max_restarts=spec.max_restarts,
                monitor_interval=spec.monitor_interval_s,
            )
        )
        self._spec = spec
        self._rendezvous_handler = rendezvous
        self._machines = rendezvous if isinstance(rendezvous, ElasticRendezvous) else None
        self._workers = workers
        self._stopping = stopping
        self._environment = environment

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        attempt = self._rendezvous_handler.restarts + 1
        if worker_group.state != WorkerState.INIT:  # a launcher that has just come back says nothing
            failed = [worker for worker in self._workers.failed if not worker.is_asked]
            why = describe_end(failed[0]) if failed else "another machine starts its workers again, or was lost"
            # The number is the launch's; how many failures are allowed is each machine's.
            limit = f" of {self._spec.max_restarts + 1}" if self._machines is None else ""
            say(f"{why}; starting all workers again, attempt {attempt}{limit}")
        own = self._variables(worker_group)
        self._workers.reap(kill_leftovers=True)  # those of the attempt before
        started = self._workers.start([self._environment(each, self._suggested()) for each in own])
        self._raise_if_stopping()
        return {worker.local_rank: worker.pid for worker in started}

    def _variables(self, worker_group: WorkerGroup) -> list[dict[str, str]]:
        """Each worker's place, as the rendezvous has found it."""
        assert worker_group.group_rank is not None
        assert worker_group.master_addr is not None and worker_group.master_port is not None
        elastic = elastic_variables(
            run_id=self._spec.run_id,
            restarts=self._rendezvous_handler.restarts,
            max_restarts=self._spec.max_restarts,
            is_store_shared=True,
        )
        return [
            elastic
            | worker_variables(
                rank=worker.global_rank,
                local_rank=worker.local_rank,
                world_size=worker.world_size,
                local_world_size=self._spec.local_processes,
                machine_rank=worker_group.group_rank,
                address=worker_group.master_addr,
                port=worker_group.master_port,
            )
            for worker in worker_group.workers
        ]

    def _suggested(self) -> dict[str, str]:
        """Variables for workers that nobody has set otherwise."""
        address = self._machines and self._machines.meeting.own_address
        interface = interface_of(address) if address else None
        return {"GLOO_SOCKET_IFNAME": interface} if interface else {}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._raise_if_stopping()
        if failed := self._workers.failed:
            if not self._remaining_restarts:
                self._announce(describe_end(failed[0]))
            failures = {w.rank: ProcessFailure(w.local_rank, w.pid, w.code or 0, "") for w in failed}
            return RunResult(state=WorkerState.FAILED, failures=failures)
        if self._workers.running:
            self._raise_if_ended()
            return RunResult(state=WorkerState.HEALTHY)
        values = {worker.global_rank: None for worker in worker_group.workers}
        return RunResult(state=WorkerState.SUCCEEDED, return_values=values)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._shutdown()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        """End all workers; the grace period of the spec counts, not torch's ``timeout``."""
        if self._stopping.signum is not None:
            self._workers.wait(
                self._spec.grace_period_s + KILL_LIMIT_S
            )  # they were asked, and will be killed when their time is over
        else:
            self._workers.stop(self._spec.grace_period_s)

    def _exit_barrier(self) -> None:
        """Wait until the workers of all machines have finished, as long as that takes and can still happen.

        torch's own waits 300 s, and then takes the store away from workers that need longer.
        """
        if self._machines is None:
            return
        self._machines.say_finished(self._store)
        while not self._machines.have_all_finished(self._store):
            self._raise_if_stopping()
            if self._machines.meeting.end() or self._machines.num_nodes_waiting():
                return  # a machine failed after this one's workers had succeeded
            time.sleep(self._spec.monitor_interval_s)

    def _announce(self, reason: str) -> None:
        if self._machines is not None:
            self._machines.announce_end(reason)

    def _raise_if_ended(self) -> None:
        if self._machines is not None and (reason := self._machines.end()):
            self._machines.leave(STOPPED_LEAVE_LIMIT_S)  # now: the workers may take their time to save
            raise EndedElsewhereError(reason)

    def _raise_if_stopping(self) -> None:
        if self._stopping.signum is None:
            return
        if self._machines is not None and not self._machines.can_be_missed:
            self._announce(describe_stop(self._stopping.signum, 0, 0))
        raise StoppedBySignalError


@contextmanager
def quiet_elastic(is_quiet: bool) -> Iterator[None]:
    """Keep what torch's elastic training logs to itself: its facts are in our own last line."""
    logger = logging.getLogger("torch.distributed.elastic")
    before, handler = logger.propagate, logging.NullHandler()
    if is_quiet:
        logger.propagate = False
        logger.addHandler(handler)
    try:
        yield
    finally:
        logger.propagate = before
        logger.removeHandler(handler)


def run_elastic(spec: LaunchSpec, workers: Workers, stopping: Stopping, environment: MakeEnvironment) -> str | None:
    """Run ``workers`` to their end, successful, failed or stopped; they are not reaped.

    Returns: why the run ended, where another machine or the way to it was the cause; else None.
    Raises: LaunchError if the machines do not meet.
    """

    def raise_if_stopping() -> None:
        if stopping.signum is not None:
            raise StoppedBySignalError

    rendezvous: Rendezvous | None = None
    limit_s, may_return = FAILED_LEAVE_LIMIT_S, False
    with quiet_elastic(not spec.is_verbose):
        try:
            rendezvous = make_rendezvous(spec, raise_if_stopping)
            result = LaunchAgent(spec, rendezvous, workers, stopping, environment).run()
            limit_s = FAILED_LEAVE_LIMIT_S if result.is_failed() else LEAVE_LIMIT_S
        except StoppedBySignalError:
            limit_s = STOPPED_LEAVE_LIMIT_S
            may_return = isinstance(rendezvous, ElasticRendezvous) and rendezvous.can_be_missed
        except EndedElsewhereError as error:
            return str(error)
        except (RendezvousError, DistError) as error:
            if isinstance(rendezvous, ElasticRendezvous) and rendezvous.rank is not None:
                return rendezvous.end() or f"the machines did not meet again within {spec.rdzv_timeout_s} s ({error})"
            place = f"{spec.address}:{spec.main_process_port or DEFAULT_PORT}"
            raise LaunchError(
                f"{spec.num_machines} machine(s) did not meet at {place} ({spec.rdzv_backend}, "
                f"machine_rank={spec.machine_rank}): {error}. Check that machine 0 runs, that "
                "the address and port are its own and open, and that all machines say the same numbers"
            ) from error
        finally:
            if isinstance(rendezvous, ElasticRendezvous):
                rendezvous.leave(limit_s, may_return=may_return)
    return None
