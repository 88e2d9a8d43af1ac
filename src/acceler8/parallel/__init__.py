"""How a model is spread over processes: one strategy a file behind one protocol."""

from __future__ import annotations

from acceler8.parallel.ddp import ReplicatedProcesses
from acceler8.parallel.deepspeed import DeepSpeedProcesses
from acceler8.parallel.fsdp2 import ShardedProcesses, ShardingOptions
from acceler8.parallel.protocol import Strategy
from acceler8.parallel.single import SingleProcess

__all__ = [
    "DeepSpeedProcesses",
    "ReplicatedProcesses",
    "ShardedProcesses",
    "ShardingOptions",
    "SingleProcess",
    "Strategy",
]
