"""FSDP2's gradients in FP8 on the wire: a reduce-scatter of its own for each sharded module.

    reduction = ShardedGradientReduction()
    reduction.install(model)            # behind fully_shard, on every process

FSDP2 hands over one flat buffer with a chunk for each process, in it the shards of the module's parameters one behind
another. Blocks follow those shards; one-dimensional parameters travel in FP32. There is one rounding: sums are not
quantised again. In hybrid sharding the all-reduce between replicas stays FSDP2's own.
Source: PyTorch's ``FSDPModule.set_custom_reduce_scatter``.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from acceler8.comm.exchange import Exchange, Groups
from acceler8.comm.layout import Layout, Span
from acceler8.errors import ConfigError

_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # renamed in torch 2.13


class ShardedGradientReduction:
    """FP8 reduce-scatters for a sharded model.

    least_bytes: buffers below this travel as they are.
    """

    def __init__(self, *, least_bytes: int = 0) -> None:
        if least_bytes < 0:
            raise ConfigError(f"least_bytes={least_bytes}; allowed: 0 or more")
        self.least_bytes = least_bytes
        self.sent: Counter[str] = Counter()
        """Bytes that this process sent in FP8 (``fp8``) and otherwise (``plain``)."""

    def install(self, model: nn.Module) -> None:
        """Take over the reduce-scatters of every sharded module. Raises: ConfigError if there is none."""
        modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        groups = [(module, _group_of(module)) for module in modules]
        if not any(group is not None for _, group in groups):
            raise ConfigError(
                f"FP8 reduce-scatter got a {type(model).__name__} without sharded parameters; allowed: a model that"
                " fully_shard was called on; shard it first"
            )
        for module, group in groups:
            if group is not None:
                comm: Any = _ReduceScatter(self, group)
                module.set_custom_reduce_scatter(comm)


def _group_of(module: FSDPModule) -> Any:
    """The module's parameters as FSDP2 keeps them; None if others have them all."""
    return module._get_fsdp_state()._fsdp_param_group


class _ReduceScatter:
    """What FSDP2 calls for one module."""

    def __init__(self, owner: ShardedGradientReduction, group: Any) -> None:
        self._owner, self._params = owner, group.fsdp_params
        self._exchanges: dict[tuple[Any, ...], Exchange | None] = {}

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer of FSDP2's."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        """``output_tensor`` becomes this process's chunk of the sum, or mean, as ``op`` says."""
        processes = dist.get_world_size(group)
        exchange = self._exchange(input_tensor, group, processes)
        if exchange is None:
            sent = input_tensor.numel() * input_tensor.element_size() * (processes - 1) // processes
            self._owner.sent["plain"] += sent
            return _reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        exchange.reduce_scatter(input_tensor, output_tensor, _factor(op, processes))
        self._owner.sent["fp8"] += exchange.layout.bytes_sent()
        return None

    def _exchange(self, flat: Tensor, group: Any, processes: int) -> Exchange | None:
        if flat.numel() * flat.element_size() < self._owner.least_bytes:
            return None
        key = (flat.numel(), flat.device, tuple(p.sharded_param.requires_grad for p in self._params))
        if key not in self._exchanges:
            spans, chunk = self._spans(processes), flat.numel() // processes
            # a parameter that took no part in this backward is not in the buffer, and then nothing says which are
            is_whole = sum(span.length for span in spans) == chunk and any(span.is_coded for span in spans)
            made = Exchange(Layout.chunked(spans, chunk, processes, flat.device), Groups(group)) if is_whole else None
            self._exchanges[key] = made
        return self._exchanges[key]

    def _spans(self, processes: int) -> list[Span]:
        """Where each parameter's shard lies in a chunk: rows of dim 0, filled up so that all chunks are equal."""
        spans, at = [], 0
        for param in self._params:
            if not param.sharded_param.requires_grad:
                continue
            size = param._orig_size
            dim = param.fsdp_placement.dim
            rows, rest = size[dim], size.numel() // max(1, size[dim])
            length = -(-rows // processes) * rest
            spans.append(Span(at, length, len(size) > 1))
            at += length
        return spans


def _factor(op: Any, processes: int) -> float:
    """What the sum is multiplied by. Raises: ConfigError for an operation that is neither a sum nor a mean."""
    if op == dist.ReduceOp.SUM:
        return 1.0
    if op == dist.ReduceOp.AVG:
        return 1.0 / processes
    raise ConfigError(
        f"FP8 reduce-scatter got operation {op}; allowed: SUM and AVG; reduce in float32 or bfloat16"
        " (MixedPrecisionPolicy's reduce_dtype), and leave gradient_divide_factor to FSDP2"
    )
