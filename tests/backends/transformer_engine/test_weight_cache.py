"""When a weight's codes are made anew: whatever PyTorch counts, every step, and gradients that came on."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from acceler8.backends.transformer_engine.weight_cache import WeightCache


@pytest.fixture
def opened() -> tuple[WeightCache, nn.Parameter, dict[str, object]]:
    """An open window that has codes of a weight."""
    cache, weight, kept = WeightCache(), nn.Parameter(torch.randn(4, 4)), {}
    cache.open()
    assert cache.is_first(weight, kept) is True
    kept["weight"] = object()
    assert cache.is_first(weight, kept) is False
    return cache, weight, kept


def test_a_closed_window_keeps_nothing():
    cache, weight, kept = WeightCache(), nn.Parameter(torch.randn(4, 4)), {"weight": object()}
    assert cache.is_first(weight, kept) is None
    assert not kept


def test_codes_are_used_again_until_the_step(opened):
    cache, weight, kept = opened
    before = kept["weight"]
    assert cache.is_first(weight, kept) is False
    assert kept["weight"] is before
    cache.drop()
    assert cache.is_open
    assert cache.is_first(weight, kept) is True
    assert not kept  # a backward that is pending has its own reference


def assigned(weight):
    weight.data = torch.zeros(4, 4)


def in_place(weight):
    with torch.no_grad():
        weight.mul_(2)


def frozen(weight):
    weight.requires_grad_(False)


@pytest.mark.parametrize("change", [assigned, in_place, frozen])
def test_changes_that_pytorch_counts_are_seen(opened, change):
    cache, weight, kept = opened
    change(weight)
    assert cache.is_first(weight, kept) is True


def test_another_weight_and_gradients_that_came_on(opened):
    cache, weight, kept = opened
    assert cache.is_first(nn.Parameter(weight.detach().clone()), kept) is True
    with torch.no_grad():
        assert cache.is_first(weight, kept) is True  # what it keeps lacks the transposed codes
    assert cache.is_first(weight, kept) is True
    with torch.inference_mode():
        assert cache.is_first(weight, kept) is None


def test_pause_and_close(opened):
    cache, weight, kept = opened
    cache.pause()
    assert cache.is_first(weight, kept) is None
    assert kept
    cache.open()
    assert cache.is_first(weight, kept) is False
    cache.close()
    assert cache.is_first(weight, kept) is None
    assert not kept
    assert not copy.deepcopy(opened[0]).is_open
