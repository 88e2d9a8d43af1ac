"""``initialize``: a plain loop at each level; the optimizer that is put in the place of torch's."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import acceler8
from acceler8 import levels
from acceler8.errors import ConfigError, GradientError, PlanError, VerifyError
from acceler8.nn import Fp8Linear, fp8_layers
from acceler8.nn.gradients import stored_gradient
from tests.levels.support import llama, loss_of
from tests.models import Mlp, batch

MOST = {"O1": 11.1, "O2": 6.2, "O3": 7.2}


def mlp(seed: int = 0) -> Mlp:
    return Mlp(seed, width=128, hidden=256)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, start: int = 0) -> list[float]:
    losses = []
    for step in range(start, start + steps):
        x = batch(32, 128, seed=step)
        loss = (model(x) - x.flip(-1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", ["O1", "O2", "O3"])
def test_a_plain_loop_trains_in_the_promised_bytes(name):
    """Counted in storages right behind a backward, when everything is there."""
    model = mlp()
    given = list(model.parameters())
    same, optimizer = levels.initialize(model, torch.optim.AdamW(model.parameters(), lr=3e-3), opt_level=name)
    assert same is model
    assert all(p is q for p, q in zip(given, model.parameters(), strict=True))
    losses = train(model, optimizer, 8)
    assert losses[-1] < 0.7 * losses[0]
    x = batch(32, 128)
    assert model(x).dtype is torch.float32
    model(x).square().mean().backward()
    found = levels.stored_bytes(model, optimizer)
    assert found.elements == 2 * 128 * 256
    assert found.per_element <= MOST[name]
    assert found.per_element == pytest.approx(levels.LEVELS[name].bytes_per_parameter(128), abs=0.02)
    assert all(p.grad is None for p in levels.level_weights(model).values())
    assert model.norm.weight.grad is not None


def test_levels_train_as_bf16_does():
    """A small Llama, 30 steps; means of the last ten losses. O3 is O2 with codes that nothing reads: bit for bit."""
    means = {}
    for name in ("BF16", "O1", "O2"):
        model = llama(layers=1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        if name != "BF16":
            model, optimizer = levels.initialize(model, optimizer, opt_level=name)
        losses = []
        for step in range(30):
            with torch.autocast("cpu", torch.bfloat16, enabled=name == "BF16"):
                loss = loss_of(model, step)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        means[name] = sum(losses[-10:]) / 10
    assert means["BF16"] < 0.5 * 5.5
    for name in ("O1", "O2"):
        assert means[name] == pytest.approx(means["BF16"], abs=0.15), means


def test_o3_trains_as_o2_and_keeps_codes_of_the_weights_as_they_are():
    models = {}
    for name in ("O2", "O3"):
        model = models[name] = mlp()
        model, optimizer = levels.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), opt_level=name)
        train(model, optimizer, 3)
    for p, q in zip(models["O2"].parameters(), models["O3"].parameters(), strict=True):
        assert torch.equal(p, q)
    checks = acceler8.verify(models["O3"], optimizer).checks["codes"]
    assert checks == "2 live codes equal a fresh cast"
    assert acceler8.verify(models["O2"]).checks["codes"].startswith("0 live")


def kept(model: nn.Module) -> list[object]:
    return [layer._acceler8_layer.kept.get(layer.weight) for _, layer in fp8_layers(model)]


def test_codes_of_o3_never_outlive_a_change_that_is_counted_and_verify_finds_the_rest():
    model = mlp()
    model, optimizer = levels.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), opt_level="O3")
    assert None not in kept(model)
    with torch.no_grad():
        model.up.weight.mul_(2)
    assert [rows is None for rows in kept(model)] == [True, False]
    train(model, optimizer, 1)
    assert None not in kept(model)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    assert kept(model) == [None, None]
    train(model, optimizer, 1)
    model.down.weight.requires_grad_(False)
    assert [rows is None for rows in kept(model)] == [False, True]
    model.down.weight.requires_grad_(True)
    train(model, optimizer, 1)
    before = train(model, optimizer, 1, start=9)
    model.up.weight.data.mul_(1.5)  # not counted
    with pytest.raises(VerifyError, match=r"up.weight changed since the step that made its kept codes \(level O3\)"):
        acceler8.verify(model, optimizer)
    assert train(model, optimizer, 1, start=9) != before  # the forward read the weight
    assert "2 live" in acceler8.verify(model, optimizer).checks["codes"]


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise", "mxfp8"])
def test_o3_keeps_codes_of_every_recipe(recipe):
    model = acceler8.convert(mlp(), recipe)
    model, optimizer = levels.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), opt_level="O3")
    train(model, optimizer, 3)
    assert acceler8.verify(model, optimizer).checks["codes"] == "2 live codes equal a fresh cast"


def test_copies_keep_no_codes_and_plain_gradients():
    model = mlp()
    model, _ = levels.initialize(model, torch.optim.AdamW(model.parameters()), opt_level="O3")
    other = copy.deepcopy(model)
    assert [layer._acceler8_layer.kept.get(layer.weight) for _, layer in fp8_layers(other)] == [None, None]
    x = batch(32, 128)
    other(x).square().mean().backward()
    assert other.up.weight.grad is not None
    other.zero_grad()
    assert model.up.weight.grad is None


def test_the_optimizer_takes_groups_state_hooks_and_schedulers_over():
    torch.manual_seed(0)
    model = mlp()
    groups = [
        {"params": [model.up.weight], "lr": 0.02},
        {"params": [model.down.weight, model.down.bias, *model.norm.parameters()], "weight_decay": 0.0},
    ]
    before = torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.9))
    scheduler = torch.optim.lr_scheduler.LambdaLR(before, lambda step: 1.0 / (1 + step))
    stepped = []
    before.register_step_post_hook(lambda *_: stepped.append(1))
    train(model, before, 2)
    moments = before.state[model.up.weight]["exp_avg"].clone(), before.state[model.norm.weight]["exp_avg"].clone()
    model, now = levels.initialize(model, before, opt_level="O2")
    assert type(now) is acceler8.optim.AdamW
    assert [group["lr"] for group in now.param_groups] == [0.02, 0.01]
    assert now.param_groups[0]["betas"] == (0.8, 0.9)
    assert now.param_groups[1]["weight_decay"] == 0.0
    state = now.state[model.up.weight]
    assert (state["exp_avg"].dtype, state["exp_avg_sq"].dtype) == (torch.float8_e4m3fn, torch.float16)
    assert float(state["step"]) == 2
    decoded = now.export_state_dict()["state"][0]["exp_avg"]
    torch.testing.assert_close(decoded, moments[0], rtol=0.07, atol=float(moments[0].abs().max()) / 448)
    assert torch.equal(now.state[model.norm.weight]["exp_avg"], moments[1])
    train(model, now, 2)
    scheduler.step()
    assert [group["lr"] for group in now.param_groups] == [0.01, 0.005]
    assert len(stepped) == 4
    model(batch(32, 128)).sum().backward()
    with pytest.raises(GradientError, match=r"step the optimizer that acceler8\.levels.initialize"):
        before.step()


@pytest.mark.parametrize("kind", ["Adam", "AdamW"])
def test_without_an_fp8_weight_in_it_the_optimizer_is_torchs(kind):
    """Groups of other parameters: FP32 moments, the same steps to some ulps."""
    model, plain = mlp(), mlp()
    model.norm.requires_grad_(True)
    theirs = getattr(torch.optim, kind)(plain.norm.parameters(), lr=1e-2, weight_decay=0.1)
    model, mine = levels.initialize(
        model, getattr(torch.optim, kind)(model.norm.parameters(), lr=1e-2, weight_decay=0.1), opt_level="O2"
    )
    for step in range(3):
        for norm in (model.norm, plain.norm):
            for p in norm.parameters():
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step))
        mine.step()
        theirs.step()
    torch.testing.assert_close(model.norm.weight, plain.norm.weight, rtol=1e-6, atol=1e-6)


def test_choices_reach_the_tensors():
    model = mlp()
    model, optimizer = levels.initialize(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        optimization_level="O2",
        exp_avg_sq="fp8",
        master="bf16_remainder",
        gradient="weight",
    )
    train(model, optimizer, 2)
    state = optimizer.state[model.up.weight]
    assert (state["exp_avg_sq"].dtype, state["master"].dtype) == (torch.uint8, torch.int16)
    assert model.up.weight.grad.dtype is torch.bfloat16
    assert stored_gradient(model.up.weight).codes is None
    model = mlp()
    model, optimizer = levels.initialize(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), opt_level="O1", weight="fp16", master="none"
    )
    assert train(model, optimizer, 6)[-1] < 4.0
    assert model.up.weight.dtype is torch.float16


def test_an_optimizer_of_ours_is_completed_and_keeps_what_it_says():
    model = mlp()
    given = acceler8.optim.AdamW(model.parameters(), lr=1e-2, exp_avg_sq="fp8")
    model, optimizer = levels.initialize(model, given, opt_level="O2")
    assert optimizer is given
    train(model, optimizer, 1)
    state = optimizer.state[model.up.weight]
    assert (state["exp_avg"].dtype, state["exp_avg_sq"].dtype) == (torch.float8_e4m3fn, torch.uint8)


def test_a_converted_model_keeps_its_recipe_and_its_marks():
    model = acceler8.convert(mlp(), "tensorwise")
    given = torch.optim.AdamW(model.parameters(), lr=1e-2)
    acceler8.attach(model, given)
    model, optimizer = levels.initialize(model, given)
    assert model.up._acceler8_layer.recipe.name == "tensorwise"
    train(model, optimizer, 3)
    assert model.up._acceler8_layer.clock.ticks == 3


def test_restore_leaves_a_plain_model():
    model = mlp()
    model, _ = levels.initialize(model, torch.optim.AdamW(model.parameters()))
    model(batch(32, 128)).square().mean().backward()
    acceler8.restore(model)
    assert not isinstance(model.up, Fp8Linear)
    assert model.up.weight.grad is not None
    assert levels.level_weights(model) == {}
    assert "zero_grad" not in model.__dict__


def test_zero_grad_of_the_model_clears_codes():
    model = mlp()
    model, _ = levels.initialize(model, torch.optim.AdamW(model.parameters()))
    model(batch(32, 128)).square().mean().backward()
    assert levels.gradient_of(model.up.weight) is not None
    model.zero_grad()
    assert levels.gradient_of(model.up.weight) is None
    assert model.norm.weight.grad is None


def test_verify_sees_the_step_of_a_level():
    model = mlp()
    model, optimizer = levels.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), opt_level="O3")
    steps = iter(range(10))
    report = acceler8.verify(model, optimizer, step=lambda: train(model, optimizer, 1, start=next(steps)))
    assert report.checks["moved and fresh"].startswith("5 parameters moved, 2 layers used codes")


def test_tied_and_frozen_weights_are_left():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(128, 128)
            self.read = nn.Linear(128, 128, bias=False)
            self.read.weight = self.embed.weight
            self.free, self.frozen = nn.Linear(128, 128), nn.Linear(128, 128)
            self.shared, self.left = nn.Linear(128, 128), nn.Linear(128, 128)
            self.frozen.requires_grad_(False)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.left(self.shared(self.frozen(self.free(self.read(self.embed(ids))))))

    model = Tied()
    acceler8.convert(model, acceler8.plan(model, "rowwise", skip=["left"]))
    assert isinstance(model.shared, Fp8Linear)
    model.left.weight = model.shared.weight  # by the script, where a plan would have left both
    model, optimizer = levels.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-2), opt_level="O3")
    assert list(levels.level_weights(model)) == ["free.weight"]
    assert model.embed.weight.dtype is torch.float32
    assert model.frozen.weight.dtype is model.shared.weight.dtype is torch.float32
    model(torch.arange(16)).square().mean().backward()
    assert model.embed.weight.grad is not None
    optimizer.step()


def test_a_gradient_that_is_there_is_brought_along():
    model = mlp()
    x = batch(32, 128)
    model(x).square().mean().backward()
    before = model.up.weight.grad.clone()
    model, _ = levels.initialize(model, torch.optim.AdamW(model.parameters()))
    error = (levels.gradient_of(model.up.weight) - before).norm() / before.norm()
    assert error < 0.03


def refused(optimizer: object, message: str, error: type[Exception] = ConfigError, **options: object) -> None:
    model = mlp()
    before = {name: (p.dtype, type(m)) for name, p in model.named_parameters() for m in [model.up]}
    made = optimizer(model.parameters()) if callable(optimizer) else optimizer
    with pytest.raises(error, match=message):
        levels.initialize(model, made, **options)
    assert {name: (p.dtype, type(m)) for name, p in model.named_parameters() for m in [model.up]} == before


def test_what_it_cannot_do_is_said_and_changes_nothing():
    refused(torch.optim.SGD, r"level O1 got a torch.optim.sgd.SGD; allowed: Adam and AdamW of torch.optim")
    refused(lambda ps: torch.optim.AdamW(ps, amsgrad=True), "amsgrad=True; allowed: False")
    refused("adam", "got an optimizer of str; allowed: Adam, AdamW, None")
    refused(torch.optim.AdamW, "unknown opt_level 'O4'", opt_level="O4")
    refused(torch.optim.AdamW, "unknown choice of a level 'moment'", moment="fp8")
    with pytest.raises(PlanError, match=r"found no weight of an FP8 layer that trains in Mlp: .*requires no gradient"):
        levels.initialize(mlp().requires_grad_(False), None)
    with pytest.raises(PlanError, match="that is not converted; convert it first"):
        levels.apply_level(mlp(), levels.level("O1"))


def test_an_optimizer_may_come_later():
    model, none = levels.initialize(mlp(), None, opt_level="O2")
    assert none is None
    optimizer = levels.level_optimizer(torch.optim.Adam(model.parameters(), lr=1e-2), levels.level("O2"))
    assert type(optimizer) is acceler8.optim.Adam
    assert train(model, optimizer, 6)[-1] < 3.0
