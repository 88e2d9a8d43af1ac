"""The strategy that a configuration asks for, with the options that its engine takes."""

from __future__ import annotations

from acceler8.accelerator.deepspeed_settings import make_deepspeed
from acceler8.accelerator.processes import Processes
from acceler8.config.plugins import DeepSpeedPlugin, FullyShardedDataParallelPlugin
from acceler8.config.run_handlers import DistributedDataParallelKwargs
from acceler8.config.sources import Effective
from acceler8.parallel import ReplicatedProcesses, SingleProcess, Strategy


def make_strategy(
    effective: Effective,
    processes: Processes,
    ddp: DistributedDataParallelKwargs | None,
    fsdp: FullyShardedDataParallelPlugin | None,
    deepspeed: DeepSpeedPlugin | None,
) -> Strategy:
    """Which way the models of these processes are spread."""
    if effective["distributed_type"] == "DEEPSPEED":
        return make_deepspeed(effective, processes, deepspeed)
    if processes.num_processes == 1:
        return SingleProcess(processes.device)
    return ReplicatedProcesses(
        processes.device,
        processes.process_index,
        processes.num_processes,
        options=None if ddp is None else ddp.to_kwargs(),
        register=None if ddp is None else ddp.register_comm_hook,
    )
