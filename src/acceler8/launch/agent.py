"""The elastic agent: torch's rendezvous, ranks, restarts and exit barrier, around workers of our own.

``torch.distributed.elastic`` splits a launch in two: ``SimpleElasticAgent`` decides when workers start and stop,
and its subclasses, by four methods, say how. torchrun's subclass starts the workers with the launcher's own
environment, substitutes ``$`` in their arguments, turns the first exit code into 1 and, killed itself, leaves the
workers running; hence this one. Imports torch, so import it on use.
"""

from __future__ import annotations

import logging
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from acceler8.errors import LaunchError
from acceler8.launch.report import describe_end, say
from acceler8.launch.spec import DEFAULT_PORT, LaunchSpec
from acceler8.launch.stopping import StoppedBySignalError, Stopping
from acceler8.launch.worker_environment import elastic_variables, worker_variables
from acceler8.launch.workers import KILL_LIMIT_S, Workers


class LocalRendezvous(RendezvousHandler):
    """The rendezvous of one machine, which has nobody to wait for: a store for the workers to meet at.

    torch's own store listens on every interface and has no authentication. This one listens at ``address`` only,
    on a socket bound here: with port 0 the system picks a free one, which nobody can take in between.
    """

    def __init__(self, address: str, port: int, run_id: str) -> None:
        self._listener = listen(address, port)
        self._address, self._port = address, int(self._listener.getsockname()[1])
        self._run_id = run_id
        self._store: Any = None  # a TCPStore, which torch's types do not export

    def next_rendezvous(self) -> RendezvousInfo:
        """Open the store, or meet again at the one that is open."""
        if self._store is None:
            self._store = dist.TCPStore(  # type: ignore[attr-defined]
                self._address,
                self._port,
                world_size=1,
                is_master=True,
                timeout=timedelta(seconds=60),
                multi_tenant=True,
                master_listen_fd=self._listener.detach(),
            )
        store = dist.PrefixStore(self._run_id, self._store)  # type: ignore[attr-defined]
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(self._address, self._port))

    @property
    def use_agent_store(self) -> bool:
        """Workers use this store too."""
        return True

    def get_backend(self) -> str:
        """Name in torch's logs."""
        return "local"

    def get_run_id(self) -> str:
        """Name of the run."""
        return self._run_id

    def is_closed(self) -> bool:
        """Whether nobody may join any more."""
        return False

    def set_closed(self) -> None:
        """Nothing to do."""

    def num_nodes_waiting(self) -> int:
        """Machines that want to join."""
        return 0

    def shutdown(self) -> bool:
        """Close the socket, if the store has not taken it."""
        self._listener.close()
        return True


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


LEAVE_LIMIT_S = 30.0
"""How long the machine with the store waits for the others to leave it; only a machine that died takes this long."""


def leave_in_order(store: Any, machine_rank: int, num_machines: int) -> None:
    """Let the machine that hosts ``store``, machine 0, be the last to go; nobody may use the store after this.

    A barrier alone does not do it: its last answer may still be on the way when machine 0 has read its own and
    ends, and torch's C++ then writes a page of warnings on the other machine, after a success. A ``set`` is not
    answered, so whoever has sent it can go at once.
    """
    if machine_rank:
        store.set(f"acceler8/left/{machine_rank}", "")
        return
    with suppress(DistError):  # a machine that died will not say anything
        others = [f"acceler8/left/{rank}" for rank in range(1, num_machines)]
        store.wait(others, timedelta(seconds=LEAVE_LIMIT_S))


