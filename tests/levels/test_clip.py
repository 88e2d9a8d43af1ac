"""Clipping over plain gradients and codes at once, against PyTorch over the decoded numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from acceler8.errors import GradientError
from acceler8.levels import clip_grad_norm_, clip_grad_value_, gradient_of
from acceler8.levels.clip import has_stored
from acceler8.nn.gradients import open_windows, store_gradients, stored_gradient


def pair(factor: float = 1.0) -> tuple[nn.Sequential, nn.Sequential]:
    """A model with one gradient in codes, large enough for several slices, and one with its numbers in ``grad``."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.Sequential(nn.Linear(515, 513), nn.Linear(513, 8)))
    coded, plain = models
    store_gradients([coded[0].weight])
    (coded(torch.randn(4, 515)).square().sum() * factor).backward()
    for p, q in zip(coded.parameters(), plain.parameters(), strict=True):
        q.grad = gradient_of(p).clone()
    return coded, plain


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("share", [0.5, 2.0])
def test_the_norm_and_the_clipped_gradients_are_pytorchs(norm_type, share):
    coded, plain = pair()
    norm = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()], norm_type)
    codes = stored_gradient(coded[0].weight).codes.view(torch.uint8).clone()
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), share * float(norm), norm_type)
    got = clip_grad_norm_(coded.parameters(), share * float(norm), norm_type)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=0.0)
    for p, q in zip(coded.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(gradient_of(p), q.grad, rtol=1e-5, atol=0.0)
    assert torch.equal(stored_gradient(coded[0].weight).codes.view(torch.uint8), codes)  # nothing was rounded again


def test_a_norm_that_is_not_finite_is_seen_and_refused_on_request():
    coded, _ = pair(float("nan"))
    before = gradient_of(coded[1].weight).clone()
    with pytest.raises(GradientError, match=r"norm of order 2.0 of the gradients is nan; allowed: finite"):
        clip_grad_norm_(coded.parameters(), 1.0, error_if_nonfinite=True)
    assert torch.equal(gradient_of(coded[1].weight).nan_to_num(), before.nan_to_num())
    assert clip_grad_norm_(coded.parameters(), 1.0).isnan()


def test_values_are_clamped():
    coded, plain = pair()
    limit = float(plain[0].weight.grad.abs().median())
    clip_grad_value_(coded.parameters(), limit)
    torch.nn.utils.clip_grad_value_(plain.parameters(), limit)
    assert gradient_of(coded[0].weight).abs().max() <= limit * (1 + 1e-6)
    error = (gradient_of(coded[0].weight) - plain[0].weight.grad).norm() / plain[0].weight.grad.norm()
    assert 0 < error < 0.03  # rounded again
    assert torch.equal(coded[1].weight.grad, plain[1].weight.grad)


def test_what_adds_up_in_a_window_counts():
    """On top of codes that wait: the norm is that of the sum, not of the two beside each other."""
    coded, plain = pair()
    open_windows(coded)
    for model in (coded, plain):
        (-model(torch.ones(4, 515)).square().sum()).backward()
    expected = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()])
    with pytest.warns(UserWarning, match="rounds the sums to FP8 again"):
        got = clip_grad_norm_(coded.parameters(), 1e9)
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=0.0)


def test_one_tensor_none_and_no_gradients():
    coded, plain = pair()
    assert clip_grad_norm_(coded[0].weight, 1e9) > 0
    assert clip_grad_norm_([], 1.0) == 0
    assert clip_grad_norm_(nn.Linear(2, 2).parameters(), 1.0) == 0
    assert has_stored(coded.parameters())
    assert not has_stored(plain.parameters())
