"""Delayed scaling by the step clock: the numbers of TransformerEngine's own loop, and what its own loop gets wrong."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import acceler8
from acceler8 import backends, recipes
from acceler8.backends.transformer_engine import library
from acceler8.backends.transformer_engine.region import Region, state_manager
from acceler8.errors import PlanError, VerifyError
from tests.backends.transformer_engine.gpu import MARKS, Pair, convert, gaussian

pytestmark = MARKS
STEPS = 6


def delayed(**fields: object) -> object:
    return recipes.get("delayed", **{"amax_history_len": 4, **fields})


def raw_twin(model: Pair) -> nn.Module:
    """The same layers by TransformerEngine's own classes, with copies of the weights."""
    te = library.load()
    twin = Pair()
    for name in ("up", "down"):
        layer = getattr(model, name)
        own = te.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, params_dtype=torch.bfloat16)
        with torch.no_grad():
            for own_p, p in zip(own.parameters(), layer.parameters(), strict=True):
                own_p.copy_(p)
        setattr(twin, name, own)
    return twin


def raw_context(**fields: object) -> object:
    from transformer_engine.common import recipe as te_recipe

    from acceler8.backends.transformer_engine.region import autocast

    return autocast(te_recipe.DelayedScaling(**{"amax_history_len": 4, **fields}))


@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize("margin", [0, 2])
def test_training_is_that_of_the_raw_library_bit_for_bit(algo, margin):
    model = Pair()
    raw = raw_twin(model)
    convert(model, delayed(amax_compute_algo=algo, margin=margin))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (model, raw)]
    acceler8.attach(model, optimizers[0])
    for step in range(STEPS):
        x, dy = gaussian(64, 256, seed=step, std=1 + step % 3), gaussian(64, 256, seed=100 + step, std=0.01)
        y = model(x)
        with raw_context(amax_compute_algo=algo, margin=margin):
            expected = raw(x)
        assert torch.equal(y, expected), step
        y.backward(dy)
        expected.backward(dy)
        for p, q in zip(model.parameters(), raw.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad), step
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name in ("up", "down"):
        for side in ("scaling_fwd", "scaling_bwd"):
            ours, theirs = getattr(model, name).fp8_meta[side], getattr(raw, name).fp8_meta[side]
            assert torch.equal(ours.scale, theirs.scale)
            assert torch.equal(ours.amax_history, theirs.amax_history)
            assert not torch.equal(ours.scale[:1], torch.ones_like(ours.scale[:1]))


def scales_of_x(model: nn.Module) -> float:
    return float(model.up.fp8_meta["scaling_fwd"].scale[0])


def run(model: nn.Module, x: Tensor) -> None:
    """One step without an optimizer."""
    model(x).float().square().mean().backward()
    acceler8.step(model)


def test_margin_algorithm_and_history_arrive():
    loud, quiet = gaussian(64, 256, std=8), gaussian(64, 256)
    amax = {id(x): float(x.abs().max()) for x in (loud, quiet)}
    found = {}
    for name, fields in {
        "max": {"amax_compute_algo": "max"},
        "recent": {"amax_compute_algo": "most_recent"},
        "margin": {"amax_compute_algo": "most_recent", "margin": 2},
        "short": {"amax_compute_algo": "max", "amax_history_len": 2},
    }.items():
        model = convert(Pair(), delayed(**fields))
        for x in (loud, quiet, quiet, quiet):
            run(model, x)
        found[name] = scales_of_x(model)
    assert found["max"] == pytest.approx(448 / amax[id(loud)])
    assert found["recent"] == pytest.approx(448 / amax[id(quiet)])
    assert found["margin"] == pytest.approx(448 / amax[id(quiet)] / 4)
    assert found["short"] == pytest.approx(448 / amax[id(quiet)])


def test_interval_is_counted_in_steps():
    model = convert(Pair(), delayed(interval=3, amax_compute_algo="most_recent"))
    seen = []
    for step in range(6):
        run(model, gaussian(64, 256, seed=step, std=step + 1))
        seen.append(scales_of_x(model))
    assert seen[0] == seen[1] == 1.0
    assert seen[2] == seen[3] == seen[4] != 1.0
    assert seen[5] not in seen[:5]


def histories(model: nn.Module) -> dict[str, Tensor]:
    return backends.get("te").state(model)


