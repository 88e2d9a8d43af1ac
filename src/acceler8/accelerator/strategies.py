"""The strategy that a configuration asks for, with the options that its engine takes."""

from __future__ import annotations

import logging

from acceler8.accelerator.deepspeed_settings import make_deepspeed
from acceler8.accelerator.fsdp_settings import sharding_options, strategy_word
from acceler8.accelerator.processes import Processes
from acceler8.config.plugins import DeepSpeedPlugin, FullyShardedDataParallelPlugin
from acceler8.config.run_handlers import DistributedDataParallelKwargs
from acceler8.config.sources import Effective
from acceler8.parallel import ReplicatedProcesses, ShardedProcesses, SingleProcess, Strategy

_log = logging.getLogger("acceler8")


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
    is_fsdp = effective["distributed_type"] == "FSDP"
    if processes.num_processes == 1:
        if is_fsdp:
            _log.warning("distributed_type FSDP: this is the only process, so it holds the whole model")
        return SingleProcess(processes.device)
    if is_fsdp and strategy_word(effective) != "NO_SHARD":
        options, notes = sharding_options(effective, processes, fsdp)
        for note in notes if processes.process_index == 0 else ():
            _log.warning(note)
        return ShardedProcesses(processes.device, processes.process_index, processes.num_processes, options)
    if is_fsdp and processes.process_index == 0:
        _log.warning("fsdp_sharding_strategy NO_SHARD: each process holds the whole model, by DistributedDataParallel")
    return ReplicatedProcesses(
        processes.device,
        processes.process_index,
        processes.num_processes,
        options=None if ddp is None else ddp.to_kwargs(),
        register=None if ddp is None else ddp.register_comm_hook,
    )
