"""Attention and MLP side by side behind one norm: they read one cast of its result, with the numbers of two."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import acceler8
from acceler8 import recipes
from acceler8.nn import group as groups_module
from acceler8.recipes import Recipe
from tests.models import assert_equal, batch, outcome
from tests.nn.test_norm import Casts, Parallel, has_codes, norm_state, unlearning

CURRENT = ("rowwise", "tensorwise", "blockwise", "mxfp8")
WIDTH = 128  # blocks of 128 fit, so q, k and v run as one


class GptJ(nn.Module):
    """q, k and v beside a plain MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q_proj, self.k_proj, self.v_proj, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.fc_in, self.fc_out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.skips_mlp, self.edits, self.is_crossed = False, False, False

    def mlp(self, h: Tensor) -> Tensor:
        return self.fc_out(F.gelu(self.fc_in(h)))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q = self.q_proj(h)
        early = self.mlp(h) if self.is_crossed else 0.0
        mixed = self.out(q * torch.sigmoid(self.k_proj(h)) + self.v_proj(h))
        if self.skips_mlp:
            return x + mixed
        if self.edits:
            h.add_(1.0)
        return x + mixed + (early if self.is_crossed else self.mlp(h))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))


class Cohere(GptJ):
    """q, k and v beside a gated MLP; an RMSNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH, eps=1e-5)
        del self.fc_in, self.fc_out
        self.ffn = Gated()

    def mlp(self, h: Tensor) -> Tensor:
        return self.ffn(h)


class TwoLayers(Parallel):
    """One layer each, as where q, k and v are one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)


MODELS = (GptJ, Cohere, TwoLayers)


