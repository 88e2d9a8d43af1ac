"""A fused gated MLP inside PyTorch's machinery: when it runs as one, when not, and that it is the author's module."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

import acceler8
from acceler8.errors import ShapeError
from acceler8.health import record_statistics
from acceler8.nn import Fp8Linear, FusedMLP, fused_mlps
from tests.models import assert_equal, batch, outcome
from tests.nn.fused import copied, near, operations, pickled, why_not

RECIPES = ("tensorwise", "rowwise", "blockwise", "mxfp8", "delayed")


class Act(nn.Module):
    """An activation with a child, as libraries wrap them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Gated(nn.Module):
    """The author's class."""

    def __init__(self, width: int = 32, hidden: int = 128, *, bias: bool = False) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, hidden, bias=bias)
        self.w3 = nn.Linear(width, hidden, bias=bias)
        self.w2 = nn.Linear(hidden, width, bias=bias)
        self.act = Act()
        self.note = "said by the author"
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) * 0.1)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.w2(self.act(self.w1(hidden)) * self.w3(hidden))


class Merged(nn.Module):
    """Gate and up in one layer, as Phi-3 has them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Linear(32, 256, bias=False)
        self.down = nn.Linear(128, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(up * torch.nn.functional.silu(gate))


class Model(nn.Module):
    def __init__(self, mlp: nn.Module | None = None) -> None:
        super().__init__()
        self.mlp = mlp or Gated()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x * 1.0)


def fused(recipe: object = "rowwise", mlp: nn.Module | None = None) -> Model:
    model = acceler8.convert(Model(mlp), recipe)
    assert isinstance(model.mlp, FusedMLP)
    return model


def unfused(recipe: object = "rowwise") -> Model:
    model = Model()
    return acceler8.convert(model, acceler8.plan(model, recipe, fuse=False))


@pytest.mark.parametrize("recipe", RECIPES)
def test_runs_as_one_and_gives_what_the_layers_give(recipe):
    model = fused(recipe)
    got = outcome(model, batch())
    assert why_not(model) is None
    near(got, outcome(unfused(recipe), batch()), 0.02 if recipe in ("rowwise", "mxfp8", "blockwise") else 0.12)
    names = [name for name, p in model.mlp.named_parameters() if isinstance(p, nn.Parameter)]
    assert names == ["w1.weight", "w3.weight", "w2.weight"]
    model(batch()).sum().backward()
    assert len({p.grad.data_ptr() for p in model.parameters()}) == 3
    assert all(p.grad.shape == p.shape for p in model.parameters())


def test_gate_and_up_in_one_layer():
    for recipe in RECIPES:
        model = fused(recipe, Merged())
        with acceler8.window(model):
            got = outcome(model, batch())
            assert why_not(model) is None
            assert_equal(outcome(model, batch()), got)
            acceler8.verify(model)
        model.mlp.gate_up.register_forward_hook(lambda *_: None)
        near(got, outcome(model, batch()), 0.12)
        assert why_not(model) == "gate_up has a hook"


def test_called_by_keyword():
    model = fused()
    x = batch()
    want = model.mlp(x)
    assert torch.equal(model.mlp(hidden=x), want)
    assert why_not(model) is None
    with pytest.raises(TypeError, match="other"):
        model.mlp(other=x)
    with pytest.raises(TypeError):
        model.mlp(x, x)
    with pytest.raises(ShapeError):
        model.mlp(batch(width=48))


# ------------------------------------------------------------------------------------------------ when it does not run


def hook(model: Model) -> None:
    model.mlp.w1.register_forward_hook(lambda *_: None)


def backward_hook(model: Model) -> None:
    model.mlp.w2.register_full_backward_hook(lambda *_: None)


def hook_inside_the_activation(model: Model) -> None:
    model.mlp.act.inner.register_forward_pre_hook(lambda *_: None)


def layer_replaced(model: Model) -> None:
    model.mlp.w3 = nn.Linear(32, 128, bias=False)


def activation_replaced(model: Model) -> None:
    model.mlp.act = nn.ReLU()


def activation_changed_inside(model: Model) -> None:
    model.mlp.act.inner.inplace = True


def attribute_changed(model: Model) -> None:
    model.mlp.note = "another"


def forward_set(model: Model) -> None:
    layer = model.mlp.w1
    layer.forward = lambda x: 2 * Fp8Linear.forward(layer, x)


def gate_frozen(model: Model) -> None:
    model.mlp.w1.weight.requires_grad_(False)


def bias_added(model: Model) -> None:
    model.mlp.w2.bias = nn.Parameter(torch.ones(32))


def part_in_eval(model: Model) -> None:
    model.mlp.w2.eval()


def parametrised(model: Model) -> None:
    nn.utils.parametrize.register_parametrization(model.mlp.w1, "weight", nn.Identity(), unsafe=True)


REASONS: list[tuple[Callable[[Model], None], str]] = [
    (hook, "w1 has a hook"),
    (backward_hook, "w2 has a hook"),
    (hook_inside_the_activation, "act has a hook"),
    (layer_replaced, "w3 is a Linear"),
    (activation_replaced, "act is not what it was at conversion"),
    (activation_changed_inside, "act.inner.inplace is not what it was at conversion"),
    (attribute_changed, "note is not what it was at conversion"),
    (forward_set, "w1 has a forward of its own"),
    (gate_frozen, "one of w1 and w3 is frozen"),
    (bias_added, "a bias"),
    (part_in_eval, "w2 is not in the module's mode"),
    (parametrised, "w1 is a ParametrizedFp8Linear"),
]


@pytest.mark.parametrize(("change", "reason"), REASONS, ids=[change.__name__ for change, _ in REASONS])
def test_not_as_one_and_why(change, reason):
    torch.manual_seed(0)
    model = fused()
    change(model)
    got = outcome(model, batch())
    assert why_not(model) == reason
    torch.manual_seed(0)
    reference = unfused()
    change(reference)
    assert_equal(got, outcome(reference, batch()))


def test_observed_layers_are_each_observed():
    model = fused()
    with record_statistics(model) as statistics:
        outcome(model, batch())
    assert why_not(model) == "its layers are observed"
    assert {(f"mlp.{name}", role) for name in ("w1", "w2", "w3") for role in ("x", "w", "dy")} == set(
        statistics.casts()
    )
    outcome(model, batch())
    assert why_not(model) is None


def test_global_hooks_see_every_layer():
    model, seen = fused(), []
    handle = torch_module.register_module_forward_hook(lambda module, *_: seen.append(type(module)))
    try:
        model(batch())
    finally:
        handle.remove()
    assert why_not(model) == "w1 has a hook, as all modules"
    assert seen.count(Fp8Linear) == 3


def test_a_lora_adapter_gets_its_gradient():
    from peft import LoraConfig, get_peft_model

    model = fused()
    wrapped = get_peft_model(model, LoraConfig(r=8, target_modules=["w3"], init_lora_weights=False))
    wrapped(batch()).sum().backward()
    adapters = {name: p for name, p in wrapped.named_parameters() if "lora" in name}
    assert len(adapters) == 2
    assert all(p.grad is not None and p.grad.any() for p in adapters.values())
    assert "is a Linear" in why_not(model)


@pytest.mark.filterwarnings("ignore")
def test_a_sharded_child(tmp_path):
    from torch import distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = fused()
        want = outcome(unfused(), batch())["y"]
        fully_shard(model.mlp.w1, mesh=init_device_mesh("cpu", (1,)))
        assert torch.equal(model(batch()), want)
        assert why_not(model) == "w1 is a FSDPFp8Linear"
    finally:
        dist.destroy_process_group()


# Dynamo itself does this with every autograd.Function that it traces (torch 2.13)
@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be inst:DeprecationWarning")
@pytest.mark.parametrize("recipe", RECIPES)
def test_compiles_in_one_graph_and_runs_as_one_there(recipe):
    torch.compiler.reset()
    model, twin = fused(recipe), fused(recipe)
    call, found = operations(model, fullgraph=True)
    assert_equal(outcome(model, batch(), call), outcome(twin, batch()))
    assert sum("gated" in name for name in found) == 1, found
    acceler8.step(model)
    acceler8.step(twin)
    assert_equal(outcome(model, batch(), call), outcome(twin, batch()))
    torch.compiler.reset()


class Doubled(nn.Module):
    """What an adapter puts in a layer's place."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.base_layer(x)


