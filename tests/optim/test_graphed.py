"""The optimizer inside a captured training step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import acceler8
from acceler8.optim import AdamW
from tests.models import Mlp
from tests.optim.support import same


def training(graphed: bool, lr: float | Tensor, **options: Any) -> tuple[Any, nn.Module, AdamW]:
    model = nn.Sequential(Mlp(0, width=128, hidden=256), Mlp(1, width=128, hidden=256)).to("cuda", torch.bfloat16)
    acceler8.convert(model, "rowwise")
    optimizer = AdamW(model.parameters(), lr=lr, **options)
    acceler8.attach(model, optimizer)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x.flip(-1))
        loss.backward()
        optimizer.step()
        return loss

    return (acceler8.GraphedStep(step, model, optimizer) if graphed else step), model, optimizer


@pytest.mark.requires(sm=90)
@pytest.mark.parametrize("master", ["bf16_remainder", "fp16", "stochastic"])
@pytest.mark.parametrize("is_tensor", [True, False])
def test_a_graphed_training_is_the_eager_one(master, is_tensor):
    """Also while the learning rate changes: a tensor in place, or a number, for which the step is captured anew."""
    rates = [torch.tensor(1e-3, device="cuda") if is_tensor else 1e-3 for _ in range(2)]
    both = [
        training(graphed, lr, moments="fp8", master=master)
        for graphed, lr in zip((True, False), rates, strict=True)
    ]  # fmt: skip
    for seed in range(14):
        if seed == 8:
            for (_, _, optimizer), lr in zip(both, rates, strict=True):
                if isinstance(lr, Tensor):
                    lr.fill_(3e-4)
                else:
                    optimizer.param_groups[0]["lr"] = 3e-4
        x = torch.randn(48, 128, generator=torch.Generator().manual_seed(seed)).to("cuda", torch.bfloat16)
        losses = [step(x).detach() for step, _, _ in both]
        assert torch.equal(*losses), seed
    assert both[0][0].replays > 4
    states = [optimizer.state_dict()["state"] for _, _, optimizer in both]
    assert same(*states)
    assert same(*(dict(model.state_dict()) for _, model, _ in both))
