"""What users of Accelerate's FP8 ran into, each as a test: a script that says ``mixed_precision="fp8"`` and no more.

The text of a test tells what went wrong there; the test fails if it goes wrong here. Where a check is to find a fault
that does not come about here, the fault is planted.
"""

from __future__ import annotations

import copy
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

import acceler8
from acceler8 import levels, recipes
from acceler8.accelerator import Accelerator
from acceler8.backends.native import NativeBackend
from acceler8.config.plugins import DeepSpeedPlugin, FullyShardedDataParallelPlugin
from acceler8.conversion import Plan
from acceler8.errors import VerifyError
from acceler8.functional import linear
from acceler8.nn import Fp8Linear, FusedNorm, state_of
from acceler8.utils import DistributedType, FP8RecipeKwargs, NativeRecipeKwargs, TERecipeKwargs

Optimizer = Any


class Mlps(nn.Module):
    """Features -> residual blocks of two linears -> logits by ``lm_head``."""

    def __init__(self, blocks: int = 2, width: int = 64) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
                for _ in range(blocks)
            )
            self.lm_head = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.lm_head(x)


LINEARS = ["blocks.0.1", "blocks.0.3", "blocks.1.1", "blocks.1.3"]


def features(accelerator: Accelerator, *shape: int) -> Tensor:
    x = torch.randn(shape or (24, 64), generator=torch.Generator().manual_seed(1))
    return x.to(accelerator.device)


def make_step(
    accelerator: Accelerator, model: nn.Module, optimizer: Optimizer, x: Tensor | None = None
) -> Callable[[], None]:
    """One training step of a script."""
    batch = features(accelerator) if x is None else x

    def step() -> None:
        optimizer.zero_grad()
        accelerator.backward((model(batch) - batch.flip(-1)).square().mean())
        optimizer.step()

    return step


def language_step(accelerator: Accelerator, model: nn.Module, optimizer: Optimizer) -> Callable[[], None]:
    tokens = torch.randint(0, 96, (2, 16), generator=torch.Generator().manual_seed(1)).to(accelerator.device)

    def step() -> None:
        optimizer.zero_grad()
        accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
        optimizer.step()

    return step


def prepared(model: nn.Module, **arguments: Any) -> tuple[Accelerator, nn.Module, Optimizer]:
    accelerator = Accelerator(mixed_precision="fp8", **arguments)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    return accelerator, model, optimizer


def copies(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def unmoved(model: nn.Module, before: dict[str, Tensor]) -> list[str]:
    return [name for name, p in model.named_parameters() if torch.equal(p.detach(), before[name])]


def held(optimizer: Optimizer) -> list[int]:
    """The id of each tensor that the optimizer steps, as often as it does."""
    return [id(p) for group in optimizer.param_groups for p in group["params"]]


def reasons(plan: Plan | None) -> dict[str, str]:
    assert plan is not None
    return {row.name: row.reason for row in plan.rows if not row.is_fp8}


def fp8_names(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, Fp8Linear)]


SIZES = dict(vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)


def llama(*, tie: bool) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, max_position_embeddings=32, tie_word_embeddings=tie)
    return transformers.LlamaForCausalLM(config)


# -------------------------------------------------------------- the optimizer stepped other tensors than the model uses


@pytest.mark.parametrize(
    ("kind", "order"),
    [("mlps", "one call"), ("mlps", "model first"), ("mlps", "optimizer first"), ("llama", "one call")],
)
def test_every_weight_moves(kind: str, order: str) -> None:
    """Every FP8 weight was frozen: conversion made new Parameters, the optimizer kept the old ones, and the loss still
    fell, because norms, biases and embeddings trained.
    """
    model = Mlps() if kind == "mlps" else llama(tie=False)
    before, parameters = copies(model), {name: id(p) for name, p in model.named_parameters()}
    accelerator = Accelerator(mixed_precision="fp8")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if order == "one call":
        model, optimizer = accelerator.prepare(model, optimizer)
    elif order == "model first":
        model = accelerator.prepare(model)
        optimizer = accelerator.prepare(optimizer)
    else:
        optimizer = accelerator.prepare(optimizer)
        model = accelerator.prepare(model)
    assert len(fp8_names(model)) == (4 if kind == "mlps" else 14)
    assert {name: id(p) for name, p in model.named_parameters()} == parameters
    assert sorted(held(optimizer)) == sorted(parameters.values())
    step = (make_step if kind == "mlps" else language_step)(accelerator, model, optimizer)
    before = {name: value.to(accelerator.device) for name, value in before.items()}
    for _ in range(3):
        step()
    assert unmoved(model, before) == []
    acceler8.verify(model, optimizer, step=step)


