"""Several processes that exchange gradients: started by ``test_processes.py``, prints what it found as JSON."""

from __future__ import annotations

import datetime
import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from acceler8.bench.wire import CountBytes
from acceler8.comm import Exchange, GradientReduction, Groups, Layout, ShardedGradientReduction, Span

CPU = torch.device("cpu")
SIZES = [(3000, True), (7, False), (1000, True), (128 * 9, True), (33, False), (5, True)]


def main() -> None:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    found: dict[str, Any] = {}
    for check in (all_reduce, two_levels, reduce_scatter, ddp, twins, not_finite, fsdp2):
        found |= check()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps(everyone) + "\n")
    dist.destroy_process_group()


def gradients(seed: int = 0) -> tuple[Tensor, list[Span]]:
    spans, at = [], 0
    for size, is_coded in SIZES:
        spans.append(Span(at, size, is_coded))
        at += size
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return torch.randn(at, generator=generator), spans


def same_everywhere(x: Tensor) -> bool:
    copies = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(copies, x.contiguous())
    return all(torch.equal(x.view(torch.uint8), copy.view(torch.uint8)) for copy in copies)


def mean_of(x: Tensor) -> Tensor:
    whole = x.double().clone()
    dist.all_reduce(whole)
    return whole / dist.get_world_size()


def sqnr(got: Tensor, truth: Tensor) -> float:
    return float(10 * torch.log10(truth.square().sum() / (got.double() - truth).square().sum()))


def all_reduce() -> dict[str, Any]:
    flat, spans = gradients()
    truth, again = mean_of(flat), flat.clone()
    exchange = Exchange(Layout.balanced(spans, dist.get_world_size(), CPU))
    with CountBytes() as counted:
        exchange.all_reduce(flat, 1 / dist.get_world_size())
    exchange.all_reduce(again, 1 / dist.get_world_size())
    return {
        "all_reduce": [sqnr(flat[s.start :][: s.length], truth[s.start :][: s.length]) for s in spans],
        "same": same_everywhere(flat),
        "repeats": torch.equal(flat, again),
        "bytes": sum(counted.sent.values()),
        "said": exchange.bytes_sent(),
        "ring": 2 * 2 * flat.numel() * (dist.get_world_size() - 1) / dist.get_world_size(),
    }


