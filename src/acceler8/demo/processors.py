"""How many processors this process may really use, and keeping PyTorch to them.

PyTorch starts a thread for every processor that it sees. In a container with a quota (``docker --cpus=2`` on
a machine of 64) that is far too many: they wait for each other, and a small model trains many times slower
than on two.
"""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path

import torch

CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""Two words, the quota and its period in microseconds; ``max`` where there is no quota (Linux, cgroup v2)."""


def usable_processors() -> int:
    """Processors that the machine, the affinity of this process and its container's quota leave to it; at
    least 1.
    """
    count = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # not on macOS and Windows
        count = len(os.sched_getaffinity(0))
    return max(1, min(count, _quota()))


def _quota() -> int:
    """Return the container's quota in processors, rounded up; where there is none, more than any machine
    has.
    """
    try:
        quota, period = CGROUP_QUOTA.read_text(encoding="ascii").split()
        return math.ceil(int(quota) / int(period))
    except (OSError, ValueError):  # no cgroup v2 here, or no quota in it
        return sys.maxsize


def limit_threads() -> None:
    """Lower PyTorch's threads to ``usable_processors``; a lower number that was set before stays."""
    torch.set_num_threads(min(torch.get_num_threads(), usable_processors()))