def test_a_weight_that_the_optimizer_lost_is_found() -> None:
    """The same fault, planted: verify names the weight, from the groups alone and from the training step alone."""
    accelerator, model, optimizer = prepared(Mlps())
    step = make_step(accelerator, model, optimizer)
    acceler8.verify(model, optimizer, step=step)
    layer = model.blocks[1][3]
    layer.weight = nn.Parameter(layer.weight.detach().clone())
    before = copies(model)
    step()
    assert unmoved(model, before) == ["blocks.1.3.weight"]  # what nobody was told
    with pytest.raises(VerifyError, match=r"blocks\.1\.3\.weight is in no group of the optimizer: it will never move"):
        acceler8.verify(model, optimizer)
    with pytest.raises(VerifyError, match=r"blocks\.1\.3\.weight had a gradient and .* did not move") as error:
        acceler8.verify(model, step=step)
    assert "blocks.0" not in str(error.value)


# ----------------------------------------------------------------------------- checkpoints could not be written or read


def test_checkpoints_hold_plain_tensors(tmp_path) -> None:
    """``save_state`` and ``save_model`` raised, and ``torch.save`` pickled a tensor subclass of the FP8 library."""
    accelerator, model, optimizer = prepared(llama(tie=False))
    step = language_step(accelerator, model, optimizer)
    step()
    accelerator.save_state(tmp_path / "state")
    accelerator.save_model(model, tmp_path / "model")
    model.save_pretrained(tmp_path / "pretrained")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "all.pt")

    want = {name: p.detach().cpu() for name, p in model.named_parameters()}
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "all.pt"]
    assert {path.suffix for path in files} <= {".safetensors", ".json"}
    assert sum(path.name == "model.safetensors" for path in files) == 3
    for path in (path for path in files if path.name == "model.safetensors"):
        tensors = load_file(path)
        assert tensors.keys() == want.keys()
        for name, tensor in tensors.items():
            assert type(tensor) is torch.Tensor
            assert torch.equal(tensor, want[name]), (path, name)
    loaded = torch.load(tmp_path / "all.pt", weights_only=True, map_location="cpu")
    assert {type(tensor) for tensor in loaded["model"].values()} == {torch.Tensor}
    assert loaded["model"].keys() == want.keys()
    moments = [value for state in loaded["optimizer"]["state"].values() for value in state.values()]
    assert {type(value) for value in moments} == {torch.Tensor}

    step()
    accelerator.load_state(tmp_path / "state")
    assert all(torch.equal(p.detach().cpu(), want[name]) for name, p in model.named_parameters())
    acceler8.verify(model, optimizer, step=step)


# ------------------------------------------------------------------------------ layers that were, or were not, left out


def test_first_and_last_layers_are_left_out() -> None:
    """The filter of the first and last linear layer left out none: it looked for them inside the leaf it was given."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    accelerator, model, optimizer = prepared(model, skip=["0", "3"])
    assert fp8_names(model) == ["1", "2"]
    assert reasons(accelerator.plan) == {"0": "skipped by name (0)", "3": "skipped by name (3)"}
    assert "2 of 4 layers FP8" in str(accelerator.fp8_report())
    x = features(accelerator).bfloat16()
    for i, layer in enumerate(model):
        with accelerator.autocast():
            in_high_precision = torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))
        assert in_high_precision == (i in (0, 3)), i
    acceler8.verify(model, optimizer, step=make_step(accelerator, model, optimizer))


def test_the_head_is_left_out_by_default_and_listed() -> None:
    """Whether the output head was FP8 depended on the library behind, and nothing told."""
    for model, how in ((Mlps(), "by its name"), (llama(tie=False), "get_output_embeddings")):
        accelerator, model, _ = prepared(model)
        assert type(model.lm_head) is nn.Linear
        assert reasons(accelerator.plan) == {"lm_head": f"output head ({how})"}
        assert f"output head ({how})" in str(accelerator.plan)


def test_an_odd_layer_does_not_stop_its_siblings() -> None:
    """Conversion ended at the first layer whose dimension is no multiple of 16; what came behind it stayed as it was,
    silently.
    """
    model = nn.Sequential(nn.Linear(64, 33), nn.Linear(33, 64), nn.Linear(64, 64), nn.Sequential(nn.Linear(64, 64)))
    accelerator, model, optimizer = prepared(model)
    assert fp8_names(model) == ["2", "3.0"]
    why = "33 not a multiple of 16, which FP8 GEMM needs"
    assert reasons(accelerator.plan) == {"0": why, "1": why}
    assert why in str(accelerator.plan)
    step = make_step(accelerator, model, optimizer)
    assert "2 layers used codes" in str(acceler8.verify(model, optimizer, step=step))


# --------------------------------------------------------------------------------------------------------- tied weights


class TiedLinears(nn.Module):
    """Two linears that share one weight, and one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(64, 64) for _ in range(3))
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(F.gelu(self.first(x))))


