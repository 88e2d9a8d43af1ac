"""A converted layer inside PyTorch's machinery: checkpoint, compile, copies, pickles, eval, moves."""

from __future__ import annotations

import copy
import io
import logging
import shutil

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import acceler8
from acceler8 import recipes
from acceler8.nn import Fp8Linear, state_of
from tests.models import RECIPES, Mlp, assert_equal, batch, converted, differs, outcome, train

# ---------------------------------------------------------------------------------------- activation checkpoint


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_checkpoint_changes_nothing(recipe, reentrant, device):
    plain, saving = converted(recipe, device=device), converted(recipe, device=device)
    for step in range(3):
        x = batch(seed=step, device=device)
        want = outcome(plain, x)
        if reentrant:  # takes backward(), not grad()
            leaf = x.clone().requires_grad_()
            y = checkpoint(saving, leaf, use_reentrant=True)
            dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y) * 0.01
            y.backward(dy)
            got = {"y": y.detach(), "dx": leaf.grad, **{f"d{n}": p.grad for n, p in saving.named_parameters()}}
            saving.zero_grad()
        else:
            got = outcome(saving, x, lambda x: checkpoint(saving, x, use_reentrant=False))
        assert_equal(got, want)
        acceler8.step(plain)
        acceler8.step(saving)
        for name, state in acceler8.fp8_state_dict(plain).items():
            assert torch.equal(acceler8.fp8_state_dict(saving)[name], state)
    assert bool(acceler8.fp8_state_dict(plain)) == (recipe == "delayed")


# -------------------------------------------------------------------------------------------------------- compile


# Dynamo itself does this with every autograd.Function that it traces (torch 2.13)
by_dynamo = pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be inst:DeprecationWarning")


@pytest.fixture
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@by_dynamo
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("recipe", RECIPES)
def test_compiles_in_one_graph_and_equals_eager(recipe, device):
    eager, traced = converted(recipe, device=device, fuse=False), converted(recipe, device=device)
    fused = converted(recipe, device=device)
    call = torch.compile(traced, backend="aot_eager", fullgraph=True)
    for tokens in (24, 17, 40):  # the second makes the number of tokens symbolic
        x = batch(tokens, device=device)
        got = outcome(traced, x, call)
        assert_equal(got, outcome(eager, x))
        for name, value in outcome(fused, x).items():  # whose norm sums in another order: some codes are others
            assert (value - got[name]).norm() < 0.01 * got[name].norm(), name
        for model in (eager, traced, fused):
            acceler8.step(model)
    for name, state in acceler8.fp8_state_dict(eager).items():
        assert torch.equal(acceler8.fp8_state_dict(traced)[name], state)


@by_dynamo
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_sees_new_weights_and_eval_mode(device):
    model, eager = converted("rowwise", device=device), converted("rowwise", device=device, fuse=False)
    call = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = batch(device=device)
    first = call(x)
    with torch.no_grad():
        model.up.weight.data.mul_(2)
        eager.up.weight.data.mul_(2)
    assert torch.equal(call(x), eager(x))
    assert not torch.equal(call(x), first)
    model.eval()
    assert torch.equal(call(x), acceler8.restore(copy.deepcopy(model))(x))


@by_dynamo
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_inside_a_window_keeps_no_codes(device):
    """Tensors of a compiled region must not outlive it; codes that eager code kept are not baked in."""
    model, eager = converted("rowwise", device=device), converted("rowwise", device=device, fuse=False)
    call = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = batch(device=device)
    with acceler8.window(model):
        model(x)
        kept = model.up._acceler8_layer.codes.live()
        assert torch.equal(call(x), eager(x))
        assert model.up._acceler8_layer.codes.live().keys() == kept.keys()
        with torch.no_grad():
            model.up.weight.data.mul_(2)
            eager.up.weight.data.mul_(2)
        model.up._acceler8_layer.codes.drop()
        assert torch.equal(call(x), eager(x))


