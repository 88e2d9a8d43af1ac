"""FP8 state of a whole model: delayed scaling through training, and what a checkpoint keeps of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import acceler8
from acceler8 import recipes
from acceler8.errors import PlanError
from acceler8.nn import fp8_layers, state_of
from tests.models import RECIPES, Mlp, assert_equal, batch, converted, outcome, train

LEN = 4
HISTORY = slice(2, None)


def delayed(device: str = "cpu", **fields: object) -> nn.Module:
    return converted(recipes.get("delayed", **{"amax_history_len": LEN, **fields}), device=device)


def history(model: nn.Module, layer: str = "up") -> list[list[float]]:
    """``[[x, w, dy], ...]``, oldest first."""
    return acceler8.fp8_state_dict(model)[f"{layer}.amax"][HISTORY].tolist()


def in_use(model: nn.Module, layer: str = "up") -> list[float]:
    return acceler8.fp8_state_dict(model)[f"{layer}.amax"][1].tolist()


def amaxes(model: nn.Module, x: torch.Tensor) -> list[float]:
    """amax of the first layer's x, w and dy in one forward and backward, seen from outside."""
    seen: dict[str, float] = {"w": model.up.weight.abs().max().item()}
    handles = [
        model.up.register_forward_hook(lambda m, args, y: seen.__setitem__("x", args[0].abs().max().item())),
        model.up.register_full_backward_hook(lambda m, dx, dy: seen.__setitem__("dy", dy[0].abs().max().item())),
    ]
    outcome(model, x)
    for handle in handles:
        handle.remove()
    return [seen[role] for role in ("x", "w", "dy")]


def test_each_boundary_puts_one_row_into_the_history(device):
    model = delayed(device)
    want = [[0.0] * 3] * LEN
    assert history(model) == want
    for step in range(LEN + 2):
        with torch.no_grad():
            model.up.weight.mul_(1.25 if step % 2 else 0.5)
        row = amaxes(model, batch(seed=step, device=device) * (step + 1))
        assert history(model) == want  # constant between boundaries
        acceler8.step(model)
        want = [*want[1:], row]
        assert history(model) == want
        assert in_use(model) == [max(column) for column in zip(*want, strict=True)]


