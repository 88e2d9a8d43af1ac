"""Norms by TransformerEngine on a GPU: the author's numbers, and the author's own forward where it is to run."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import acceler8
from acceler8.backends.transformer_engine import TransformerEngineOptions, library
from tests.backends.transformer_engine.gpu import MARKS, TENSORWISE, convert, gaussian, recipe, sqnr_db

pytestmark = MARKS


class Offset(nn.Module):
    """As Gemma's: the weight is an offset from one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.zeros(256)), 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (y * (1.0 + self.weight.float())).type_as(x)


class Llama(nn.Module):
    """As Llama's: rounded before the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(256)), 1e-5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * y.to(x.dtype)


NORMS = {
    "layer": lambda: nn.LayerNorm(256, eps=1e-6),
    "rms": lambda: nn.RMSNorm(256, eps=1e-6),
    "offset": Offset,
    "llama": Llama,
}


def model_of(norm: nn.Module) -> nn.Sequential:
    model = nn.Sequential(norm, nn.Linear(256, 256)).cuda().bfloat16()
    with torch.no_grad():
        for i, p in enumerate(norm.parameters()):
            p.add_(gaussian(256, seed=20 + i, std=0.2))
    return model


@pytest.mark.parametrize("which", NORMS)
def test_values_and_gradients_are_the_authors(which):
    model = model_of(NORMS[which]())
    author, twin = type(model[0]), copy.deepcopy(model[0])
    convert(model, TENSORWISE)
    te = library.load()
    assert isinstance(model[0], te.LayerNorm if which == "layer" else te.RMSNorm)
    assert isinstance(model[0], author)
    x = gaussian(3, 40, 256, seed=1, std=3)
    dy = gaussian(3, 40, 256, seed=2)
    found = []
    for norm in (model[0], twin):
        leaf = x.clone().requires_grad_()
        norm(leaf).backward(dy)
        found.append((norm(leaf).detach(), leaf.grad, *(p.grad for p in norm.parameters())))
    for got, want in zip(*found, strict=True):
        assert got.dtype is want.dtype
        assert sqnr_db(got, want) > 35
    assert list(model[0].state_dict()) == list(twin.state_dict())


@pytest.mark.parametrize("which", NORMS)
def test_evaluation_and_the_restored_norm_are_the_authors(which):
    model = model_of(NORMS[which]())
    attributes = set(model[0].__dict__)
    x = gaussian(40, 256, seed=1, std=3)
    plain = model(x)
    convert(model, TENSORWISE)
    with torch.no_grad():
        assert torch.equal(model.eval()(x), plain)
    model.train()(x).sum().backward()
    twin = copy.deepcopy(model)
    assert torch.equal(twin[0](x), model[0](x))
    for m in (model, twin):
        acceler8.restore(m)
        assert type(m[0]) is type(NORMS[which]())
        assert set(m[0].__dict__) == attributes
        assert torch.equal(m(x), plain)


def test_a_norm_outside_of_fp8s_steps_is_the_authors():
    model = model_of(nn.LayerNorm(256))
    x = gaussian(40, 256, seed=1, std=3)
    plain = model(x)
    convert(model, TENSORWISE, fp8_steps="1:")
    assert torch.equal(model(x), plain)
    acceler8.step(model)
    assert not torch.equal(model(x), plain)


def test_norms_that_it_cannot_take_stay():
    model = nn.Sequential(
        nn.LayerNorm(256, bias=False),
        nn.Linear(256, 256),
        nn.LayerNorm(256, elementwise_affine=False),
        nn.LayerNorm(256),
    ).cuda()
    model = model.bfloat16()
    plan = acceler8.plan(model, TENSORWISE, "transformer_engine")
    assert "no bias, and TransformerEngine's LayerNorm always has one" in str(plan)
    parameters = [name for name, _ in model.named_parameters()]
    acceler8.convert(model, plan)
    assert type(model[0]) is type(model[2]) is nn.LayerNorm
    assert isinstance(model[3], library.load().LayerNorm)
    assert [name for name, _ in model.named_parameters()] == parameters
    model(gaussian(40, 256)).sum().backward()


def test_they_can_be_left():
    model = model_of(nn.LayerNorm(256))
    plan = acceler8.plan(model, TENSORWISE, "te", options=TransformerEngineOptions(convert_norms=False))
    assert "convert_norms is off" in str(plan)
    acceler8.convert(model, plan)
    assert type(model[0]) is nn.LayerNorm


def test_under_autocast_with_fp32_weights():
    model = nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 256)).cuda()
    convert(model, TENSORWISE)
    x = gaussian(40, 256, seed=1, std=3, dtype=torch.float32)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        y = model[0](x)
    assert y.dtype is torch.bfloat16
    assert sqnr_db(y, nn.functional.layer_norm(x, (256,))) > 40
    # a 16-bit input and FP32 weights without autocast: the author's rule, whatever it is
    plain = nn.LayerNorm(256).cuda()
    assert model[0](x.bfloat16().float()).dtype is plain(x).dtype


def test_frozen_norms_get_no_gradient():
    model = model_of(nn.LayerNorm(256))
    model[0].requires_grad_(False)
    convert(model, recipe("delayed"))
    x = gaussian(40, 256).requires_grad_()
    model(x).sum().backward()
    assert x.grad is not None
    assert model[0].weight.grad is None
    acceler8.verify(model)
