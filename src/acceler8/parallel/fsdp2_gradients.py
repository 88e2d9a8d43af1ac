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
        by_groups.setdefault(_groups(grad), []).append(_local(grad).detach())
    sums = []
    for groups, parts in by_groups.items():
        norms = [_norms(alike, norm_type).to(device) for alike in _alike(parts)]
        own = torch.cat(norms) if norms else torch.zeros(1, device=device)
        part = own.amax() if is_max else own.pow(norm_type).sum()
        for group in groups:
            dist.all_reduce(part, dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM, group=group)
        sums.append(part)
    found = torch.stack(sums)
    return found.amax() if is_max else found.sum().pow(1.0 / norm_type)


def _alike(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Those with elements, by device and dtype, as operations on many tensors in one launch take them."""
    found: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for t in tensors:
        if t.numel():
            found.setdefault((t.device, t.dtype), []).append(t)
    return list(found.values())


def _norms(tensors: list[Tensor], norm_type: float) -> Tensor:
    """Of each tensor, summed in FP32 or more: FP32 [tensors]."""
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    return torch.stack(torch._foreach_norm(tensors, norm_type, dtype=dtype)).float()


@torch.no_grad()
def clip_grad_norm(parameters: Iterable[Tensor], max_norm: float, norm_type: float, device: torch.device) -> Tensor:
    """Scale gradients so that their norm is at most ``max_norm``; returns the norm before."""
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = total_norm(grads, float(norm_type), device)
    coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for alike in _alike(_local(grad) for grad in grads):
        torch._foreach_mul_(alike, coefficient.to(alike[0].device))
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

    A process whose part of the model was not used gives zeros; a gradient that none has stays none. One collective for
    all gradients of a dtype. Only a process that lacks one waits for the device, to learn whether another has it.
    """
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for p in parameters:
        if p.requires_grad and not isinstance(p, DTensor):
            by_kind.setdefault((p.device, p.dtype), []).append(p)
    for trained in by_kind.values():
        _average(trained)


def _average(trained: list[Tensor]) -> None:
    """Of one device and dtype. Behind the gradients travels how many processes have each."""
    has = torch.tensor([p.grad is not None for p in trained], dtype=trained[0].dtype)
    flat = torch.cat([*(_filled(p).reshape(-1) for p in trained), has.to(trained[0].device, non_blocking=True)])
    dist.all_reduce(flat)
    flat.div_(dist.get_world_size())
    *means, has = flat.split([*(p.numel() for p in trained), len(trained)])
    is_used = has.tolist() if any(p.grad is None for p in trained) else [1.0] * len(trained)
    grads, values = [], []
    for p, mean, used in zip(trained, means, is_used, strict=True):
        mean = mean.view_as(p)
        if p.grad is not None and not p.grad.is_sparse:
            grads.append(p.grad)
            values.append(mean)
        elif used:
            p.grad = mean.clone()
    if grads:
        torch._foreach_copy_(grads, values)


def _filled(p: Tensor) -> Tensor:
    """The gradient, in the parameter's dtype; zeros for none."""
    grad = torch.zeros_like(p) if p.grad is None else p.grad.to(p.dtype)
    return grad.to_dense() if grad.is_sparse else grad


__all__ = ["average_plain", "clip_grad_norm", "clip_grad_value", "total_norm"]
