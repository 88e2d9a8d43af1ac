"""The layer inside autograd: first derivatives in every mode, no second ones."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from acceler8 import recipes
from acceler8.errors import DoubleBackwardError
from acceler8.functional import linear
from tests.functional.support import NAMES, make_data, run, slots_for

EVERY = [*NAMES, "activations_only"]


@pytest.mark.parametrize("name", EVERY)
def test_retain_graph_gives_the_same_gradients_again(name, device):
    data = make_data(20, 32, 48, device=device)
    recipe = recipes.get(name)
    x, w, bias = data.leaves()
    y = linear(x, w, bias, recipe=recipe, slots=slots_for(recipe, device))
    first = torch.autograd.grad(y, (x, w, bias), data.dy, retain_graph=True)
    second = torch.autograd.grad(y, (x, w, bias), data.dy)
    for one, other, result in zip(first, second, ("dx", "dw", "dbias"), strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, run(recipe, data)[result])
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(y, x, data.dy)


def test_gradients_accumulate(device):
    data = make_data(20, 32, 48, device=device)
    want = run("rowwise", data)
    x, w, bias = data.leaves()
    for _ in range(2):
        linear(x, w, bias, recipe=recipes.get("rowwise")).backward(data.dy)
    for got, result in ((x.grad, "dx"), (w.grad, "dw"), (bias.grad, "dbias")):
        assert torch.equal(got, want[result] * 2)


@pytest.mark.parametrize("name", EVERY)
def test_create_graph_alone_gives_first_derivatives(name, device):
    data = make_data(20, 32, 48, device=device)
    recipe = recipes.get(name)
    want = run(recipe, data)
    x, w, bias = data.leaves()
    y = linear(x, w, bias, recipe=recipe, slots=slots_for(recipe, device))
    got = torch.autograd.grad(y, (x, w, bias), data.dy, create_graph=True)
    for gradient, result in zip(got, ("dx", "dw", "dbias"), strict=True):
        assert torch.equal(gradient, want[result])


@pytest.mark.parametrize("of", ["x", "w", "bias"])
@pytest.mark.parametrize("name", EVERY)
def test_a_second_derivative_is_a_typed_error(name, of, device):
    """Also where dy is a constant, so that a missing dependence on it would go unseen."""
    data = make_data(20, 32, 48, device=device)
    recipe = recipes.get(name)
    x, w, bias = data.leaves()
    y = linear(x, w, bias, recipe=recipe, slots=slots_for(recipe, device))
    first = {"x": x, "w": w, "bias": bias}[of]
    (gradient,) = torch.autograd.grad(y.sum(), first, create_graph=True)
    loss = F.mse_loss(y, data.dy) + gradient.square().sum()
    with pytest.raises(DoubleBackwardError, match=r"second derivative.*allowed: first derivatives; keep the layer"):
        loss.backward()


def test_a_penalty_through_a_nonlinearity_is_a_typed_error(device):
    data = make_data(20, 32, 48, device=device)
    x, w, _ = data.leaves()
    y = linear(x, w, recipe=recipes.get("rowwise")).square().sum()
    (dx,) = torch.autograd.grad(y, x, create_graph=True)
    with pytest.raises(DoubleBackwardError):
        dx.norm().backward()


def test_function_transforms_are_refused_by_pytorch(device):
    """torch.func needs a rule per transform, which rounding to codes has not; the error is PyTorch's own."""
    data = make_data(4, 32, 48, device=device)
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda x: linear(x, data.w, recipe=recipes.get("rowwise")).sum())(data.x)
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.vmap(lambda x: linear(x, data.w, recipe=recipes.get("rowwise")))(data.x[None])


@pytest.mark.parametrize("w_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", ["rowwise", "activations_only", "rowwise with plain wgrad", "rowwise, plain fprop"])
def test_autocast(recipe, w_dtype, device):
    """Results in autocast's dtype, gradients in the dtype of their tensor, for FP8 and high-precision GEMMs."""
    data = make_data(20, 32, 48, device=device)
    made = recipes.get(recipe.split()[0].strip(","))
    if "plain" in recipe:
        made = made.with_gemms(**{recipe.split()[-1]: False})
    x, w, bias = data.leaves()
    w = w.detach().to(w_dtype).requires_grad_()
    with torch.autocast(device, torch.bfloat16):
        y = linear(x, w, bias, recipe=made)
        assert y.dtype == torch.bfloat16
        loss = (y * data.dy).float().sum()
    loss.backward()
    assert (x.grad.dtype, w.grad.dtype, bias.grad.dtype) == (torch.float32, w_dtype, torch.float32)
    want = run(made, data)
    for got, result in ((y, "y"), (x.grad, "dx"), (w.grad, "dw")):
        error = (got.detach().double() - want[result].double()).norm() / want[result].double().norm()
        # y of FP32 operands is rounded to BF16 once; a weight or dy that was rounded to BF16 before its cast lands
        # on other codes now and then
        assert error < (0.005 if result == "y" and w_dtype == torch.float32 else 0.03), result


def test_autocast_quantises_fp32_operands_as_they_are(device):
    """No BF16 rounding comes before the FP8 one."""
    data = make_data(20, 32, 48, device=device)
    with torch.autocast(device, torch.bfloat16):
        got = linear(data.x, data.w, recipe=recipes.get("rowwise"))
    assert torch.equal(got, linear(data.x, data.w, recipe=recipes.get("rowwise")).bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gemms_in_high_precision_do_not_see_an_outer_autocast(dtype, device):
    """The result's dtype was fixed in forward; a backward that runs under autocast does not change it."""
    data = make_data(20, 32, 48, dtype=dtype, device=device)
    x, w, _ = data.leaves()
    y = linear(x, w, recipe=recipes.get("activations_only"))
    with torch.autocast(device, torch.float16 if device == "cuda" else torch.bfloat16):
        y.backward(data.dy)
    want = run("activations_only", data)
    assert torch.equal(x.grad, want["dx"])
    assert torch.equal(w.grad, want["dw"])


@pytest.mark.parametrize("shape", [(20, 32), (2, 10, 32), (2, 5, 2, 32), (32,)])
def test_leading_dimensions_and_changes_in_place(shape, device):
    """As nn.Linear's, the result may be changed in place, and gradients have the shapes of their tensors."""
    data = make_data(20, 32, 48, device=device)
    x, w, bias = data.leaves()
    x = data.x.flatten()[: torch.Size(shape).numel()].view(shape).detach().requires_grad_()
    flat = x.detach().reshape(-1, 32).requires_grad_()
    got, want = (linear(t, w, bias, recipe=recipes.get("rowwise")) for t in (x, flat))
    assert got.shape == (*shape[:-1], 48)
    assert torch.equal(got.reshape(-1, 48), want)
    got += 1.0
    F.relu_(got)
    dx, dw = torch.autograd.grad(got.sum(), (x, w))
    dx_flat, dw_flat = torch.autograd.grad(F.relu(want + 1.0).sum(), (flat, w))
    assert torch.equal(dx, dx_flat.view(shape))
    assert torch.equal(dw, dw_flat)
