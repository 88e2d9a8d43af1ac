"""Layers are checked before they are timed, on operands that all share, by replays where they can be captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from acceler8.bench import layers
from acceler8.bench.layers import Layer, Operands, layer_rows, linear, ready, worst_db
from acceler8.conversion.graphed_step import CudaGraphs
from acceler8.errors import PlanError

CPU = torch.device("cpu")
SHAPE = (32, 64, 48)
gpu = pytest.mark.requires(sm=90)


class Again:
    """Stands for CUDA graphs on a CPU: a replay does the work anew, into the results of the record."""

    def __init__(self) -> None:
        self.replays = 0

    def warm_up(self, function: Callable[[], Any]) -> Any:
        return function()

    def record(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        results = tuple(torch.zeros_like(t) for t in function())  # a capture runs nothing

        def replay() -> None:
            self.replays += 1
            for into, got in zip(results, function(), strict=True):
                into.copy_(got)

        return replay, results


class Refuses(Again):
    """A capture that fails as CUDA's does."""

    def __init__(self, error: type[RuntimeError] = RuntimeError) -> None:
        super().__init__()
        self._error = error

    def record(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        raise self._error("operation not permitted when stream is capturing")


def test_sqnr_by_hand():
    exact = torch.tensor([3.0, 4.0])
    assert layers.sqnr_db(torch.tensor([3.0, 4.5]), exact) == pytest.approx(20.0)
    assert layers.finite(layers.sqnr_db(exact, exact)) == 999.0
    assert layers.finite(layers.sqnr_db(torch.tensor([float("nan"), 0.0]), exact)) == -999.0


def test_a_layer_gives_result_and_gradients_of_the_shared_operands():
    operands = Operands(linear(SHAPE), CPU)
    plain, fp8 = Layer(operands, None), Layer(operands, "rowwise")
    assert plain.modules[0].weight is fp8.modules[0].weight
    y, dx, dw = plain.run()
    x, (dy,), w = operands.xs[0].double(), operands.dys[0], plain.modules[0].weight.double()
    for got, exact in ((y, x @ w.t()), (dx, dy.double() @ w), (dw, dy.double().t() @ x)):
        torch.testing.assert_close(got.double(), exact, rtol=2**-7, atol=2**-6)
    assert 26 < worst_db(fp8.run(), (y, dx, dw)) < 32  # one cast of each operand, not none
    assert operands.flops == 6 * 32 * 64 * 48


def test_a_layer_of_another_backend():
    pytest.importorskip("torchao")
    operands = Operands(linear(SHAPE), CPU)
    plain, other = Layer(operands, None), Layer(operands, "torchao:rowwise")
    assert plain.modules[0].weight is other.modules[0].weight
    assert type(other.modules[0]).__mro__[1].__name__ == "Float8Linear"
    assert 22 < worst_db(other.run(), plain.run()) < 32
    rows = {row.name: row for row in layers.layer_rows(linear(SHAPE), ["torchao:rowwise"], CPU, None, rounds=1)}
    assert rows["torchao:rowwise"].labels["group"] == "torchao"
    assert rows["torchao:rowwise"].ms is not None


def test_recipes_of_other_backends_are_checked():
    pytest.importorskip("torchao")
    assert layers.layer_recipes(CPU, ["rowwise", "torchao:rowwise"]) == ["rowwise", "torchao:rowwise"]
    assert not any(":" in name for name in layers.layer_recipes(CPU, None))
    with pytest.raises(PlanError, match="backend 'torchao' has no recipe delayed; allowed there: tensorwise, rowwise"):
        layers.layer_recipes(CPU, ["torchao:delayed"])
    with pytest.raises(PlanError, match="unknown backend 'torcha'; did you mean 'torchao'"):
        layers.layer_recipes(CPU, ["torcha:rowwise"])


def test_another_backend_that_cannot_be_captured_costs_the_others_nothing():
    pytest.importorskip("torchao")

    class Picky(Again):
        def record(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
            if type(function.__self__.modules[0]).__mro__[1].__name__ == "Float8Linear":
                raise RuntimeError("operation not permitted when stream is capturing")
            return super().record(function)

    rows = layers.timed_rows(linear(SHAPE), ["rowwise", "torchao:rowwise"], CPU, Picky(), rounds=1)
    assert [(row.status, row.ms is not None) for row in rows] == [("ok", True), ("ok", True), ("error", False)]
    assert "not captured as a CUDA graph" in rows[2].detail


def test_a_wrong_gradient_is_found():
    operands = Operands(linear(SHAPE), CPU)
    y, dx, dw = Layer(operands, None).run()
    assert worst_db((y, dx, dw), (y, dx, dw)) == 999.0
    assert worst_db((y, dx, dw * 1.25), (y, dx, dw)) < 18
    assert worst_db((y, dx * float("nan"), dw), (y, dx, dw)) == -999.0


def test_float32_weights_run_under_autocast():
    unit = layers.Unit(
        name="o", tokens=32, k=64, widths=(48,), label="", make=linear(SHAPE).make, weight_dtype=torch.float32
    )
    operands = Operands(unit, CPU)
    for recipe in (None, "rowwise"):
        y, dx, dw = Layer(operands, recipe).run()
        assert (y.dtype, dx.dtype, dw.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)


def test_each_copy_has_operands_of_its_own_and_runs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(layers, "_copies", lambda size, device: 3)
    operands = Operands(linear(SHAPE), CPU)
    layer = Layer(operands, "rowwise")
    assert len({x.data_ptr() for x in operands.xs}) == len({m.weight.data_ptr() for m in layer.modules}) == 3
    calls = []
    for number, module in enumerate(layer.modules):
        module.register_forward_hook(lambda *_, number=number: calls.append(number))
    layer.run()
    assert calls == [0, 1, 2]
    monkeypatch.setattr(layers.timing, "queued_ms", lambda works, *_, **__: dict.fromkeys(works, SIX))
    rows = layers.timed_rows(linear(SHAPE), ["rowwise"], CPU, Again(), rounds=1)
    assert [row.ms.median for row in rows] == [2.0, 2.0]  # of one copy


SIX = layers.timing.Spread.of([6.0])


def test_copies_fill_twice_the_cache(monkeypatch: pytest.MonkeyPatch):
    class Properties:
        L2_cache_size = 50 * 2**20

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    there = torch.device("cuda", 0)
    sizes = (1, 2**20, 30 * 2**20, 100 * 2**20, 2**30)
    assert [layers._copies(size, there) for size in sizes] == [8, 8, 4, 1, 1]
    assert layers._copies(1, CPU) == 1


@pytest.mark.parametrize("name", ["rowwise", "delayed"])
def test_what_is_timed_is_the_replay_and_its_result_is_checked(name: str):
    capture = Again()
    rows = layer_rows(linear(SHAPE), [name], CPU, capture, rounds=2)
    assert [row.labels["timing"] for row in rows] == ["graph", "graph"]
    assert all(row.status == "ok" and row.ms and row.values["eager_ms"] > 0 for row in rows)
    assert rows[0].values["eager_speed_against_bf16"] == rows[0].values["speed_against_bf16"] == 1.0
    assert rows[1].values["sqnr_db"] > 20
    assert capture.replays >= 2 * 3


def test_a_replay_that_does_nothing_is_wrong():
    class Idle(Again):
        def record(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
            replay, results = super().record(function)
            self.replays += 1
            return (replay if self.replays == 1 else lambda: None), results

    rows = layer_rows(linear(SHAPE), ["rowwise"], CPU, Idle(), rounds=1)
    assert [(row.status, row.ms is None) for row in rows] == [("ok", False), ("wrong", True)]


def test_where_a_capture_fails_all_are_called():
    rows = layer_rows(linear(SHAPE), ["rowwise"], CPU, Refuses(), rounds=1)
    assert [(row.status, row.labels["timing"]) for row in rows] == [("ok", "eager"), ("ok", "eager")]
    assert rows[0].detail.startswith("not captured as a CUDA graph: RuntimeError: operation not permitted")
    assert all(row.ms is not None and "eager_ms" not in row.values for row in rows)


def test_too_little_memory_is_no_failed_capture():
    layer = Layer(Operands(linear(SHAPE), CPU), None)
    with pytest.raises(torch.OutOfMemoryError):
        ready(layer, Refuses(torch.OutOfMemoryError))


def test_a_wrong_layer_is_not_timed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(layers, "worst_db", lambda sample, exact: 3.0)
    rows = layer_rows(linear(SHAPE), ["rowwise"], CPU, None, rounds=1)
    assert [(row.status, row.ms is None) for row in rows] == [("ok", False), ("wrong", True)]
    assert rows[1].detail == "3.0 dB, at least 18 are right"


def test_what_raises_is_an_error_of_its_row():
    rows = layer_rows(linear((32, 64, 40)), ["rowwise"], CPU, None, rounds=1)  # N is no multiple of 16: stays in BF16
    assert rows[1].values["sqnr_db"] == 999.0


@gpu
@pytest.mark.parametrize("name", [None, "tensorwise", "rowwise", "blockwise", "delayed", "activations_only"])
def test_a_replayed_graph_gives_what_calls_give(name: str | None):
    device = torch.device("cuda", torch.cuda.current_device())
    operands = Operands(linear((512, 512, 1024)), device)
    assert len(operands.copies) == layers.MOST_COPIES
    layer = Layer(operands, name)
    one = ready(layer, CudaGraphs(device))
    again = Layer(operands, name)
    assert all(torch.equal(a, b) for a, b in zip(one.sample, ready(again, None).sample, strict=True))


@gpu
def test_a_replay_is_not_held_up_by_the_host():
    device = torch.device("cuda", torch.cuda.current_device())
    rows = layer_rows(linear((512, 512, 512)), ["rowwise"], device, CudaGraphs(device))
    assert [row.labels["timing"] for row in rows] == ["graph", "graph"], rows[0].detail
    assert all(row.ms is not None and row.ms.median < 0.5 * row.values["eager_ms"] for row in rows)
