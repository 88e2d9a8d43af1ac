"""The torchao backend against torchao itself, bit for bit, and what it does that torchao does not."""

from __future__ import annotations

import copy
import importlib
import io
import pickle
from importlib import metadata
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import acceler8
from acceler8 import backends, recipes
from acceler8.backends.torchao import TorchaoOptions, library
from acceler8.errors import PlanError, RecipeError
from acceler8.health import record_statistics

torchao = pytest.importorskip("torchao")
if (problem := library.unavailable()) is not None:
    pytest.skip(problem, allow_module_level=True)

float8 = library.library()
NAMES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
BOTH = TorchaoOptions(skip_first_and_last=False)


class Net(nn.Module):
    """Four linears of which the default leaves two: the first and the last."""

    def __init__(self, width: int = 32, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(width, dtype=dtype)
        self.first, self.last = nn.Linear(width, width, dtype=dtype), None
        self.up, self.down = nn.Linear(width, 64, bias=False, dtype=dtype), nn.Linear(64, width, dtype=dtype)
        self.last = nn.Linear(width, 16, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.norm(x))
        x = x + self.down(self.up(x).relu())
        return self.last(x)


def data(tokens: int = 24, width: int = 32, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(tokens, width, generator=torch.Generator().manual_seed(1)).to(dtype)


def trained(model: nn.Module, x: Tensor, steps: int = 3) -> list[Tensor]:
    """The loss of each step, the gradients of the last, and the weights."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(x).float() - x.float().flip(-1)[..., :16]).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(p.grad for p in model.parameters()), *(p.detach() for p in model.parameters())]


def planned(model: nn.Module, recipe: Any = "tensorwise", **arguments: Any) -> nn.Module:
    return acceler8.convert(model, acceler8.plan(model, recipe, "torchao", **arguments))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("tokens", [24, 7, 1])
@pytest.mark.parametrize("name", NAMES)
def test_training_is_torchaos_bit_for_bit(name, tokens, dtype):
    config = float8.Float8LinearConfig.from_recipe_name(name)
    object.__setattr__(config, "pad_inner_dim", True)
    raw = float8.convert_to_float8_training(
        Net(dtype=dtype), config=config, module_filter_fn=lambda module, name: name in ("up", "down")
    )
    ours = planned(Net(dtype=dtype), name)
    assert [n for n, m in ours.named_modules() if "_acceler8_layer" in m.__dict__] == ["up", "down"]
    x = data(tokens, dtype=dtype)
    for a, b in zip(trained(raw, x), trained(ours, x), strict=True):
        assert torch.equal(a, b)
    plain = trained(Net(dtype=dtype), x)
    assert not all(torch.equal(a, b) for a, b in zip(trained(ours, x), plain, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_a_recipes_config_is_torchaos(name):
    ours = planned(Net(), name, options=TorchaoOptions(pad_inner_dim=False)).up.config
    assert ours == float8.Float8LinearConfig.from_recipe_name(name)


def test_a_config_says_everything_and_travels_in_a_plan():
    config = float8.Float8LinearConfig(
        gemm_config_grad_weight=float8.Float8GemmConfig(use_fast_accum=True), round_scales_to_power_of_2=True
    )
    plan = acceler8.plan(Net(), backend="torchao", options=TorchaoOptions(config=config))
    assert "torchao config (tensorwise)" in str(plan)
    again = acceler8.Plan.from_dict(plan.to_dict())
    assert again == plan
    assert acceler8.convert(Net(), again).up.config == config
    for name in NAMES:
        config = float8.Float8LinearConfig.from_recipe_name(name)
        plan = acceler8.plan(Net(), backend="torchao", options=TorchaoOptions(config=config))
        assert acceler8.Plan.from_dict(plan.to_dict()).options.config == config
        assert acceler8.convert(Net(), plan).up.config == config
    with pytest.raises(PlanError, match="a recipe and options with a Float8LinearConfig"):
        acceler8.plan(Net(), "rowwise", "torchao", options=TorchaoOptions(config=config))
    with pytest.raises(PlanError, match=r"config is a str; allowed: a torchao\.float8\.Float8LinearConfig"):
        TorchaoOptions(config="rowwise")


def test_modules_and_parameters_stay_the_same_objects():
    model = Net().eval()
    model.up.register_forward_hook(lambda *args: None)
    model.up.note = "mine"
    modules, parameters, keys = list(model.modules()), list(model.parameters()), list(model.state_dict())
    planned(model)
    assert list(map(id, model.modules())) == list(map(id, modules))
    assert list(map(id, model.parameters())) == list(map(id, parameters))
    assert list(model.state_dict()) == keys
    assert {type(t) for t in model.state_dict().values()} == {Tensor}
    assert isinstance(model.up, float8.float8_linear.Float8Linear)
    assert (model.up.note, len(model.up._forward_hooks), model.up.training) == ("mine", 1, False)
    assert "fp8=torchao tensorwise" in repr(model.up)
    acceler8.restore(model)
    assert type(model.up) is nn.Linear
    fresh = {*nn.Linear(16, 16).__dict__, "note"}
    assert set(model.up.__dict__) == fresh


@pytest.mark.parametrize("name", ["config", "linear_mm_config", "scaling_type_input"])
def test_an_attribute_that_torchao_uses_stays_and_so_does_the_layer(name):
    """Conversion overwrote it, and restoring took it away."""
    model = Net()
    setattr(model.up, name, {"mine": 1})
    plan = acceler8.plan(model, "tensorwise", "torchao")
    reason = f"its attribute '{name}' is one that torchao's Float8Linear needs for itself; rename yours"
    assert {row.name: row.reason for row in plan.rows}["up"] == reason
    assert plan.fp8_names == ("down",)
    acceler8.restore(acceler8.convert(model, plan))
    assert getattr(model.up, name) == {"mine": 1}
    later = Net()
    plan = acceler8.plan(later, "tensorwise", "torchao")
    later.down.register_buffer(name, torch.zeros(1))
    with pytest.raises(PlanError, match=f"layer 'down' cannot become FP8 any more: its attribute '{name}'"):
        acceler8.convert(later, plan)


def test_the_all_gather_changes_no_parameter_and_is_said():
    """With the library's own switch every FP8 weight became a new Parameter, which no optimizer held."""
    config = float8.Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    for options in (TorchaoOptions(config=config), TorchaoOptions(all_gather=True)):
        model = Net()
        optimizer, weight = torch.optim.AdamW(model.parameters(), lr=1e-2), model.up.weight
        planned(model, None, options=options)
        assert model.up.weight is weight
        assert type(model.up.weight) is nn.Parameter
        assert "enable_fsdp_float8_all_gather does nothing here" in str(model._acceler8_model.plan)
        acceler8.verify(model, optimizer)


def test_copies_and_pickles():
    model = planned(Net())
    x = data()
    assert torch.equal(copy.deepcopy(model)(x), model(x))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(x), model(x))
    assert type(pickle.loads(pickle.dumps(model)).up) is type(model.up)


def test_evaluation_is_in_high_precision_unless_asked():
    x, plain = data(), Net().eval()
    model = planned(Net()).eval()
    assert torch.equal(model(x), plain(x))
    with acceler8.evaluate_in_fp8(model):
        in_fp8 = model(x)
    assert torch.equal(in_fp8, model.train()(x))
    assert not torch.equal(in_fp8, plain(x))
    asked = planned(Net(), recipes.get("tensorwise", eval="fp8")).eval()
    assert torch.equal(asked(x), in_fp8)
    options = TorchaoOptions(config=float8.Float8LinearConfig(pad_inner_dim=True), eval="fp8")
    assert torch.equal(planned(Net(), None, options=options).eval()(x), in_fp8)


def test_steps_outside_of_the_window_are_in_high_precision():
    x, model = data(), Net()
    plain = model(x)
    planned(model, fp8_steps="1:2")
    assert torch.equal(model(x), plain)
    acceler8.step(model)
    assert not torch.equal(model(x), plain)
    acceler8.step(model)
    assert torch.equal(model(x), plain)


def test_first_and_last_are_left_unless_told():
    def left(**arguments: Any) -> dict[str, str]:
        plan = acceler8.plan(Net(), arguments.pop("recipe", None), "torchao", **arguments)
        return {row.name: row.reason for row in plan.rows if not row.is_fp8}

    assert left() == {
        "first": "first linear layer of the model, which torchao's default leaves",
        "last": "last linear layer of the model, which torchao's default leaves",
    }
    assert left(options=BOTH) == {}
    assert left(recipe={"first": "rowwise", "*": "tensorwise"}).keys() == {"last"}
    assert left(skip=["up"]).keys() == {"first", "up", "last"}
    assert left(filter_fn=lambda name, module: name != "down") == {"down": "left by filter_fn"}


def test_a_filter_decides_of_an_output_head_too():
    model = nn.ModuleDict({"body": nn.Linear(32, 32), "lm_head": nn.Linear(32, 32)})
    plan = acceler8.plan(model, backend="torchao", filter_fn=lambda name, module: True)
    assert plan.fp8_names == ("body", "lm_head")


REFUSED = {
    "delayed": "has no recipe delayed; allowed there: tensorwise, rowwise",
    "blockwise": "has no recipe blockwise; allowed there: tensorwise, rowwise",
    "mxfp8": "has no recipe mxfp8; allowed there: tensorwise, rowwise",
    "activations_only": "has no recipe activations_only; allowed there: tensorwise, rowwise",
}


@pytest.mark.parametrize("name", REFUSED)
def test_recipes_that_it_lacks_are_refused_with_those_that_it_has(name):
    with pytest.raises(PlanError, match=f"backend 'torchao' {REFUSED[name]}"):
        acceler8.plan(Net(), name, "torchao")


def test_settings_that_it_lacks_are_refused():
    with pytest.raises(PlanError, match="x is in E5M2 and E4M3; allowed: one format for both GEMMs; use HYBRID"):
        acceler8.plan(Net(), recipes.get("tensorwise", formats="E5M2"), "torchao")
    with pytest.raises(PlanError, match="save_for_backward is fp8_compressed"):
        acceler8.plan(Net(), "tensorwise", "torchao", save_for_backward="fp8_compressed")
    with pytest.raises(PlanError, match="does not run recipe rowwise under deepspeed"):
        acceler8.plan(Net(), "rowwise", "torchao", strategy="deepspeed")
    with pytest.raises(RecipeError, match="unknown recipe 'rowwize'; did you mean 'rowwise'"):
        acceler8.plan(Net(), "rowwize", "torchao")


@pytest.mark.parametrize("off", ["fprop", "dgrad", "wgrad"])
def test_single_gemms_run_in_high_precision(off):
    recipe = recipes.get("tensorwise").with_gemms(**{off: False})
    model, x = planned(Net(), recipe), data().requires_grad_()
    acceler8.plan(Net(), recipe, "torchao")
    is_off = {name: getattr(recipe, name).is_fp8 is False for name in ("fprop", "dgrad", "wgrad")}
    assert sum(is_off.values()) == 1
    layer, plain = model.down, nn.Linear(64, 32)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(3)).requires_grad_()
    dy = torch.randn(16, 32, generator=torch.Generator().manual_seed(4))
    got, want = (
        dict(zip(("dgrad", "wgrad"), torch.autograd.grad(m(x), (x, m.weight), dy), strict=True))
        | {"fprop": m(x).detach()}
        for m in (layer, plain)
    )
    exact = {name for name in got if torch.allclose(got[name], want[name], rtol=1e-4, atol=1e-5)}
    assert exact == {off}


