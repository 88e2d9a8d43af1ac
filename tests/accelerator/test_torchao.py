"""``Accelerator`` with the torchao backend: models people train, settings from every route, and what went wrong with
torchao in Accelerate, each defect as a test that fails where it is there.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import acceler8
from acceler8.accelerator import Accelerator
from acceler8.backends.torchao import library
from acceler8.errors import ConfigError, MissingLibraryError, VerifyError
from acceler8.nn import converted_layers
from acceler8.utils import AORecipeKwargs, TorchDynamoPlugin
from tests.config.packages import forget_environment

if (problem := library.unavailable()) is not None:
    pytest.skip(problem, allow_module_level=True)

SIZES = dict(vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_environment(monkeypatch)


def mlps(*widths: int) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for k, n in itertools.pairwise(widths):
        layers += [nn.Linear(k, n), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, max_position_embeddings=32))


def bert() -> nn.Module:
    """Its decoder's weight is the embedding's."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(**SIZES, max_position_embeddings=32, hidden_dropout_prob=0.0)
    model = transformers.BertForMaskedLM(config)
    assert model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight
    return model


def lora() -> nn.Module:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=16, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.get_peft_model(llama(), config)


def half_frozen() -> nn.Module:
    model = llama()
    model.model.layers[0].requires_grad_(False)
    return model


def prepared(model: nn.Module, **arguments: Any) -> tuple[Accelerator, nn.Module, Any]:
    arguments.setdefault("backend", "torchao")
    accelerator = Accelerator(mixed_precision="fp8", cpu=True, **arguments)
    trained = [p for p in model.parameters() if p.requires_grad]
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(trained, lr=1e-2))
    return accelerator, model, optimizer


def make_step(accelerator: Accelerator, model: nn.Module, optimizer: Any) -> Callable[[], float]:
    tokens = torch.randint(0, 96, (2, 16), generator=torch.Generator().manual_seed(1))
    width = next(model.parameters()).shape[-1]
    x = torch.randn(24, width, generator=torch.Generator().manual_seed(1))

    def step() -> float:
        optimizer.zero_grad()
        if isinstance(model, nn.Sequential):
            loss = (model(x) - 1).square().mean()
        else:
            loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        optimizer.step()
        return float(loss.detach())

    return step


def fp8_names(model: nn.Module) -> list[str]:
    return [name for name, _ in converted_layers(model)]


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "llama": (llama, 13),  # 14 and the head: the first is left
    "bert": (bert, 12),
    "lora": (lora, 21),
    "half frozen": (half_frozen, 13),
    "odd sizes": (lambda: mlps(32, 64, 33, 64, 64, 48, 16), 2),
}


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("kind", MODELS)
def test_verify_is_green_on(kind: str, recipe: str) -> None:
    build, count = MODELS[kind]
    model = build()
    before = {name: (id(p), p.requires_grad, p.detach().clone()) for name, p in model.named_parameters()}
    accelerator, model, optimizer = prepared(model, recipe=recipe)
    assert len(fp8_names(model)) == count, fp8_names(model)
    assert {name: (id(p), p.requires_grad) for name, p in model.named_parameters()} == {
        name: value[:2] for name, value in before.items()
    }
    step = make_step(accelerator, model, optimizer)
    losses = [step() for _ in range(4)]
    assert losses[-1] < losses[0]
    report = acceler8.verify(model, optimizer, step=step)
    assert f"{count} FP8 layers as planned" in str(report)
    moved = {n: not torch.equal(p.detach(), before[n][2]) for n, p in model.named_parameters()}
    trains = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {name for name, has in moved.items() if has} == trains


def test_a_model_without_linear_layers_is_said() -> None:
    """GPT-2's matrices are Conv1D: it was "FP8" with no FP8 layer, and nothing told."""
    transformers = pytest.importorskip("transformers")
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=2))
    with pytest.warns(UserWarning, match="FP8 would cover 0% of the matrix FLOPs.*Conv1D is not nn.Linear"):
        accelerator, model, _ = prepared(model)
    assert not accelerator.fp8_report().is_fp8
    with pytest.warns(UserWarning, match="torchao's default leaves"):
        prepared(mlps(32, 32, 32))  # two linears: the first and the last