@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be inst:DeprecationWarning")
def test_compiled_it_stops_running_as_one_when_a_part_is_wrapped():
    torch.compiler.reset()
    model = fused()
    call, found = operations(model)
    outcome(model, batch(), call)
    assert sum("gated" in name for name in found) == 1, found
    model.mlp.w3 = Doubled(model.mlp.w3)
    found.clear()
    got = outcome(model, batch(), call)
    assert found
    assert not any("gated" in name for name in found), found
    assert_equal(got, outcome(model, batch()))
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be inst:DeprecationWarning")
def test_compiled_it_stops_running_as_one_when_a_forward_is_replaced():
    torch.compiler.reset()
    model = fused()
    call, found = operations(model)
    outcome(model, batch(), call)
    own = model.mlp.w3.forward
    model.mlp.w3.forward = lambda x: 2 * own(x)
    found.clear()
    got = outcome(model, batch(), call)
    assert not any("gated" in name for name in found), found
    assert_equal(got, outcome(model, batch()))
    torch.compiler.reset()


# ----------------------------------------------------------------------------------------------- the author's module


@pytest.mark.parametrize("recipe", RECIPES)
def test_eval_equals_restore(recipe):
    model = fused(recipe)
    outcome(model, batch())
    model.eval()
    assert_equal(outcome(model, batch()), outcome(acceler8.restore(copy.deepcopy(model)), batch()))
    with acceler8.evaluate_in_fp8(model), torch.no_grad():
        in_fp8 = model(batch())
    assert torch.equal(in_fp8, model.train()(batch()))