@pytest.mark.parametrize("kind", ["linears", "llama"])
def test_tied_weights_stay_tied_and_train(kind: str) -> None:
    """Conversion untied them; the head's new weight was in no optimizer and never changed."""
    model = TiedLinears() if kind == "linears" else llama(tie=True)
    accelerator, model, optimizer = prepared(model)
    if kind == "linears":
        one, other, own = model.first, model.last, model.middle
        step = make_step(accelerator, model, optimizer)
        assert "weight tied with" in reasons(accelerator.plan)["last"]
    else:
        one, other, own = model.model.embed_tokens, model.lm_head, model.model.layers[0].mlp.up_proj
        step = language_step(accelerator, model, optimizer)
    assert isinstance(own, Fp8Linear)
    assert other.weight is one.weight
    assert held(optimizer).count(id(one.weight)) == 1
    before = copies(model)
    step()
    assert unmoved(model, before) == []
    assert other.weight is one.weight
    assert "1 ties" in str(acceler8.verify(model, optimizer, step=step))

    other.weight = nn.Parameter(other.weight.detach().clone())  # planted: untied behind the optimizer's back
    with pytest.raises(VerifyError) as error:
        acceler8.verify(model, optimizer)
    assert "shared one Parameter and no longer do" in str(error.value)
    assert "is in no group of the optimizer" in str(error.value)


# ---------------------------------------------------------------------------------------------------------- layer norms


