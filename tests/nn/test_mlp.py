"""A fused MLP without a gate inside PyTorch's machinery: when it runs as one, when not, and that it is the author's."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import acceler8
from acceler8.errors import ShapeError
from acceler8.health import record_statistics
from acceler8.nn import Fp8Linear, FusedMLP, fused_mlps
from tests.models import assert_equal, batch, outcome
from tests.nn.fused import copied, near, operations, pickled, why_not

RECIPES = ("tensorwise", "rowwise", "blockwise", "mxfp8", "delayed")
WEIGHTS = ["c_fc.weight", "c_fc.bias", "c_proj.weight", "c_proj.bias"]


class Ungated(nn.Module):
    """The author's class, as nanoGPT has it."""

    def __init__(self, width: int = 32, hidden: int = 128, *, bias: bool = True) -> None:
        super().__init__()
        self.c_fc = nn.Linear(width, hidden, bias=bias)
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(hidden, width, bias=bias)
        self.dropout = nn.Dropout(0.0)
        self.note = "said by the author"
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.c_fc(x)
        x = self.gelu(x)
        x = self.c_proj(x)
        return self.dropout(x)


class Model(nn.Module):
    def __init__(self, mlp: nn.Module | None = None) -> None:
        super().__init__()
        self.mlp = mlp or Ungated()

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
    assert got.keys() == {"y", "dx", *(f"dmlp.{name}" for name in WEIGHTS)}
    near(got, outcome(unfused(recipe), batch()))
    assert [name for name, _ in model.mlp.named_parameters()] == WEIGHTS


def test_without_biases():
    model = fused(mlp=Ungated(bias=False))
    got = outcome(model, batch())
    assert why_not(model) is None
    assert len(got) == 4


def test_both_layers_keep_scales_of_their_own():
    """Not one for what both read, as gate and up have it: the second reads another activation."""
    model = fused("delayed")
    outcome(model, batch())
    acceler8.step(model)
    state = acceler8.fp8_state_dict(model)
    apart = unfused("delayed")
    outcome(apart, batch())
    acceler8.step(apart)
    for name, value in acceler8.fp8_state_dict(apart).items():
        torch.testing.assert_close(state[name], value, rtol=0.01, atol=0)
    assert not torch.equal(state["mlp.c_fc.amax"], state["mlp.c_proj.amax"])


@pytest.mark.parametrize("frozen", [WEIGHTS[:2], WEIGHTS[2:], WEIGHTS[::2], WEIGHTS[1::2]], ids=str)
def test_frozen_parts(frozen):
    model, want = fused(), outcome(fused(), batch())
    for name in frozen:
        model.mlp.get_parameter(name).requires_grad_(False)
    got = outcome(model, batch())
    assert why_not(model) is None
    assert_equal(got, {name: value for name, value in want.items() if name.removeprefix("dmlp.") not in frozen})


@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
def test_recomputed(recipe):
    model = fused(recipe)
    want = outcome(model, batch())
    assert_equal(outcome(model, batch(), lambda x: checkpoint(model, x, use_reentrant=False)), want)


# ------------------------------------------------------------------------------------------------ when it does not run


def hook(model: Model) -> None:
    model.mlp.c_fc.register_forward_hook(lambda *_: None)


def hook_on_the_dropout(model: Model) -> None:
    model.mlp.dropout.register_forward_pre_hook(lambda *_: None)


def layer_replaced(model: Model) -> None:
    model.mlp.c_proj = nn.Linear(128, 32)


def activation_replaced(model: Model) -> None:
    model.mlp.gelu = nn.ReLU()


def activation_changed(model: Model) -> None:
    model.mlp.gelu.approximate = "tanh"


def dropout_turned_on(model: Model) -> None:
    model.mlp.dropout.p = 0.5


def attribute_changed(model: Model) -> None:
    model.mlp.note = "another"


def forward_set(model: Model) -> None:
    layer = model.mlp.c_fc
    layer.forward = lambda x: 2 * Fp8Linear.forward(layer, x)


def part_in_eval(model: Model) -> None:
    model.mlp.c_proj.eval()


def parametrised(model: Model) -> None:
    nn.utils.parametrize.register_parametrization(model.mlp.c_fc, "weight", nn.Identity(), unsafe=True)


def bias_in_another_dtype(model: Model) -> None:
    model.mlp.c_fc.bias = nn.Parameter(model.mlp.c_fc.bias.detach().bfloat16())


