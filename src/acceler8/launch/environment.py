"""What the children of a launch find in their environment, and what a configuration may put there.

The children get the parent's environment as it is, plus added variables. A configuration is a file that people
pass around, so what it may add is an allow-list: the settings of training, and of the libraries below it.
Three kinds are refused, each with its reason:

- variables that make a process load or run other code (``LD_PRELOAD``, ``PYTHONPATH``, ``PATH``, ``BASH_ENV``,
  NCCL's plugins, folders from which compiled code or pickles are loaded): a configuration describes a training,
  it does not bring programs along;
- secrets (``HF_TOKEN``, ``WANDB_API_KEY``): a file is no place for them;
- everything else, because a misspelt name would be ignored without a word.

Whoever needs one of these sets it in the shell: the parent's own values are never touched. Nothing here reads the
process environment; callers pass it in.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from acceler8.errors import LaunchError
from acceler8.launch.guardian import MARK

ALLOWED_PREFIXES = (
    "ACCELERATE_",
    "ACCELER8_",
    "FSDP_",
    "GLOO_",
    "NCCL_",
    "PARALLELISM_CONFIG_",
    "TORCH_",
    "TORCHELASTIC_",
)
"""A variable whose name starts like this may be added; ``FSDP_`` and ``PARALLELISM_CONFIG_`` are Accelerate's."""

RANK_NAMES = frozenset(
    {
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "RANK",
        "ROLE_NAME",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        "WORLD_SIZE",
    }
)
"""What ``torch.distributed`` reads to find its peers; computed by the launch, and by nobody else."""

ALLOWED_NAMES = RANK_NAMES | {
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_DEVICE_ORDER",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_VISIBLE_DEVICES",
    "HF_DATASETS_OFFLINE",
    "HF_HUB_DISABLE_PROGRESS_BARS",
    "HF_HUB_DISABLE_TELEMETRY",
    "HF_HUB_DOWNLOAD_TIMEOUT",
    "HF_HUB_ENABLE_HF_TRANSFER",
    "HF_HUB_OFFLINE",
    "MKL_NUM_THREADS",
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TOKENIZERS_PARALLELISM",
    "TRANSFORMERS_OFFLINE",
    "TRANSFORMERS_VERBOSITY",
}
"""Single variables that may be added."""

LOADS_CODE = frozenset(
    {
        "BASH_ENV",
        "ENV",
        "LD_AUDIT",
        "LD_LIBRARY_PATH",
        "LD_PRELOAD",
        "NCCL_CONF_FILE",
        "PATH",
        "PYTHONHOME",
        "PYTHONPATH",
        "PYTHONSTARTUP",
        "TORCH_EXTENSIONS_DIR",
        "TORCH_HOME",
    }
)
"""Refused although some match an allowed prefix: they name a file or folder from which code or settings come."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET_WORDS = {"CREDENTIAL", "CREDENTIALS", "KEY", "PASSWD", "PASSWORD", "SECRET", "TOKEN"}


def _check(name: object, value: object) -> None:
    """Raise LaunchError unless ``name`` may be added with ``value``; the message never shows the value."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise LaunchError(
            f"environment variable name {name!r} is not allowed in a configuration; a name is letters, digits and "
            "underscores and does not start with a digit. Correct the name"
        )
    reason = None
    if name in LOADS_CODE or name.startswith(("LD_", "DYLD_")) or name.endswith(("_PLUGIN", "_PLUGIN_LIBS")):
        reason = "it decides what code or settings a process loads"
    elif _SECRET_WORDS & set(name.upper().split("_")):
        reason = "its name says that it holds a secret"
    elif name not in ALLOWED_NAMES and not name.startswith(ALLOWED_PREFIXES):
        prefixes = ", ".join(f"{prefix}*" for prefix in ALLOWED_PREFIXES)
        reason = f"allowed are {prefixes} and {', '.join(sorted(ALLOWED_NAMES))}"
    if reason:
        raise LaunchError(
            f"environment variable {name} cannot come from a configuration: {reason}. Set it in the shell that starts "
            "the launch; the children get the shell's environment as it is"
        )
    if not isinstance(value, str) or any(character in value for character in "\n\r\0"):
        got = "a line break or a NUL" if isinstance(value, str) else f"a {type(value).__name__}"
        raise LaunchError(
            f"the value of environment variable {name} is or holds {got}; allowed is text on one line. Correct it in "
            "the configuration"
        )


def child_environment(parent: Mapping[str, str], added: Mapping[str, str]) -> dict[str, str]:
    """Environment of a child: all of ``parent``, and ``added`` on top of it.

    An added value wins over the parent's value of the same name. Neither argument is changed, and the parent's
    variables are not looked at: whoever starts the launch may have any ``LD_LIBRARY_PATH``.
    Raises: LaunchError if an added name is not in the allow-list, loads code or is a secret, or if a value is
        not text on one line.
    """
    for name, value in added.items():
        _check(name, value)
    return {**parent, **added}


def check_configured(added: Mapping[str, str]) -> None:
    """Raise LaunchError for what a configuration must not add: all that ``child_environment`` refuses, and the
    variables that the launch computes.
    """
    child_environment({}, added)
    computed = sorted(name for name in added if name in RANK_NAMES or name == MARK or name.startswith("TORCHELASTIC_"))
    if computed:
        raise LaunchError(
            f"environment variable {computed[0]} cannot come from a configuration: the launch computes it. Say it with "
            "num_processes, num_machines, machine_rank, main_process_ip and main_process_port"
        )


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
