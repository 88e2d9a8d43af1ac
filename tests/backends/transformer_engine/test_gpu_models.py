"""Whole models: ``verify`` with two real steps, coverage that is said, checkpoints, and Accelerate's functions."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import acceler8
from acceler8.backends.transformer_engine import library
from acceler8.errors import RecipeError
from acceler8.utils import (
    TERecipeKwargs,
    apply_fp8_autowrap,
    contextual_fp8_autocast,
    convert_model,
    has_transformer_engine_layers,
)
from tests.backends.transformer_engine.gpu import MARKS, RECIPES, TENSORWISE, Pair, convert, gaussian, is_fp8, recipe

pytestmark = MARKS


def tiny_llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return transformers.LlamaForCausalLM(config).cuda().bfloat16()


def tiny_bert() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4
    )
    return transformers.BertForMaskedLM(config).cuda().bfloat16()


def tiny_lora() -> nn.Module:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(tiny_llama(), peft.LoraConfig(r=16, target_modules=["q_proj", "v_proj"]))


def half_frozen() -> nn.Module:
    model = tiny_llama()
    model.model.layers[0].requires_grad_(False)
    return model


def verified(model: nn.Module, name: str, ignore: tuple[str, ...] = ()) -> None:
    ids = torch.randint(0, 256, (3, 11), generator=torch.Generator().manual_seed(0)).cuda()  # 33 tokens: padded
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)  # made before convert
    convert(model, recipe(name))
    acceler8.attach(model, optimizer)

    def step() -> None:
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()

    acceler8.verify(model, optimizer, step=step, ignore=ignore)


@pytest.mark.parametrize("name", ["tensorwise", "delayed", "blockwise"])
def test_verify_is_green_on_llama(name):
    verified(tiny_llama(), name)


@pytest.mark.parametrize("make", [tiny_bert, tiny_lora, half_frozen])
def test_verify_is_green_on(make):
    verified(make(), "delayed")


def test_generation_after_training_and_in_fp8():
    model = tiny_llama()
    ids = torch.randint(0, 256, (1, 9), generator=torch.Generator().manual_seed(0)).cuda()
    plain = copy.deepcopy(model).eval().generate(ids, max_new_tokens=4, do_sample=False)
    convert(model, TENSORWISE).eval()
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), plain)
    seen = []
    layer = model.model.layers[0].mlp.up_proj
    layer.register_forward_hook(
        lambda module, args, y: seen.append(is_fp8(y, nn.functional.linear(args[0], module.weight)))
    )
    with acceler8.evaluate_in_fp8(model):
        model.generate(ids, max_new_tokens=4, do_sample=False)
    assert len(seen) >= 4
    assert all(seen)


def test_gpt2_is_said_to_have_no_coverage():
    transformers = pytest.importorskip("transformers")
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_embd=64, n_head=2, vocab_size=256)).cuda()
    plan = acceler8.plan(model, TENSORWISE, "transformer_engine")
    assert plan.totals.fp8_layers == 0
    assert plan.warnings


def test_an_odd_layer_does_not_keep_its_siblings():
    model = (
        nn.Sequential(nn.Linear(256, 250), nn.Linear(250, 256), nn.Linear(256, 128), nn.Linear(128, 64))
        .cuda()
        .bfloat16()
    )
    convert(model, TENSORWISE)
    is_te = [isinstance(layer, library.load().Linear) for layer in model]
    assert is_te == [False, False, True, True]
    model(gaussian(7, 256)).sum().backward()


def test_the_optimizers_state_is_kept():
    model = Pair()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(gaussian(32, 256)).float().square().mean().backward()
    optimizer.step()
    state = {id(p): s["exp_avg"] for p, s in optimizer.state.items()}
    convert(model, TENSORWISE)
    assert {id(p) for p in model.parameters()} == set(state)
    assert all(optimizer.state[p]["exp_avg"] is state[id(p)] for p in model.parameters())


@pytest.mark.parametrize("name", RECIPES)
def test_loss_falls(name):
    model = nn.Sequential(nn.LayerNorm(256), Pair()).cuda().bfloat16()
    convert(model, recipe(name))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    acceler8.attach(model, optimizer)
    x, target = gaussian(130, 256, seed=1), gaussian(130, 256, seed=2)
    losses = []
    for _ in range(30):
        loss = (model(x) - target).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]


def test_the_functions_of_accelerate():
    model = nn.Sequential(nn.LayerNorm(256), Pair(), nn.Linear(256, 250)).cuda().bfloat16()
    ids = [id(p) for p in model.parameters()]
    assert not has_transformer_engine_layers(model)
    convert_model(model)
    te = library.load()
    assert [isinstance(m, te.Linear) for m in (model[1].up, model[1].down, model[2])] == [True, True, False]
    assert isinstance(model[0], te.LayerNorm)
    assert has_transformer_engine_layers(model)
    assert [id(p) for p in model.parameters()] == ids
    x = gaussian(33, 256)
    plain = model(x)
    apply_fp8_autowrap(model, TERecipeKwargs(amax_history_len=8, margin=1, fp8_format="e4m3"))
    assert hasattr(model.forward, "__wrapped__")
    in_fp8 = model(x)
    assert is_fp8(in_fp8, plain)
    in_fp8.sum().backward()
    found = model[1].up.fp8_meta["recipe"]
    assert (found.amax_compute_algo, found.amax_history_len, found.margin) == ("most_recent", 8, 1)
    with torch.no_grad():
        assert not torch.equal(model.train()(x), plain)
        assert torch.equal(model.eval()(x), plain)
    with pytest.raises(
        RecipeError, match=r"override_linear_precision=\(False, False, True\), which TransformerEngine dropped"
    ):
        apply_fp8_autowrap(model, TERecipeKwargs(override_linear_precision=(False, False, True)))
    convert_model(model, to_transformer_engine=False)
    assert not has_transformer_engine_layers(model)
    assert type(model[1].up) is nn.Linear
    assert [id(p) for p in model.parameters()] == ids


def test_a_context_during_evaluation():
    from transformer_engine.common import recipe as te_recipe

    model = Pair()
    convert_model(model)
    forward = contextual_fp8_autocast(model.forward, te_recipe.Float8CurrentScaling(), use_during_eval=True)
    x = gaussian(32, 256)
    model.eval()
    with torch.no_grad():
        assert is_fp8(forward(model, x), model(x))
    assert forward.__wrapped__ == model.forward


def test_modules_that_a_script_made_itself_become_plain():
    te = library.load()
    model = nn.Sequential(te.Linear(64, 64, bias=False), te.LayerNorm(64)).cuda()
    parameters = dict(model.named_parameters())
    convert_model(model, to_transformer_engine=False)
    assert [type(m) for m in model] == [nn.Linear, nn.LayerNorm]
    assert dict(model.named_parameters()) == parameters
    model(torch.randn(3, 64, device="cuda"))
