"""verify: silent on healthy models, and each broken invariant is found and named."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

import acceler8
from acceler8 import recipes
from acceler8.errors import PlanError, VerifyError
from tests.models import RECIPES, Mlp, batch, converted, outcome, train


def stepper(model: nn.Module, optimizer: torch.optim.Optimizer, device: str = "cpu") -> Callable[[], None]:
    def step() -> None:
        train(model, 1, optimizer=optimizer, device=device)

    return step


def healthy(recipe: object = "rowwise", device: str = "cpu") -> tuple[nn.Module, torch.optim.Optimizer]:
    model = converted(recipe, device=device)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    acceler8.attach(model, optimizer)
    return model, optimizer


# ------------------------------------------------------------------------------------------------------------ healthy


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_healthy_model_passes_every_level(recipe, device):
    model, optimizer = healthy(recipe, device)
    acceler8.verify(model)
    train(model, optimizer=optimizer, device=device)
    report = acceler8.verify(model, optimizer, step=stepper(model, optimizer, device))
    used = 0 if recipe == "activations_only" else 2
    assert report.checks == {
        "layers": "2 FP8 layers as planned",
        "ties": "0 ties",
        "requires_grad": "5 parameters",
        "dtypes": "5 parameters",
        "codes": "0 live codes equal a fresh cast",
        "optimizer": "5 trainable parameters, each in one group",
        "moved and fresh": f"5 parameters moved, {used} layers used codes of their new weight",
        "fused": "1 of 1 norms ran in one kernel",
    }
    assert str(report).count("ok  ") == 8


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_step_check_disturbs_nothing(recipe):
    model, optimizer = healthy(recipe)
    twin = copy.deepcopy(model)
    twin_optimizer = AdamW(twin.parameters(), lr=1e-2)
    acceler8.attach(twin, twin_optimizer)
    acceler8.verify(model, optimizer, step=stepper(model, optimizer))
    for _ in range(2):
        train(twin, 1, optimizer=twin_optimizer)
    for got, want in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(got, want)
    for name, state in acceler8.fp8_state_dict(twin).items():
        assert torch.equal(acceler8.fp8_state_dict(model)[name], state)
    assert not model.up._forward_hooks
    assert not model.up.weight._post_accumulate_grad_hooks


@pytest.mark.parametrize("recipe", ["rowwise", "delayed", "blockwise"])
def test_live_codes_of_a_window_pass(recipe, device):
    model, optimizer = healthy(recipe, device)
    train(model, optimizer=optimizer, device=device)
    with acceler8.window(model):
        outcome(model, batch(device=device))
        report = acceler8.verify(model, optimizer)
    assert report.checks["codes"] == "4 live codes equal a fresh cast"


def test_a_healthy_step_inside_a_window_passes():
    model, optimizer = healthy()
    with acceler8.window(model):
        acceler8.verify(model, optimizer, step=stepper(model, optimizer))


def test_frozen_tied_and_accumulated_parameters_pass():
    model = nn.ModuleDict({"a": nn.Linear(32, 32), "b": nn.Linear(32, 32), "c": Mlp()})
    model["b"].weight = model["a"].weight
    model["c"].norm.requires_grad_(False)
    acceler8.convert(model)
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        for seed in range(2):
            x = batch(seed=seed)
            model["c"](model["b"](model["a"](x))).square().mean().backward()
        optimizer.step()
        acceler8.step(model)

    report = acceler8.verify(model, optimizer, step=step)
    assert report.checks["ties"] == "1 ties"


def test_hooks_of_the_user_do_not_confuse_the_step_check():
    """One that scales the output, one that changes the input, and a layer that is called by keyword."""
    model, optimizer = healthy()
    model.up.register_forward_hook(lambda module, args, y: y * 2)
    model.down.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    report = acceler8.verify(model, optimizer, step=stepper(model, optimizer))
    assert "2 layers used codes" in report.checks["moved and fresh"]


def test_steps_too_small_for_sixteen_bits_are_counted_and_not_blamed():
    """A norm weight of 1 in BF16 moves in steps of 2**-8; AdamW at 1e-3 asks for less."""
    model = acceler8.convert(Mlp().bfloat16())
    optimizer = AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)

    def step() -> None:
        optimizer.zero_grad()
        model(batch().bfloat16()).square().mean().backward()
        optimizer.step()

    before = model.norm.weight.detach().clone()
    report = acceler8.verify(model, optimizer, step=step)
    assert torch.equal(model.norm.weight, before)
    assert report.checks["moved and fresh"].endswith(", 1 had steps below their resolution")


def test_a_learning_rate_of_zero_and_no_gradient_are_no_violation():
    model = converted()
    model.idle = nn.Parameter(torch.ones(3))
    optimizer = SGD([{"params": [*model.norm.parameters()], "lr": 0.0}, {"params": [model.up.weight]}], lr=0.1)
    optimizer.add_param_group({"params": [*model.down.parameters(), model.idle]})
    acceler8.verify(model, optimizer, step=stepper(model, optimizer))


def test_behind_a_wrapper():
    model, optimizer = healthy()
    acceler8.verify(nn.Sequential(model), optimizer)


# --------------------------------------------------------------------------------------------- planted: static checks


def missing(model, optimizer):
    optimizer.param_groups[0]["params"].pop(1)


def duplicate(model, optimizer):
    optimizer.param_groups[0]["params"].append(model.up.weight)


def another_tensor(model, optimizer):
    model.up.weight = nn.Parameter(model.up.weight.detach().clone())


def frozen(model, optimizer):
    model.down.weight.requires_grad_(False)


def cast(model, optimizer):
    model.down.bfloat16()


def restored_behind_the_back(model, optimizer):
    model.down.__class__ = nn.Linear


def replaced(model, optimizer):
    model.up = nn.Linear(32, 64, bias=False)
    optimizer.param_groups[0]["params"] = list(model.parameters())


def forward_replaced(model, optimizer):
    model.up.forward = nn.Linear.forward.__get__(model.up)


STATIC = [
    (missing, r"optimizer: norm\.bias is in no group of the optimizer: it will never move; build the optimizer from"),
    (duplicate, r"optimizer: up\.weight is held 2 times by the optimizer"),
    (another_tensor, r"optimizer: up\.weight is in no group of the optimizer"),
    (frozen, r"requires_grad: down\.weight was trainable and now is not"),
    (cast, r"dtypes: down\.weight is torch\.bfloat16, at conversion it was torch\.float32"),
    (restored_behind_the_back, r"layers: layer 'down' is planned FP8 but is not; convert the model again"),
    (replaced, r"layers: layer 'up' is planned FP8 but is not"),
    (forward_replaced, r"layers: layer 'up' does not run in FP8: its forward was replaced on the instance"),
]


@pytest.mark.parametrize(("plant", "message"), STATIC, ids=[f.__name__ for f, _ in STATIC])
@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
def test_planted(recipe, plant, message):
    model, optimizer = healthy(recipe)
    plant(model, optimizer)
    with pytest.raises(VerifyError, match=message) as error:
        acceler8.verify(model, optimizer)
    assert len(str(error.value).splitlines()) == (2 if plant is cast else 1)  # its bias too
    with pytest.raises(VerifyError, match=message.replace("optimizer: ", r"optimizer: 0\.", 1)):
        acceler8.verify(nn.Sequential(model), optimizer)


def test_untied():
    model = nn.ModuleDict({"embed": nn.Embedding(48, 32), "head": nn.Linear(32, 48, bias=False), "mlp": Mlp()})
    model["head"].weight = model["embed"].weight
    acceler8.convert(model)
    acceler8.verify(model)
    model["head"].weight = nn.Parameter(model["head"].weight.detach().clone())
    with pytest.raises(
        VerifyError, match=r"ties: embed\.weight and head\.weight shared one Parameter and no longer do"
    ):
        acceler8.verify(model)


def test_every_violation_is_named_at_once_and_can_be_ignored():
    model, optimizer = healthy()
    missing(model, optimizer)
    frozen(model, optimizer)
    restored_behind_the_back(model, optimizer)
    with pytest.raises(VerifyError) as error:
        acceler8.verify(model, optimizer)
    assert [line.split(":")[0] for line in str(error.value).splitlines()] == ["layers", "requires_grad", "optimizer"]
    report = acceler8.verify(model, optimizer, ignore=("layers", "requires_grad", "optimizer"))
    assert list(report.checks) == ["ties", "dtypes", "codes"]


def test_an_unknown_check_in_ignore_is_an_error():
    model, optimizer = healthy()
    with pytest.raises(VerifyError, match="unknown check 'requires_gard'; did you mean 'requires_grad'"):
        acceler8.verify(model, optimizer, ignore=("requires_gard",))


def test_parameters_renamed_by_a_wrapper_are_not_counted_as_checked():
    from peft import LoraConfig, get_peft_model

    model = converted()
    get_peft_model(model, LoraConfig(r=8, target_modules=["up"]))
    checks = acceler8.verify(model, ignore=("requires_grad",)).checks
    assert checks["dtypes"] == "4 parameters; 1 have another name since conversion"


@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
def test_stale_codes_in_a_window(recipe):
    model, _ = healthy(recipe)
    with acceler8.window(model):
        outcome(model, batch())
        model.down.weight.data[0, 0] += 100
        with pytest.raises(VerifyError) as error:
            acceler8.verify(model)
        assert [line.split(" ")[1] for line in str(error.value).splitlines()] == ["down.weight"] * 2
        assert "(rows) are stale; close the window, or mark the change with acceler8.step(model)" in str(error.value)


# ---------------------------------------------------------------------------------------------- planted: step checks


def test_an_optimizer_that_holds_other_tensors():
    """Built before the model was moved or sharded: losses are reported, nothing is learnt."""
    model = converted()
    optimizer = SGD(copy.deepcopy(model).parameters(), lr=0.1)

    def step() -> None:
        model.zero_grad()
        model(batch()).square().mean().backward()
        optimizer.step()

    with pytest.raises(VerifyError, match=r"up\.weight had a gradient and a learning rate but did not move") as error:
        acceler8.verify(model, step=step)
    assert "no parameter moved: step() must run backward and an optimizer step" in str(error.value)


def test_one_parameter_that_does_not_move_is_named():
    model = converted()
    others = [p for p in model.parameters() if p is not model.down.weight]
    optimizer = SGD([*others, nn.Parameter(model.down.weight.detach().clone())], lr=0.1)

    def step() -> None:
        model.zero_grad()
        model(batch()).square().mean().backward()
        optimizer.step()

    with pytest.raises(VerifyError) as error:
        acceler8.verify(model, step=step)
    assert [line.split(" ")[3] for line in str(error.value).splitlines()] == ["down.weight"]


def test_a_step_without_backward():
    model, optimizer = healthy()
    with pytest.raises(VerifyError, match="no parameter moved"):
        acceler8.verify(model, optimizer, step=optimizer.step)


def test_a_step_that_goes_on_with_old_codes():
    """An accumulation window that nobody closes, around fused steps that nobody marks."""
    model = converted()
    optimizer = AdamW(model.parameters(), lr=0.1, fused=True)
    with acceler8.window(model), pytest.raises(VerifyError) as error:
        acceler8.verify(model, optimizer, step=stepper(model, optimizer))
    assert [line.split(": ")[1] for line in str(error.value).splitlines()] == ["up", "down"]
    assert "its forward after the step used codes of an older weight" in str(error.value)


class Bypass(torch.nn.Module):
    """Multiplies by its layers' weights without calling them."""

    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(32, 32, bias=False), torch.nn.Linear(32, 32, bias=False)

    def forward(self, x):
        return torch.nn.functional.linear(x, torch.cat([self.a.weight, self.b.weight]))


