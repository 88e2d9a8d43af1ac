"""Linear layers by TransformerEngine on a GPU: numbers, tokens, gradients, and FP8 whoever calls."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import acceler8
from acceler8 import recipes
from acceler8.errors import HardwareError
from tests.backends.transformer_engine.gpu import (
    MARKS,
    RECIPES,
    TENSORWISE,
    Pair,
    convert,
    gaussian,
    is_fp8,
    one_layer,
    recipe,
    sqnr_db,
)

pytestmark = MARKS
SHAPES = [(0, 256), (1, 256), (7, 256), (17, 256), (256,), (3, 5, 256), (2, 0, 256), (130, 256)]


@pytest.mark.parametrize("name", RECIPES)
def test_forward_and_gradients_are_fp8s(name):
    model = one_layer()
    weight, bias = model[0].weight.detach().double(), model[0].bias.detach().double()
    convert(model, recipe(name))
    x = gaussian(256, 256, seed=1).requires_grad_()
    dy = gaussian(256, 384, seed=2)
    for _ in range(2):  # the second with scales, where those come from the step before
        x.grad = model[0].weight.grad = model[0].bias.grad = None
        y = model(x)
        y.backward(dy)
        acceler8.step(model)
    assert y.dtype is torch.bfloat16
    assert is_fp8(y, x.double() @ weight.t() + bias)
    assert is_fp8(x.grad, dy.double() @ weight)
    assert is_fp8(model[0].weight.grad, dy.double().t() @ x.double())
    assert sqnr_db(model[0].bias.grad, dy.double().sum(0)) > 40


def test_restored_it_is_the_plain_layer():
    model = one_layer()
    x = gaussian(32, 256)
    plain, before = model(x), dict(model[0].__dict__)
    convert(model, TENSORWISE)
    assert not torch.equal(model(x), plain)
    model(x).sum().backward()
    acceler8.restore(model)
    assert type(model[0]) is nn.Linear
    assert model[0].__dict__.keys() == before.keys()
    assert torch.equal(model(x), plain)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize(
    "shape", [(0, 256), (1, 256), (7, 256), (17, 256), (256,), (3, 5, 256), (2, 0, 256), (130, 256)]
)
def test_any_number_of_tokens(name, shape):
    model = convert(one_layer(), recipe(name))
    x = gaussian(*shape, seed=1).requires_grad_()
    y = model(x)
    assert y.shape == (*shape[:-1], 384)
    y.float().square().sum().backward()
    assert x.grad.shape == x.shape
    tokens = x.numel() // 256
    if not tokens:
        assert not model[0].weight.grad.any()
        return
    # rows of zeros beside it change nothing
    rows = torch.cat([x.detach().reshape(tokens, 256), x.new_zeros(-tokens % 128, 256)]).requires_grad_()
    expected = model(rows)
    assert sqnr_db(y.reshape(tokens, 384), expected[:tokens]) > 35


def test_evaluation_is_in_high_precision_unless_asked():
    model = convert(Pair(), TENSORWISE).eval()
    x = gaussian(32, 256)
    with torch.no_grad():
        plain = F.linear(F.gelu(F.linear(x, model.up.weight)), model.down.weight, model.down.bias)
        assert torch.equal(model(x), plain)
        with acceler8.evaluate_in_fp8(model):
            in_fp8 = model(x)
        assert is_fp8(in_fp8, plain)
        assert torch.equal(model(x), plain)
    asked = convert(Pair(), recipes.get("tensorwise", eval="fp8")).eval()
    with torch.no_grad():
        assert torch.equal(asked(x), in_fp8)


@pytest.mark.parametrize("name", RECIPES)
def test_a_layer_called_by_itself_is_in_fp8(name):
    model = convert(Pair(), recipe(name))
    x = gaussian(32, 256)
    model(x)
    acceler8.step(model)
    assert is_fp8(model.up(x), x.double() @ model.up.weight.double().t())


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputation_is_in_fp8_too(name, use_reentrant):
    """Backward runs outside of the root's forward: with one context around that it would recompute in BF16."""
    x = gaussian(64, 256, seed=1)
    dy = gaussian(64, 256, seed=2)
    outcomes = []
    for recompute in (False, True):
        model = convert(Pair(), recipe(name))
        for _ in range(3):
            model.zero_grad()
            leaf = x.clone().requires_grad_()
            y = checkpoint(model, leaf, use_reentrant=use_reentrant) if recompute else model(leaf)
            y.backward(dy)
            acceler8.step(model)
        outcomes.append((y, leaf.grad, model.up.weight.grad, model.down.weight.grad, model.down.bias.grad))
    for plain, recomputed in zip(*outcomes, strict=True):
        assert torch.equal(plain, recomputed)


@pytest.mark.parametrize(
    ("dgrad", "wgrad"), [(True, False), (False, True), (False, False)], ids=["wgrad", "dgrad", "dgrad and wgrad"]
)
@pytest.mark.parametrize("name", ["tensorwise", "delayed"])
def test_gradients_in_high_precision(name, dgrad, wgrad):
    model = one_layer()
    convert(model, recipe(name).with_gemms(dgrad=dgrad, wgrad=wgrad))
    x, dy = gaussian(64, 256, seed=1), gaussian(64, 384, seed=2)
    for _ in range(2):
        model.zero_grad()
        leaf = x.clone().requires_grad_()
        y = model(leaf)
        y.backward(dy)
        acceler8.step(model)
    weight = model[0].weight.detach().double()
    assert is_fp8(y, x.double() @ weight.t() + model[0].bias.double())
    exact = {"dgrad": dy.double() @ weight, "wgrad": dy.double().t() @ x.double()}
    got = {"dgrad": leaf.grad, "wgrad": model[0].weight.grad}
    for which, in_fp8 in (("dgrad", dgrad), ("wgrad", wgrad)):
        assert is_fp8(got[which], exact[which]) if in_fp8 else sqnr_db(got[which], exact[which]) > 45, which
    assert sqnr_db(model[0].bias.grad, dy.double().sum(0)) > 40