def made(
    kind: type[nn.Module], recipe: object = "rowwise", *, apart: bool = False, device: str = "cpu", fuse: bool = True
) -> nn.Module:
    """A converted model; ``apart``: codes go behind the first group that reads, as if none were to follow."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = kind().to(device)
    acceler8.convert(model, acceler8.plan(model, recipe, fuse=fuse))
    if apart:
        norm_state(model).expect_groups = lambda: 1
    return model


def x_for(model: nn.Module, seed: int = 1, device: str = "cpu") -> Tensor:
    return batch(width=model.norm.weight.shape[0], seed=seed, device=device)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("recipe", CURRENT)
def test_one_cast_for_all_of_them(kind, recipe, device, monkeypatch):
    model = made(kind, recipe, device=device)
    casts = Casts(model, monkeypatch)
    first = casts.of(lambda: outcome(model, x_for(model, device=device)))
    assert [cast[:2] for cast in first] == [(True, True)] * 2
    for seed in range(2, 5):
        later = casts.of(lambda seed=seed: outcome(model, x_for(model, seed, device)))
        assert [cast[:2] for cast in later] == [(False, True)]  # rows are the norm's
        assert not has_codes(casts.y)
    assert norm_state(model).groups == 2


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(
    ("recipe", "save_for_backward"),
    [
        *itertools.product((*CURRENT, "delayed"), ("fp8", "fp8_compressed", "bf16")),
        *itertools.product(("activations_only",), ("fp8", "fp8_compressed")),
    ],
)
def test_the_numbers_are_those_of_two_casts(kind, recipe, save_for_backward, device):
    recipe = dataclasses.replace(recipes.get(recipe), save_for_backward=save_for_backward)
    together, apart, unknown = (made(kind, recipe, device=device, apart=i > 0) for i in range(3))
    unlearning(unknown)
    for seed in range(4):
        got = outcome(together, x_for(together, seed, device))
        for other in (apart, unknown):
            assert_equal(got, outcome(other, x_for(together, seed, device)))
        for model in (together, apart, unknown):
            acceler8.step(model)
    for other in (apart, unknown):
        assert_equal(acceler8.fp8_state_dict(together), acceler8.fp8_state_dict(other))


@pytest.mark.parametrize("kind", MODELS)
def test_near_what_nothing_fused_gives(kind):
    got, plain = made(kind), made(kind, fuse=False)
    for _ in range(2):
        want = outcome(plain, x_for(got))
        for name, value in outcome(got, x_for(got)).items():
            assert (value - want[name]).norm() <= 0.05 * want[name].norm(), name


@pytest.mark.parametrize(("apart", "copies"), [(False, 1), (True, 2)])
def test_one_copy_is_kept_for_backward(apart, copies):
    model = made(TwoLayers, apart=apart)
    kept: dict[int, Tensor] = {}

    def pack(t: Tensor) -> Tensor:
        if t.dtype is torch.float8_e4m3fn and t.shape[0] == 32:  # x, transposed
            kept[t.data_ptr()] = t
        return t

    outcome(model, x_for(model))
    with saved_tensors_hooks(pack, lambda t: t):
        model(x_for(model).requires_grad_())
    assert len(kept) == copies


@pytest.mark.parametrize("recipe", ["delayed", {"*fc*": "tensorwise", "*": "rowwise"}])
def test_other_scales_are_not_shared_and_nothing_stays_for_them(recipe, monkeypatch):
    model = made(GptJ, recipe)
    casts = Casts(model, monkeypatch)
    for seed in range(3):
        cast = casts.of(lambda seed=seed: outcome(model, x_for(model, seed)))
        assert [c[:2] for c in cast] == [(seed == 0, True), (True, True)]
        assert norm_state(model).groups == 1
        acceler8.step(model)


def test_codes_stay_between_the_groups_and_go_behind_the_last():
    model, seen = made(GptJ), []
    outcome(model, x_for(model))
    y = model.norm(x_for(model).requires_grad_())
    for layer in (model.q_proj, model.k_proj, model.v_proj, model.fc_in):
        seen.append(has_codes(y))
        layer(y)
    assert seen == [True] * 4
    assert not has_codes(y)


def test_a_group_that_comes_no_more_is_not_waited_for_long():
    model = made(GptJ)
    outcome(model, x_for(model))
    model.skips_mlp = True
    ys: list[Tensor] = []
    model.norm.register_forward_hook(lambda module, args, y: ys.append(y))
    for _ in range(7):
        outcome(model, x_for(model))
    assert [has_codes(y) for y in ys] == [True] * 5 + [False] * 2
    model.skips_mlp = False
    outcome(model, x_for(model))
    assert norm_state(model).groups == 2


def test_now_and_then_fewer_changes_nothing():
    """As where checkpointing stops its second forward early."""
    model = made(GptJ)
    for seed in range(16):
        model.skips_mlp = seed % 2 == 1
        outcome(model, x_for(model))
    outcome(model, x_for(model))
    assert norm_state(model).groups == 2


def edited(model: GptJ) -> None:
    model.edits = True


def frozen_attention(model: GptJ) -> None:
    for layer in (model.q_proj, model.k_proj, model.v_proj):
        layer.weight.requires_grad_(False)


def frozen_mlp(model: GptJ) -> None:
    model.fc_in.weight.requires_grad_(False)


def hooked(model: GptJ) -> None:
    model.k_proj.register_forward_pre_hook(lambda module, args: (args[0] * 2,))


@pytest.mark.parametrize("change", [edited, frozen_attention, frozen_mlp, hooked])
@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_what_a_group_may_not_share(change, recipe):
    together, apart = made(GptJ, recipe), made(GptJ, recipe, apart=True)
    before = [outcome(model, x_for(model)) for model in (together, apart)]
    for model in (together, apart):
        change(model)
    for seed in range(3):
        got, want = (outcome(model, x_for(model, seed)) for model in (together, apart))
        assert_equal(got, want)
    assert before[0].keys() >= got.keys()


@pytest.mark.parametrize("freeze", [frozen_attention, frozen_mlp])
def test_a_frozen_group_does_not_take_the_amax_of_columns_from_the_other(freeze, monkeypatch):
    model = made(GptJ)
    freeze(model)
    casts = Casts(model, monkeypatch)
    for seed in range(3):
        cast = casts.of(lambda seed=seed: outcome(model, x_for(model, seed)))
    ((rows, cols, column_amax, _),) = cast
    assert (rows, cols) == (False, True)
    assert column_amax is not None


def test_results_that_wait_for_their_layers_survive_another_reader(monkeypatch):
    """q, then the MLP, then k and v, whose results lie there since q was called."""
    merged, real = [], groups_module.linears
    monkeypatch.setattr(groups_module, "linears", lambda *a, **k: merged.append(1) or real(*a, **k))
    model, plain = made(GptJ), made(GptJ, apart=True)
    for each in (model, plain):
        each.is_crossed = True
    for seed in range(3):
        assert_equal(outcome(model, x_for(model, seed)), outcome(plain, x_for(model, seed)))
    assert len(merged) == 6


def checkpointed(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: checkpoint(model, x, use_reentrant=False)


@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
def test_checkpointing(recipe: str | Recipe):
    model, plain = made(Cohere, recipe), made(Cohere, recipe)
    for seed in range(4):
        x = x_for(model, seed)
        assert_equal(outcome(model, x, checkpointed(model)), outcome(plain, x))
        acceler8.step(model)
        acceler8.step(plain)
    assert_equal(acceler8.fp8_state_dict(model), acceler8.fp8_state_dict(plain))
    assert norm_state(model).groups == norm_state(plain).groups


def test_a_copy_learns_anew():
    model = made(GptJ)
    outcome(model, x_for(model))
    twin = copy.deepcopy(model)
    assert (norm_state(model).groups, norm_state(twin).groups) == (2, 1)
    for _ in range(2):
        assert_equal(outcome(model, x_for(model)), outcome(twin, x_for(model)))
