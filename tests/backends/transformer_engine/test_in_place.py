"""Taking over a class's attributes, and giving them back: any module can be a donor."""

from __future__ import annotations

import copy

import torch
from torch import nn

from acceler8.backends.transformer_engine.in_place import attributes_of, give_back, take_over
from acceler8.nn.class_change import clash


class Vendor(nn.Module):
    """Stands for any library's linear layer: attributes, a placeholder in place of a missing bias."""

    def __init__(self, width: int, *, bias: bool) -> None:
        super().__init__()
        self.in_features, self.out_features, self.meta = width, width, {"scale": 1}
        self.weight = nn.Parameter(torch.empty(width, width, device="meta"))
        self.register_parameter("bias", nn.Parameter(torch.empty(width, device="meta"))) if bias else None
        if not bias:
            self.__dict__["bias"] = torch.empty(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.__dict__["fp8_parameters"] = True
        return 2 * nn.functional.linear(x, self.weight, self._parameters["bias"])


class Taken(Vendor, nn.Linear):
    """What the module becomes."""


def test_the_module_stays_the_object_that_it_is():
    layer = nn.Linear(4, 4, bias=False)
    layer.note = "mine"
    calls = []
    layer.register_forward_hook(lambda *_: calls.append(1))
    weight, before = layer.weight, dict(layer.__dict__)
    parent = nn.Sequential(layer, nn.Linear(4, 4))
    parent[1].weight = weight
    x = torch.randn(3, 4)
    plain = layer(x)

    take_over(layer, Vendor(4, bias=False), nn.Linear, Taken)
    assert parent[0] is layer
    assert isinstance(layer, Vendor)
    assert isinstance(layer, nn.Linear)
    assert layer.weight is weight is parent[1].weight
    assert layer.bias is None  # not the placeholder
    assert layer.note == "mine"
    assert list(layer.state_dict()) == ["weight"]
    assert torch.equal(layer(x), 2 * plain)
    assert len(calls) == 2

    give_back(layer, Taken, nn.Linear)
    assert type(layer) is nn.Linear
    assert layer.__dict__.keys() == before.keys()
    assert all(layer.__dict__[name] is value for name, value in before.items())
    assert torch.equal(layer(x), plain)


def test_a_copy_can_be_given_back_too():
    layer = nn.Linear(4, 4)
    take_over(layer, Vendor(4, bias=True), nn.Linear, Taken)
    twin = copy.deepcopy(layer)
    give_back(twin, Taken, nn.Linear)
    assert type(twin) is nn.Linear
    assert isinstance(layer, Taken)


def test_attributes_that_would_be_lost_clash():
    layer, wanted = nn.Linear(4, 4), attributes_of(Vendor(4, bias=True))
    assert wanted == {"in_features": 4, "out_features": 4, "meta": {"scale": 1}}
    assert clash(layer, wanted, "Vendor") is None
    said = "its attribute 'meta' is one that Vendor needs for itself; rename yours"
    layer.meta = "mine"
    assert clash(layer, wanted, "Vendor") == said
    del layer.meta
    layer.register_buffer("meta", torch.zeros(1))
    assert clash(layer, wanted, "Vendor") == said
    assert "'in_features'" in str(clash(nn.Linear(8, 4), wanted, "Vendor"))
