"""A small whole training behind an Accelerator, for tests that stop it anywhere and resume it."""

from __future__ import annotations

import copy
import random
from pathlib import Path

import numpy
import torch
from torch import nn
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from acceler8 import Accelerator, fp8_state_dict
from acceler8.nn import find_states


class Counter:
    """A registered object: numbers and a tensor."""

    def __init__(self) -> None:
        self.seen, self.total = 0, torch.zeros(2)

    def add(self, loss: float) -> None:
        self.seen += 1
        self.total = self.total + loss

    def state_dict(self):
        return {"seen": self.seen, "total": self.total}

    def load_state_dict(self, state):
        self.seen, self.total = state["seen"], state["total"]


class Run:
    """7 batches an epoch, windows of ``window`` micro-batches, dropout, a schedule, and draws from every generator."""

    def __init__(
        self, seed: int = 0, *, precision="fp8", recipe="delayed", window=2, width=32, depth=1, cpu=True, **kwargs
    ):
        torch.manual_seed(seed)
        random.seed(seed)
        numpy.random.seed(seed)
        layers = [nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.2), nn.Linear(2 * width, width)]
        model = nn.Sequential(*layers, *(nn.Linear(width, width) for _ in range(depth)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
        data = TensorDataset(torch.randn(28, width, generator=torch.Generator().manual_seed(5)))
        loader = StatefulDataLoader(data, batch_size=4, shuffle=True)
        self.accelerator = Accelerator(
            mixed_precision=precision,
            recipe=recipe if precision == "fp8" else None,
            cpu=cpu,
            gradient_accumulation_steps=window,
            **kwargs,
        )
        self.counter = Counter()
        self.accelerator.register_for_checkpointing(self.counter)
        self.model, self.optimizer, self.scheduler, self.loader = self.accelerator.prepare(
            model, optimizer, scheduler, loader
        )
        self._batches = None

    def train(self, micro_batches: int) -> list[float]:
        return [self.micro_batch() for _ in range(micro_batches)]

    def micro_batch(self) -> float:
        (x,) = self._next()
        x = x + random.random() * 0.01 + float(numpy.random.rand()) * 0.01
        with self.accelerator.accumulate(self.model):
            loss = (self.model(x) - x.flip(-1)).square().mean()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        self.counter.add(loss.item())
        return loss.item()

    def _next(self):
        while True:
            if self._batches is None:
                self._batches = iter(self.loader)
            batch = next(self._batches, None)
            if batch is not None:
                return batch
            self._batches = None

    def save(self, folder: Path, **kwargs) -> Path:
        return Path(self.accelerator.save_state(folder, **kwargs))

    def load(self, folder: Path | None = None, **kwargs):
        self._batches = None
        return self.accelerator.load_state(folder, **kwargs)

    def everything(self) -> dict:
        """A copy of all state, to compare with ``support.assert_same``."""
        window = self.accelerator.gradients
        return copy.deepcopy(
            {
                "model": dict(self.model.state_dict()),
                "gradients": {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None},
                "optimizer": self.optimizer.state_dict(),
                "scheduler": self.scheduler.state_dict(),
                "fp8": fp8_state_dict(self.model) if find_states(self.model) else {},
                "counter": self.counter.state_dict(),
                "steps": self.accelerator.clock.ticks,
                "window": (window.micro_batch, window.sync_gradients),
                "random": (random.getstate(), repr(numpy.random.get_state()), torch.get_rng_state()),
            }
        )
