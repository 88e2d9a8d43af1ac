"""What the watch reports against states that are known to be well and to be ill."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from acceler8 import Accelerator
from acceler8.errors import ConfigError
from acceler8.optim import AdamW, watch_states
from tests.optim.support import Net, train

B = torch.bfloat16


def look(optimizer: AdamW, p: nn.Parameter, steps: int, every: int, grad, sample: int = 2**16):
    with watch_states(optimizer, every=every, sample=sample) as watch:
        for step in range(steps):
            p.grad = grad(step)
            optimizer.step()
    (row,) = watch.rows()
    return row


@pytest.mark.parametrize("moments", ["fp32", "bf16", "fp16", "fp8"])
@pytest.mark.parametrize("sample", [2**16, 1024])
def test_a_state_that_is_well(make_generator, moments, sample):
    p = nn.Parameter(torch.randn(64, 128, generator=make_generator(0)))
    optimizer = AdamW([p], moments=moments)
    generator = make_generator(1)
    row = look(optimizer, p, 6, 2, lambda _: torch.randn(64, 128, generator=generator), sample)
    assert (row.name, row.step, row.elements) == ("group 0, parameter 0", 6, min(sample, 8192))
    assert row.zero_share == 0.0
    assert row.lost_share < 0.01
    # Codes of a block whose scale moved all mean something else; BF16 stands still now and then.
    assert row.stuck_share < (0.2 if moments == "bf16" else 0.01)


def test_lost_updates_of_bf16_weights_are_counted(make_generator):
    shares = {}
    for master in ("none", "fp16", "bf16_remainder"):
        p = nn.Parameter(torch.ones(64, 128).to(B))
        optimizer = AdamW([p], lr=2.0**-11.5, weight_decay=0.0, master=master)
        generator = make_generator(2)
        shares[master] = look(
            optimizer, p, 3, 3, lambda _, g=generator: torch.randn(64, 128, generator=g).to(B)
        ).lost_share
    assert shares["none"] > 0.99
    assert 0.1 < shares["fp16"] < 1.0  # half an ulp of FP16 at 1 is 2**-11 above and 2**-12 below
    assert shares["bf16_remainder"] < 0.01


def test_zeros_and_stuck_moments_are_counted():
    """A state whose second moment somebody zeroes or freezes behind each step."""
    for kind in ("zero", "stuck"):
        p = nn.Parameter(torch.ones(2, 128))
        optimizer = AdamW([p], moments="fp32")

        def meddle(opt, *_, p=p, kind=kind):
            opt.state[p]["exp_avg_sq"][0] = 0.0 if kind == "zero" else 0.25

        optimizer.register_step_post_hook(meddle)  # before the watch, so it sees what this leaves
        row = look(optimizer, p, 4, 2, lambda step: torch.full((2, 128), 1.0 + step))
        assert (row.zero_share, row.stuck_share) == ((0.5, 0.0) if kind == "zero" else (0.0, 0.5))


def test_the_worst_is_first_and_names_are_the_models():
    net = Net(dtype=B)
    accelerator = Accelerator(cpu=True)
    net, optimizer = accelerator.prepare(net, AdamW(net.named_parameters(), lr=1e-5, moments="fp8"))
    with watch_states(optimizer, every=1) as watch:
        train(net, optimizer, range(3))
    rows = watch.rows()
    assert {row.name for row in rows} == {name for name, _ in net.named_parameters()}
    worst = [max(row.zero_share, row.stuck_share or 0, row.lost_share) for row in rows]
    assert worst == sorted(worst, reverse=True)
    train(net, optimizer, range(3, 4))
    assert watch.rows() == rows  # it looks no more


def test_what_cannot_be_watched_is_refused():
    p = [nn.Parameter(torch.ones(2))]
    with (
        pytest.raises(ConfigError, match=r"got a SGD; allowed: an optimizer of acceler8.optim"),
        watch_states(torch.optim.SGD(p)),
    ):
        pass
    with pytest.raises(ConfigError, match="every=0, sample=65536; allowed: 1 or more"), watch_states(AdamW(p), every=0):
        pass
