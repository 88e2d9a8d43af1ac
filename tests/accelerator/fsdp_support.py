"""Models, data and a training loop that the tests of sharded training share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from acceler8 import Accelerator, verify
from acceler8.parallel.fsdp2_whole import whole
from acceler8.utils import FullyShardedDataParallelPlugin

WIDTH, CLASSES, ROWS, STEPS = 64, 5, 16, 3
Facts = dict[str, Any]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Three blocks between two layers that stay in high precision; the head's five rows divide among no two ranks."""

    def __init__(self, seed: int = 1) -> None:
        super().__init__()
        self.first = nn.Linear(16, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)
        generator = torch.Generator().manual_seed(seed)
        for name, p in self.named_parameters():
            if "norm" not in name:
                nn.init.normal_(p, std=WIDTH**-0.5, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make_data(parts: int, micro: int = 1) -> tuple[Tensor, Tensor]:
    """``[STEPS, micro, parts, ROWS, 16]`` and their classes; a later part's rows are larger, so amaxes differ."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(STEPS, micro, parts, ROWS, 16, generator=generator)
    x *= torch.arange(1, parts + 1).view(-1, 1, 1)
    return x, torch.randint(0, CLASSES, (STEPS, micro, parts, ROWS), generator=generator)


def plugin(**options: Any) -> FullyShardedDataParallelPlugin:
    return FullyShardedDataParallelPlugin(fsdp_version=2, **options)


def full(t: Tensor) -> Tensor:
    """All of a tensor, a copy."""
    return whole(t).clone()


def parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name.removeprefix("module."): full(p) for name, p in model.named_parameters()}


def make_optimizer(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def train(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    parts: int = 2,
    micro: int = 1,
    steps: int = STEPS,
    clips: float = 1.0,
    verifies: bool = True,
) -> Facts:
    """Train on this process's part of each batch; one process alone takes all parts at once."""
    x, y = make_data(parts, micro)
    rank, is_alone = accelerator.process_index, accelerator.num_processes == 1
    losses, norms = [], []

    def run(step: int) -> None:
        for i in range(micro):
            mine = slice(None) if is_alone else rank
            inputs, targets = x[step, i, mine].reshape(-1, 16), y[step, i, mine].reshape(-1)
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(accelerator.clip_grad_norm_(model.parameters(), clips))
                optimizer.step()
                optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean"))

    for step in range(steps):
        run(step)
    facts: Facts = {"losses": torch.stack(losses), "norms": torch.stack(norms), "end": parameters(model)}
    if verifies and accelerator.mixed_precision == "fp8" and not is_alone:
        report = verify(model, optimizer, step=lambda: run(steps - 1))
        facts["verified"] = dict(report.checks)
        facts["steps"] = accelerator.clock.ticks
    facts["local"] = {n: tuple(p.to_local().shape) for n, p in model.named_parameters() if isinstance(p, DTensor)}
    return facts


def fp8(recipe: Any = "rowwise", **options: Any) -> Accelerator:
    return Accelerator("fp8", recipe=recipe, cpu=True, **options)


def in_fp32(**options: Any) -> FullyShardedDataParallelPlugin:
    """Weights are gathered as they are stored, in FP32."""
    return plugin(mixed_precision_policy=MixedPrecisionPolicy(), **options)
