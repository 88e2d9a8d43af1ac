"""What to launch, where, and how: one frozen description, checked when it is made."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from acceler8.config.kinds import Host
from acceler8.errors import LaunchError
from acceler8.launch.worker_environment import check_configured

LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 29500
"""torchrun's and Accelerate's, for several machines: all must agree on it without having talked."""

RENDEZVOUS_BACKENDS = ("static", "c10d")


@dataclass(frozen=True, kw_only=True)
class LaunchSpec:
    """One launch, as one of its machines sees it.

    Raises: LaunchError on a number, host, port or variable that cannot be right; the message names it.
    """

    command: tuple[str, ...]
    """Script (or module, or program) and its own arguments, which reach it untouched."""
    is_module: bool = False
    """The command's first word is a module, as after ``python -m``."""
    is_program: bool = False
    """The command's first word is an executable; no Python goes in front (Accelerate's ``--no_python``)."""
    num_processes: int = 1
    """Workers over all machines; a multiple of ``num_machines``."""
    num_machines: int = 1
    machine_rank: int = 0
    """This machine's number, from 0; machine 0 is the one at ``main_process_ip``."""
    main_process_ip: str | None = None
    """Where the workers meet: host name or address. None: loopback; required with several machines."""
    main_process_port: int | None = None
    """Port there. None: a free one; 29500 with several machines."""
    use_cpu: bool = False
    """The workers compute on the CPU: they find ``ACCELERATE_USE_CPU=true``. ``CUDA_VISIBLE_DEVICES`` stays."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """What the configuration adds to the workers' environment; see ``config.variables`` for what it may."""
    max_restarts: int = 0
    """How often all workers are started again after one failed."""
    monitor_interval_s: float = 0.05
    """Seconds between two looks at the workers; several processes only."""
    grace_period_s: float = 30.0
    """Seconds that workers asked to end may take, to save; then they are killed."""
    log_dir: Path | None = None
    """Folder for ``rank_N.stdout.log`` and ``rank_N.stderr.log``, appended to. None: the launcher's own streams."""
    rdzv_backend: str = "static"
    """How several machines meet: static (ranks are given) or c10d (ranks are found out)."""
    rdzv_timeout_s: int = 900
    """Seconds to wait for the other machines, at the start and after a restart."""
    lost_after_s: float = 15.0
    """A machine whose launcher was not heard of for as many seconds is lost; the machines' clocks must agree better."""
    run_id: str = "acceler8"
    """Name of the run, the same on all machines."""
    is_quiet: bool = False
    """Say nothing but failures."""
    is_verbose: bool = False
    """Show what torch's elastic training logs."""

    def __post_init__(self) -> None:
        """Check every field."""
        self._check_counts()
        self._check_meeting_point()
        for name in ("monitor_interval_s", "rdzv_timeout_s", "lost_after_s"):
            if not getattr(self, name) > 0:
                raise LaunchError(f"{name}={getattr(self, name)!r}; it must be above 0 seconds")
        if not self.grace_period_s >= 0:
            raise LaunchError(f"grace_period_s={self.grace_period_s!r}; it must be 0 seconds or more")
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,128}", self.run_id):
            raise LaunchError(f"run_id={self.run_id!r}; use up to 128 letters, digits, '_', '.' and '-'")
        check_configured(self.environment)

    def _check_counts(self) -> None:
        for name, least in (("num_processes", 1), ("num_machines", 1), ("machine_rank", 0), ("max_restarts", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise LaunchError(f"{name}={value!r}; it must be a whole number of at least {least}")
        if self.num_processes % self.num_machines:
            raise LaunchError(
                f"num_processes={self.num_processes} is not a multiple of num_machines={self.num_machines}; "
                "num_processes counts the workers of all machines, and each machine runs the same number"
            )
        if self.machine_rank >= self.num_machines:
            raise LaunchError(
                f"machine_rank={self.machine_rank} with num_machines={self.num_machines}; ranks count from 0 to "
                f"{self.num_machines - 1}"
            )

    def _check_meeting_point(self) -> None:
        if self.main_process_ip is not None:
            check_host(self.main_process_ip)
        elif self.num_machines > 1:
            raise LaunchError(
                f"main_process_ip is not set, with num_machines={self.num_machines}; give the address of machine 0"
            )
        if self.main_process_port is not None:
            check_port(self.main_process_port)
        if self.rdzv_backend not in RENDEZVOUS_BACKENDS:
            raise LaunchError(f"rdzv_backend={self.rdzv_backend!r}; valid: {', '.join(RENDEZVOUS_BACKENDS)}")

    @property
    def local_processes(self) -> int:
        """Workers of this machine."""
        return self.num_processes // self.num_machines

    @property
    def address(self) -> str:
        """Host where the workers meet."""
        return self.main_process_ip or LOOPBACK


def check_host(host: str) -> None:
    """Raise LaunchError unless ``host`` is a host name or an IP address, without scheme and port."""
    try:
        Host().parse(host)
    except ValueError:
        raise LaunchError(
            f"main_process_ip={host!r} is neither a host name nor an IP address; give it alone, such as "
            "node0.cluster or 10.0.0.1, and the port with main_process_port"
        ) from None


def check_port(port: int) -> None:
    """Raise LaunchError unless ``port`` is a TCP port number."""
    if not isinstance(port, int) or isinstance(port, bool) or not 1 <= port <= 65535:
        raise LaunchError(
            f"main_process_port={port!r}; a port is a number from 1 to 65535. On one machine leave it out for "
            "a free one"
        )
