"""What the second moment must survive: thousands of steps of slow decay, and numbers twelve octaves apart."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from acceler8.formats import E4M3, encode
from acceler8.optim import AdamW
from acceler8.optim.state import Moment, read_moment

SECOND = Moment("exp_avg_sq", is_unsigned=True)


def naive(v: Tensor) -> Tensor:
    """E4M3 under one power of two for the whole tensor, rounded to nearest: what per-tensor FP8 states do."""
    scale = torch.exp2(torch.ceil(torch.log2(v.amax() / E4M3.max)))
    return encode(v / scale, E4M3).float() * scale


def run(steps: int, beta2: float, log_sigma: float, fall: float, moments: str, generator: torch.Generator):
    """The optimizer's second moment, the true one, and one kept naively, after ``steps`` with the same gradients."""
    n = 8192
    sigma = torch.exp(log_sigma * torch.randn(n, generator=generator)) * 1e-4
    p = nn.Parameter(torch.zeros(64, n // 64))
    optimizer = AdamW([p], lr=1e-3, betas=(0.9, beta2), moments=moments, weight_decay=0.0)
    true, kept_naively = torch.zeros(n), torch.zeros(n)
    for step in range(steps):
        g = sigma * fall ** (step / steps) * torch.randn(n, generator=generator)
        p.grad = g.view(p.shape)
        optimizer.step()
        true = true * beta2 + g * g * (1 - beta2)
        kept_naively = naive(kept_naively * beta2 + g * g * (1 - beta2))
    return read_moment(optimizer.state[p], SECOND).view(-1), true, kept_naively, p.detach()


@pytest.mark.parametrize(
    "moments", ["fp8", pytest.param("fp16", marks=pytest.mark.slow), pytest.param("bf16", marks=pytest.mark.slow)]
)
def test_it_follows_gradients_that_fall_tenfold(make_generator, moments):
    """2,500 steps at beta2 0.999, where a step moves v by 0.1 % at most and half an ulp of FP8 is 3 to 6 %."""
    v, true, kept_naively, _ = run(2500, 0.999, 1.0, 0.1, moments, make_generator(0))
    ratio = v / true
    assert abs(ratio.median().item() - 1) < 0.05
    low, high = torch.quantile(ratio, torch.tensor([0.05, 0.95])).tolist()
    assert 0.6 < low < high < 1.7  # rounding is a walk: single elements are further off than the median
    assert (v == 0).sum() == 0
    assert (kept_naively == 0).float().mean() > 0.01  # and what is left of it, below
    assert torch.quantile(kept_naively / true, 0.05) < 0.5


def test_kept_naively_it_freezes(make_generator):
    """At beta2 0.95, 500 steps: the naive one is left more than twenty times too large, ours within 5 %."""
    v, true, kept_naively, _ = run(500, 0.95, 1.0, 0.1, "fp8", make_generator(1))
    assert abs((v / true).median().item() - 1) < 0.05
    assert (kept_naively / true).median() > 20


@pytest.mark.parametrize("moments", ["fp8", "fp16", "bf16"])
def test_nothing_is_rounded_to_zero_at_log_sigma_2(make_generator, moments):
    """Where per-tensor and E4M3 block codes lose elements and their updates explode, no weight moves far."""
    v, true, kept_naively, p = run(200, 0.999, 2.0, 1.0, moments, make_generator(2))
    assert (v == 0).sum() == 0
    assert (kept_naively == 0).float().mean() > 0.3
    assert (v / true).median().item() == pytest.approx(1.0, abs=0.05)
    # an update is a few learning rates at most; 200 of 1e-3, of random signs, stay well below one
    assert p.abs().max() < 0.3
