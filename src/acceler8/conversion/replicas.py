"""What several processes hold of one model: their shards, and whether what they hold twice is the same."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard


def shard(t: Tensor) -> Tensor:
    """What this process holds of a tensor: of a DTensor its shard, without a library's subclass around it."""
    own = t._local_tensor if isinstance(t, DTensor) else t
    return getattr(own, "_tensor", own).detach()


def of_all(*names: set[str]) -> tuple[set[str], ...]:
    """The names that any process has."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, names)
    return tuple(set().union(*(of_rank[i] for of_rank in every)) for i in range(len(names)))


def replicas(model: nn.Module) -> list[str]:
    """Parameters that several processes hold and that differ: shards of several copies, and what is not sharded.

    Not buffers: running statistics are each process's own.
    """
    own = {
        name: (
            _place(t),
            hashlib.sha256(shard(t).cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest(),
        )
        for name, t in model.named_parameters()
        if shard(t).numel()
    }
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    seen: dict[tuple[str, Any], tuple[int, str]] = {}
    bad = {}
    for rank, of_rank in enumerate(every):
        for name, (place, digest) in of_rank.items():
            first, known = seen.setdefault((name, place), (rank, digest))
            if digest != known:
                bad[name] = (
                    f"{name} differs between processes {first} and {rank}, which hold the same part of it; its"
                    " gradients were not averaged, or it was changed in one process"
                )
    return list(bad.values())


def _place(t: Tensor) -> tuple[int, ...]:
    """Which part of a tensor a process holds; all of it is the same part everywhere."""
    coordinate = t.device_mesh.get_coordinate() if isinstance(t, DTensor) else None
    if coordinate is None:
        return ()
    assert isinstance(t, DTensor)
    return tuple(at for at, placement in zip(coordinate, t.placements, strict=True) if isinstance(placement, Shard))
