"""The native backend by itself: what it refuses, class change behind FSDP2's mixin, its notes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from acceler8 import backends, recipes
from acceler8.backends.native import plain_type, swap_class
from acceler8.nn import Fp8Linear

ROWWISE = recipes.get("rowwise")


def test_refusals():
    native = backends.get("native")
    assert native.refuses(nn.Linear(16, 16), ROWWISE) is None
    assert native.refuses(nn.LayerNorm(16), ROWWISE) == "weight has 1 dimensions, not 2"
    assert native.refuses(nn.ReLU(), ROWWISE) == "no weight"
    assert native.refuses(nn.Linear(16, 16, device="meta"), ROWWISE) is None


class FSDPModule:
    """Stands for torch.distributed.fsdp.FSDPModule, which fully_shard puts in front of a module's class."""


def sharded(layer: nn.Linear) -> nn.Linear:
    """What fully_shard does to a class (torch 2.13, _fully_shard.py): a new one, mixin first."""
    layer.__class__ = type("FSDPLinear", (FSDPModule, type(layer)), {"__deepcopy__": lambda self, memo: None})
    return layer


def test_the_class_of_a_sharded_layer_is_changed_behind_the_mixin():
    layer = sharded(nn.Linear(16, 32))
    assert plain_type(layer) is nn.Linear
    swap_class(layer, nn.Linear, Fp8Linear)
    assert isinstance(layer, Fp8Linear)
    assert isinstance(layer, FSDPModule)
    assert type(layer).__mro__.index(FSDPModule) < type(layer).__mro__.index(Fp8Linear)
    assert type(layer).__name__ == "FSDPFp8Linear"
    assert "__deepcopy__" in vars(type(layer))
    swap_class(layer, Fp8Linear, nn.Linear)
    assert type(layer).__bases__ == (FSDPModule, nn.Linear)


def test_a_class_that_only_looks_sharded_is_a_subclass():
    class FSDPish(nn.Linear):
        pass

    assert plain_type(FSDPish(16, 16)) is FSDPish


def test_emulation_is_said():
    native = backends.get("native")
    (note,) = native.notes(ROWWISE, torch.device("cpu"))
    assert note.startswith("emulated: the CPU has no rowwise FP8 GEMM")
    assert native.notes(recipes.get("activations_only"), torch.device("cpu")) == []


@pytest.mark.requires(sm=90)
def test_hopper_emulates_mx_only():
    native, device = backends.get("native"), torch.device("cuda")
    for name in ("tensorwise", "rowwise", "blockwise", "delayed"):
        assert native.notes(recipes.get(name), device) == []
    if torch.cuda.get_device_capability() == (9, 0):
        (note,) = native.notes(recipes.get("mxfp8"), device)
        assert "(sm_90) has no mx1x32 FP8 GEMM" in note
