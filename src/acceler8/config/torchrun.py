"""torchrun's own variables, ``PET_*``, as a route of ``acceler8 launch``.

torchrun reads each of its flags from a variable too, and who starts it on a cluster sets those: Kubeflow's training
operator does for a PyTorchJob (``pkg/controller.v1/pytorch``). Reading them makes ``acceler8 launch script.py`` enough
as such a job's command. ``ACCELERATE_*`` variables and flags win over them.
"""

from __future__ import annotations

from collections.abc import Mapping

from acceler8.config.sources import Precedence, RouteValues, Source
from acceler8.errors import ConfigError

_PLAIN = {
    "PET_NODE_RANK": "machine_rank",
    "PET_MASTER_ADDR": "main_process_ip",
    "PET_MASTER_PORT": "main_process_port",
    "PET_RDZV_BACKEND": "rdzv_backend",
    "PET_MAX_RESTARTS": "max_restarts",
    "PET_MONITOR_INTERVAL": "monitor_interval",
}
_PROCESSES = ("PET_NPROC_PER_NODE", "PET_N_PROC_PER_NODE")  # torchrun's, and that of operators before 1.6


def read_torchrun(environ: Mapping[str, str]) -> RouteValues:
    """The settings that ``PET_*`` variables give. Raises ConfigError naming the variable."""
    route = RouteValues()
    given = {name: text.strip() for name, text in environ.items() if name.startswith("PET_") and text.strip()}
    for name, path in _PLAIN.items():
        if name in given:
            route.put(path, given[name], _source(name))
    if endpoint := given.get("PET_RDZV_ENDPOINT"):
        host, _, port = endpoint.rpartition(":")
        if not host:
            raise ConfigError(f"PET_RDZV_ENDPOINT: got {endpoint!r}; allowed: HOST:PORT")
        route.put("main_process_ip", host.strip("[]"), _source("PET_RDZV_ENDPOINT"))
        route.put("main_process_port", port, _source("PET_RDZV_ENDPOINT"))
    machines = _machines(given["PET_NNODES"]) if "PET_NNODES" in given else 1
    if "PET_NNODES" in given:
        route.put("num_machines", machines, _source("PET_NNODES"))
    for name in _PROCESSES:
        if given.get(name, "").isdecimal():  # else "auto" or "gpu": one for each GPU, as without it
            route.put("num_processes", int(given[name]) * machines, _source(name))
    return route


def _machines(text: str) -> int:
    """One number of machines, also where torchrun's MIN:MAX gives the same twice."""
    least, _, most = text.partition(":")
    if not least.isdecimal() or most not in ("", least):
        raise ConfigError(f"PET_NNODES: got {text!r}; allowed: one number, for the number of machines stays the same")
    return int(least)


def _source(name: str) -> Source:
    return Source(Precedence.ENVIRONMENT, name)