def test_planned_layers_that_never_run_are_named():
    model = acceler8.convert(Bypass())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        model(torch.ones(4, 32)).square().mean().backward()
        optimizer.step()

    with pytest.raises(VerifyError, match="2 FP8 layers were not called in training mode by step\\(\\), such as 'a'"):
        acceler8.verify(model, optimizer, step=step)
    acceler8.verify(model, optimizer, step=step, ignore=("called",))


@pytest.mark.parametrize("rate", [0.0, 1e-9])
def test_a_step_of_a_warm_up_is_no_violation(rate):
    model = acceler8.convert(torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.LayerNorm(32)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=0.0)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 1.0})
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate if step == 0 else 1e-2)

    def step():
        optimizer.zero_grad()
        model(torch.randn(4, 32, generator=torch.Generator().manual_seed(0))).pow(3).mean().backward()
        optimizer.step()
        scheduler.step()

    if rate == 0.0:  # nothing may move in the first step, so that alone is reported
        with pytest.raises(VerifyError) as caught:
            acceler8.verify(model, optimizer, step=step)
        assert (
            str(caught.value) == "moved and fresh: no parameter moved: step() must run backward and an optimizer step"
        )
    else:
        assert "below their resolution" in acceler8.verify(model, optimizer, step=step).checks["moved and fresh"]


def test_delayed_scaling_without_step_boundaries_is_named():
    model = acceler8.convert(Mlp(), recipes.get("delayed"))
    optimizer = AdamW(model.parameters(), lr=1e-2)
    with pytest.raises(PlanError, match="holds no Parameter of the model"):
        acceler8.attach(model, AdamW(Mlp().parameters()))
    with pytest.raises(VerifyError, match="marked no step boundary"):
        acceler8.verify(model, optimizer, step=stepper(model, optimizer))
    acceler8.attach(model, optimizer)
    acceler8.verify(model, optimizer, step=stepper(model, optimizer))
