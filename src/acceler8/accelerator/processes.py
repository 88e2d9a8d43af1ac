"""Which of several processes this is: the variables of torchrun (and of ``acceler8 launch``), and the process group."""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import distributed

from acceler8.config.environment import current_environment
from acceler8.config.run_handlers import InitProcessGroupKwargs
from acceler8.errors import ConfigError, HardwareError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_stores: dict[tuple[str, ...], Store] = {}
"""Where this process met others. Kept until it ends, so that no server stops and starts again."""
_groups_started = 0


@dataclass
class Processes:
    """This process among those that train together."""

    device: torch.device
    num_processes: int = 1
    process_index: int = 0
    local_process_index: int = 0
    owns_group: bool = False
    """True if this object started the process group, and so ends it."""

    def wait(self) -> None:
        """Return when every process has come here."""
        if self.num_processes > 1:
            distributed.barrier(device_ids=[self.device.index] if self.device.type == "cuda" else None)

    def end(self) -> None:
        """End the process group if it was started here."""
        if self.owns_group and distributed.is_initialized():
            for group in (distributed.group.WORLD, *distributed.distributed_c10d._world.pg_map):  # a mesh has its own
                _keep_for_ever(group)
            distributed.destroy_process_group()
        self.owns_group = False


def place_of_this_process() -> tuple[int, int]:
    """``(number, how many)``: of the process group that runs, else of the launcher's variables, else alone."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    environ = current_environment()
    return _number(environ, "RANK", 0), _number(environ, "WORLD_SIZE", 1)


def _keep_for_ever(group: object) -> None:
    """Have the interpreter never free a group that is ended.

    Freeing one of Gloo joins its threads while holding the interpreter's lock, for which such a thread may be waiting
    to let go of the last collective's result: both wait for ever. The last owner is often a DistributedDataParallel,
    which goes when the script's function returns. The threads end with the process.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def join_processes(
    environ: Mapping[str, str],
    device: torch.device | str | None,
    cpu: bool,
    options: InitProcessGroupKwargs | None = None,
) -> Processes:
    """Find this process's place and device, and start the process group where there are several and none runs yet.

    The group uses NCCL on GPUs and Gloo on CPUs; one that runs already is used as it is. Without ``device`` it is the
    GPU of LOCAL_RANK, the current GPU for one process, or the CPU. ``options`` are for a group that starts here.
    Raises: ConfigError for a variable that is missing or no number; HardwareError for a GPU that is not there.
    """
    has_group = distributed.is_available() and distributed.is_initialized()
    world = distributed.get_world_size() if has_group else _number(environ, "WORLD_SIZE", 1)
    rank = distributed.get_rank() if has_group else _number(environ, "RANK", None if world > 1 else 0)
    local = _number(environ, "LOCAL_RANK", rank if has_group or world == 1 else None)
    if not has_group and not 0 <= rank < world:
        raise ConfigError(f"RANK: got {rank}; allowed: 0 to {world - 1}, for WORLD_SIZE is {world}")
    place = _pick_device(device, cpu, local if world > 1 else None)
    if world == 1 or has_group:
        return Processes(place, world, rank, local)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not environ.get(name) and (options is None or options.init_method is None):
            raise ConfigError(f"{name} is not set, and WORLD_SIZE is {world}; start with acceler8 launch or torchrun")
    if place.type == "cuda":
        torch.cuda.set_device(place)
    backend = "nccl" if place.type == "cuda" else "gloo"
    if options is not None and options.backend is not None and (place.type == "cuda" or options.backend != "nccl"):
        backend = options.backend
    distributed.init_process_group(
        backend,
        store=_meet(environ, options, rank, world),
        timeout=None if options is None else options.timeout,
        rank=rank,
        world_size=world,
    )
    found = Processes(place, world, rank, local, owns_group=True)
    atexit.register(_end_at_exit, found, os.getpid())
    if "nccl" not in distributed.get_backend():
        # Gloo returns here when its own connections stand, not those of the others. A process that left by then took
        # their half away: they failed to connect, or waited until the timeout. NCCL connects at the first collective.
        found.wait()
    return found


def _meet(environ: Mapping[str, str], options: InitProcessGroupKwargs | None, rank: int, world: int) -> Store:
    """The store in which the processes exchange their addresses, with names that no earlier group of theirs used.

    PyTorch starts the store anew with each group, under the same names. A process that joined again before the first
    one had stopped its old store met nobody there; in torchrun's store, which stays, it read addresses of closed
    sockets ("Connection refused").
    """
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    global _groups_started
    method = (None if options is None else options.init_method) or "env://"
    where = (method, environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", ""), str(rank), str(world))
    timeout = {} if options is None or options.timeout is None else {"timeout": options.timeout}
    if where not in _stores:
        _stores[where] = next(rendezvous(method, rank, world, **timeout))[0]
    if timeout:
        _stores[where].set_timeout(timeout["timeout"])
    _groups_started += 1
    return PrefixStore(f"acceler8/{_groups_started}", _stores[where])


def _end_at_exit(processes: Processes, pid: int) -> None:
    """End a group that no ``end_training`` ended, of which NCCL warns. Not after an error: others may wait in it."""
    if os.getpid() == pid and not hasattr(sys, "last_type"):
        processes.end()


def _number(environ: Mapping[str, str], name: str, default: int | None) -> int:
    text = environ.get(name, "")
    if not text:
        if default is None:
            raise ConfigError(f"{name} is not set, and WORLD_SIZE is above 1; start with acceler8 launch or torchrun")
        return default
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"{name}: got {text[:40]!r}; allowed: a whole number; the launcher sets it, so unset it")
    return int(text)


def _pick_device(device: torch.device | str | None, cpu: bool, local: int | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    if cpu or not torch.cuda.is_available():
        return torch.device("cpu")
    if local is None:
        return torch.device("cuda", torch.cuda.current_device())
    if local >= torch.cuda.device_count():
        raise HardwareError(
            f"LOCAL_RANK is {local}, and this machine shows {torch.cuda.device_count()} GPUs; start fewer processes on"
            " it, or set use_cpu"
        )
    return torch.device("cuda", local)