def test_neither_recomputation_nor_repetition_nor_evaluation_moves_them():
    x = gaussian(64, 256)
    found = []
    for variant in ("plain", "recomputed", "twice", "evaluated"):
        model = convert(Pair(), delayed())
        for _ in range(3):
            leaf = x.clone().requires_grad_()
            y = checkpoint(model, leaf, use_reentrant=False) if variant == "recomputed" else model(leaf)
            y.float().square().mean().backward()
            if variant == "twice":
                model(leaf)
            if variant == "evaluated":
                model.eval()
                with torch.no_grad(), acceler8.evaluate_in_fp8(model):
                    model(100 * x)
                model.train()
            acceler8.step(model)
        found.append(histories(model))
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        assert all(torch.equal(found[0][name], other[name]) for name in other)


def test_a_layer_by_itself_keeps_its_history():
    model = convert(Pair(), delayed())
    x = gaussian(64, 256)
    for _ in range(2):
        model.up(x).float().square().mean().backward()
        acceler8.step(model)
    assert scales_of_x(model) == pytest.approx(448 / float(x.abs().max()))
    assert torch.equal(model.down.fp8_meta["scaling_fwd"].scale, torch.ones(3, device="cuda"))


def test_resuming_goes_on_as_the_other_would_have():
    model = convert(Pair(), delayed())
    for step in range(3):
        run(model, gaussian(64, 256, seed=step))
    state = histories(model)
    assert {name: tuple(t.shape) for name, t in state.items() if name.startswith("up")} == {
        "up.amax_history_fwd": (4, 3),
        "up.amax_history_bwd": (4, 2),
        "up.scale_fwd": (3,),
        "up.scale_bwd": (2,),
    }
    resumed = convert(Pair(), delayed())
    backends.get("te").load_state(resumed, state)
    model.zero_grad()
    for step in range(3, 6):
        run(model, gaussian(64, 256, seed=step))
        run(resumed, gaussian(64, 256, seed=step))
        assert torch.equal(model.up.weight.grad, resumed.up.weight.grad)
    for name, tensor in histories(model).items():
        assert torch.equal(tensor, histories(resumed)[name]), name
    with pytest.raises(
        PlanError, match=r"FP8 state 'up.amax_history_fwd' is torch.float32 \(4, 3\); allowed: .* \(8, 3\)"
    ):
        backends.get("te").load_state(convert(Pair(), delayed(amax_history_len=8)), state)
    with pytest.raises(PlanError, match="differ in 1 entries, such as 'steps'"):
        backends.get("te").load_state(resumed, {k: v for k, v in state.items() if k != "steps"})


def test_a_copy_goes_on_with_the_histories():
    model = convert(Pair(), delayed())
    for step in range(3):
        run(model, gaussian(64, 256, seed=step))
    model.zero_grad()
    twin = copy.deepcopy(model)
    for step in range(3, 6):
        for m in (model, twin):
            run(m, gaussian(64, 256, seed=step))
    assert torch.equal(model.up.weight.grad, twin.up.weight.grad)
    assert all(torch.equal(t, histories(twin)[name]) for name, t in histories(model).items())
    assert model.up.fp8_meta["scaling_fwd"].scale is not twin.up.fp8_meta["scaling_fwd"].scale


def test_models_do_not_move_each_others_scales():
    one, other = convert(Pair(), delayed()), convert(Pair(), delayed())
    alone = convert(Pair(), delayed())
    x = gaussian(64, 256)
    for _ in range(3):
        other(x).float().square().mean().backward()
        run(one, 7 * x)
        run(one, 9 * x)
        acceler8.step(other)
        run(alone, x)
    assert scales_of_x(other) == scales_of_x(alone) != scales_of_x(one)


def test_raw_modules_beside_it_are_left_to_themselves():
    """Layers' contexts end all the time, which is when TransformerEngine updates what is in its global buffers."""
    model = Pair()
    raw, reference = raw_twin(model), raw_twin(model)
    convert(model, delayed())
    alone = convert(Pair(), delayed())
    x = gaussian(64, 256)
    for _ in range(3):
        for twin, beside in ((reference, False), (raw, True)):
            with raw_context():
                y = twin(x)
                if beside:
                    model(x)
            y.float().square().mean().backward()
        with raw_context():
            y = model(x)  # a context of the script's own around it ends before the step does
        y.float().square().mean().backward()
        acceler8.step(model)
        run(alone, x)
    assert all(torch.equal(t, histories(alone)[name]) for name, t in histories(model).items())
    assert_same_scales(raw, reference)