def test_two_models_at_once() -> None:
    accelerator = Accelerator(mixed_precision="fp8", cpu=True, backend="ao")
    one, two = mlps(32, 64, 32, 16), mlps(16, 64, 64, 32)
    first, second = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (one, two))
    one, first, two, second = accelerator.prepare(one, first, two, second)
    assert len(accelerator.fp8_report().plans) == 2
    for model, optimizer in ((one, first), (two, second)):
        acceler8.verify(model, optimizer, step=make_step(accelerator, model, optimizer))
    acceler8.restore(one)
    assert fp8_names(one) == []
    assert fp8_names(two) == ["2"]


# ------------------------------------------------------------------------------------- defects of Accelerate's torchao


@pytest.mark.parametrize("gather", [None, True])
def test_every_weight_moves_with_the_default_recipe_too(gather: bool | None) -> None:
    """The default asked for FSDP2's FP8 all-gather, which put new Parameters into the layers: outside of FSDP2 every
    FP8 weight was frozen, and the loss still fell.
    """
    model = llama()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    handler = AORecipeKwargs(enable_fsdp_float8_all_gather=gather)
    accelerator, model, optimizer = prepared(model, backend=None, kwargs_handlers=[handler])
    step = make_step(accelerator, model, optimizer)
    step()
    assert [n for n, p in model.named_parameters() if torch.equal(p.detach(), before[n])] == []
    assert ("enable_fsdp_float8_all_gather does nothing here" in str(accelerator.fp8_report())) is bool(gather)
    layer = model.model.layers[1].mlp.up_proj
    layer.weight = nn.Parameter(layer.weight.detach().clone())  # planted
    with pytest.raises(VerifyError, match=r"up_proj\.weight is in no group of the optimizer"):
        acceler8.verify(model, optimizer)


def test_checkpoints_hold_plain_tensors(tmp_path: Path) -> None:
    """``save_state`` and ``save_model`` raised; ``torch.save`` pickled torchao's tensor subclass."""
    accelerator, model, optimizer = prepared(llama())
    step = make_step(accelerator, model, optimizer)
    step()
    accelerator.save_state(tmp_path / "state")
    accelerator.save_model(model, tmp_path / "model")
    want = {name: p.detach().clone() for name, p in model.named_parameters()}
    files = [path for path in tmp_path.rglob("model.safetensors")]
    assert len(files) == 2
    for path in files:
        tensors = load_file(path)
        assert tensors.keys() == want.keys()
        assert all(torch.equal(tensors[name], want[name]) for name in want)
    step()
    accelerator.load_state(tmp_path / "state")
    assert all(torch.equal(p.detach(), want[name]) for name, p in model.named_parameters())
    acceler8.verify(model, optimizer, step=step)


@pytest.mark.parametrize("word", ["ao", "AO", "torchao"])
@pytest.mark.parametrize("route", ["environment", "yaml"])
def test_the_backend_is_named_in_any_case_by_every_route(monkeypatch, tmp_path, word: str, route: str) -> None:
    """``launch --fp8_backend ao``, and ``backend: ao`` in a file, always failed later with a ValueError."""
    file = tmp_path / "run.yaml"
    file.write_text(f"mixed_precision: fp8\nfp8_config:\n  backend: {word}\n")
    if route == "environment":
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
        monkeypatch.setenv("ACCELERATE_FP8_BACKEND", word)
    accelerator = Accelerator(cpu=True, config_file=file if route == "yaml" else None)
    model = accelerator.prepare(llama())
    assert accelerator.plan is not None
    assert accelerator.plan.backend == "torchao"
    assert len(fp8_names(model)) == 13


# ---------------------------------------------------------------------------------------------------------- settings


def keep_even(module: nn.Module, name: str) -> bool:
    """Named by the files below."""
    return int(name) % 4 == 0


