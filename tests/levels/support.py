"""A small Llama over bytes, batches of words, and steps of it."""

from __future__ import annotations

import torch
from torch import Tensor

from acceler8.demo.model import ByteLlama, build_model, next_byte_loss
from acceler8.demo.settings import ModelSize

WORDS = (
    b"the model weighs every gradient in eight bits and adds them up in sixteen while its moments keep still ".split()
)


def llama(seed: int = 0, *, layers: int = 2) -> ByteLlama:
    """FP32, on the CPU."""
    return build_model(
        ModelSize(dim=64, layers=layers, heads=2, kv_heads=1, ffn=128, steps=1, batch=4, seq=32, lr=1e-3), seed
    )


def text(step: int, *, batch: int = 4, length: int = 33) -> Tensor:
    """Batch ``step``: random words in a row, [batch, length] bytes."""
    generator = torch.Generator().manual_seed(step)
    rows = []
    for _ in range(batch):
        order = torch.randint(len(WORDS), (length,), generator=generator).tolist()
        rows.append(list(b" ".join(WORDS[i] for i in order)[:length]))
    return torch.tensor(rows)


def loss_of(model: torch.nn.Module, step: int) -> Tensor:
    """On batch ``step``."""
    return next_byte_loss(model, text(step))
