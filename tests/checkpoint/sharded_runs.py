"""A small training that is spread in one of several ways, and all of its state as whole tensors, to compare."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from acceler8 import Accelerator, fp8_state_dict, optim
from acceler8.accelerator.unwrap import plain_model
from acceler8.config.run_handlers import InitProcessGroupKwargs
from acceler8.nn import find_states
from acceler8.optim.state import Moment, read_moment
from acceler8.parallel import Strategy
from acceler8.parallel.ddp import share_amaxes

GLOBAL_BATCH = 16  # of four processes' 4, two processes' 8


class ByHand(Strategy):
    """``fully_shard`` on each layer and the whole, and the optimizer's Parameters exchanged."""

    name = "ddp"  # the plan knows it
    is_sharded = True
    has_dtensors = True
    keeps_gradients = True

    def __init__(self, device: torch.device, process_index: int, num_processes: int, saves_whole: bool) -> None:
        super().__init__(device)
        self.process_index, self.num_processes, self.saves_whole = process_index, num_processes, saves_whole
        self._new: dict[Tensor, Tensor] = {}

    def wrap(self, model: nn.Module, optimizers: Sequence[Optimizer] = ()) -> nn.Module:
        before = dict(model.named_parameters())
        mesh = init_device_mesh("cpu", (self.num_processes,))
        for part in (model.up, model.down, model.mid):
            fully_shard(part, mesh=mesh)
        fully_shard(model, mesh=mesh)
        now = dict(model.named_parameters())
        self._new |= {p: now[name] for name, p in before.items()}
        for optimizer in optimizers:
            self.take(optimizer)
        for state in find_states(model):
            share_amaxes(state)
        return model

    def take(self, optimizer: Optimizer) -> Optimizer:
        for group in optimizer.param_groups:
            group["params"] = [self._new.get(p, p) for p in group["params"]]
        return optimizer

    def model_state(self, model: nn.Module) -> dict[str, Any]:
        state = {name: whole(value) for name, value in model.state_dict().items()}
        return state if self.process_index == 0 else {}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        state = map_tensors(optimizer.state_dict(), whole)
        return state if self.process_index == 0 else {}


class Net(nn.Module):
    """Rows of 128, which blocks of an FP8 moment fit, rows of 100, a tie, one row for all, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 128)
        self.up = nn.Linear(128, 100)
        self.down = nn.Linear(100, 128)
        self.mid = nn.Linear(128, 128)  # in FP8: both sizes are multiples of 16
        self.one = nn.Linear(128, 1)
        self.head = nn.Linear(128, 10, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: Tensor) -> Tensor:
        self.seen += 1
        x = self.embed(tokens)
        x = x + self.down(self.up(x).relu())
        x = x + self.mid(x)
        return self.head(x) + self.one(x)


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "fp8": lambda p: optim.AdamW(p, lr=1e-2, moments="fp8", quantize="all"),
}


class Sharded:
    """One process of a training in ``form``: ``shards`` or ``whole`` (of FSDP2), ``ddp`` or ``single``."""

    def __init__(self, form: str, optimizer: str = "adamw", seed: int = 0, window: int = 1) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        short = InitProcessGroupKwargs(timeout=timedelta(seconds=60))
        self.accelerator = Accelerator(
            "fp8", recipe="delayed", cpu=True, kwargs_handlers=[short], gradient_accumulation_steps=window
        )
        here = self.accelerator.processes
        if form in ("shards", "whole"):
            self.accelerator.strategy = ByHand(here.device, here.process_index, here.num_processes, form == "whole")
        net = Net()
        optimizer = OPTIMIZERS[optimizer](net.parameters())
        self.model, self.optimizer = self.accelerator.prepare(net, optimizer)
        self.rank, self.count = here.process_index, here.num_processes

    def train(self, first: int, last: int) -> list[float]:
        """Steps ``first`` to ``last``; each process its part of the same batches."""
        losses = []
        for step in range(first, last):
            generator = torch.Generator().manual_seed(step)
            tokens = torch.randint(10, (GLOBAL_BATCH, 16), generator=generator).chunk(self.count)[self.rank]
            with self.accelerator.accumulate(self.model):
                loss = nn.functional.cross_entropy(self.model(tokens).flatten(0, 1), tokens.roll(1, -1).flatten())
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def everything(self) -> dict[str, Any]:
        """All state, whole, by name; the same in every process but for random numbers."""
        plain = plain_model(self.model)
        state = {name: whole(value) for name, value in plain.state_dict().items()}
        found = {
            name: {key: whole(value) for key, value in self.optimizer.optimizer.state[p].items()}
            for name, p in plain.named_parameters()
        }
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        return {
            "model": state,
            "optimizer": found,
            "groups": groups,
            "fp8": {k: v.clone() for k, v in fp8_state_dict(plain).items()} if find_states(plain) else {},
            "steps": self.accelerator.clock.ticks,
        }

    def moments(self) -> dict[str, Any]:
        """Both moments in FP32, whole, by name, whatever they are stored in."""
        optimizer, found = self.optimizer.optimizer, {}
        known = optimizer.MOMENTS if isinstance(optimizer, optim.AdamW) else (Moment("exp_avg"), Moment("exp_avg_sq"))
        for name, p in plain_model(self.model).named_parameters():
            state = optimizer.state[p]
            found[name] = {moment.name: whole(read_moment(state, moment)) for moment in known}
        return found

    def save(self, folder: Path) -> str:
        return self.accelerator.save_state(folder)


def whole(value: Any) -> Any:
    """A copy of a tensor, gathered byte by byte, for gloo knows no FP8."""
    if not isinstance(value, Tensor):
        return value
    if not isinstance(value, DTensor):
        return value.detach().clone()
    own = value.detach()._local_tensor.contiguous().clone()
    rows = [None] * value.device_mesh.size()
    dist.all_gather_object(rows, (own.view(torch.uint8).flatten() if own.numel() else torch.empty(0)).tolist())
    held = torch.tensor([byte for row in rows for byte in row], dtype=torch.uint8)
    return held.view(value.dtype).reshape(value.shape)


def map_tensors(value: Any, change: Any) -> Any:
    """A tree with ``change`` of each tensor in its place."""
    if isinstance(value, dict):
        return {key: map_tensors(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [map_tensors(item, change) for item in value]
    return change(value)