def test_parameters_hooks_ties_and_an_earlier_optimizer():
    model = Pair()
    model.up.weight.requires_grad_(False)
    calls = []
    model.up.register_forward_hook(lambda *_: calls.append("forward"))
    model.down.register_full_backward_hook(lambda *_: calls.append("backward"))
    model.down.note = "mine"
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = {name: (p, p.detach().clone()) for name, p in model.named_parameters()}
    keys = list(model.state_dict())
    convert(model, TENSORWISE)
    assert {n: id(p) for n, p in model.named_parameters()} == {n: id(p) for n, (p, _) in before.items()}
    model(gaussian(32, 256).requires_grad_()).float().square().mean().backward()
    optimizer.step()
    moved = {name: not torch.equal(p, before[name][1]) for name, p in model.named_parameters()}
    assert moved == {"up.weight": False, "down.weight": True, "down.bias": True}
    assert model.up.weight.grad is None
    assert sorted(calls) == ["backward", "forward"]
    assert model.down.note == "mine"
    assert list(model.state_dict()) == keys
    acceler8.verify(model, optimizer)


def test_state_dicts_are_plain():
    model, plain = convert(Pair(), recipe("delayed")), Pair()
    model(gaussian(32, 256)).sum().backward()
    assert list(model.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(model.state_dict())
    model.load_state_dict(plain.state_dict())
    # one that TransformerEngine's own modules wrote
    model.load_state_dict({**plain.state_dict(), "up._extra_state": torch.zeros(4, dtype=torch.uint8)})


def test_verify_follows_the_weights_through_a_step():
    model = convert(Pair(), TENSORWISE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    acceler8.attach(model, optimizer)
    x = gaussian(32, 256)

    def step():
        optimizer.zero_grad()
        model(x).float().square().mean().backward()
        optimizer.step()

    report = acceler8.verify(model, optimizer, step=step)
    assert "2 layers used codes of their new weight" in str(report)


def test_codes_are_made_once_in_a_window_and_anew_behind_the_step():
    model, alone = convert(Pair(), TENSORWISE), convert(Pair(), TENSORWISE)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, alone)]
    for m, optimizer in zip((model, alone), optimizers, strict=True):
        acceler8.attach(m, optimizer)
    batches = [gaussian(32, 256, seed=seed) for seed in range(4)]
    assert not model.up._fp8_workspaces
    with acceler8.window(model):
        for start in (0, 2):
            kept = []
            for x in batches[start : start + 2]:
                losses = [m(x).float().square().mean() for m in (model, alone)]
                assert torch.equal(*losses)
                for loss in losses:
                    loss.backward()
                kept.append(id(model.up._fp8_workspaces["weight"]))
            assert kept[0] == kept[1]
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    model(batches[0])
    assert not model.up._fp8_workspaces
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_window_of_steps():
    model = convert(Pair(), TENSORWISE, fp8_steps="1:2")
    x = gaussian(32, 256)
    plain = Pair()(x)
    assert torch.equal(model(x), plain)
    acceler8.step(model)
    assert is_fp8(model(x), plain)
    acceler8.step(model)
    assert torch.equal(model(x), plain)


def test_fp32_parameters_under_autocast():
    model = convert(Pair(dtype=torch.float32), TENSORWISE)
    x = gaussian(33, 256, dtype=torch.float32)
    exact = F.linear(F.gelu(F.linear(x, model.up.weight)), model.down.weight, model.down.bias)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        y = model(x)
    assert y.dtype is torch.bfloat16
    assert is_fp8(y, exact)
    y.float().sum().backward()
    assert model.up.weight.grad.dtype is torch.float32
    assert model(x).dtype is torch.float32  # without autocast: FP32 in and out, FP8 between


def test_a_copy_is_a_model_of_its_own():
    model = convert(Pair(), TENSORWISE)
    x = gaussian(32, 256)
    y = model(x)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(x), y)
    with torch.no_grad():
        twin.up.weight.zero_()
    assert torch.equal(model(x), y)
    acceler8.restore(twin)
    assert type(twin.up) is nn.Linear
    assert torch.equal(model(x), y)


def test_an_attribute_that_would_be_lost_leaves_the_layer():
    model = Pair()
    model.up.name = "mine"
    rows = {row.name: row for row in acceler8.plan(model, TENSORWISE, "transformer_engine").rows}
    assert "its attribute 'name' is one that TransformerEngine's Linear needs" in rows["up"].reason
    assert rows["down"].is_fp8


def test_an_input_on_the_cpu():
    model = convert(Pair(), TENSORWISE)
    with pytest.raises(HardwareError, match="layer 'up' got an input on cpu; TransformerEngine computes FP8 on CUDA"):
        model(torch.randn(16, 256, dtype=torch.bfloat16))


def test_memory_of_a_closed_window_is_given_back():
    model = convert(Pair(), TENSORWISE)
    x = gaussian(32, 256)
    with acceler8.window(model):
        model(x)
        assert model.up._fp8_workspaces
    model(x)
    assert not model.up._fp8_workspaces
