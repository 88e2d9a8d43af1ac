"""The elastic agent's own parts, with real stores."""

from __future__ import annotations

import threading
from datetime import timedelta

import torch.distributed as dist

from acceler8.launch.agent import leave_in_order


def test_the_machine_with_the_store_leaves_last():
    own = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=30))
    others = [dist.TCPStore("127.0.0.1", own.port, is_master=False) for _ in range(2)]
    first = threading.Thread(target=leave_in_order, args=(own, 0, 3), daemon=True)
    first.start()
    for rank, store in enumerate(others, start=1):
        first.join(0.2)
        assert first.is_alive(), f"machine 0 left while machine {rank} could still use its store"
        leave_in_order(store, rank, 3)
    first.join(20)
    assert not first.is_alive(), "machine 0 did not see the others leave"
