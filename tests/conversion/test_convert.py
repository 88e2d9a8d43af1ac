"""Conversion changes classes and nothing else, restore undoes it, steps and windows are marked."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

import acceler8
from acceler8 import recipes
from acceler8.conversion import Plan
from acceler8.errors import PlanError, RecipeError
from acceler8.nn import Fp8Linear, fp8_layers, state_of
from acceler8.scaling import StepClock
from tests.models import RECIPES, Mlp, assert_equal, batch, converted, outcome, train


class Tied(nn.Module):
    """An embedding tied to the head, two blocks, a frozen layer and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(48, 32)
        self.blocks = nn.ModuleList(Mlp(seed) for seed in range(2))
        self.frozen = nn.Linear(32, 32).requires_grad_(False)
        self.head = nn.Linear(32, 48, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(1))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(self.frozen(x))


def tied_model() -> Tied:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return Tied()


@pytest.mark.parametrize("recipe", RECIPES)
def test_everything_but_the_class_survives(recipe):
    model = tied_model()
    calls: list[str] = []
    model.blocks[0].up.register_forward_hook(lambda *_: calls.append("forward"))
    model.blocks[0].up.register_forward_pre_hook(lambda *_: calls.append("before"))
    model.blocks[0].up.register_full_backward_hook(lambda *_: calls.append("backward"))
    model.blocks[1].up.mine = "attribute"
    model.blocks[1].eval()
    modules = dict(model.named_modules())
    parameters = dict(model.named_parameters(remove_duplicate=False))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    metadata = model.state_dict()._metadata
    attributes = {name: set(vars(m)) for name, m in modules.items()}

    got = acceler8.convert(model, recipe)

    assert got is model
    assert list(model.state_dict()) == list(state)
    assert model.state_dict()._metadata == metadata
    for name, value in state.items():
        assert torch.equal(model.state_dict()[name], value)
    for name, module in model.named_modules():
        assert module is modules[name]
        assert set(vars(module)) - attributes[name] <= {"_acceler8_layer", "_acceler8_model", "_acceler8_norm"}
    for name, p in model.named_parameters(remove_duplicate=False):
        assert p is parameters[name]
    assert model.head.weight is model.embed.weight
    assert [n for n, p in model.named_parameters() if not p.requires_grad] == ["frozen.weight", "frozen.bias"]
    layer = model.blocks[1].up
    assert isinstance(layer, nn.Linear)
    assert type(layer) is Fp8Linear
    assert (layer.mine, layer.training, model.blocks[0].up.training) == ("attribute", False, True)
    assert (layer.in_features, layer.out_features) == (32, 64)
    fp8 = [name for name, _ in fp8_layers(model)]
    trained_only = recipe == "activations_only"
    assert fp8 == [f"blocks.{i}.{n}" for i in (0, 1) for n in ("up", "down")] + ["frozen"] * (not trained_only)
    model(torch.arange(48).reshape(2, 24)).square().mean().backward()
    assert calls == ["before", "forward", "backward"]
    model.load_state_dict(state)


@pytest.mark.parametrize("recipe", RECIPES)
def test_restore_is_exact(recipe):
    model, plain = tied_model(), tied_model()
    before = {name: (type(m), set(vars(m))) for name, m in model.named_modules()}
    acceler8.convert(model, recipe)
    assert acceler8.restore(model) is model
    assert {name: (type(m), set(vars(m))) for name, m in model.named_modules()} == before
    tokens = torch.arange(48).reshape(2, 24)
    assert torch.equal(model(tokens), plain(tokens))
    with pytest.raises(PlanError, match=r"Tied is not converted; call acceler8\.convert"):
        acceler8.restore(model)
    acceler8.convert(model, recipe)  # and again
    acceler8.verify(model)


def test_restore_keeps_what_was_learnt_and_leaves_clock_and_optimizer():
    clock = StepClock()
    model = acceler8.convert(Mlp(), "delayed", clock=clock)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    acceler8.attach(model, optimizer)
    train(model, optimizer=optimizer)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    acceler8.restore(model)
    assert_equal(model.state_dict(), weights)
    ticks = clock.ticks
    train(model, 1, optimizer=optimizer)
    assert clock.ticks == ticks == 3
    assert clock._subscribers == []


@pytest.mark.parametrize("first", ["optimizer", "conversion"])
def test_an_optimizer_made_before_or_after_trains_the_same(first):
    plain = Mlp()
    if first == "optimizer":
        optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
        model = acceler8.convert(plain, "rowwise")
    else:
        model = acceler8.convert(plain, "rowwise")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    acceler8.attach(model, optimizer)
    acceler8.verify(model, optimizer)
    before = outcome(model, batch())
    got = train(model, optimizer=optimizer)
    other = converted("rowwise")
    assert got == train(other, optimizer=torch.optim.AdamW(other.parameters(), lr=0.01))
    assert not torch.equal(outcome(model, batch())["y"], before["y"])


