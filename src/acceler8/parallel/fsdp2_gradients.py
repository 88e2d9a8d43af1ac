"""Norms and clipping of gradients that are DTensors, plain tensors, or both.

Each process sums over its own shards; one collective for each set of processes that share shards completes the sum.
PyTorch's ``clip_grad_norm_`` does not take DTensors beside plain tensors (torch 2.13).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard


def _local(grad: Tensor) -> Tensor:
    return grad._local_tensor if isinstance(grad, DTensor) else grad


def _groups(grad: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """The process groups whose members hold different parts of ``grad``."""
    if not isinstance(grad, DTensor):
        return ()
    mesh = grad.device_mesh
    return tuple(mesh.get_group(i) for i, placement in enumerate(grad.placements) if isinstance(placement, Shard))


def total_norm(grads: Iterable[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """The norm of all gradients as one vector: FP32 [], the same on every process, which all call this.

    A gradient that is no DTensor counts once, for it is the same everywhere. ``norm_type`` inf is the largest element.
    """
    is_max = math.isinf(norm_type)
    by_groups: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {(): []}
    for grad in grads:
        by_groups.setdefault(_groups(grad), []).append(_local(grad))
    sums = []
    for groups, parts in by_groups.items():
        filled = [t.detach() for t in parts if t.numel()]
        norms = [torch.linalg.vector_norm(t.float(), norm_type).to(device) for t in filled]
        own = torch.stack(norms) if norms else torch.zeros(1, device=device)
        part = own.amax() if is_max else own.pow(norm_type).sum()
        for group in groups:
            dist.all_reduce(part, dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM, group=group)
        sums.append(part)
    found = torch.stack(sums)
    return found.amax() if is_max else found.sum().pow(1.0 / norm_type)


@torch.no_grad()
def clip_grad_norm(parameters: Iterable[Tensor], max_norm: float, norm_type: float, device: torch.device) -> Tensor:
    """Scale gradients so that their norm is at most ``max_norm``; returns the norm before."""
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = total_norm(grads, float(norm_type), device)
    coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for grad in grads:
        local = _local(grad)
        local.mul_(coefficient.to(local.device))
    return norm


@torch.no_grad()
def clip_grad_value(parameters: Iterable[Tensor], clip_value: float) -> None:
    """Clip each element to ±``clip_value``."""
    for p in parameters:
        if p.grad is not None:
            _local(p.grad).clamp_(-clip_value, clip_value)


@torch.no_grad()
def average_plain(parameters: Iterable[Tensor]) -> None:
    """The mean over processes of gradients that FSDP2 does not manage. Every process calls this.

    A process whose part of the model was not used gives zeros; a gradient that none has stays none.
    """
    trained = [p for p in parameters if p.requires_grad and not isinstance(p, DTensor)]
    if not trained:
        return
    has = torch.tensor([p.grad is not None for p in trained], dtype=torch.int32, device=trained[0].device)
    dist.all_reduce(has, dist.ReduceOp.MAX)
    for p, is_used in zip(trained, has.tolist(), strict=True):
        if is_used:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad)
            p.grad.div_(dist.get_world_size())


__all__ = ["average_plain", "clip_grad_norm", "clip_grad_value", "total_norm"]