def assert_same_scales(raw: nn.Module, reference: nn.Module) -> None:
    for name in ("up", "down"):
        for side in ("scaling_fwd", "scaling_bwd"):
            ours, theirs = getattr(raw, name).fp8_meta[side], getattr(reference, name).fp8_meta[side]
            assert torch.equal(ours.scale, theirs.scale)
            assert torch.equal(ours.amax_history, theirs.amax_history)


def test_raw_modules_that_ran_before_are_left_to_themselves_too():
    """Their amaxes wait in the global buffers while a model is converted, copied and run."""
    x, model = gaussian(64, 256), Pair()
    raw = raw_twin(model)
    with torch.no_grad(), raw_context():  # without gradients its end updates nothing
        raw(3 * x)
    waiting = raw.up.fp8_meta["scaling_fwd"].amax_history[0].clone()
    assert waiting[0] == 3 * x.abs().max()
    convert(model, delayed())
    run(copy.deepcopy(model), x)
    run(model, x)
    older = Region(model.up._acceler8_layer.te_recipe)
    older._inside = None  # as in versions that give the state inside of a context to nobody
    with older:
        pass
    assert torch.equal(raw.up.fp8_meta["scaling_fwd"].amax_history[0], waiting)
    assert torch.equal(raw.up.fp8_meta["scaling_fwd"].scale, torch.ones(3, device="cuda"))
    with raw_context():
        pass
    assert not torch.equal(raw.up.fp8_meta["scaling_fwd"].scale, torch.ones(3, device="cuda"))


def test_no_layers_backward_updates_what_is_global(monkeypatch):
    """Each would, as the first module of its context, which would cost as much as all layers for every layer."""
    calls = []
    monkeypatch.setattr(state_manager(), "reduce_and_update_fp8_tensors", lambda forward=True: calls.append(forward))
    model = convert(Pair(), delayed())
    model(gaussian(64, 256)).float().square().mean().backward()
    assert False not in calls


def test_a_window_keeps_codes_and_scale_together():
    model, alone = convert(Pair(), delayed()), convert(Pair(), delayed())
    for step in range(3):
        with acceler8.window(model):
            for micro in range(2):
                x = gaussian(64, 256, seed=10 * step + micro)
                losses = [m(x).float().square().mean() for m in (model, alone)]
                assert torch.equal(*losses)
                for loss in losses:
                    loss.backward()
        acceler8.step(model)
        acceler8.step(alone)
    assert all(torch.equal(t, histories(alone)[name]) for name, t in histories(model).items())


def test_verify_misses_step_boundaries():
    model = convert(Pair(), delayed())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(gaussian(64, 256)).float().square().mean().backward()
        optimizer.step()

    with pytest.raises(VerifyError, match="marked no step boundary, so delayed scaling keeps no history"):
        acceler8.verify(model, optimizer, step=step)
    acceler8.attach(model, optimizer)
    acceler8.verify(model, optimizer, step=step)


def test_an_evaluation_without_tokens_comes_first():
    model = convert(Pair(), delayed()).eval()
    with torch.no_grad(), acceler8.evaluate_in_fp8(model):
        assert model(gaussian(0, 256)).shape == (0, 256)


def test_steps_that_nobody_marks_are_warned_of(caplog):
    model = convert(Pair(), delayed())
    x = gaussian(16, 256)
    for _ in range(260):
        model.up(x)
    assert "no step boundary was marked, so no amax history exists" in caplog.text


def test_one_layer_carries_no_other(monkeypatch):
    copied, copying = [], nn.Parameter.__deepcopy__
    monkeypatch.setattr(nn.Parameter, "__deepcopy__", lambda p, memo: copied.append(p.shape) or copying(p, memo))
    model = convert(Pair(), delayed())
    for _ in range(2):
        run(model, gaussian(64, 256))
    twin, up, gone = copy.deepcopy(model.up), model.up, weakref.ref(model.down)
    assert copied == [up.weight.shape]
    assert all(torch.equal(p, q) for p, q in zip(twin.parameters(), up.parameters(), strict=True))
    del model
    gc.collect()
    assert gone() is None