def test_attach_step_and_a_window_grow_it_alike(device):
    models = [delayed(device) for _ in range(3)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    acceler8.attach(models[0], optimizers[0])
    for model, optimizer in zip(models, optimizers, strict=True):
        for step in range(2):
            x = batch(seed=step, device=device)
            with acceler8.window(model) if model is models[2] else torch.enable_grad():
                (model(x) - x.flip(-1)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if model is not models[0]:
                acceler8.step(model)
    for model in models[1:]:
        assert_equal(acceler8.fp8_state_dict(model), acceler8.fp8_state_dict(models[0]))
    assert acceler8.fp8_state_dict(models[0])["steps"] == 2


def test_micro_batches_enter_as_their_maximum(device):
    model = delayed(device)
    rows = [amaxes(model, batch(seed=s, device=device) * f) for s, f in ((0, 1.0), (1, 5.0), (2, 0.1))]
    assert acceler8.fp8_state_dict(model)["steps"] == 0
    acceler8.step(model)
    assert history(model)[-1] == [max(column) for column in zip(*rows, strict=True)]
    assert history(model)[:-1] == [[0.0] * 3] * (LEN - 1)


def test_scales_are_constant_between_boundaries(device):
    """A huge batch in a step changes neither the next micro-batch nor a recompute; only the next step."""
    model = delayed(device)
    x = batch(device=device)
    outcome(model, x)
    acceler8.step(model)
    want = outcome(model, x)
    with torch.no_grad():
        model.up(1000 * x)
    assert_equal(outcome(model, x), want)
    acceler8.step(model)
    assert not torch.equal(outcome(model, x)["y"], want["y"])


@pytest.mark.parametrize("algo", ["max", "most_recent"])
def test_the_amax_in_use_follows_the_recipe(algo):
    model = delayed(amax_compute_algo=algo, interval=2)
    rows, used = [], []
    for step, factor in enumerate((1.0, 8.0, 2.0, 0.5, 0.25)):
        rows.append(amaxes(model, batch(seed=step) * factor))
        acceler8.step(model)
        used.append(in_use(model))
    # updated at the first boundary, then at every second
    for step, last in ((0, 0), (1, 1), (2, 1), (3, 3), (4, 3)):
        seen = rows[max(0, last + 1 - LEN) : last + 1]
        assert used[step] == (rows[last] if algo == "most_recent" else [max(c) for c in zip(*seen, strict=True)])


def test_margin_leaves_headroom():
    """With a margin of 1 the largest value lands on half the format's maximum: twice the amax still fits."""
    tight, roomy = delayed(), delayed(margin=1)
    x = batch()
    for model in (tight, roomy):
        outcome(model, x)
        acceler8.step(model)
        with acceler8.record_statistics(model) as statistics, torch.no_grad():
            model.up(1.9 * model.norm(x))
        saturated = statistics.casts()["up", "x"].saturated
        assert (saturated > 0) == (model is tight)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_step_with_nan_does_not_poison_later_scales(bad, device):
    model, clean = delayed(device), delayed(device)
    x = batch(device=device)
    for m in (model, clean):
        outcome(m, x)
        acceler8.step(m)
    poisoned = x.clone()
    poisoned[3, 4] = bad
    assert outcome(model, poisoned)["y"].isnan().any()
    acceler8.step(model)
    assert torch.tensor(history(model)).isfinite().all()
    assert torch.tensor(in_use(model)).isfinite().all()
    want, got = outcome(clean, x), outcome(model, x)
    assert_equal(got, want)


def test_a_layer_that_did_not_run_keeps_its_past(device):
    model = delayed(device)
    x = batch(device=device)
    outcome(model, x)
    acceler8.step(model)
    before = history(model, "down")
    model.up(x).sum().backward()
    acceler8.step(model)
    assert history(model, "down") == before
    assert history(model) != before


# --------------------------------------------------------------------------------------------- moves, casts, state_dict


def test_casting_the_model_does_not_round_the_state():
    model = delayed()
    train_once(model)
    state = acceler8.fp8_state_dict(model)
    assert any(v.bfloat16().float().ne(v).any() for v in state.values())
    for move in (model.bfloat16, model.half, model.float, model.double, model.float):
        move()
        assert_equal(acceler8.fp8_state_dict(model), state)


def train_once(model: nn.Module) -> None:
    outcome(model, batch(device=str(next(model.parameters()).device)))
    acceler8.step(model)


@pytest.mark.requires(gpus=1)
def test_the_state_moves_with_the_model():
    model = delayed()
    train_once(model)
    state = acceler8.fp8_state_dict(model)
    model.cuda()
    assert all(v.device.type == "cuda" for name, v in acceler8.fp8_state_dict(model).items() if name != "steps")
    train_once(model)
    model.cpu()
    assert_equal({n: v[3] for n, v in acceler8.fp8_state_dict(model).items() if v.ndim},
                 {n: v[4] for n, v in state.items() if v.ndim})  # fmt: skip
    train_once(model)


@pytest.mark.parametrize("recipe", RECIPES)
def test_state_dict_has_the_plain_models_keys_and_no_others(recipe):
    model = converted(recipe)
    train_once(model)
    assert list(model.state_dict()) == list(Mlp().state_dict())
    assert list(dict(model.named_buffers())) == []
    Mlp().load_state_dict(model.state_dict())
    model.load_state_dict(Mlp(3).state_dict())


# ------------------------------------------------------------------------------------------------------ fp8_state_dict


@pytest.mark.parametrize("recipe", RECIPES)
def test_round_trip_resumes_bit_for_bit(recipe, device):
    model = converted(recipe, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    acceler8.attach(model, optimizer)
    train(model, 3, optimizer=optimizer, device=device)
    weights, state = {n: v.clone() for n, v in model.state_dict().items()}, acceler8.fp8_state_dict(model)
    assert bool(state) == (recipe == "delayed")
    want = train(model, 2, optimizer=optimizer, device=device)
    again = converted(recipe, seed=9, device=device)
    again.load_state_dict(weights)
    acceler8.load_fp8_state_dict(again, state)
    assert_equal(acceler8.fp8_state_dict(again), state)
    other = torch.optim.SGD(again.parameters(), lr=0.1)
    acceler8.attach(again, other)
    assert train(again, 2, optimizer=other, device=device) == want


def test_the_state_is_a_copy_by_layer_name():
    model = delayed()
    train_once(model)
    state = acceler8.fp8_state_dict(model)
    assert {name: (tuple(v.shape), v.dtype) for name, v in state.items()} == {
        "up.amax": ((2 + LEN, 3), torch.float32),
        "down.amax": ((2 + LEN, 3), torch.float32),
        "steps": ((), torch.int64),
    }
    kept = {name: v.clone() for name, v in state.items()}
    train_once(model)
    assert_equal(state, kept)
    assert all(v.is_contiguous() and v.untyped_storage().nbytes() == v.nbytes for v in state.values())


def test_an_empty_state_leaves_fresh_histories():
    model = delayed()
    with pytest.raises(PlanError, match="it would go on with fresh ones"):
        acceler8.load_fp8_state_dict(model, {})
    acceler8.load_fp8_state_dict(model, {}, strict=False)
    assert history(model) == [[0.0] * 3] * LEN


def break_(state: dict[str, torch.Tensor], **changes: torch.Tensor | None) -> dict[str, torch.Tensor]:
    return {name: v for name, v in {**state, **changes}.items() if v is not None}


def test_a_state_of_another_plan_is_refused_and_changes_nothing():
    model = delayed()
    train_once(model)
    state = acceler8.fp8_state_dict(model)
    larger = {name: v + 1 for name, v in state.items()}
    wrong = [
        (
            {**break_(larger, **{"down.amax": None}), "downn.amax": state["down.amax"]},
            "differ in 2 entries, such as 'down",
        ),
        (break_(larger, **{"up.amax": None}), "differ in 1 entries, such as 'up.amax'"),
        (break_(larger, steps=None), "such as 'steps'"),
        (
            break_(larger, **{"down.amax": torch.zeros(9, 3)}),
            r"'down.amax' is torch.float32 \(9, 3\); allowed: .* \(6, 3\)",
        ),
        (break_(larger, **{"down.amax": state["down.amax"].bfloat16()}), "'down.amax' is torch.bfloat16"),
    ]
    for bad, message in wrong:
        with pytest.raises(PlanError, match=message):
            acceler8.load_fp8_state_dict(model, bad)
        assert_equal(acceler8.fp8_state_dict(model), state)
    with pytest.raises(PlanError, match="the model's recipe keeps none; convert it with the recipe that was saved"):
        acceler8.load_fp8_state_dict(converted("rowwise"), state)


def test_loading_drops_kept_codes(device):
    """Scales changed, so codes did, though no weight moved."""
    model, other = delayed(device), delayed(device)
    x = batch(device=device)
    outcome(other, 3 * x)
    with torch.no_grad():
        other.up.weight.data.mul_(3)
    outcome(other, x)
    acceler8.step(other)
    with acceler8.window(model):
        outcome(model, x)
        acceler8.load_fp8_state_dict(model, acceler8.fp8_state_dict(other))
        got = outcome(model, x)
    assert_equal(got, outcome(model, x))
    assert not any(layer._acceler8_layer.codes.live() for _, layer in fp8_layers(model))


def test_state_is_found_behind_wrappers():
    model = delayed()
    assert state_of(nn.ModuleDict({"inner": nn.Sequential(model)})) is state_of(model)