def test_odd_layers_frozen_ones_subclasses_and_no_tokens():
    class Own(nn.Linear):
        pass

    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(2)), nn.Linear(32, 33), nn.Linear(33, 32), Own(32, 32))
    model.append(nn.Linear(32, 32))
    model[1].requires_grad_(False)
    plan = acceler8.plan(model, backend="torchao")
    assert plan.fp8_names == ("1",)
    why = {row.name: row.reason for row in plan.rows}
    assert why["2"] == why["3"] == "33 not a multiple of 16, which FP8 GEMM needs"
    assert why["4"] == "Own is a subclass of nn.Linear: its own forward would be lost"
    acceler8.convert(model, plan)
    assert model(torch.empty(0, 32)).shape == (0, 32)
    model(data()).sum().backward()
    assert model[1].weight.grad is None


def test_autocast_counts_on_the_cpu():
    model = planned(Net())
    with torch.autocast("cpu", torch.bfloat16):
        y = model.up(data())
        assert y.dtype is torch.bfloat16
        # as torchao does under CUDA's: what is cast to FP8 is the input in BF16
        assert torch.equal(y, model.up(data().bfloat16()))
    assert model.up(data()).dtype is torch.float32


def test_what_only_the_native_backend_has_is_refused_by_name():
    model = planned(Net())
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(PlanError, match="record_statistics got a model of backend 'torchao'"), record_statistics(model):
        pass
    with pytest.raises(PlanError, match="GraphedStep got a model of backend 'torchao'"):
        acceler8.GraphedStep(lambda: None, model, optimizer)