class LaunchAgent(SimpleElasticAgent):
    """Runs ``workers`` as torch's elastic training asks."""

    def __init__(
        self,
        worker_spec: WorkerSpec,
        workers: Workers,
        stopping: Stopping,
        environment: Callable[[dict[str, str]], dict[str, str]],
        grace_s: float,
    ) -> None:
        super().__init__(worker_spec)
        self._workers = workers
        self._stopping = stopping
        self._environment = environment
        self._grace_s = grace_s

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        spec = worker_group.spec
        restarts = spec.max_restarts - self._remaining_restarts
        if failed := self._workers.failed:
            attempt = f"attempt {restarts + 1} of {spec.max_restarts + 1}"
            say(f"{describe_end(failed[0])}; starting all workers again, {attempt}")
        assert worker_group.group_rank is not None  # the rendezvous has set all three
        assert worker_group.master_addr is not None and worker_group.master_port is not None
        elastic = elastic_variables(
            run_id=spec.rdzv_handler.get_run_id(),
            restarts=restarts,
            max_restarts=spec.max_restarts,
            is_store_shared=spec.rdzv_handler.use_agent_store,
        )
        places = [
            worker_variables(
                rank=worker.global_rank,
                local_rank=worker.local_rank,
                world_size=worker.world_size,
                local_world_size=spec.local_world_size,
                machine_rank=worker_group.group_rank,
                address=worker_group.master_addr,
                port=worker_group.master_port,
            )
            for worker in worker_group.workers
        ]
        self._workers.reap(kill_leftovers=True)  # those of the attempt before
        started = self._workers.start([self._environment({**place, **elastic}) for place in places])
        self._raise_if_stopping()
        return {worker.local_rank: worker.pid for worker in started}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._raise_if_stopping()
        if failed := self._workers.failed:
            failures = {w.rank: ProcessFailure(w.local_rank, w.pid, w.code or 0, "") for w in failed}
            return RunResult(state=WorkerState.FAILED, failures=failures)
        if self._workers.running:
            return RunResult(state=WorkerState.HEALTHY)
        values = {worker.global_rank: None for worker in worker_group.workers}
        return RunResult(state=WorkerState.SUCCEEDED, return_values=values)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._shutdown()

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        """End all workers; the grace period of the spec counts, not torch's ``timeout``."""
        if self._stopping.signum is not None:
            self._workers.wait(
                self._grace_s + KILL_LIMIT_S
            )  # they were asked, and will be killed when their time is over
        else:
            self._workers.stop(self._grace_s)

    def leave(self) -> None:
        """Leave the other machines, after all of them have finished."""
        group = self._worker_group
        if group.state == WorkerState.SUCCEEDED and (group.group_world_size or 1) > 1:
            leave_in_order(self._store, group.group_rank or 0, group.group_world_size or 1)

    def _raise_if_stopping(self) -> None:
        if self._stopping.signum is not None:
            raise StoppedBySignalError


def make_rendezvous(spec: LaunchSpec) -> RendezvousHandler:
    """How the machines of ``spec`` meet."""
    if spec.num_machines == 1:
        return LocalRendezvous(spec.address, spec.main_process_port or 0, spec.run_id)
    host = f"[{spec.address}]" if ":" in spec.address else spec.address
    return get_rendezvous_handler(
        RendezvousParameters(
            backend=spec.rdzv_backend,
            endpoint=f"{host}:{spec.main_process_port or DEFAULT_PORT}",
            run_id=spec.run_id,
            min_nodes=spec.num_machines,
            max_nodes=spec.num_machines,
            rank=spec.machine_rank,
            timeout=spec.rdzv_timeout_s,
        )
    )


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


def run_elastic(
    spec: LaunchSpec, workers: Workers, stopping: Stopping, environment: Callable[[dict[str, str]], dict[str, str]]
) -> None:
    """Run ``workers`` to their end, successful, failed or stopped; they are not reaped.

    Raises: LaunchError if the machines do not meet.
    """
    with quiet_elastic(not spec.is_verbose):
        try:
            rendezvous = make_rendezvous(spec)
            worker_spec = WorkerSpec(
                role="default",
                local_world_size=spec.local_processes,
                rdzv_handler=rendezvous,
                entrypoint=spec.command[0],
                max_restarts=spec.max_restarts,
                monitor_interval=spec.monitor_interval_s,
            )
            agent = LaunchAgent(worker_spec, workers, stopping, environment, spec.grace_period_s)
            agent.run()
            rendezvous.shutdown()
            agent.leave()
        except StoppedBySignalError:
            pass
        except (RendezvousError, DistError) as error:
            place = f"{spec.address}:{spec.main_process_port or DEFAULT_PORT}"
            raise LaunchError(
                f"{spec.num_machines} machine(s) did not meet at {place} ({spec.rdzv_backend}, "
                f"machine_rank={spec.machine_rank}): {error}. Check that machine 0 runs, that "
                "the address and port are its own and open, and that all machines say the same numbers"
            ) from error