class Norms(nn.Module):
    """Every LayerNorm that there is, each behind a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.norms = nn.ModuleList(
            [
                nn.LayerNorm(64, elementwise_affine=False),
                nn.LayerNorm((4, 64)),
                nn.LayerNorm(64, bias=False),
                nn.LayerNorm(64),
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.linears, self.norms, strict=True):
            x = norm(x + layer(x))
        return x


def test_layer_norms_of_every_kind_stay_as_they_are() -> None:
    """Without affine: AttributeError. Over two dimensions: RuntimeError. Without bias: it got one, which no optimizer
    held.
    """
    torch.manual_seed(0)
    model = Norms()
    parameters = {name: (id(p), p.shape) for name, p in model.named_parameters()}
    plain = copy.deepcopy(model).eval()
    accelerator, model, optimizer = prepared(model)
    plain.to(accelerator.device)
    assert len(fp8_names(model)) == 4
    assert all(isinstance(norm, nn.LayerNorm) for norm in model.norms)
    assert [isinstance(norm, FusedNorm) for norm in model.norms] == [False, False, True, True]
    assert {name: (id(p), p.shape) for name, p in model.named_parameters()} == parameters
    assert sorted(held(optimizer)) == sorted(i for i, _ in parameters.values())
    assert model.norms[0].weight is None
    assert model.norms[2].bias is None
    x = features(accelerator, 6, 4, 64)
    for norm, alike in zip(model.norms, plain.norms, strict=True):
        torch.testing.assert_close(norm(x), alike(x), atol=2e-6, rtol=2e-6)  # sums in another order
    model.eval()
    for norm, alike in zip(model.norms, plain.norms, strict=True):
        assert torch.equal(norm(x), alike(x))
    with accelerator.autocast():
        assert torch.equal(model(x), plain(x).float())
    model.train()
    before = copies(model)
    step = make_step(accelerator, model, optimizer, x)
    step()
    assert unmoved(model, before) == []
    acceler8.verify(model, optimizer, step=step)


# ------------------------------------------------------------------------------------------------- the recipe that runs

HIGH_WGRAD = recipes.get("tensorwise", formats="E4M3").with_gemms(wgrad=False)


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ({}, recipes.get("rowwise")),
        ({"recipe": "tensorwise"}, recipes.get("tensorwise")),
        ({"recipe": HIGH_WGRAD}, HIGH_WGRAD),
        ({"kwargs_handlers": [NativeRecipeKwargs(recipe="blockwise")]}, recipes.get("blockwise")),
        ({"kwargs_handlers": [NativeRecipeKwargs(recipe=HIGH_WGRAD)]}, HIGH_WGRAD),
        (
            {"kwargs_handlers": [NativeRecipeKwargs(override_linear_precision=(False, False, True))]},
            recipes.get("rowwise").with_gemms(wgrad=False),
        ),
    ],
    ids=["default", "named", "object", "handler", "handler with object", "handler with settings"],
)
def test_the_recipe_that_was_given_runs(arguments: dict, given: recipes.Recipe) -> None:
    """A recipe object that the script gave was left aside for the library's defaults, under DeepSpeed."""
    accelerator, model, _ = prepared(nn.Sequential(nn.Linear(64, 64)), **arguments)
    assert accelerator.recipe == accelerator.plan.recipe == given
    layer = model[0]
    generator = torch.Generator().manual_seed(1)
    spread = torch.logspace(-3, 3, 64)  # values that no other scale or format rounds to the same
    x = (torch.randn(32, 64, generator=generator) * spread).bfloat16().to(accelerator.device)
    dy = (torch.randn(32, 64, generator=generator) * spread).bfloat16().to(accelerator.device)

    def outcome(call: Callable[[Tensor], Tensor]) -> list[Tensor]:
        leaf = x.detach().requires_grad_()
        with accelerator.autocast():
            y = call(leaf)
        return [y.detach(), *torch.autograd.grad(y, (leaf, layer.weight), dy)]

    def alike(recipe: recipes.Recipe) -> bool:
        wanted = outcome(lambda x: linear(x, layer.weight, layer.bias, recipe=recipe))
        return all(torch.equal(a, b) for a, b in zip(ran, wanted, strict=True))

    ran = outcome(layer)
    assert alike(given)
    others = [recipes.get(name) for name in ("rowwise", "tensorwise", "blockwise", "mxfp8")]
    assert not any(alike(other) for other in [*others, HIGH_WGRAD] if other != given)


def test_settings_of_delayed_scaling_reach_the_layers() -> None:
    handler = NativeRecipeKwargs(recipe="delayed", margin=3, amax_history_len=5, amax_compute_algo="max")
    accelerator, model, _ = prepared(Mlps(), kwargs_handlers=[handler])
    for name in fp8_names(model):
        recipe = model.get_submodule(name)._acceler8_layer.recipe
        scaling = recipe.scaling
        assert (recipe.margin, scaling.amax_history_len, scaling.amax_compute_algo) == (3, 5, "max")
    assert "margin" in str(accelerator.fp8_report())
    assert state_of(model).plan.recipe is accelerator.recipe


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs DeepSpeed")
@pytest.mark.filterwarnings("ignore::FutureWarning:torch", "ignore::DeprecationWarning:deepspeed")
def test_an_engine_does_not_replace_the_recipe() -> None:
    """The very case: in DeepSpeed's engine the layers run the recipe that the script gave."""
    handler = NativeRecipeKwargs(recipe="delayed", margin=3)
    accelerator = Accelerator(
        "fp8", cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=2), kwargs_handlers=[handler]
    )
    try:
        model = Mlps()
        wrapped, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert type(wrapped).__name__ == "DeepSpeedEngine"
        assert accelerator.unwrap_model(wrapped) is model
        assert accelerator.distributed_type is DistributedType.DEEPSPEED
        layers = [model.get_submodule(name)._acceler8_layer for name in fp8_names(model)]
        assert {(layer.recipe.name, layer.recipe.margin) for layer in layers} == {("delayed", 3)}
    finally:
        accelerator.end_training()


# -------------------------------------------------------------------------------------------- devices without FP8 GEMMs