@pytest.mark.slow
@by_dynamo
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
def test_inductor(recipe, device):
    if device == "cpu" and shutil.which("g++") is None:
        pytest.skip("needs g++, which torch.compile's default backend uses on a CPU; this machine has none")
    eager, compiled = converted(recipe, device=device), converted(recipe, device=device)
    call = torch.compile(compiled, fullgraph=True)
    for seed in (1, 2):
        got = outcome(compiled, batch(seed=seed, device=device), call)
        want = outcome(eager, batch(seed=seed, device=device))
        for name in want:  # norm and GELU are fused, so a cast's input may move by an ulp and its code by one
            error = (got[name] - want[name]).norm() / want[name].norm()
            assert error < 1e-3, name
        acceler8.step(eager)
        acceler8.step(compiled)


# ------------------------------------------------------------------------------------------- copies and pickles


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_deep_copy_is_independent(recipe, device):
    model = converted(recipe, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    acceler8.attach(model, optimizer)
    train(model, optimizer=optimizer, device=device)
    x = batch(device=device)
    want, state = outcome(model, x), acceler8.fp8_state_dict(model)
    twin = copy.deepcopy(model)
    assert_equal(outcome(twin, x), want)
    twin_optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    acceler8.attach(twin, twin_optimizer)
    train(twin, optimizer=twin_optimizer, device=device)
    assert differs(outcome(twin, x), want)
    assert_equal(outcome(model, x), want)
    for name, value in acceler8.fp8_state_dict(model).items():
        assert torch.equal(value[1:], state[name][1:]) if value.ndim else value == state[name]  # row 0: this step's
    assert state_of(twin).clock is not state_of(model).clock
    assert state_of(twin).clock.ticks == 6
    assert state_of(model).clock.ticks == 3
    acceler8.verify(twin, twin_optimizer)
    acceler8.restore(twin)
    assert type(twin.up) is nn.Linear
    assert type(model.up) is Fp8Linear


def test_a_deep_copy_of_one_layer_works_alone(device):
    model = converted("delayed", device=device)
    x = batch(device=device)
    outcome(model, x)
    acceler8.step(model)
    layer = copy.deepcopy(model.up)
    assert torch.equal(layer(x), model.up(x))
    acceler8.step(model)
    assert torch.equal(layer(3 * x), copy.deepcopy(layer)(3 * x))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_saved_model_loads_and_goes_on(recipe, device):
    model = converted(recipe, device=device)
    optimizer = torch.optim.AdamW(model.parameters())
    acceler8.attach(model, optimizer)
    optimizer.register_step_post_hook(lambda *_: None)  # a hook that no pickle can hold
    train(model, optimizer=optimizer, device=device)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    x = batch(device=device)
    assert_equal(outcome(loaded, x), outcome(model, x))
    assert loaded.up._acceler8_layer.recipe == model.up._acceler8_layer.recipe
    assert state_of(loaded).attached == []
    acceler8.step(loaded)
    acceler8.step(model)
    assert_equal(outcome(loaded, x), outcome(model, x))


# ---------------------------------------------------------------------------------------------- several calls


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_module_called_twice_in_a_step(recipe, device):
    """Weight gradients of both calls add up, and a second call finds the scales of the first."""
    model = converted(recipe, device=device).up
    one, two = batch(seed=1, device=device), batch(seed=2, device=device)
    want = [outcome(model, x) for x in (one, two)]
    for x, result in ((one, want[0]), (two, want[1])):
        assert_equal(outcome(model, x), result)
    dy = [torch.randn(24, 64, generator=torch.Generator().manual_seed(2)).to(device) * 0.01 for _ in range(2)]
    leaves = [one.clone().requires_grad_(), two.clone().requires_grad_()]
    ys = [model(x) for x in leaves]
    torch.autograd.backward(ys, dy)
    assert torch.equal(model.weight.grad, want[1]["dweight"] + want[0]["dweight"])
    for leaf, result in zip(leaves, want, strict=True):
        assert torch.equal(leaf.grad, result["dx"])


# ------------------------------------------------------------------------------------------------- eval policy


@pytest.mark.parametrize("recipe", RECIPES)
def test_eval_logits_equal_the_restored_models(recipe, device):
    model = converted(recipe, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    acceler8.attach(model, optimizer)
    train(model, optimizer=optimizer, device=device)
    x = batch(device=device)
    training = model(x)
    got = outcome(model.eval(), x)
    assert_equal(got, outcome(acceler8.restore(copy.deepcopy(model)).eval(), x))
    error = (got["y"] - training).norm() / training.norm()  # the norm's other order of sums, or FP8
    assert (error < 1e-6) == (recipe == "activations_only")
    assert (error > 1e-3) == (recipe != "activations_only")


@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
def test_eval_in_fp8_when_asked(recipe, device):
    x = batch(device=device)
    model = converted(recipe, device=device, fuse=False)
    want = model(x)
    fused = converted(recipe, device=device).eval()
    with acceler8.evaluate_in_fp8(fused):  # evaluations run the norm as its author wrote it
        assert torch.equal(fused(x), want)
    acceler8.step(model)
    model.eval()
    plain = model(x)
    with acceler8.evaluate_in_fp8(model):
        assert torch.equal(model(x), want)
        with acceler8.evaluate_in_fp8(model):
            pass
        assert torch.equal(model(x), want)
    assert torch.equal(model(x), plain)
    always = converted(recipes.get(recipe, eval="fp8"), device=device).eval()
    assert torch.equal(always(x), want)
    with pytest.raises(RuntimeError, match="on purpose"), acceler8.evaluate_in_fp8(model):
        raise RuntimeError("on purpose")
    assert torch.equal(model(x), plain)


def test_an_evaluation_does_not_move_the_scales_of_training(device):
    seen, unseen = converted("delayed", device=device), converted("delayed", device=device)
    for model in (seen, unseen):
        outcome(model, batch(device=device))
    seen.eval()
    with acceler8.evaluate_in_fp8(seen), torch.no_grad():
        seen(batch(device=device) * 100)
    seen.train()
    for model in (seen, unseen):
        acceler8.step(model)
    for name, state in acceler8.fp8_state_dict(unseen).items():
        assert torch.equal(acceler8.fp8_state_dict(seen)[name], state)


# -------------------------------------------------------------------------------------- delayed without boundaries


def test_delayed_scaling_without_boundaries_is_said_once(caplog):
    model = converted("delayed")
    x = batch(2)
    with caplog.at_level(logging.WARNING, logger="acceler8"), torch.no_grad():
        for _ in range(255):
            model.up(x)
        assert caplog.records == []
        for _ in range(20):
            model.up(x)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("up: 256 training forwards under delayed scaling and no step boundary was marked")
    assert "acceler8.attach(model, optimizer)" in said


@pytest.mark.parametrize("mark", [acceler8.step, lambda model: model.eval()], ids=["step", "eval"])
def test_marked_boundaries_and_evaluation_are_not_warned_about(mark, caplog):
    model = converted("delayed")
    mark(model)
    x = batch(2)
    with caplog.at_level(logging.WARNING, logger="acceler8"), torch.no_grad():
        for _ in range(260):
            model.up(x)
    assert caplog.records == []


def test_the_description_names_the_recipe():
    model = converted("blockwise")
    assert repr(model.up) == "Fp8Linear(in_features=32, out_features=64, bias=False, fp8=blockwise)"


def test_a_converted_model_trains_like_a_plain_one(device):
    """The heartbeat in small: losses of FP8 and FP32 lie on each other."""
    for recipe in RECIPES:
        model, plain = converted(recipe, device=device), Mlp().to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        acceler8.attach(model, optimizer)
        got, want = train(model, 8, optimizer=optimizer, device=device), train(plain, 8, device=device)
        assert got == pytest.approx(want, rel=0.01)
        assert got[-1] < got[0]