def yaml_run(tmp_path: Path, text: str) -> nn.Module:
    file = tmp_path / "run.yaml"
    file.write_text(f"mixed_precision: fp8\nfp8_config:\n  backend: AO\n{text}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Accelerator(cpu=True, config_file=file).prepare(mlps(*(32,) * 6))


FILES = {
    "": ["2", "4", "6"],
    "  skip_first_and_last: false\n": ["0", "2", "4", "6", "8"],
    '  skip: ["4"]\n': ["2", "6"],
    '  skip: ["[26]"]\n': ["4"],
    "  module_filter_func: tests.accelerator.test_torchao:keep_even\n": ["0", "4", "8"],
    '  layer_recipes: ["0=rowwise", "2=none"]\n': ["0", "4", "6"],
}


@pytest.mark.parametrize("text", FILES)
def test_layers_are_chosen_in_a_file_too(tmp_path: Path, text: str) -> None:
    assert fp8_names(yaml_run(tmp_path, text)) == FILES[text]


def test_a_filter_that_cannot_be_imported_is_located(tmp_path: Path) -> None:
    for place, why in (("no_such_module:f", "cannot be imported: No module"), ("math", "allowed: MODULE:FUNCTION")):
        with pytest.raises(ConfigError, match=rf"run\.yaml:4: module_filter_func got '{place}'.*{why}"):
            yaml_run(tmp_path, f"  module_filter_func: {place}\n")


def test_settings_reach_the_layers(tmp_path: Path) -> None:
    model = yaml_run(tmp_path, "  recipe: rowwise\n  pad_inner_dim: false\n  use_autocast_during_eval: true\n")
    config = model[2].config
    assert (config.pad_inner_dim, config.round_scales_to_power_of_2) == (False, True)
    assert config.cast_config_input.short_str() == "dyn_axs_e4m3"
    assert model[2]._acceler8_layer.is_fp8(training=False)
    model = yaml_run(tmp_path, "  recipe: rowwise\n  override_linear_precision: [false, false, true]\n")
    by_name = yaml_run(tmp_path, "  recipe: rowwise_with_gw_hp\n")
    assert by_name[2].config == model[2].config
    want = library.library().Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp")
    object.__setattr__(want, "pad_inner_dim", True)
    assert model[2].config == want


def test_a_config_and_a_function_in_code() -> None:
    config = library.library().Float8LinearConfig(pad_inner_dim=True, round_scales_to_power_of_2=True)
    handler = AORecipeKwargs(config=config, module_filter_func=lambda module, name: name != "2", skip=["4"])
    accelerator, model, optimizer = prepared(mlps(*(32,) * 6), backend=None, kwargs_handlers=[handler])
    assert fp8_names(model) == ["0", "6", "8"]
    assert model[0].config == config
    acceler8.verify(model, optimizer, step=make_step(accelerator, model, optimizer))
    handler = AORecipeKwargs(recipe="rowwise", fp8_steps="2:", skip_first_and_last=False)
    accelerator, model, _ = prepared(mlps(32, 32, 32), backend=None, kwargs_handlers=[handler])
    assert "only in steps from 2 on" in str(accelerator.plan)
    assert fp8_names(model) == ["0", "2"]


def test_a_recipe_that_torchao_lacks_is_refused_with_those_that_it_has() -> None:
    with pytest.raises(ValueError, match="backend 'torchao' has no recipe delayed; allowed there: tensorwise, rowwise"):
        prepared(llama(), recipe="delayed")


# ----------------------------------------------------------------------------------------------------- torch.compile


def by_dynamo(test: Any) -> Any:
    """Without what dynamo warns of while it traces: it asks every tensor for .grad, and makes autograd functions."""
    for said in ("The .grad attribute of a Tensor that is not a leaf", ".*autograd.function.Function.* should not be"):
        test = pytest.mark.filterwarnings(f"ignore:{said}")(test)
    return test


@by_dynamo
@pytest.mark.parametrize("backend", ["torchao", "native"])
@pytest.mark.parametrize("regional", [False, True])
def test_compiled_models_train_as_eager_ones(backend: str, regional: bool) -> None:
    plugin = TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=regional)
    losses, models = [], []
    for dynamo_plugin in (None, plugin):
        torch._dynamo.reset()
        accelerator, model, optimizer = prepared(
            llama(), backend=backend, recipe="rowwise", dynamo_plugin=dynamo_plugin
        )
        step = make_step(accelerator, model, optimizer)
        losses.append([step() for _ in range(3)])
        models.append(model)
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)
    eager, compiled = models
    assert list(compiled.state_dict()) == list(eager.state_dict())
    has = [name for name, module in compiled.named_modules() if module._compiled_call_impl is not None]
    assert has == (["model.layers.0", "model.layers.1"] if regional else [""])
    acceler8.verify(compiled, optimizer, step=step)


