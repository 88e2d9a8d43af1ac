"""DistributedDataParallel's gradients in FP8 on the wire: a communication hook.

    reduction = GradientReduction()
    ddp_model.register_comm_hook(reduction, reduction.hook)

Each bucket is quantised in blocks of its parameters' own gradients; one-dimensional ones (norms, biases), which are few
and small, travel in FP32. On a GPU the work runs on a stream of its own, so backward goes on beside it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from acceler8.comm.exchange import Exchange, Groups
from acceler8.comm.layout import Layout, Span
from acceler8.errors import ConfigError


class GradientReduction:
    """FP8 all-reduce of DDP's buckets. One object a model.

    groups: over several machines, an inner and an outer one. error_feedback: keep what the cast of this step lost, in
        BF16 (2 bytes a parameter), and add it in the next; a window of micro-batches is one step. It begins with
        nothing where DDP makes its buckets anew (behind the first step) and where a training is resumed.
    least_bytes: buckets below this travel as they are, where a second collective costs more than bytes save.
    """

    def __init__(self, groups: Groups | None = None, *, error_feedback: bool = False, least_bytes: int = 0) -> None:
        if least_bytes < 0:
            raise ConfigError(f"least_bytes={least_bytes}; allowed: 0 or more")
        self.groups, self.error_feedback, self.least_bytes = groups or Groups(), error_feedback, least_bytes
        self.sent: Counter[str] = Counter()
        """Bytes that this process sent in FP8 buckets (``fp8``) and in others (``plain``)."""
        self._exchanges: dict[tuple[Any, ...], Exchange] = {}
        self._residuals: dict[int, tuple[tuple[int, ...], Tensor]] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def hook(self, state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """What ``register_comm_hook`` takes: the bucket's gradients averaged over all processes."""
        flat = bucket.buffer()
        if flat.device.type != "cuda":
            return _done(self._average(flat, bucket), [])
        stream = self._streams.get(flat.device)
        if stream is None:
            stream = self._streams[flat.device] = torch.cuda.Stream(flat.device)
        stream.wait_stream(torch.cuda.current_stream(flat.device))
        with torch.cuda.stream(stream):
            flat.record_stream(stream)
            return _done(self._average(flat, bucket), [flat.device])

    def _average(self, flat: Tensor, bucket: GradBucket) -> Tensor:
        factor, spans = 1.0 / self.groups.size, spans_of(bucket)
        is_small = flat.numel() * flat.element_size() < self.least_bytes
        if is_small or not any(span.is_coded for span in spans):
            return self._average_plain(flat, factor)
        # buckets are rebuilt after the first step: a layout belongs to what is in them
        key = (tuple(spans), flat.dtype, flat.device)
        if key not in self._exchanges:
            layout = Layout.balanced(spans, self.groups.inner_size, flat.device)
            self._exchanges[key] = Exchange(layout, self.groups)
        exchange = self._exchanges[key]
        exchange.all_reduce(flat, factor, self._residual(flat, bucket))
        self.sent["fp8"] += exchange.bytes_sent()
        return flat

    def _residual(self, flat: Tensor, bucket: GradBucket) -> Tensor | None:
        """What the casts of this bucket's parameters have lost so far; None without error feedback."""
        if not self.error_feedback:
            return None
        parameters = tuple(map(id, bucket.parameters()))
        known = self._residuals.get(bucket.index())
        if known is None or known[0] != parameters or known[1].device != flat.device:
            known = self._residuals[bucket.index()] = parameters, torch.zeros_like(flat, dtype=torch.bfloat16)
        return known[1]

    def _average_plain(self, flat: Tensor, factor: float) -> Tensor:
        flat.mul_(factor)
        dist.all_reduce(flat, group=self.groups.inner)
        if self.groups.outer is not None:
            dist.all_reduce(flat, group=self.groups.outer)
        processes = self.groups.size
        self.sent["plain"] += 2 * flat.numel() * flat.element_size() * (processes - 1) // processes
        return flat


# DistributedDataParallel compares these with the classes, not with their names
GradientReduction.hook.__annotations__.update({"bucket": GradBucket, "return": torch.futures.Future[Tensor]})


def spans_of(bucket: GradBucket) -> list[Span]:
    """Where each parameter's gradient lies in the bucket; those of one dimension travel in FP32."""
    flat, spans = bucket.buffer(), []
    for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
        start = int(gradient.storage_offset()) - int(flat.storage_offset())
        spans.append(Span(start, gradient.numel(), parameter.ndim > 1))
    return spans


def _done(flat: Tensor, devices: Sequence[int | str | torch.device]) -> torch.futures.Future[Tensor]:
    """A future that is complete as far as the host knows; on a GPU whoever waits waits for this stream."""
    future: torch.futures.Future[Tensor] = torch.futures.Future(devices=list(devices) or None)
    future.set_result(flat)
    return future
