"""A small model, its training, and comparing states bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 32


class Net(nn.Module):
    """An embedding, two matrices, a vector norm and a head; [batch] token ids -> [batch, 32]."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embed_tokens = nn.Embedding(VOCABULARY, 64)
        self.up = nn.Linear(64, 128)
        self.norm = nn.LayerNorm(128)
        self.down = nn.Linear(128, 64, bias=False)
        self.lm_head = nn.Linear(64, VOCABULARY, bias=False)
        for p in self.parameters():
            p.data = (torch.randn(p.shape, generator=generator) * 0.1).to(dtype)

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.nn.functional.gelu(self.norm(self.up(self.embed_tokens(ids))))
        return self.lm_head(self.down(x))


def loss_of(net: nn.Module, step: int) -> Tensor:
    """The loss on batch ``step``; the same for every model."""
    generator = torch.Generator().manual_seed(1000 + step)
    device = next(net.parameters()).device
    ids = torch.randint(VOCABULARY, (16,), generator=generator).to(device)
    return torch.nn.functional.cross_entropy(net(ids).float(), (ids * 7 + 3) % VOCABULARY)


def train(net: nn.Module, optimizer: Any, steps: range, between: Callable[[int], None] = lambda step: None) -> float:
    """Train on the batches of ``steps``, calling ``between(step)`` behind each backward; the last loss."""
    loss = torch.zeros(())
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(net, step)
        loss.backward()
        between(step)
        optimizer.step()
    return float(loss.detach())


def same(a: Any, b: Any) -> bool:
    """Bit for bit, through dicts and lists."""
    if isinstance(a, Tensor):
        if not isinstance(b, Tensor) or a.dtype != b.dtype or a.shape != b.shape:
            return False
        wide = a.element_size() > 1
        return torch.equal(
            a.cpu() if wide else a.cpu().view(torch.uint8), b.cpu() if wide else b.cpu().view(torch.uint8)
        )
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)
