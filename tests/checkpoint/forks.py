"""Several processes of one training, forked from one that has imported all it needs: a start costs no import.

``run(count, work, *args)`` calls ``work(*args)`` in ``count`` processes that find each other as torchrun's do, and
gives back what each returned. The parent computes nothing itself, so that each child starts clean.
"""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

LIMIT = 120  # seconds that a group may take


def run(count: int, work: Callable[..., Any], *args: Any, dies: tuple[int, ...] = ()) -> list[Any]:
    """What each process returned; None for one that ``dies``, by SIGKILL, as the work itself arranges."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        pids = [_start(rank, count, port, Path(folder), work, args) for rank in range(count)]
        codes = _wait(pids)
        allowed = [-signal.SIGKILL if rank in dies else 0 for rank in range(count)]
        assert codes == allowed, f"{work.__name__}: exit codes {codes}"
        results = [Path(folder) / str(rank) for rank in range(count)]
        return [torch.load(path, weights_only=False) if path.is_file() else None for path in results]


def _start(rank: int, count: int, port: int, folder: Path, work: Callable[..., Any], args: Any) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in place.items()} if count > 1 else {})
        result = work(*args)
        torch.save(result, folder / str(rank))
        code = 0
    except BaseException:
        traceback.print_exc()
    os._exit(code)


def _wait(pids: list[int]) -> list[int]:
    """Exit codes; those that hang are killed."""
    codes: dict[int, int] = {}
    end = time.monotonic() + LIMIT
    while len(codes) < len(pids):
        for pid in pids:
            if pid not in codes and (found := os.waitpid(pid, os.WNOHANG))[0]:
                codes[pid] = os.waitstatus_to_exitcode(found[1])
        if time.monotonic() > end:
            for pid in pids:
                if pid not in codes:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    codes[pid] = -signal.SIGALRM
        time.sleep(0.01)
    return [codes[pid] for pid in pids]