@pytest.mark.parametrize("route", ["code", "environment"])
def test_a_device_without_fp8_gemms_emulates_and_says_so(route: str, monkeypatch) -> None:
    """A fallback to FP16 was announced and did not happen: by code the layers were converted all the same."""
    if route == "environment":
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    accelerator = Accelerator(mixed_precision="fp8" if route == "code" else None, cpu=True)
    model = Mlps()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    assert accelerator.mixed_precision == "fp8"
    assert accelerator.fp8_enabled
    assert accelerator.scaler is None  # nothing of FP16
    assert fp8_names(model) == LINEARS
    report = accelerator.fp8_report()
    assert report.is_fp8
    assert "note: emulated: the CPU has no rowwise FP8 GEMM; same numerics, not faster" in str(report)

    layer, x = model.blocks[0][1], features(accelerator)

    def rounded(t: Tensor) -> Tensor:
        scale = t.abs().amax(-1, keepdim=True) / 448
        return (t / scale).to(torch.float8_e4m3fn).float() * scale

    with accelerator.autocast():
        y = layer(x.bfloat16()).float()
    by_hand = F.linear(rounded(x.bfloat16().float()), rounded(layer.weight.detach()), layer.bias)
    plain = F.linear(x, layer.weight, layer.bias)
    assert (y - by_hand).norm() < 0.2 * (y - plain).norm()  # FP8's own rounding, and not high precision
    acceler8.verify(model, optimizer, step=make_step(accelerator, model, optimizer))


def test_a_gpu_of_an_older_generation_is_named(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Older GPU")
    monkeypatch.setattr("acceler8.backends.native.has_hardware_matmul", lambda device, granularity: False)
    notes = NativeBackend().notes(recipes.get("rowwise"), torch.device("cuda", 0))
    assert any(note.startswith("emulated: Older GPU (sm_80) has no rowwise FP8 GEMM") for note in notes)


# ----------------------------------------------------------------------------------------------- the older recipe class


@pytest.mark.parametrize("spelling", ["msamp", "MSAMP"])
def test_the_older_recipe_class_of_msamp_has_its_level(spelling: str, monkeypatch) -> None:
    """``opt_level`` stayed None, and TransformerEngine had to be installed for a recipe that is not its own."""
    for name in ("transformer_engine", "transformer_engine.pytorch", "msamp"):
        monkeypatch.setitem(sys.modules, name, None)  # an import of it fails
    with pytest.warns(FutureWarning, match="write MSAMPRecipeKwargs"):
        handler = FP8RecipeKwargs(backend=spelling)
    assert (handler.backend, handler.opt_level) == ("MSAMP", "O2")
    accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[handler])
    assert accelerator.fp8_recipe_handler is handler
    assert accelerator.level == levels.LEVELS["O2"]
    assert levels.level_weights(accelerator.prepare(Mlps()))


# --------------------------------------------------------------------------------------- models of hardly any nn.Linear