def test_a_single_layer_is_a_model():
    layer = nn.Linear(32, 48)
    plan = acceler8.plan(layer, "rowwise")
    assert plan.fp8_names == ("(root)",)
    acceler8.convert(layer, plan)
    assert type(layer) is Fp8Linear
    acceler8.verify(layer)
    assert acceler8.fp8_state_dict(acceler8.convert(nn.Linear(16, 16), "delayed")).keys() == {"amax", "steps"}
    assert type(acceler8.restore(layer)) is nn.Linear


def test_a_recipe_or_its_name_stands_for_the_plan():
    for recipe in ("blockwise", recipes.get("blockwise")):
        model = acceler8.convert(Mlp(), recipe)
        assert model.up._acceler8_layer.recipe == recipes.get("blockwise")
    assert acceler8.convert(Mlp()).up._acceler8_layer.recipe == recipes.get("rowwise")
    with pytest.raises(RecipeError, match="unknown recipe 'rowise'; did you mean 'rowwise'"):
        acceler8.convert(Mlp(), "rowise")


# ---------------------------------------------------------------------------------------------------- what is refused


def unchanged(model: nn.Module) -> bool:
    return not any(isinstance(m, Fp8Linear) for m in model.modules()) and not hasattr(model, "_acceler8_model")


def test_converting_twice_is_an_error():
    model = converted()
    for again in (lambda: acceler8.convert(model), lambda: acceler8.plan(model)):
        with pytest.raises(PlanError, match=r"Mlp is converted already; call acceler8\.restore"):
            again()
    outer = nn.Sequential(model)
    with pytest.raises(PlanError, match="Sequential is converted already"):
        acceler8.convert(outer)
    with pytest.raises(PlanError, match="Fp8Linear is part of a converted model"):
        acceler8.plan(model.up)
    acceler8.verify(model)


def change_shape(model: Mlp) -> None:
    model.up = nn.Linear(32, 80, bias=False)


def remove_layer(model: Mlp) -> None:
    model.down = nn.Identity()


def add_layer(model: Mlp) -> None:
    model.extra = nn.Linear(32, 32)


def other_module(model: Mlp) -> None:
    model.up = nn.ReLU()


def subclass(model: Mlp) -> None:
    class Mine(nn.Linear):
        pass

    model.down.__class__ = Mine


def to_float64(model: Mlp) -> None:
    model.double()


def parametrise(model: Mlp) -> None:
    torch.nn.utils.parametrizations.weight_norm(model.down)


MISMATCH = [
    (change_shape, r"layer 'up' has shape \(80, 32\), the plan says \(64, 32\)"),
    (remove_layer, "plan names layer 'down', which this Mlp lacks"),
    (add_layer, "this Mlp has layer 'extra', which the plan does not name"),
    (other_module, "plan names layer 'up', which this Mlp lacks"),
    (subclass, "layer 'down' cannot become FP8 any more: Mine is a subclass"),
    (to_float64, "layer 'up' cannot become FP8 any more: weight is float64"),
    (parametrise, "layer 'down' cannot become FP8 any more: parametrised"),
]


@pytest.mark.parametrize(("change", "message"), MISMATCH, ids=[f.__name__ for f, _ in MISMATCH])
def test_a_model_that_is_not_the_planned_one_is_left_alone(change, message):
    model = Mlp()
    plan = acceler8.plan(model)
    change(model)
    with pytest.raises(PlanError, match=message):
        acceler8.convert(model, plan)
    assert unchanged(model)


def test_delayed_scaling_over_several_devices_is_refused_before_anything_changes():
    model = Mlp()
    model.down.to("meta")
    plan = acceler8.plan(model, "delayed")
    with pytest.raises(PlanError, match=r"layers on cpu, meta; allowed: one device.*use a current-scaling recipe"):
        acceler8.convert(model, plan)
    assert unchanged(model)


@pytest.mark.parametrize("call", [acceler8.step, acceler8.verify, acceler8.fp8_state_dict, acceler8.restore])
def test_a_plain_model_is_said_to_be_plain(call):
    with pytest.raises(PlanError, match=r"Mlp is not converted; call acceler8\.convert\(model, acceler8\.plan"):
        call(Mlp())
    with pytest.raises(PlanError, match="not converted"), acceler8.window(Mlp()):
        pass


@pytest.mark.parametrize("call", [acceler8.step, acceler8.verify, acceler8.fp8_state_dict, acceler8.restore])
def test_parts_converted_on_their_own_are_not_taken_for_one_model(call):
    """A step of the first alone would leave the other's scales behind, silently."""
    both = nn.ModuleList([converted("delayed"), converted("rowwise")])
    with pytest.raises(PlanError, match="ModuleList holds 2 parts that were converted on their own"):
        call(both)
    call(both[0])


