"""Time work on a CUDA device: events, warm-up, median and 20/80 percentiles; and the facts a figure needs beside it."""

from __future__ import annotations

import datetime
import statistics
import subprocess
from collections.abc import Callable

import torch


def device_ms(work: Callable[[], object], repeats: int = 20, warmup: int = 5) -> tuple[float, float, float]:
    """``(20th percentile, median, 80th percentile)`` of one call, in milliseconds, between device events."""
    for _ in range(warmup):
        work()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    times.sort()
    return times[len(times) // 5], statistics.median(times), times[-len(times) // 5]


def facts() -> str:
    """GPU, torch, Triton, date and commit: what stands beside every figure."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    triton = "none"
    try:
        import triton as triton_package

        triton = triton_package.__version__
    except ImportError:
        pass
    today = datetime.datetime.now(tz=datetime.UTC).date()
    return f"{gpu}, torch {torch.__version__}, Triton {triton}, {today}, commit {commit.strip() or 'unknown'}"
