"""What the workers of a launch find in their environment.

They get the parent's environment as it is, plus added variables: the settings (``ACCELERATE_*`` and the like, written
from the effective configuration), what ``config.variables`` lets a configuration add, and their place among each other.
Nothing here reads the process environment; callers pass it in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from acceler8.config.variables import holds_secret, objection
from acceler8.errors import LaunchError
from acceler8.launch.guardian import MARK

MakeEnvironment = Callable[[Mapping[str, str], Mapping[str, str]], dict[str, str]]
"""From a worker's own variables, and those that it gets where nobody has set them, to its whole environment."""

SETTINGS = ("ACCELERATE_", "ACCELER8_", "FSDP_")
"""The names of variables that carry settings start like this."""


def child_environment(parent: Mapping[str, str], added: Mapping[str, str]) -> dict[str, str]:
    """Environment of a child: all of ``parent``, and ``added`` on top of it. Neither argument is changed."""
    return {**parent, **added}


def check_configured(added: Mapping[str, str]) -> None:
    """Raise LaunchError for a variable that is neither a setting nor one that a configuration may add."""
    for name, value in added.items():
        if name == MARK:
            raise LaunchError(f"environment variable {MARK} cannot be given: the launch computes it; leave it out")
        is_setting = isinstance(name, str) and name.startswith(SETTINGS) and not holds_secret(name)
        reason = objection("NCCL_DEBUG" if is_setting else name, value, ())
        if reason:
            raise LaunchError(reason.replace("NCCL_DEBUG", name, 1) if is_setting else reason)


def default_threads(parent: Mapping[str, str], added: Mapping[str, str], cores: int, processes: int) -> dict[str, str]:
    """``OMP_NUM_THREADS`` for each of several processes that share ``cores``; empty where it is already chosen.

    Every process would otherwise start a thread for each core, and N processes would fight for the cores N-fold.
    torchrun sets 1; a fair share uses the machine as well as that does, and better with few processes.
    """
    if processes < 2 or "OMP_NUM_THREADS" in parent or "OMP_NUM_THREADS" in added:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, cores // processes))}


def worker_variables(
    *, rank: int, local_rank: int, world_size: int, local_world_size: int, machine_rank: int, address: str, port: int
) -> dict[str, str]:
    """The variables by which ``torch.distributed`` and Accelerate know a worker's place; those of torchrun."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "GROUP_RANK": str(machine_rank),
        "GROUP_WORLD_SIZE": str(world_size // local_world_size),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }


def elastic_variables(*, run_id: str, restarts: int, max_restarts: int, is_store_shared: bool) -> dict[str, str]:
    """The variables of elastic training. A shared store is the launcher's, at MASTER_ADDR:MASTER_PORT; otherwise
    rank 0 opens one there.
    """
    return {
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": str(is_store_shared),
    }
