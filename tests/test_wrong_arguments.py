"""What people pass by mistake is answered by a typed error that says what is allowed, not by a bug's traceback."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import acceler8
from acceler8 import Accelerator
from acceler8.errors import Acceler8Error
from acceler8.optim import AdamW, parameter_groups


def model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))


def converted() -> nn.Module:
    return acceler8.convert(model(), "rowwise")


CALLS = {
    "plan a number": lambda: acceler8.plan(3),
    "plan parameters": lambda: acceler8.plan(model().parameters()),
    "skip": lambda: acceler8.plan(model(), skip=3),
    "skip holds a number": lambda: acceler8.plan(model(), skip=[3]),
    "backend": lambda: acceler8.plan(model(), backend=3),
    "gpu": lambda: acceler8.plan(model(), gpu=3, tokens=64),
    "costs": lambda: acceler8.plan(model(), costs=3, tokens=64),
    "strategy": lambda: acceler8.plan(model(), strategy=3),
    "convert a number": lambda: acceler8.convert(3),
    "verify a number": lambda: acceler8.verify(3),
    "restore a number": lambda: acceler8.restore(3),
    "attach a number": lambda: acceler8.attach(converted(), 3),
    "attach a list": lambda: acceler8.attach(converted(), [torch.optim.SGD(model().parameters())]),
    "groups of parameters": lambda: parameter_groups(model().parameters()),
    "moments": lambda: AdamW(model().parameters(), moments=3),
    "accelerator's skip": lambda: Accelerator(mixed_precision="fp8", skip=3, cpu=True),
    "accelerator's backend": lambda: Accelerator(mixed_precision="fp8", backend=3, cpu=True),
    "accelerator's device": lambda: Accelerator(device=3.5),
    "a device that is none": lambda: Accelerator(device="gpu"),
    "accelerator's config_file": lambda: Accelerator(config_file=3, cpu=True),
    "accelerator's rng_types": lambda: Accelerator(rng_types=3, cpu=True),
    "accelerator's fsdp_plugin": lambda: Accelerator(fsdp_plugin=3, cpu=True),
    "accelerator's deepspeed_plugin": lambda: Accelerator(deepspeed_plugin="ds.json", cpu=True),
    "accelerator's dynamo_plugin": lambda: Accelerator(dynamo_plugin="inductor", cpu=True),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_wrong_argument_is_answered(call):
    with pytest.raises(Acceler8Error) as caught:
        call()
    said = str(caught.value)
    assert "allowed" in said or "valid:" in said


def test_one_kind_of_random_state_may_be_a_word():
    assert Accelerator(rng_types="torch", cpu=True).rng_types == ("torch",)
