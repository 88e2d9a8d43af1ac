"""Bytes in collectives: counted by hand, for each of them, in a group of eight that only pretends."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from acceler8.bench.wire import CountBytes, bytes_sent

P = 8


@pytest.fixture(scope="module", autouse=True)
def _eight_processes():
    dist.init_process_group("fake", rank=0, world_size=P, store=FakeStore())
    yield
    dist.destroy_process_group()


# renamed in torch 2.13
gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
functional_gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
functional_scatter = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor
FLOATS = torch.zeros(64)  # 256 bytes
HALVES = torch.zeros(64, dtype=torch.bfloat16)
BYTES = torch.zeros(64, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda: dist.all_reduce(FLOATS), {"all_reduce": 2 * 256 * 7 // 8}),
        (lambda: dist.all_reduce(HALVES), {"all_reduce": 2 * 128 * 7 // 8}),
        (lambda: gather(torch.empty(P * 64, dtype=torch.uint8), BYTES), {"all_gather": 7 * 64}),
        (lambda: dist.all_gather([torch.empty(64) for _ in range(P)], FLOATS), {"all_gather": 7 * 256}),
        (lambda: scatter(torch.empty(8), FLOATS), {"reduce_scatter": 256 * 7 // 8}),
        (lambda: dist.reduce_scatter(torch.empty(8), list(FLOATS.chunk(P))), {"reduce_scatter": 256 * 7 // 8}),
        (lambda: dist.all_to_all_single(torch.empty_like(BYTES), BYTES), {"all_to_all": 64 * 7 // 8}),
        (lambda: dist.broadcast(FLOATS, 0), {"broadcast": 256 * 7 // 8}),
        (lambda: functional.all_reduce(FLOATS, "sum", dist.group.WORLD), {"all_reduce": 2 * 256 * 7 // 8}),
        (lambda: functional_gather(FLOATS, 0, dist.group.WORLD), {"all_gather": 7 * 256}),
        (lambda: functional_scatter(FLOATS, "sum", 0, dist.group.WORLD), {"reduce_scatter": 224}),
        (dist.barrier, {}),
    ],
)
def test_each_collective(call, expected):
    assert bytes_sent(call) == expected


def test_a_smaller_group_sends_less():
    half = dist.new_group(list(range(2)))
    assert bytes_sent(lambda: dist.all_reduce(FLOATS, group=half)) == {"all_reduce": 256}


def test_fsdp2_in_forward_and_backward():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(2)))
    for layer in model:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    with CountBytes() as counted:
        model(torch.ones(2, 16)).sum().backward()
    weights = 2 * 256
    assert counted.dtypes == {
        ("all_gather", torch.bfloat16): 2 * 2 * weights * 7 // 8,  # forward and backward
        ("reduce_scatter", torch.float32): 4 * weights * 7 // 8,
    }
