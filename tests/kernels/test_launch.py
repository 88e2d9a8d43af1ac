"""What a launch does not look at again: plans, zeroed memory handed out once, operations past the dispatcher."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from acceler8.formats import E4M3
from acceler8.kernels import _launch, quantize, quantize_ref
from acceler8.kernels._launch import Plans
from acceler8.kernels._library import may_go_direct
from acceler8.scaling import GRANULARITIES, ROWWISE, TENSORWISE
from tests.kernels.support import assert_same, make

on_gpu = pytest.mark.requires(sm=89)
every = pytest.mark.parametrize("granularity", list(GRANULARITIES.values()), ids=str)


class Seen(TorchDispatchMode):
    """Names of the operations that reach the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Subclass(Tensor):
    pass


def test_whoever_watches_operations_sees_them():
    x = torch.ones(4, 16)
    assert may_go_direct(x)
    assert may_go_direct(torch.nn.Parameter(x))
    assert not may_go_direct(x.as_subclass(Subclass))
    with Seen():
        assert not may_go_direct(x)
    assert may_go_direct(x)
    seen: list[bool] = []

    def look(t: Tensor) -> Tensor:
        seen.append(may_go_direct(t))
        return t.sum()

    torch.func.grad(look)(x)
    assert seen == [False]


def test_a_compiled_cast_stays_an_operation():
    def cast(x: Tensor) -> Tensor:
        q, _, _ = quantize(x, E4M3, None, ROWWISE)
        assert q is not None
        return q.scale_inv

    graphs: list[str] = []

    def backend(graph, inputs):
        graphs.append(str(graph.graph))
        return graph.forward

    torch._dynamo.reset()
    torch.compile(cast, fullgraph=True, backend=backend)(torch.ones(4, 16))
    assert "acceler8.quantize" in graphs[0]


def test_plans_are_made_once_and_forgotten_when_there_are_too_many(monkeypatch):
    monkeypatch.setattr(Plans, "MOST", 3)
    plans: Plans[int] = Plans()
    made: list[int] = []

    def get(i: int) -> int:
        return plans.get((i,), lambda: made.append(i) or i)

    assert [get(i) for i in (0, 1, 1, 0, 2, 2)] == [0, 1, 1, 0, 2, 2]
    assert made == [0, 1, 2]
    assert [get(3), get(3), get(0)] == [3, 3, 0]
    assert made == [0, 1, 2, 3, 0]


@on_gpu
def test_zeros_are_handed_out_once(monkeypatch):
    monkeypatch.setattr(_launch._Zeros, "POOL", 64)
    zeros = _launch._Zeros()
    stream = torch.cuda.current_stream().cuda_stream
    other = torch.cuda.Stream().cuda_stream
    first, second = zeros.take(5, 0, stream), zeros.take(16, 0, stream)
    assert second - first == 4 * 8  # behind the first, at a multiple of 16 bytes
    elsewhere = zeros.take(5, 0, other)
    assert not first <= elsewhere < first + 4 * 64
    pools = [pool for pool, _ in zeros._pools.values()]
    for count in (43, 44, 1000):  # does not fit; does not fit; more than a pool
        assert zeros.take(count, 0, stream) % 16 == 0
        pools += [pool for pool, _ in zeros._pools.values()]
    assert all(not pool.any() for pool in pools)


@on_gpu
@every
def test_many_casts_use_up_many_pools(granularity, monkeypatch):
    """A pool that held an amax of before would make the scales too small."""
    monkeypatch.setattr(_launch._Zeros, "POOL", 1024)
    monkeypatch.setattr(_launch, "_zeros", _launch._Zeros())
    x = make("gaussian", 130, 272, torch.bfloat16)
    for factor in (8.0, 1.0, 4.0, 0.5, 2.0, 0.25):
        as_rows, as_cols, _ = quantize((x * factor).cuda(), E4M3, E4M3, granularity)
        assert_same(as_rows, *quantize_ref(x * factor, E4M3, granularity)[:2], factor)
        assert_same(as_cols, *quantize_ref(x.t() * factor, E4M3, granularity)[:2], factor)


@on_gpu
@every
def test_a_captured_graph_finds_its_own_amax_at_each_replay(granularity):
    x = make("gaussian", 130, 272, torch.bfloat16)
    still = x.cuda()
    quantize(still, E4M3, E4M3, granularity)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        as_rows, as_cols, _ = quantize(still, E4M3, E4M3, granularity)
    for factor in (8.0, 1.0, 0.25):
        still.copy_(x * factor)
        graph.replay()
        assert_same(as_rows, *quantize_ref(x * factor, E4M3, granularity)[:2], factor)
        assert_same(as_cols, *quantize_ref(x.t() * factor, E4M3, granularity)[:2], factor)


@on_gpu
def test_the_current_stream_is_used():
    x = make("gaussian", 1024, 4096, torch.bfloat16)
    expected = quantize_ref(x, E4M3, TENSORWISE)[:2]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        late = torch.empty_like(x, device="cuda")
        torch.cuda._sleep(50_000_000)  # another stream's cast would read what is not yet there
        late.copy_(x.pin_memory(), non_blocking=True)
        q, _, _ = quantize(late, E4M3, None, TENSORWISE)
    stream.synchronize()
    assert_same(q, *expected, "stream")
