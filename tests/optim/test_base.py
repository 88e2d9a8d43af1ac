"""The base under another optimizer: SGD with momentum, as docs/optimizers.md shows it."""

from __future__ import annotations

import copy

import pytest
import torch

from acceler8.kernels.adam import load_moment, store_moment
from acceler8.optim import Moment, StateFormatsOptimizer
from tests.optim.support import Net, same, train


class Momentum(StateFormatsOptimizer):
    """SGD with momentum in a format of choice."""

    MOMENTS = (Moment("momentum_buffer"),)

    def __init__(self, params, lr=1e-3, momentum=0.9, moments="fp32"):
        defaults = {"lr": lr, "momentum": momentum, "momentum_buffer_format": moments}
        super().__init__(params, {**defaults, "master": "none", "quantize": "matrices"})

    def update(self, device, rows):
        for row in rows:
            group = self.param_groups[row.group]
            code = self.MOMENTS[0].code(row.formats.moments[0])
            stored, scale = row.state["momentum_buffer"], row.state.get("momentum_buffer_scale")
            buffer = load_moment(stored, scale, code) * group["momentum"] + row.grad
            store_moment(buffer, stored, scale, code)
            row.param.sub_(buffer * group["lr"])


@pytest.mark.parametrize("moments", ["fp32", "bf16", "fp16", "fp8"])
def test_another_optimizer_over_the_base(moments):
    nets = [Net(), Net()]
    ours = Momentum(nets[0].parameters(), lr=0.1, moments=moments)
    theirs = torch.optim.SGD(nets[1].parameters(), lr=0.1, momentum=0.9)
    for net, optimizer in zip(nets, (ours, theirs), strict=True):
        train(net, optimizer, range(10))
    largest = max(float((p - q).detach().abs().max()) for p, q in zip(*(n.parameters() for n in nets), strict=True))
    assert largest < {"fp32": 1e-6, "bf16": 1e-3, "fp16": 1e-4, "fp8": 2e-2}[moments]
    saved = copy.deepcopy(ours.state_dict())
    fresh = Momentum(nets[0].parameters(), moments=moments)
    fresh.load_state_dict(saved)
    assert same(fresh.state_dict(), saved)
    assert ours.summary().rows[0].names == ({"fp8": "E4M3 / 128", "fp16": "FP16 / 128"}.get(moments, moments.upper()),)


def test_without_an_update_it_says_so():
    class Lazy(StateFormatsOptimizer):
        MOMENTS = ()

    net = Net()
    with pytest.raises(NotImplementedError, match=r"Lazy.update\(device, rows\)"):
        train(net, Lazy(net.parameters(), {"master": "none", "quantize": "all"}), range(1))
