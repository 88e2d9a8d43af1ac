"""The model: its shape, its seed, causality, and each part against an independent formula."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from acceler8.demo.model import GatedMLP, RMSNorm, build_model, next_byte_loss, rotary_tables, rotate
from acceler8.demo.settings import SIZES, ModelSize

TINY = ModelSize(dim=32, layers=2, heads=4, kv_heads=2, ffn=48, steps=1, batch=1, seq=8, lr=1e-3)


def test_weights_depend_on_the_seed_alone():
    torch.manual_seed(5)
    first = build_model(TINY, seed=1).state_dict()
    state = torch.get_rng_state()
    second = build_model(TINY, seed=1).state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first[name], second[name]) for name in first)
    other = build_model(TINY, seed=2).state_dict()
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_layers_are_plain_linears_under_the_usual_names():
    linears = {n for n, m in build_model(TINY, 0).named_modules() if type(m) is nn.Linear}
    per_layer = {f"self_attn.{n}_proj" for n in "qkvo"} | {f"mlp.{n}_proj" for n in ("gate", "up", "down")}
    assert linears == {f"layers.{i}.{name}" for i in range(2) for name in per_layer} | {"lm_head"}


def test_logits_depend_on_no_later_byte():
    model = build_model(TINY, 0)
    tokens = torch.randint(0, 256, (2, 12), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 256
    before, after = model(tokens), model(changed)
    assert before.shape == (2, 12, 256)
    torch.testing.assert_close(before[:, :7], after[:, :7], atol=0, rtol=0)
    assert not torch.equal(before[:, 7:], after[:, 7:])


def test_an_untrained_model_knows_nothing():
    windows = torch.randint(0, 256, (8, 33), generator=torch.Generator().manual_seed(1))
    loss = next_byte_loss(build_model(SIZES["tiny"], 0), windows)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(math.log(256), abs=0.1)


def test_rms_norm_against_its_formula_in_float64():
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(2))
    norm = RMSNorm(32)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(0.5, 2.0, 32))
    expected = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight.double()
    torch.testing.assert_close(norm(x).double(), expected, atol=1e-6, rtol=1e-6)
    assert norm(x.bfloat16()).dtype == torch.bfloat16
    assert norm(torch.zeros(1, 32)).abs().max() == 0


def test_rotation_is_a_complex_product_and_makes_scores_relative():
    generator = torch.Generator().manual_seed(3)
    q, k = torch.randn(1, 1, 1, 8, generator=generator), torch.randn(1, 1, 1, 8, generator=generator)
    cos, sin = rotary_tables(10, 8, torch.device("cpu"))
    at = lambda x, position: rotate(x, cos[position], sin[position])  # noqa: E731
    angles = 3 * 10_000.0 ** (-torch.arange(4, dtype=torch.float64) / 4)
    turned = torch.complex(q[..., :4].double(), q[..., 4:].double()) * torch.polar(torch.ones(4).double(), angles)
    torch.testing.assert_close(at(q, 3).double(), torch.cat((turned.real, turned.imag), -1), atol=1e-6, rtol=0)
    scores = [(at(q, i + 2) * at(k, i)).sum() for i in (0, 4, 7)]
    torch.testing.assert_close(scores[0], scores[1], atol=1e-5, rtol=0)
    torch.testing.assert_close(scores[0], scores[2], atol=1e-5, rtol=0)


def test_gated_mlp_against_its_formula_in_float64():
    mlp = GatedMLP(TINY)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in mlp.parameters():
            parameter.normal_(generator=generator)
    x = torch.randn(3, 32, generator=generator)
    gate, up, down = (p.double() for p in (mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight))
    inner = x.double() @ gate.T
    expected = (inner / (1 + (-inner).exp()) * (x.double() @ up.T)) @ down.T
    torch.testing.assert_close(mlp(x).double(), expected, atol=1e-3, rtol=1e-4)


def test_grouped_queries_share_keys_and_values():
    """With the weights of each key head repeated, plain multi-head attention computes the same."""
    from dataclasses import replace

    grouped = build_model(TINY, 0)
    plain = build_model(replace(TINY, kv_heads=4), 0)
    state = grouped.state_dict()
    for name in state:
        if "k_proj" in name or "v_proj" in name:
            state[name] = state[name].view(2, 8, 32).repeat_interleave(2, dim=0).reshape(32, 32)
    plain.load_state_dict(state)
    tokens = torch.arange(20).reshape(2, 10)
    torch.testing.assert_close(grouped(tokens), plain(tokens), atol=1e-5, rtol=1e-5)