def test_restore_gives_the_very_class_back_and_hooks_stay():
    model, plain, calls = Model(), Model(), []
    model.mlp.register_forward_hook(lambda *_: calls.append("before"))
    keys = list(model.state_dict())
    acceler8.convert(model)
    model.mlp.register_forward_pre_hook(lambda *_: calls.append("after"))
    assert isinstance(model.mlp, Gated)
    assert type(model.mlp).__name__ == "Fp8Gated"
    assert list(model.state_dict()) == keys
    model(batch())
    assert why_not(model) is None
    assert calls == ["after", "before"]
    acceler8.restore(model)
    assert type(model.mlp) is Gated
    assert "_acceler8_fusion" not in model.mlp.__dict__
    assert torch.equal(model(batch()), plain(batch()))
    assert len(calls) == 4


@pytest.mark.parametrize("twin_of", [copied, pickled])
@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
def test_copies_are_fused_and_independent(recipe, twin_of):
    model = fused(recipe)
    want = outcome(model, batch())
    twin = twin_of(model)
    assert_equal(outcome(twin, batch()), want)
    assert why_not(twin) is None
    with torch.no_grad():
        twin.mlp.w3.weight.mul_(2)
    assert_equal(outcome(model, batch()), want)
    with acceler8.window(twin):  # its codes are known to the copy's own state
        outcome(twin, batch())
        assert twin.mlp._acceler8_fusion.codes.live()
        assert not model.mlp._acceler8_fusion.codes.live()
    acceler8.restore(twin)
    assert type(twin.mlp) is Gated
    assert dict(fused_mlps(model))


def test_windows_steps_loads_and_moves():
    model = fused()
    codes = model.mlp._acceler8_fusion.codes
    with acceler8.window(model):
        for change in (
            lambda: acceler8.step(model),
            lambda: model.load_state_dict(model.state_dict()),
            lambda: model.to(torch.float64).to(torch.float32),
        ):
            outcome(model, batch())
            assert codes.live().keys() == {"rows", "cols"}
            change()
            codes.follow(model.mlp.w1.weight, model.mlp.w3.weight)
            assert not codes.live()
    assert not codes.is_open


# ---------------------------------------------------------------------------------------------------- the FP8 state


def test_slots_that_are_shared_are_saved_alike():
    model = fused("delayed")
    outcome(model, batch())
    acceler8.step(model)
    state = acceler8.fp8_state_dict(model)
    assert torch.equal(state["mlp.w1.amax"], state["mlp.w3.amax"])
    assert state["mlp.w1.amax"].any()


def test_state_moves_between_fused_and_not():
    apart = unfused("delayed")
    with torch.no_grad():
        apart.mlp.w3.weight.mul_(4)  # up's amax is the larger
    outcome(apart, batch())
    acceler8.step(apart)
    state = acceler8.fp8_state_dict(apart)
    together = fused("delayed")
    acceler8.load_fp8_state_dict(together, state)
    loaded = acceler8.fp8_state_dict(together)
    for name in ("mlp.w1.amax", "mlp.w3.amax"):
        assert torch.equal(loaded[name], torch.maximum(state["mlp.w1.amax"], state["mlp.w3.amax"]))
    assert torch.equal(loaded["mlp.w2.amax"], state["mlp.w2.amax"])
    acceler8.load_fp8_state_dict(together, loaded)
    back = unfused("delayed")
    acceler8.load_fp8_state_dict(back, loaded)
    for name, value in acceler8.fp8_state_dict(back).items():
        assert torch.equal(value, loaded[name])
        assert torch.equal(acceler8.fp8_state_dict(together)[name], value)