REASONS: list[tuple[Callable[[Model], None], str]] = [
    (hook, "c_fc has a hook"),
    (hook_on_the_dropout, "dropout has a hook"),
    (layer_replaced, "c_proj is a Linear"),
    (activation_replaced, "gelu is not what it was at conversion"),
    (activation_changed, "gelu.approximate is not what it was at conversion"),
    (dropout_turned_on, "dropout.p is not what it was at conversion"),
    (attribute_changed, "note is not what it was at conversion"),
    (forward_set, "c_fc has a forward of its own"),
    (part_in_eval, "c_proj is not in the module's mode"),
    (parametrised, "c_fc is a ParametrizedFp8Linear"),
    (bias_in_another_dtype, "dtypes or devices differ"),
]


@pytest.mark.parametrize(("change", "reason"), REASONS, ids=[change.__name__ for change, _ in REASONS])
def test_not_as_one_and_why(change, reason):
    results = []
    for model in (fused(), unfused()):
        torch.manual_seed(0)
        change(model)
        torch.manual_seed(1)
        results.append(outcome(model, batch()))
        if isinstance(model.mlp, FusedMLP):
            assert why_not(model) == reason
    assert_equal(*results)


def test_observed_layers_are_each_observed():
    model = fused()
    with record_statistics(model) as statistics:
        outcome(model, batch())
    assert why_not(model) == "its layers are observed"
    assert {(f"mlp.{name}", role) for name in ("c_fc", "c_proj") for role in ("x", "w", "dy")} == set(
        statistics.casts()
    )
    outcome(model, batch())
    assert why_not(model) is None


def test_a_lora_adapter_gets_its_gradient():
    from peft import LoraConfig, get_peft_model

    model = fused()
    wrapped = get_peft_model(model, LoraConfig(r=8, target_modules=["c_fc"], init_lora_weights=False))
    wrapped(batch()).sum().backward()
    adapters = {name: p for name, p in wrapped.named_parameters() if "lora" in name}
    assert len(adapters) == 2
    assert all(p.grad is not None and p.grad.any() for p in adapters.values())
    assert "is a Linear" in why_not(model)


def test_only_in_its_window_of_steps():
    model = Model()
    acceler8.convert(model, acceler8.plan(model, "rowwise", fp8_steps="1:2"))
    plain = outcome(Model(), batch())
    seen = []
    for _ in range(3):
        got = outcome(model, batch())
        seen.append((why_not(model), torch.equal(got["y"], plain["y"])))
        acceler8.step(model)
    assert seen == [("high precision", True), (None, False), ("high precision", True)]


def test_errors_are_those_of_the_layers():
    model = fused()
    with pytest.raises(ShapeError):
        model.mlp(batch(width=48))
    with pytest.raises(TypeError):
        model.mlp(batch(), batch())


# ---------------------------------------------------------------------------------------------------------- compiled


# Dynamo itself does this with every autograd.Function that it traces (torch 2.13)
@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be inst:DeprecationWarning")
@pytest.mark.parametrize("recipe", RECIPES)
def test_compiles_in_one_graph_and_runs_as_one_there(recipe):
    torch.compiler.reset()
    model, twin = fused(recipe), fused(recipe)
    call, found = operations(model, fullgraph=True)
    for _ in range(2):
        assert_equal(outcome(model, batch(), call), outcome(twin, batch()))
        acceler8.step(model)
        acceler8.step(twin)
    assert sum("activation" in name for name in found) == 1, found
    found.clear()
    model.mlp.dropout.p = 0.25  # asked anew: the guard fails
    call(batch())
    assert found
    assert not any("activation" in name for name in found)
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


def test_restore_gives_the_very_class_back():
    model, keys = Model(), list(Model().state_dict())
    acceler8.convert(model)
    assert isinstance(model.mlp, Ungated)
    assert type(model.mlp).__name__ == "Fp8Ungated"
    assert list(model.state_dict()) == keys
    acceler8.restore(model)
    assert type(model.mlp) is Ungated
    assert "_acceler8_fusion" not in model.mlp.__dict__
    assert_equal(outcome(model, batch()), outcome(Model(), batch()))


@pytest.mark.parametrize("twin_of", [copied, pickled])
@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
def test_copies_are_fused_and_independent(recipe, twin_of):
    model = fused(recipe)
    want = outcome(model, batch())
    twin = twin_of(model)
    assert_equal(outcome(twin, batch()), want)
    assert why_not(twin) is None
    with torch.no_grad():
        twin.mlp.c_fc.bias.add_(1)
    assert_equal(outcome(model, batch()), want)
    model.mlp.dropout.p = 0.5  # the copy has a dropout of its own
    outcome(twin, batch())
    assert why_not(twin) is None
    acceler8.restore(twin)
    assert type(twin.mlp) is Ungated
    assert dict(fused_mlps(model))
