"""A backend's hook at step boundaries: each copy of a model has its own, and no layer reaches the model through it."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

import acceler8
from acceler8.backends import registry
from acceler8.backends.native import NativeBackend

LAYERS, WIDTH = 6, 64


class Counting(NativeBackend):
    """The native backend, with a hook that counts on the model."""

    name = "counting"

    def on_step(self, model: nn.Module) -> None:
        model.__dict__["steps"] = model.__dict__.get("steps", 0) + 1


@pytest.fixture(autouse=True)
def counting(monkeypatch):
    monkeypatch.setitem(registry._made, "counting", Counting())


def converted(clock: acceler8.StepClock | None = None, backend: str = "counting") -> nn.Module:
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    return acceler8.convert(model, acceler8.plan(model, "delayed", backend), clock=clock)


def steps(model: nn.Module) -> int:
    return model.__dict__.get("steps", 0)


def saved(module: object) -> bytes:
    file = io.BytesIO()
    torch.save(module, file)
    return file.getvalue()


def loaded(file: bytes) -> nn.Module:
    return torch.load(io.BytesIO(file), weights_only=False)


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": lambda model: loaded(saved(model)),
    "clock first": lambda model: copy.deepcopy((model._acceler8_model.clock, model))[1],
    "clock first, pickled": lambda model: pickle.loads(pickle.dumps((model._acceler8_model.clock, model)))[1],
    "wrapped": lambda model: copy.deepcopy(nn.Sequential(model))[0],
    "of a copy": lambda model: pickle.loads(pickle.dumps(copy.deepcopy(model))),
}


@pytest.mark.parametrize("route", COPIES)
def test_a_copy_has_its_own(route):
    model = converted()
    acceler8.step(model)
    twin = COPIES[route](model)
    for _ in range(2):
        acceler8.step(twin)
    assert (steps(model), steps(twin)) == (1, 3)
    acceler8.step(model)
    assert (steps(model), steps(twin)) == (2, 3)


def test_one_layer_carries_no_other():
    model = converted()
    twin = copy.deepcopy(model[0])
    gc.collect()
    of_layers = [p for p in gc.get_objects() if type(p) is nn.Parameter and p.shape == (WIDTH, WIDTH)]
    assert sum(torch.equal(p, q.weight) for q in model for p in of_layers) == LAYERS + 1
    assert torch.equal(twin.weight, model[0].weight)
    assert len(saved(model[0])) < len(saved(converted(backend="native")[0])) + WIDTH * WIDTH
    twin._acceler8_layer.clock.tick()  # there is no model to call the hook on
    assert steps(model) == 0


def test_a_shared_clock_keeps_no_model_alive():
    clock = acceler8.StepClock()
    model, other = converted(clock), converted(clock)
    alive = weakref.ref(model)
    clock.tick()
    assert (steps(model), steps(other)) == (1, 1)
    del model
    gc.collect()
    assert alive() is None
    clock.tick()
    assert steps(other) == 2


def test_restoring_ends_it():
    clock = acceler8.StepClock()
    model = converted(clock)
    clock.tick()
    acceler8.restore(model)
    clock.tick()
    assert steps(model) == 1
    assert set(model.__dict__) == {*nn.Sequential().__dict__, "steps"}
