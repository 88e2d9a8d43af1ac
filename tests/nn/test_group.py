"""Layers that run as one inside a model whose own code calls them one after the other."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import Tensor, nn

import acceler8
from acceler8.nn import LinearGroup
from acceler8.nn import group as module
from tests.models import assert_equal, batch, outcome


class Attention(nn.Module):
    """q, k and v of a norm's result; ``v_from`` another activation, ``calls`` which of them are called."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(32, 32) for _ in range(3))
        self.calls, self.is_crossed = ("q_proj", "k_proj", "v_proj"), False

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        total = h
        for name in self.calls:
            total = total + getattr(self, name)(h * 0.5 if self.is_crossed and name == "v_proj" else h)
        return total


def attention(*, fuse: bool = True, recipe: str = "rowwise", norm: bool = False) -> Attention:
    """With its norm as its author wrote it, unless ``norm``."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = Attention()
    plan = acceler8.plan(model, recipe, fuse=fuse)
    kept = tuple(fusion for fusion in plan.fusions if norm or fusion.kind != "norm")
    return acceler8.convert(model, dataclasses.replace(plan, fusions=kept))


def group_of(model: Attention) -> LinearGroup:
    found = model.q_proj._acceler8_layer.group
    assert found is not None
    return found


def near(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    for name in want:
        assert (got[name] - want[name]).norm() <= 0.05 * want[name].norm(), name


@pytest.fixture
def merges(monkeypatch) -> list[int]:
    """The number of layers of each merged call."""
    made, real = [], module.linears
    monkeypatch.setattr(
        module, "linears", lambda x, weights, *a, **k: made.append(len(weights)) or real(x, weights, *a, **k)
    )
    return made


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise", "delayed"])
def test_one_operation_gives_what_the_layers_give(recipe, merges):
    got, want = outcome(attention(recipe=recipe), batch()), outcome(attention(fuse=False, recipe=recipe), batch())
    assert merges == [3]
    if recipe == "rowwise":
        assert torch.equal(got["y"], want["y"])
    near(got, want)
    behind_a_fused_norm = attention(recipe=recipe, norm=True)
    for _ in range(2):  # without its codes, and with them
        near(outcome(behind_a_fused_norm, batch()), want)
    assert merges == [3, 3, 3]


@pytest.mark.parametrize("order", [("v_proj", "q_proj", "k_proj"), ("k_proj", "v_proj", "q_proj")])
def test_whoever_is_called_first_computes_for_all(order, merges):
    model, plain = attention(), attention(fuse=False)
    model.calls = plain.calls = order
    near(outcome(model, batch()), outcome(plain, batch()))
    assert merges == [3]


def test_a_layer_with_another_input_computes_its_own():
    model, plain = attention(), attention(fuse=False)
    model.is_crossed = plain.is_crossed = True
    near(outcome(model, batch()), outcome(plain, batch()))


def test_a_layer_called_twice_on_one_activation_gives_the_same_twice():
    model, plain = attention(), attention(fuse=False)
    model.calls = plain.calls = ("q_proj", "q_proj", "k_proj", "v_proj", "v_proj")
    near(outcome(model, batch()), outcome(plain, batch()))


def test_a_change_in_place_between_two_calls_is_seen():
    model = attention()
    h = model.norm(batch()) * 1.0
    model.q_proj(h)
    h.add_(1.0)
    fresh = attention(fuse=False)
    assert torch.equal(model.k_proj(h), fresh.k_proj(h.detach()))


def test_a_group_whose_results_nobody_takes_gives_up(merges):
    model = attention()
    model.calls = ("q_proj",)
    for _ in range(8):
        outcome(model, batch())
    assert 1 <= len(merges) < 8
    assert group_of(model).why_not == "its layers are not called on one activation"


def hooked(model: Attention) -> None:
    model.k_proj.register_forward_hook(lambda module, args, y: None)


def observed(model: Attention) -> None:
    model.k_proj._acceler8_layer.observer = lambda role, packed, count: None


def replaced(model: Attention) -> None:
    model.k_proj.forward = model.k_proj.forward


@pytest.mark.parametrize(
    ("change", "why"), [(hooked, "has a hook"), (observed, "observed"), (replaced, "a forward of its own")]
)
def test_layers_that_must_be_called_are(change, why, merges):
    model = attention()
    change(model)
    near(outcome(model, batch()), outcome(attention(fuse=False), batch()))
    assert merges == []
    assert why in group_of(model).why_not


def test_evaluation_and_no_grad_run_layer_by_layer(merges):
    model, plain = attention(), attention(fuse=False)
    with torch.no_grad():
        assert torch.equal(model(batch()), plain(batch()))
    model.eval(), plain.eval()
    assert_equal(outcome(model, batch()), outcome(plain, batch()))
    assert merges == []


def test_a_copy_computes_with_its_own_weights():
    model = attention()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.k_proj.weight.zero_()
        twin.v_proj.bias.add_(1.0)
    assert group_of(twin) is not group_of(model)
    assert group_of(twin).layers[1] is twin.k_proj
    plain = attention(fuse=False)
    plain.load_state_dict(twin.state_dict())
    assert torch.equal(outcome(twin, batch())["y"], outcome(plain, batch())["y"])


def test_nothing_stays_on_the_activation_and_restore_ends_it(merges):
    model = attention()
    h = model.norm(batch()) * 1.0
    for name in model.calls:
        getattr(model, name)(h)
    assert not h.__dict__
    acceler8.restore(model)
    assert type(model.q_proj) is nn.Linear
    outcome(model, batch())
    assert merges == [3]