# -------------------------------------------------------------------------------------------------------------- meta


@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
def test_a_model_on_meta_is_planned_converted_and_filled_later(recipe, device):
    with torch.device("meta"):
        model = Mlp.__new__(Mlp)
        nn.Module.__init__(model)
        model.norm, model.up, model.down = nn.LayerNorm(32), nn.Linear(32, 64, bias=False), nn.Linear(64, 32)
    plan = acceler8.plan(model, recipe)
    assert plan.device == "meta"
    assert plan.fp8_names == ("up", "down")
    acceler8.convert(model, plan)
    model.to_empty(device=device)
    filled = Mlp().to(device)
    model.load_state_dict(filled.state_dict())
    assert_equal(outcome(model, batch(device=device)), outcome(converted(recipe, device=device), batch(device=device)))


# ------------------------------------------------------------------------------------------------- steps and windows


def test_attach_marks_each_step_until_removed():
    model = converted()
    clock = state_of(model).clock
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = acceler8.attach(model, optimizer)
    train(model, 2, optimizer=optimizer)
    assert clock.ticks == 2
    with pytest.raises(PlanError, match="marks the model's steps already"):
        acceler8.attach(model, optimizer)
    handle.remove()
    handle.remove()
    train(model, 2, optimizer=optimizer)
    assert clock.ticks == 2
    acceler8.attach(model, optimizer)
    train(model, 1, optimizer=optimizer)
    acceler8.step(model)
    assert clock.ticks == 4


def test_an_attached_optimizer_is_not_kept_alive_and_can_be_copied():
    model = converted()
    optimizer = torch.optim.AdamW(model.parameters())
    acceler8.attach(model, optimizer)
    train(model, 1, optimizer=optimizer)
    copy.deepcopy(optimizer)
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None


def casts_of_w(model: nn.Module, calls: int) -> int:
    """How often the first layer's weight is cast in some forwards and backwards."""
    with acceler8.record_statistics(model) as statistics:
        for seed in range(calls):
            outcome(model, batch(seed=seed))
    elements = {key: cast.elements for key, cast in statistics.casts().items()}
    return elements.get(("up", "w"), 0) // model.up.weight.numel()


def test_a_window_reuses_codes_and_drops_them_when_it_closes():
    model = converted()
    assert casts_of_w(model, 3) == 6  # two orientations each
    with acceler8.window(model):
        assert casts_of_w(model, 3) == 2
        with acceler8.window(model):
            assert casts_of_w(model, 1) == 0
        assert casts_of_w(model, 1) == 0  # the inner one closed nothing
        acceler8.step(model)
        assert casts_of_w(model, 2) == 2  # new weights, the window still open
    assert casts_of_w(model, 1) == 2
    with pytest.raises(ZeroDivisionError), acceler8.window(model):
        outcome(model, batch()) and 1 / 0
    assert not any(layer._acceler8_layer.codes.live() for _, layer in fp8_layers(model))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_window_changes_no_number(recipe, device):
    model, reference = converted(recipe, device=device), converted(recipe, device=device)
    with acceler8.window(model):
        for seed in range(3):
            x = batch(seed=seed, device=device)
            assert_equal(outcome(model, x), outcome(reference, x))


@pytest.mark.parametrize(
    "change",
    [lambda m: m.up.requires_grad_(False), lambda m: m.bfloat16(), lambda m: m.load_state_dict(m.state_dict())],
    ids=["requires_grad", "dtype", "load"],
)
def test_changes_of_the_module_drop_kept_codes(change):
    model = converted()
    with acceler8.window(model):
        outcome(model, batch())
        assert model.up._acceler8_layer.codes.live()
        change(model)
        assert not model.up._acceler8_layer.codes.live()


def test_codes_made_in_inference_mode_are_not_kept():
    """Inference tensors cannot be used by a later training forward."""
    model = converted()
    with acceler8.window(model):
        with torch.inference_mode():
            model(batch())
        assert not model.up._acceler8_layer.codes.live()
        outcome(model, batch())


def test_one_clock_for_several_models():
    clock = StepClock()
    models = [acceler8.convert(Mlp(seed), "delayed", clock=clock) for seed in range(2)]
    for model in models:
        outcome(model, batch())
    clock.tick()
    for model in models:
        assert acceler8.fp8_state_dict(model)["steps"] == 1
        assert acceler8.fp8_state_dict(model)["up.amax"][1, 0] > 0


def test_a_plan_from_json_converts_like_its_original():
    model, other = Mlp(), Mlp()
    plan = acceler8.plan(model, "blockwise", skip=["down"])
    again = Plan.from_dict(plan.to_dict())
    acceler8.convert(model, plan)
    acceler8.convert(other, again)
    assert [n for n, _ in fp8_layers(other)] == [n for n, _ in fp8_layers(model)] == ["up"]
    assert_equal(outcome(model, batch()), outcome(other, batch()))
