"""How the machines of a launch find together: torch's elastic rendezvous, with four of its gaps closed.

torch's ``DynamicRendezvousHandler`` ("c10d") keeps the list of machines in a store, with heartbeats: it waits until
all are there, notices one that is lost, and lets one that comes back in. What is added here:

- both kinds, ``static`` and ``c10d``, meet this way; they differ in who chooses the ranks: the machine_rank of each,
  or the order of their addresses. torch's static kind cannot take a lost machine back;
- each attempt gets a store of its own. torch gives the workers the same one again, and they connect to addresses of
  the attempt before, whose processes are dead (torch 2.13: the second attempt fails or hangs);
- all machines see the same number of attempts, also one that has just come back;
- nobody touches the store of a host that is gone; see ``meeting``.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import DistError
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from acceler8.errors import LaunchError
from acceler8.launch.meeting import Meeting, listen, open_store
from acceler8.launch.spec import DEFAULT_PORT, LaunchSpec
from acceler8.launch.stopping import StoppedBySignalError

HEARTBEATS = 3
"""A machine that misses as many is lost; torch's own number."""

ROUNDS = "acceler8/rounds"
FINISHED = "acceler8/finished"


class LocalRendezvous(RendezvousHandler):
    """The rendezvous of one machine, which has nobody to wait for: a store for the workers to meet at.

    Each attempt gets a new store. It listens at ``address`` only, on a socket bound here: with port 0 the system
    picks a free one, which nobody can take in between. Restarts take a free one too.
    """

    def __init__(self, address: str, port: int, run_id: str) -> None:
        self._listener = listen(address, port)
        self._address = address
        self._run_id = run_id
        self._store: Any = None
        self.restarts = -1
        """How often the workers have met again."""

    def next_rendezvous(self) -> RendezvousInfo:
        """Open the store of the next attempt."""
        self.restarts += 1
        if self.restarts:
            self._listener = listen(self._address, 0)
        self._store = open_store(self._address, self._listener)
        store = dist.PrefixStore(self._run_id, self._store)  # type: ignore[attr-defined]
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(self._address, self._store.port))

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


class GuardedBackend(C10dRendezvousBackend):
    """torch's table of machines in the store; not read once the host is gone, nor by a launch that is stopped."""

    def __init__(self, meeting: Meeting, run_id: str, raise_if_stopping: Callable[[], None]) -> None:
        self._meeting = meeting
        self._raise_if_stopping = raise_if_stopping
        super().__init__(meeting.store, run_id)

    def _call_store(self, store_op: str, *args: Any, **kwargs: Any) -> Any:
        if threading.current_thread() is threading.main_thread():  # the other thread sends heartbeats
            self._raise_if_stopping()
        if self._meeting.is_lost():
            raise RendezvousConnectionError(f"the launcher at {self._meeting.address}, machine 0, is gone")
        return super()._call_store(store_op, *args, **kwargs)


