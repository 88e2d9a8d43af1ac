"""Which environment variables a configuration may add to the processes that it starts.

A configuration is a file that people pass around, so what it may add is an allow-list: the knobs of the libraries below
a training. Refused, each with its reason:

- variables that make a process load or run other code, or write files (``LD_PRELOAD``, ``PYTHONPATH``, ``PATH``,
  plugins, anything that names a path): a configuration describes a training, it does not bring programs along;
- secrets (``HF_TOKEN``, ``WANDB_API_KEY``): a file is no place for them;
- ranks and addresses, which the launch computes, and settings, which have a key of their own: said here they would
  win without being seen;
- everything else, because a misspelt name would be ignored without a word.

Whoever needs one of these sets it in the shell: the parent's own values are never touched.
"""

from __future__ import annotations

import re
from collections.abc import Collection

COMPUTED = frozenset(
    {
        *("GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RANK"),
        *("ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "WORLD_SIZE"),
    }
)
"""What ``torch.distributed`` reads to find its peers; the launch computes it."""

ALLOWED_PREFIXES = ("GLOO_", "NCCL_")
"""A variable whose name starts like this may be added, unless its name says that it holds a path or code."""

ALLOWED = frozenset(
    {
        *("CUBLAS_WORKSPACE_CONFIG", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING"),
        *("CUDA_VISIBLE_DEVICES", "HF_DATASETS_OFFLINE", "HF_HUB_DISABLE_PROGRESS_BARS", "HF_HUB_DISABLE_TELEMETRY"),
        *("HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ENABLE_HF_TRANSFER", "HF_HUB_OFFLINE", "MKL_NUM_THREADS"),
        *("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"),
        *("TOKENIZERS_PARALLELISM", "TRANSFORMERS_OFFLINE", "TRANSFORMERS_VERBOSITY", "TORCHDYNAMO_DISABLE"),
        *("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_COMPILE_DISABLE", "TORCH_CPP_LOG_LEVEL", "TORCH_LOGS"),
        *("TORCH_DISTRIBUTED_DEBUG", "TORCH_SHOW_CPP_STACKTRACES", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
        *("TORCH_NCCL_AVOID_RECORD_STREAMS", "TORCH_NCCL_BLOCKING_WAIT", "TORCH_NCCL_ENABLE_MONITORING"),
        *("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "TORCH_NCCL_HIGH_PRIORITY", "TORCH_NCCL_TRACE_BUFFER_SIZE"),
        *("TORCH_NCCL_USE_COMM_NONBLOCKING", "TORCH_NCCL_ENABLE_TIMING", "TORCH_NCCL_DUMP_ON_TIMEOUT"),
    }
)
"""Single variables that may be added."""

_LOADS_CODE = frozenset({"BASH_ENV", "ENV", "PATH", "PYTHONHOME", "PYTHONPATH", "PYTHONSTARTUP"})
_LOADS_CODE_ENDS = (
    *("_CONF", "_DIR", "_FILE", "_FN", "_FORMAT", "_HOME", "_LIB", "_LOAD", "_OUT", "_PATH", "_PLUGIN", "_PLUGIN_LIBS"),
)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET_WORDS = {"CREDENTIAL", "CREDENTIALS", "KEY", "PASSWD", "PASSWORD", "SECRET", "TOKEN"}


def loads_code(name: str) -> bool:
    """True if a variable decides what code or settings a process loads, or where it writes."""
    is_loader = name in _LOADS_CODE or name.startswith(("LD_", "DYLD_"))
    return is_loader or (name.endswith(_LOADS_CODE_ENDS) and name not in ALLOWED)


def holds_secret(name: str) -> bool:
    """True if a variable's name says that it holds a secret."""
    return bool(_SECRET_WORDS & set(name.upper().split("_")))


def objection(name: object, value: object, settings: Collection[str]) -> str | None:
    """Why a configuration may not add this variable, and what to do; None if it may. Never shows the value.

    settings: the variables that are settings themselves.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        return (
            f"environment variable name {name!r:.80} is not allowed in a configuration; a name is letters, digits and"
            " underscores and does not start with a digit. Correct the name"
        )
    shell = "Set it in the shell that starts the launch; the children get the shell's environment as it is"
    reason = None
    if loads_code(name):
        reason = f"it decides what code or settings a process loads, or where it writes. {shell}"
    elif holds_secret(name):
        reason = f"its name says that it holds a secret. {shell}"
    elif name in COMPUTED or name.startswith("TORCHELASTIC_"):
        reason = (
            "the launch computes it. Say it with num_processes, num_machines, machine_rank, main_process_ip and"
            " main_process_port"
        )
    elif name in settings:
        reason = "it is a setting with a key and a flag of its own. Use those"
    elif name not in ALLOWED and not name.startswith(ALLOWED_PREFIXES):
        prefixes = ", ".join(f"{prefix}*" for prefix in ALLOWED_PREFIXES)
        reason = f"allowed are {prefixes} and {', '.join(sorted(ALLOWED))}. {shell}"
    if reason:
        return f"environment variable {name} cannot come from a configuration: {reason}"
    if not isinstance(value, str) or any(character in value for character in "\n\r\0"):
        got = "a line break or a NUL" if isinstance(value, str) else f"a {type(value).__name__}"
        return (
            f"the value of environment variable {name} is or holds {got}; allowed is text on one line. Correct it in"
            " the configuration"
        )
    return None