def test_a_model_of_other_layers_is_warned_about() -> None:
    """GPT-2, whose layers are Conv1D, trained "in FP8" with no FP8 layer and no word of it."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=2, n_positions=32)
    with pytest.warns(UserWarning, match=r"FP8 would cover 0% .*\(0 of 9 layers\).*8 x Conv1D is not nn\.Linear"):
        accelerator, model, optimizer = prepared(transformers.GPT2LMHeadModel(config))
    report = accelerator.fp8_report()
    assert not report.is_fp8
    assert "GPT2LMHeadModel: 0 of 9 layers FP8 (0% of the matrix FLOPs)" in str(report)
    assert "WARNING: FP8 would cover 0%" in str(report)
    assert reasons(accelerator.plan)["transformer.h.1.mlp.c_fc"] == "Conv1D is not nn.Linear"
    before = copies(model)
    language_step(accelerator, model, optimizer)()
    assert unmoved(model, before) == []


def test_fused_experts_are_warned_about() -> None:
    """Of a mixture of experts only attention was converted, a few per cent of the work, and nothing told."""
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(**SIZES, num_key_value_heads=1, num_local_experts=8)
    with pytest.warns(UserWarning, match=r"cover [1-9]% of the matrix FLOPs.*MixtralExperts is not nn\.Linear"):
        accelerator, model, optimizer = prepared(transformers.MixtralForCausalLM(config))
    assert all("self_attn" in name for name in fp8_names(model))
    assert reasons(accelerator.plan)["model.layers.0.mlp.experts"] == "MixtralExperts is not nn.Linear"
    t = accelerator.plan.totals
    assert t.fp8_layers == 8
    assert 0 < t.flops_share < 0.1
    assert "WARNING: FP8 would cover" in str(accelerator.fp8_report())
    language_step(accelerator, model, optimizer)()
    acceler8.verify(model, optimizer)


def test_a_model_of_two_linears_is_fp8() -> None:
    """A model of two linears lost both, as the first and the last one, and had no FP8 layer."""
    _, model, _ = prepared(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)))
    assert fp8_names(model) == ["0", "2"]


# --------------------------------------------------------------------------------------------------------- the way back


def test_the_way_back_gives_plain_layers_that_train_on() -> None:
    """Turning a model back raised TypeError, and unwrapping never tried."""
    accelerator, model, optimizer = prepared(Mlps())
    parameters = {name: id(p) for name, p in model.named_parameters()}
    step = make_step(accelerator, model, optimizer)
    for _ in range(2):
        step()
    values = copies(model)
    plain = acceler8.restore(accelerator.unwrap_model(model, keep_fp32_wrapper=False))
    assert plain is model
    assert fp8_names(plain) == []
    assert {type(plain.get_submodule(name)) for name in LINEARS} == {nn.Linear}
    assert not any(key.startswith("_acceler8") for module in plain.modules() for key in module.__dict__)
    assert {name: id(p) for name, p in plain.named_parameters()} == parameters
    assert all(torch.equal(p, values[name]) for name, p in plain.named_parameters())
    assert sorted(held(optimizer)) == sorted(parameters.values())

    never_converted = Mlps().to(accelerator.device)
    never_converted.load_state_dict(plain.state_dict())
    reference = torch.optim.AdamW(never_converted.parameters(), lr=1e-2)
    reference.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for m, o in ((plain, optimizer), (never_converted, reference)):
        make_step(accelerator, m, o)()
    assert unmoved(plain, values) == []
    for (name, p), q in zip(plain.named_parameters(), never_converted.parameters(), strict=True):
        assert torch.equal(p, q), name


# ----------------------------------------------------------------------------------------- what would not have been FP8


@pytest.mark.parametrize("route", ["plugin", "version 2", "environment"])
def test_sharding_does_not_run_without_fp8(route: str, monkeypatch) -> None:
    """Under FSDP2 layers were FP8 by their class and no forward ever was, without a warning.

    Here of one process, which holds the whole model; of several it is test_fsdp's.
    """
    if route == "environment":
        monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
        accelerator = Accelerator(mixed_precision="fp8")
    else:
        version = {"fsdp_version": 2} if route == "version 2" else {}
        accelerator = Accelerator(mixed_precision="fp8", fsdp_plugin=FullyShardedDataParallelPlugin(**version))
    model = Mlps()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    assert fp8_names(model)
    report = acceler8.verify(model, optimizer, step=make_step(accelerator, model, optimizer))
    assert f"{len(fp8_names(model))} layers used codes of their new weight" in report.checks["moved and fresh"]


def test_a_library_that_is_missing_is_not_run_without(monkeypatch) -> None:
    """What TransformerEngine was to compute is neither dropped nor done by another."""
    monkeypatch.setattr("acceler8.config.backend_choice.is_backend_available", lambda backend: backend == "NATIVE")
    with pytest.raises(ImportError, match="TERecipeKwargs: FP8 backend TE is not installed"):
        Accelerator(mixed_precision="fp8", kwargs_handlers=[TERecipeKwargs()])


def test_layers_that_are_fp8_by_class_alone_are_found() -> None:
    """The same, planted: a layer whose forward another library replaced, and one that the step never calls."""
    accelerator, model, optimizer = prepared(Mlps())
    layer = model.blocks[0][1]
    layer.forward = lambda x: F.linear(x, layer.weight, layer.bias)
    with pytest.raises(VerifyError, match=r"layer 'blocks\.0\.1' does not run in FP8: its forward was replaced"):
        acceler8.verify(model, optimizer)
    del layer.forward
    acceler8.verify(model, optimizer)
    step = make_step(accelerator, model, optimizer)
    model.blocks[1].forward = lambda x: x
    with pytest.raises(VerifyError, match=r"2 FP8 layers were not called in training mode by step\(\)"):
        acceler8.verify(model, optimizer, step=step)
