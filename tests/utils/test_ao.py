"""torchao under Accelerate's names."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import acceler8
import acceler8.utils
import acceler8.utils.ao
from acceler8.accelerator import Accelerator
from acceler8.backends.torchao import library
from acceler8.errors import PlanError
from acceler8.utils import (
    AORecipeKwargs,
    filter_first_and_last_linear_layers,
    filter_linear_layers,
    find_first_last_linear_layers,
)

NAMES = (
    *("convert_model_to_fp8_ao", "filter_first_and_last_linear_layers", "filter_linear_layers"),
    *("find_first_last_linear_layers", "has_ao_layers"),
)
works = pytest.mark.skipif(library.unavailable() is not None, reason=f"torchao: {library.unavailable()}")


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 64), nn.Linear(64, 40), nn.Linear(40, 32), nn.Linear(32, 32))


@pytest.mark.parametrize("name", NAMES)
def test_the_names_are_there(name):
    assert getattr(acceler8.utils, name) is getattr(acceler8.utils.ao, name)
    assert name in acceler8.utils.__all__


def test_filters_are_accelerates():
    net = model()
    theirs = pytest.importorskip("accelerate.utils.ao")
    assert find_first_last_linear_layers(net) == theirs.find_first_last_linear_layers(net) == ("0", "4")
    assert find_first_last_linear_layers(nn.ReLU()) == theirs.find_first_last_linear_layers(nn.ReLU()) == (None, None)
    for name, layer in net.named_children():
        arguments = (layer, name, ["1"])
        assert filter_linear_layers(*arguments) is theirs.filter_linear_layers(*arguments)


def test_first_and_last_are_found_in_the_model():
    """Accelerate's looked for them inside the layer that it was given, and left none out."""
    net = model()
    kept = {name: filter_first_and_last_linear_layers(net, name) for name, _ in net.named_children()}
    assert kept == {"0": False, "1": True, "2": False, "3": False, "4": False}  # 40 is no multiple of 16
    with pytest.raises(PlanError, match="got Linear and the name '1'; allowed: the model and the name of one of its"):
        filter_first_and_last_linear_layers(net[1], "1")


@works
def test_a_model_is_converted_in_place():
    net = model()
    weights = [layer.weight for layer in net]
    assert not acceler8.utils.has_ao_layers(net)
    acceler8.utils.convert_model_to_fp8_ao(net)
    assert acceler8.utils.has_ao_layers(net)
    assert net[1].config == library.library().Float8LinearConfig()
    assert [type(layer) is nn.Linear for layer in net] == [True, False, True, True, True]
    assert all(layer.weight is weight for layer, weight in zip(net, weights, strict=True))
    acceler8.restore(net)
    assert not acceler8.utils.has_ao_layers(net)


@works
def test_the_raw_librarys_layers_are_seen_and_not_converted_twice():
    net = library.library().convert_to_float8_training(model(), module_filter_fn=lambda module, name: name == "1")
    assert acceler8.utils.has_ao_layers(net)
    reasons = {row.name: row.reason for row in acceler8.plan(net, backend="torchao").rows}
    assert reasons["1"] == "Float8Linear is a subclass of nn.Linear: its own forward would be lost"


@works
@pytest.mark.parametrize(
    ("chosen", "layers"),
    [
        (None, ["1"]),
        (filter_first_and_last_linear_layers, ["1"]),
        (lambda module, name: True, ["0", "1", "4"]),
        (functools.partial(filter_linear_layers, layers_to_filter=["1"]), ["0", "4"]),
    ],
)
def test_the_filter_decides(chosen, layers):
    net = model()
    acceler8.utils.convert_model_to_fp8_ao(net, module_filter_func=chosen)
    assert [name for name, layer in net.named_children() if type(layer) is not nn.Linear] == layers
    handler = AORecipeKwargs(module_filter_func=chosen)
    prepared = Accelerator("fp8", cpu=True, kwargs_handlers=[handler]).prepare(model())
    assert [name for name, layer in prepared.named_children() if type(layer) is not nn.Linear] == layers


def test_without_the_library_they_raise_import_errors(monkeypatch):
    monkeypatch.setattr(library, "unavailable", lambda: "torchao is not installed; pip install it")
    for call in (acceler8.utils.convert_model_to_fp8_ao, acceler8.utils.has_ao_layers):
        with pytest.raises(ImportError, match="needs torchao: torchao is not installed; pip install it"):
            call(model())
