"""The cache of weight codes by itself."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from acceler8.formats import E4M3
from acceler8.functional import WeightCodes
from acceler8.kernels import Quantized, quantize
from acceler8.scaling import ROWWISE


def made(w: torch.Tensor) -> Quantized:
    codes, _, _ = quantize(w.detach(), E4M3, None, ROWWISE)
    assert codes is not None
    return codes


def holding(w: torch.Tensor) -> WeightCodes:
    codes = WeightCodes()
    codes.open()
    codes.follow(w)
    codes.put("rows", made(w))
    return codes


@pytest.fixture
def w(make_generator) -> torch.Tensor:
    return torch.randn(16, 32, generator=make_generator()).requires_grad_()


def test_nothing_is_kept_without_a_window(w):
    codes = WeightCodes()
    codes.follow(w)
    codes.put("rows", made(w))
    assert codes.get("rows") is None
    assert codes.live() == {}


def test_kept_by_orientation_until_closed(w):
    codes = holding(w)
    codes.follow(w)
    assert codes.get("rows") is codes.live()["rows"]
    assert codes.get("cols") is None
    codes.close()
    assert codes.get("rows") is None
    codes.open()
    assert codes.get("rows") is None


def test_drop_leaves_the_window_open(w):
    codes = holding(w)
    codes.drop()
    assert codes.is_open
    assert codes.get("rows") is None


CHANGES = {
    "in place": lambda w: w.detach().mul_(2),
    "another tensor": lambda w: w.detach().clone(),
    "a view of other elements": lambda w: torch.cat([w, w]).detach()[16:],
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_weight_or_a_counted_change_drops(w, change):
    codes = holding(w)
    codes.follow(w)
    assert codes.live()
    now = CHANGES[change](w)
    codes.follow(now)
    assert codes.live() == {}


def test_data_assignment_drops(w):
    codes = holding(w)
    w.data = torch.ones(16, 32)
    codes.follow(w)
    assert codes.live() == {}


def test_a_parameter_object_of_the_same_memory_keeps(w):
    """FSDP2 and functional_call wrap one memory in several tensors."""
    codes = holding(w)
    codes.follow(w.detach())
    assert codes.live()


def test_inference_mode_and_inference_tensors(w):
    codes = WeightCodes()
    codes.open()
    with torch.inference_mode():
        codes.follow(w)
        codes.put("rows", made(w))
        frozen = torch.ones(16, 32)
    assert codes.live() == {}
    codes.follow(frozen)  # has no version counter
    codes.put("rows", made(frozen))
    codes.follow(frozen)
    assert codes.live()


@pytest.mark.parametrize("twin_of", [copy.copy, copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))])
def test_copies_start_empty_and_closed(w, twin_of):
    codes = holding(w)
    twin = twin_of(codes)
    assert not twin.is_open
    assert twin.live() == {}
    assert codes.live()


def test_what_a_plain_weight_stands_for(w):
    codes = WeightCodes()
    assert codes.dtype_of(w.bfloat16()) is torch.bfloat16
    assert codes.in_high_precision(w) is w
