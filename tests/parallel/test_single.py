"""The strategy without communication keeps Parameters and clips like PyTorch."""

from __future__ import annotations

import torch
from torch import nn

from acceler8.parallel import SingleProcess


def test_prepare_keeps_parameters_and_no_sync_does_nothing() -> None:
    strategy = SingleProcess(torch.device("cpu"))
    model = nn.Linear(4, 4)
    before = [id(p) for p in model.parameters()]
    strategy.place(model)
    assert strategy.wrap(model) is model
    assert [id(p) for p in model.parameters()] == before
    with strategy.no_sync(model):
        model(torch.ones(2, 4)).sum().backward()
    assert model.weight.grad is not None
    assert (strategy.process_index, strategy.num_processes) == (0, 1)


def test_clip_grad_norm_scales_to_the_limit_and_returns_the_norm_before() -> None:
    strategy = SingleProcess(torch.device("cpu"))
    a, b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))
    a.grad, b.grad = torch.tensor([3.0, 0.0]), torch.tensor([4.0])
    assert strategy.clip_grad_norm([a, b], 1.0, 2.0).item() == 5.0
    torch.testing.assert_close(a.grad, torch.tensor([0.6, 0.0]), rtol=1e-5, atol=0.0)