def two_levels() -> dict[str, Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    if size < 4:
        return {}
    inside = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    groups = Groups(inside[rank // 2], across[rank % 2])
    flat, spans = gradients(1)
    truth = mean_of(flat)
    Exchange(Layout.balanced(spans, 2, CPU), groups).all_reduce(flat, 1 / size)
    quality = [sqnr(flat[s.start :][: s.length], truth[s.start :][: s.length]) for s in spans]
    return {"two_levels": quality, "two_levels_same": same_everywhere(flat)}


def reduce_scatter() -> dict[str, Any]:
    rank, size, chunk = dist.get_rank(), dist.get_world_size(), 1000
    flat = torch.randn(chunk * size, generator=torch.Generator().manual_seed(rank))
    truth = mean_of(flat)[rank * chunk :][:chunk]
    out = torch.full((chunk,), torch.nan)
    spans = [Span(0, 700, True), Span(700, 50, False), Span(750, 250, True)]
    Exchange(Layout.chunked(spans, chunk, size, CPU)).reduce_scatter(flat, out, 1 / size)
    return {"reduce_scatter": sqnr(out, truth), "scattered_plain": sqnr(out[700:750], truth[700:750])}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.LayerNorm(96), nn.GELU(), nn.Linear(96, 64))


def train(
    reduction: GradientReduction | None, steps: int = 12, micro_batches: int = 1
) -> tuple[nn.Module, list[float]]:
    wrapped = DistributedDataParallel(model(), bucket_cap_mb=0.02)
    if reduction is not None:
        wrapped.register_comm_hook(reduction, reduction.hook)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(7 + dist.get_rank())
    x = torch.randn(64, 64, generator=generator)
    losses = []
    for _ in range(steps):
        for i in range(micro_batches):
            part = x.chunk(micro_batches)[i]
            if i < micro_batches - 1:
                with wrapped.no_sync():
                    loss(wrapped, part).backward()
            else:
                last = loss(wrapped, part)
                last.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = last.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / dist.get_world_size())
    return wrapped.module, losses


def loss(wrapped: nn.Module, x: Tensor) -> Tensor:
    target = x.flip(1) * 0.5
    found: Tensor = (wrapped(x) - target).square().mean()
    return found


def ddp() -> dict[str, Any]:
    found: dict[str, Any] = {}
    plain = train(None)[1]
    for name, reduction, options in (
        ("fp8", GradientReduction(), {}),
        ("error_feedback", GradientReduction(error_feedback=True), {}),
        ("small_buckets", GradientReduction(least_bytes=2**30), {}),
        ("window", GradientReduction(), {"micro_batches": 2}),
    ):
        trained, losses = train(reduction, **options)
        reference = plain if not options else train(None, **options)[1]
        flat = torch.cat([p.detach().flatten() for p in trained.parameters()])
        found[name] = {
            "losses": losses,
            "plain": reference,
            "same": same_everywhere(flat),
            "sent": dict(reduction.sent),
        }
    return {"ddp": found}


class Twins(nn.Module):
    """Two layers of one shape, each a bucket, whose gradients differ by a factor of a million."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.large, self.small = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.large(x) + 1e-6 * self.small(x)
        return found


def twins() -> dict[str, Any]:
    """Error feedback of each bucket is its own: gradients of the small one stay small."""
    wrapped = DistributedDataParallel(Twins(), bucket_cap_mb=0.01)
    reduction = GradientReduction(error_feedback=True)
    wrapped.register_comm_hook(reduction, reduction.hook)
    x, seen = torch.randn(8, 64, generator=torch.Generator().manual_seed(dist.get_rank())), []
    for _ in range(4):
        wrapped(x).square().sum().backward()
        seen.append(float(wrapped.module.small.weight.grad.abs().max() / wrapped.module.large.weight.grad.abs().max()))
        wrapped.zero_grad()
    return {"twins": max(seen), "residuals": len(reduction._residuals)}


def not_finite() -> dict[str, Any]:
    wrapped = DistributedDataParallel(model())
    reduction = GradientReduction()
    wrapped.register_comm_hook(reduction, reduction.hook)
    x = torch.ones(4, 64)
    if dist.get_rank() == 1:
        x[0, 0] = torch.inf
    loss(wrapped, x).backward()
    bad = {name: int((~p.grad.isfinite()).sum()) for name, p in wrapped.module.named_parameters()}
    return {"not_finite": bad}


class Partly(nn.Module):
    """One of its layers has nothing to do in some steps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.other = model(), nn.Linear(64, 64)
        self.uses_other = True

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.body(x)
        return found + self.other(x) if self.uses_other else found


def sharded(reduction: ShardedGradientReduction | None, policy: MixedPrecisionPolicy, steps: int = 10) -> list[float]:
    whole = Partly()
    fully_shard(whole.body, mp_policy=policy)
    fully_shard(whole, mp_policy=policy)
    if reduction is not None:
        reduction.install(whole)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(7 + dist.get_rank()))
    losses = []
    for step in range(steps):
        whole.uses_other = step != 4
        last = loss(whole, x)
        last.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = last.detach().float().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / dist.get_world_size())
    return losses


def fsdp2() -> dict[str, Any]:
    found = {}
    for name, dtype in (("float32", None), ("bfloat16", torch.bfloat16)):
        policy = MixedPrecisionPolicy(reduce_dtype=dtype)
        reduction = ShardedGradientReduction()
        found[name] = {
            "losses": sharded(reduction, policy), "plain": sharded(None, policy), "sent": dict(reduction.sent),
        }  # fmt: skip
    return {"fsdp2": found}


if __name__ == "__main__":
    main()
