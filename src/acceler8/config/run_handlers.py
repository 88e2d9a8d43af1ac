"""Objects that a script passes to ``Accelerator`` beside recipes: Hugging Face Accelerate's names, fields, defaults.

They are mutable, as scripts expect, and read once, when the Accelerator is made. PyTorch is imported on use.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from typing import TYPE_CHECKING, Any

from acceler8.config.handlers import KwargsHandler
from acceler8.errors import ConfigError, unknown_name

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel


class DDPCommunicationHookType(Enum):
    """How gradients travel between processes; ``NO`` is as they are."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


_NONE, _POWER_SGD = (
    DDPCommunicationHookType.NO,
    (
        DDPCommunicationHookType.POWER_SGD,
        DDPCommunicationHookType.BATCHED_POWER_SGD,
    ),
)


def _hook_type(value: Any, name: str, allowed: Iterable[DDPCommunicationHookType]) -> DDPCommunicationHookType:
    words = {kind.value: kind for kind in allowed}
    kind = value if isinstance(value, DDPCommunicationHookType) else words.get(str(value).lower())
    if kind is None or kind not in words.values():
        raise ConfigError(unknown_name(f"DistributedDataParallelKwargs({name}=)", str(value), words))
    return kind


@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """Arguments of ``torch.nn.parallel.DistributedDataParallel``, and a hook that compresses gradients on their way."""

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_wrapper: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_state_option: dict[str, Any] = field(default_factory=dict)

    def to_dict(self, ignore_keys: tuple[str, ...] = ("comm_hook", "comm_wrapper", "comm_state_option")) -> Any:
        """The arguments of the constructor, as a copy."""
        return {key: value for key, value in super().to_dict().items() if key not in ignore_keys}

    def register_comm_hook(self, model: DistributedDataParallel) -> None:
        """Let the gradients of a wrapped model travel as ``comm_hook`` says. Raises: ConfigError for another word."""
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        kind = _hook_type(self.comm_hook, "comm_hook", DDPCommunicationHookType)
        wrapper = _hook_type(
            self.comm_wrapper, "comm_wrapper", [k for k in DDPCommunicationHookType if k not in _POWER_SGD]
        )
        if kind is _NONE:
            return
        if kind in _POWER_SGD:
            state: Any = powerSGD_hook.PowerSGDState(None, **self.comm_state_option)
            hook: Any = powerSGD_hook.powerSGD_hook
            if kind is DDPCommunicationHookType.BATCHED_POWER_SGD:
                hook = powerSGD_hook.batched_powerSGD_hook
        else:
            state, hook = None, getattr(default_hooks, f"{kind.value}_compress_hook")
        if wrapper is not _NONE:
            hook = getattr(default_hooks, f"{wrapper.value}_compress_wrapper")(hook)
        model.register_comm_hook(state, hook)


@dataclass
class GradScalerKwargs(KwargsHandler):
    """Arguments of ``torch.amp.GradScaler``, which FP16 trains with."""

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True


@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """Arguments of ``torch.distributed.init_process_group``. On CPUs ``nccl`` stands for ``gloo``.

    timeout: None becomes 600 s for NCCL and 1800 s for others.
    """

    backend: str | None = "nccl"
    init_method: str | None = None
    timeout: timedelta | None = None

    def __post_init__(self) -> None:
        if self.timeout is None:
            self.timeout = timedelta(seconds=600 if self.backend == "nccl" else 1800)


@dataclass
class AutocastKwargs(KwargsHandler):
    """Arguments of ``torch.autocast``: in a prepared model's forward and in ``accelerator.autocast()``."""

    enabled: bool = True
    cache_enabled: bool | None = None


# class -> attribute of the Accelerator
HANDLERS: dict[type[KwargsHandler], str] = {
    DistributedDataParallelKwargs: "ddp_handler",
    GradScalerKwargs: "scaler_handler",
    InitProcessGroupKwargs: "init_handler",
    AutocastKwargs: "autocast_handler",
}


@dataclass
class DataLoaderConfiguration:
    """How ``prepare`` spreads a DataLoader over processes.

    split_batches: each process takes its part of every batch, so that the batch size is the global one; else each takes
        whole batches in turn. A batch must be a multiple of the processes.
    dispatch_batches: rank 0 reads and sends each process its part; None: for iterable datasets only.
    even_batches: complete a short tail with samples from the start, so that all processes see batches of one size;
        ``gather_for_metrics`` drops the copies.
    use_seedable_sampler: shuffle by a seed and the epoch's number, on all ranks alike and in every run.
    data_seed: that seed; None: PyTorch's current one.
    non_blocking: copy to the device without waiting; useful with ``pin_memory=True``.
    use_stateful_dataloader: taken and always so: prepared loaders are resumable (torchdata's StatefulDataLoader).
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False


@dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """How micro-batches add up.

    num_steps: micro-batches a step.
    adjust_scheduler: taken for Accelerate's sake; a scheduler moves once a step either way.
    sync_with_dataloader: the last batch of an epoch completes a step.
    sync_each_batch: average gradients in every micro-batch: less memory, more communication.
    """

    num_steps: int | None = None
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False