class ElasticRendezvous(DynamicRendezvousHandler):
    """The rendezvous of several machines."""

    spec: LaunchSpec
    meeting: Meeting
    restarts = 0
    rank: int | None = None
    """This machine's rank in the last round; None before the first."""

    @classmethod
    def of(cls, spec: LaunchSpec, raise_if_stopping: Callable[[], None]) -> ElasticRendezvous:
        """Meet as ``spec`` says. Raises: RendezvousConnectionError, LaunchError."""
        is_host = spec.machine_rank == 0 if spec.rdzv_backend == "static" else None
        meeting = Meeting(
            spec.address,
            spec.main_process_port or DEFAULT_PORT,
            is_host=is_host,
            timeout_s=spec.rdzv_timeout_s,
            lost_after_s=spec.lost_after_s,
        )
        handler: ElasticRendezvous = cls.from_backend(
            spec.run_id,
            meeting.store,
            GuardedBackend(meeting, spec.run_id, raise_if_stopping),
            spec.num_machines,
            spec.num_machines,
            meeting.own_address,
            RendezvousTimeout(join=timedelta(seconds=spec.rdzv_timeout_s), close=timedelta(seconds=5)),
            keep_alive_interval=spec.lost_after_s / HEARTBEATS,  # type: ignore[arg-type]  # becomes a timedelta
            keep_alive_max_attempt=HEARTBEATS,
        )
        handler.spec, handler.meeting = spec, meeting
        return handler

    def _create_tcp_store_server(self, master_addr: str, master_port: int) -> Any:
        return self.meeting.store  # torch would open one more, on every interface; it is not used

    @property
    def use_agent_store(self) -> bool:
        """Workers use a store of machine 0's launcher."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for all machines and agree on ranks, the number of this attempt and the workers' store.

        Raises: RendezvousError if they do not come; LaunchError if they do not agree.
        """
        self._bootstrap_store_info = None  # torch keeps it, and a machine that comes back waits for it in vain
        info = super().next_rendezvous()
        self.rank = info.rank
        machines = self._gather(info)
        if self.spec.rdzv_backend == "static":
            check_ranks(machines)
            self.rank = self.spec.machine_rank
        self.restarts, port = self._agree(info.store, is_first=info.rank == 0)
        return RendezvousInfo(info.store, self.rank, info.world_size, RendezvousStoreInfo(self.meeting.address, port))

    def _gather(self, info: RendezvousInfo) -> list[dict[str, Any]]:
        """What each machine says of itself, in the order that torch found."""
        own = {
            "address": self.meeting.own_address or self.meeting.address,
            "machine_rank": self.spec.machine_rank,
            "num_processes": self.spec.num_processes,
            "is_host": self.meeting.is_host,
        }
        info.store.set(f"acceler8/machine/{info.rank}", json.dumps(own))
        machines = [json.loads(info.store.get(f"acceler8/machine/{rank}")) for rank in range(info.world_size)]
        different = {machine["num_processes"] for machine in machines}
        if len(different) > 1:
            raise LaunchError(
                f"num_processes differs between machines: {sorted(different)}; say the same on all (it counts the "
                "workers of all machines)"
            )
        return machines

    def _agree(self, store: Any, *, is_first: bool) -> tuple[int, int]:
        """Number of this attempt, from 0, and the port of its workers' store.

        The first attempt meets at the port that the user gave, the later ones at a free one.
        """
        if is_first:
            store.set("acceler8/round", str(self.meeting.store.add(ROUNDS, 1) - 1))
        attempt = int(store.get("acceler8/round"))
        if self.meeting.is_host:
            store.set("acceler8/port", str(self.meeting.open_worker_store() if attempt else self.meeting.port))
        return attempt, int(store.get("acceler8/port"))

    # While the workers run

    def num_nodes_waiting(self) -> int:
        """Machines that want to join, or have to be waited for: above 0, all workers start again."""
        waiting = super().num_nodes_waiting()
        return waiting or int(self.spec.max_restarts > 0 and not self._is_complete)

    @property
    def _is_complete(self) -> bool:
        """Whether all machines of this round were heard of lately."""
        return len(self._state_holder.state.participants) >= self.spec.num_machines

    @property
    def can_be_missed(self) -> bool:
        """Whether the others may wait for this machine to come back, should it be stopped."""
        return self.spec.max_restarts > 0 and not self.meeting.is_host

    def end(self) -> str | None:
        """Why the run is over, if that came from elsewhere; None while it goes on."""
        if reason := self.meeting.end():
            return reason
        if self._is_complete or self.spec.max_restarts:
            return None
        return f"a machine has not been heard of for {self.spec.lost_after_s:g} s"

    def announce_end(self, reason: str) -> None:
        """Tell the other machines that this one ends the run before its time."""
        self.meeting.announce_end(f"machine {self.rank} ended the run: {reason}")

    # The end

    def say_finished(self, store: Any) -> None:
        """Tell the other machines of this round, in its ``store``, that the workers here have succeeded."""
        if not self.meeting.is_lost():
            with suppress(DistError):  # the host is gone: nobody waits for this any more
                store.set(f"{FINISHED}/{self.rank}", "")

    def have_all_finished(self, store: Any) -> bool:
        """Whether the workers of all machines have succeeded, or the host of the store is gone."""
        try:
            if not self.meeting.is_lost():
                return bool(store.check([f"{FINISHED}/{rank}" for rank in range(self.spec.num_machines)]))
        except DistError:
            if not self.meeting.is_lost_soon():
                raise
        return True

    def leave(self, limit_s: float, *, may_return: bool = False) -> None:
        """Leave the other machines; nobody uses the store after this. The host waits for them, at most ``limit_s``.

        may_return: the others wait for this machine; else they cannot meet again.
        """
        self._stop_heartbeats()
        if not may_return and not self.meeting.is_lost():
            with suppress(RendezvousError, StoppedBySignalError):
                self.shutdown()
        if self.rank is not None:
            self.meeting.leave(self.restarts, self.rank, self.spec.num_machines, limit_s)


def check_ranks(machines: list[dict[str, Any]]) -> None:
    """Raise LaunchError unless the ``machine_rank`` of each of ``machines`` is its own."""
    ranks = sorted(machine["machine_rank"] for machine in machines)
    if ranks != list(range(len(machines))):
        given = ", ".join(f"{machine['machine_rank']} (at {machine['address']})" for machine in machines)
        raise LaunchError(
            f"machine_rank is not different on each machine: {given}; give each its own, from 0 to {len(machines) - 1}"
        )


Rendezvous = LocalRendezvous | ElasticRendezvous


def make_rendezvous(spec: LaunchSpec, raise_if_stopping: Callable[[], None]) -> Rendezvous:
    """How the machines of ``spec`` meet. Raises: RendezvousError, LaunchError."""
    if spec.num_machines == 1:
        return LocalRendezvous(spec.address, spec.main_process_port or 0, spec.run_id)
    return ElasticRendezvous.of(spec, raise_if_stopping)
