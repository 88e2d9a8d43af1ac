"""How many threads a run on the CPU gets: few, on purpose.

PyTorch starts a thread for every processor that it sees, and threads that wait for each other spin. Where a
processor is not really there (other work has it, or a container's quota forbids it, as ``docker --cpus=2`` does on a
machine of 64), a step of the small model took 4.6 s on two threads and 0.5 s on one. On one thread it also computes
the same bits on every number of processors.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from acceler8.demo.settings import DemoSettings

CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""Two words, the quota and its period in microseconds; ``max`` where there is no quota (Linux, cgroup v2)."""


def usable_processors() -> int:
    """Processors that the machine, this process's affinity and its container's quota leave to it; at least 1."""
    count = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # not on macOS and Windows
        count = len(os.sched_getaffinity(0))
    return max(1, min(count, _quota()))


def _quota() -> int:
    """Return the container's quota in processors, rounded up; without one, more than any machine has."""
    try:
        quota, period = CGROUP_QUOTA.read_text(encoding="ascii").split()
        return math.ceil(int(quota) / int(period))
    except (OSError, ValueError):  # no cgroup v2 here, or no quota in it
        return sys.maxsize


def thread_count(settings: DemoSettings) -> int:
    """Return the threads of a run: PyTorch's number, lowered to what is usable and to what the size gains from."""
    limits = [torch.get_num_threads(), usable_processors()]
    if settings.device == "cpu" and settings.model_size.cpu_threads is not None:
        limits.append(settings.model_size.cpu_threads)
    return min(limits)


@contextlib.contextmanager
def threads_of(settings: DemoSettings) -> Iterator[None]:
    """Inside, PyTorch uses ``thread_count`` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(thread_count(settings))
    try:
        yield
    finally:
        torch.set_num_threads(before)
