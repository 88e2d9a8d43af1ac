"""One rank of the FSDP2 test: ``fsdp2_worker.py RANK RANKS FOLDER`` trains, saves, resumes and writes FOLDER/RANK.pt.

Both ranks see the same batches, so that the mean of their gradients is each one's own and one process is the truth.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from acceler8.optim import AdamW

STEPS = 4


def build() -> nn.Sequential:
    """Rows of 128 and 256, which shards leave whole, then rows of 100, which they do not."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 100), nn.GELU(), nn.Linear(100, 6))


def optimize(net: nn.Module) -> AdamW:
    """FP8 moments wherever shards leave blocks whole."""
    return AdamW(net.named_parameters(), lr=1e-2, moments="fp8")


def train(net: nn.Module, optimizer: AdamW, steps: range) -> None:
    """The same batches everywhere."""
    for step in steps:
        x = torch.randn(8, 128, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()


def full(value: Any) -> Any:
    """DTensors gathered, a copy of everything else."""
    if isinstance(value, DTensor):
        if value.dtype.itemsize == 1:  # gloo gathers no FP8
            local = value._local_tensor.view(torch.uint8)
            value = DTensor.from_local(
                local, value.device_mesh, value.placements, shape=value.shape, stride=value.stride(), run_check=False
            )
        return value.full_tensor()
    return value.clone()


def states(net: nn.Module, optimizer: AdamW) -> dict[str, dict[str, Tensor]]:
    """Full state by parameter name."""
    return {name: {key: full(t) for key, t in optimizer.state[p].items()} for name, p in net.named_parameters()}


def main() -> None:
    """Run one rank."""
    rank, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    net = build()
    fully_shard(net, mesh=mesh)
    optimizer = optimize(net)
    train(net, optimizer, range(STEPS))
    saved = get_optimizer_state_dict(net, optimizer)
    dcp.save({"optimizer": saved}, checkpoint_id=folder / "dcp")
    weights = {name: p.full_tensor().detach().clone() for name, p in net.named_parameters()}

    again = build()
    fully_shard(again, mesh=mesh)
    for p, q in zip(again.parameters(), net.parameters(), strict=True):
        p.data.copy_(q.data)
    fresh = optimize(again)
    train(again, fresh, range(90, 91))  # state to load over
    for p, q in zip(again.parameters(), net.parameters(), strict=True):
        p.data.copy_(q.data)
    loaded = {"optimizer": get_optimizer_state_dict(again, fresh)}
    dcp.load(loaded, checkpoint_id=folder / "dcp")
    set_optimizer_state_dict(again, fresh, loaded["optimizer"])
    resumed_states = states(again, fresh)
    train(again, fresh, range(STEPS, STEPS + 2))
    result = {
        "weights": weights,
        "states": states(net, optimizer),
        "loaded": resumed_states,
        "resumed": {name: p.full_tensor().detach().clone() for name, p in again.named_parameters()},
        "placements": {
            f"{name}.{key}": str(t.placements) if isinstance(t, DTensor) else "plain"
            for name, p in net.named_parameters()
            for key, t in optimizer.state[p].items()
        },
        "reasons": {name: optimizer.formats_of(p).reason for name, p in net.named_parameters()},
    }
    torch.save(result, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