@by_dynamo
def test_torchao_compiles_by_inductor() -> None:
    torch._dynamo.reset()
    plugin = TorchDynamoPlugin(backend="inductor", use_regional_compilation=True, fullgraph=True)
    accelerator, model, optimizer = prepared(llama(), recipe="tensorwise", dynamo_plugin=plugin)
    eager_accelerator, eager, eager_optimizer = prepared(llama(), recipe="tensorwise")
    step, eager_step = make_step(accelerator, model, optimizer), make_step(eager_accelerator, eager, eager_optimizer)
    assert [step() for _ in range(2)] == pytest.approx([eager_step() for _ in range(2)], rel=2e-2)
    acceler8.verify(model, optimizer, step=step)


def test_blocks_that_are_not_there_are_said() -> None:
    plugin = TorchDynamoPlugin(backend="eager", use_regional_compilation=True)
    model = nn.ModuleDict({"a": nn.Linear(32, 32)})
    with pytest.raises(ConfigError, match="use_regional_compilation compiles repeated blocks, and ModuleDict has none"):
        Accelerator("bf16", cpu=True, dynamo_plugin=plugin).prepare(model)


def test_a_disabled_plugin_compiles_nothing() -> None:
    plugin = TorchDynamoPlugin(backend="eager", disable=True)
    model = Accelerator("bf16", cpu=True, dynamo_plugin=plugin).prepare(mlps(32, 32, 32))
    assert model._compiled_call_impl is None


@pytest.mark.requires(sm=89)
def test_eager_is_warned_about_once_on_a_gpu() -> None:
    accelerator = Accelerator(mixed_precision="fp8", backend="torchao")
    with pytest.warns(UserWarning, match=r"without it a training step of the bench presets A and B ran at 0\.64x"):
        accelerator.prepare(llama())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accelerator.prepare(llama())


# ------------------------------------------------------------------------------------------- one run, several backends


@pytest.mark.parametrize("order", [("torchao", "native"), ("native", "torchao", "native")])
def test_a_run_goes_on_with_another_backend(tmp_path: Path, order: tuple[str, ...]) -> None:
    def run(backend: str) -> tuple[Accelerator, Callable[[], float], nn.Module]:
        accelerator, model, optimizer = prepared(llama(), backend=backend, recipe="tensorwise")
        return accelerator, make_step(accelerator, model, optimizer), model

    alone = [run("native")[1]]
    want = [alone[0]() for _ in range(4 * len(order))]
    losses: list[float] = []
    for place, backend in enumerate(order):
        accelerator, step, model = run(backend)
        if place:
            report = accelerator.load_state(tmp_path / str(place - 1))
            before = order[place - 1]
            assert any(f"backend was {before}, now {backend}" in line for line in report.reset)
            assert accelerator.clock.ticks == 4 * place
        assert accelerator.plan is not None
        assert accelerator.plan.backend == backend
        losses += [step() for _ in range(4)]
        accelerator.save_state(tmp_path / str(place))
    # the same numbers but for which two layers are FP8, so what a lost optimizer state would do stands out
    assert losses == pytest.approx(want, rel=0.02)
    assert copy.deepcopy(model) is not model


def test_a_library_that_does_not_load_is_said_by_the_constructor(monkeypatch):
    def fails(name: str, *args: Any) -> Any:
        raise ImportError("undefined symbol: _ZN5torch\nwith a second line")

    library._problem_of.cache_clear()
    monkeypatch.setattr(library, "import_module", fails)
    try:
        with pytest.raises(MissingLibraryError) as error:
            Accelerator(mixed_precision="fp8", backend="AO")
    finally:
        library._problem_of.cache_clear()
    said = str(error.value)
    assert said.startswith("code Accelerator(backend=): FP8 backend ao cannot be used: torchao")
    assert "cannot be imported with torch" in said
    assert "\n" not in said
    assert Accelerator(mixed_precision="bf16").backend == "no"  # nothing of it is needed then
