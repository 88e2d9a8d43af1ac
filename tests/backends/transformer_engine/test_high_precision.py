"""Gradients that TransformerEngine is not asked for: those of the plain layer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from acceler8.backends.transformer_engine.high_precision import with_gradients


def operands(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x = torch.randn(2, 5, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(4, generator=generator, dtype=torch.float64, requires_grad=True)
    return x, weight, bias, torch.randn(2, 5, 4, generator=generator, dtype=torch.float64)


def test_all_three_by_plain_gemms(make_generator):
    x, weight, bias, dy = operands(make_generator())
    with torch.no_grad():
        y = F.linear(x, weight, bias)
    got = torch.autograd.grad(with_gradients(y, x, weight, bias), (x, weight, bias), dy)
    want = torch.autograd.grad(F.linear(x, weight, bias), (x, weight, bias), dy)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w)


@pytest.mark.parametrize("which", ["dgrad", "wgrad"])
def test_one_from_here_and_the_others_from_the_layer(make_generator, which):
    x, weight, bias, dy = operands(make_generator())
    if which == "wgrad":
        y = with_gradients(3 * F.linear(x, weight.detach(), bias), x.detach(), weight)
        factors = 3, 1, 3
    else:
        y = with_gradients(3 * F.linear(x.detach(), weight, bias), x, weight.detach())
        factors = 1, 3, 3
    got = torch.autograd.grad(y, (x, weight, bias), dy)
    want = torch.autograd.grad(F.linear(x, weight, bias), (x, weight, bias), dy)
    for g, w, factor in zip(got, want, factors, strict=True):
        torch.testing.assert_close(g, factor * w)


def test_frozen_operands_and_other_dtypes(make_generator):
    x = torch.randn(5, 6, generator=make_generator(), requires_grad=True)
    weight = torch.randn(4, 6, generator=make_generator(1))
    y = with_gradients((x.detach() @ weight.t()).bfloat16(), x, weight)
    y.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, weight.bfloat16().float().sum(0).expand(5, 6), atol=0.1, rtol=0.01)
    assert weight.grad is None
    assert not with_gradients(torch.zeros(5, 4), x.detach(), weight).requires_grad