# --------------------------------------------------------------------------------------- a library that cannot be used


@pytest.fixture
def forgetful(monkeypatch):
    library._problem_of.cache_clear()
    yield monkeypatch
    library._problem_of.cache_clear()


def version(monkeypatch: pytest.MonkeyPatch, found: str | None) -> None:
    known = metadata.version

    def of(name: str) -> str:
        if name != "torchao":
            return known(name)
        if found is None:
            raise metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(metadata, "version", of)


def test_a_missing_or_old_library_is_one_sentence(forgetful):
    version(forgetful, None)
    with pytest.raises(PlanError, match=r"^backend 'torchao' cannot be used: torchao is not installed; pip install '"):
        acceler8.plan(Net(), backend="torchao")
    version(forgetful, "0.6.1")
    with pytest.raises(PlanError, match=r"torchao 0\.6\.1 is installed; needed: 0\.\d+ or newer; pip install") as error:
        acceler8.plan(Net(), backend="torchao")
    assert "\n" not in str(error.value)


def test_a_library_that_cannot_be_imported_is_one_sentence(forgetful):
    def fails(name: str, *args: Any) -> Any:
        raise ImportError("undefined symbol: _ZN5torch\nwith a second line")

    forgetful.setattr(library, "import_module", fails)
    with pytest.raises(PlanError) as error:
        acceler8.plan(Net(), backend="torchao")
    said = str(error.value)
    assert f"torchao {torchao.__version__} is installed and cannot be imported with torch {torch.__version__}" in said
    assert "(ImportError: undefined symbol: _ZN5torch)" in said
    assert "\n" not in said


def test_a_library_without_what_is_needed_is_one_sentence(forgetful):
    real = importlib.import_module

    class Bare:
        pass

    forgetful.setattr(library, "import_module", lambda name: Bare() if name == "torchao.float8" else real(name))
    with pytest.raises(PlanError, match=r"is installed and has no Float8LinearConfig, .*; needed: "):
        acceler8.plan(Net(), backend="torchao")


def test_capabilities_need_no_library(forgetful):
    version(forgetful, None)
    rows = backends.find("torchao").capabilities()
    assert {row.recipe for row in rows} == {"tensorwise", "rowwise"}
