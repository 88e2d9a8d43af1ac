"""A cost table holds what was measured, all of it in one way."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from acceler8.bench import layers
from acceler8.bench.cost_grid import measure_costs
from acceler8.costs import BF16, CostTable
from acceler8.errors import RunError
from tests.bench.test_layers import Again, Refuses

CPU = torch.device("cpu")


def test_a_wrong_layer_makes_no_table(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(layers, "worst_db", lambda sample, exact: 3.0)
    with pytest.raises(RunError, match=r"rowwise on 32x32x32 has 3\.0 dB, which is wrong; no cost table is made of it"):
        measure_costs(CPU, ["rowwise"], tokens=(32,), sizes=(32,))


def test_a_measured_table_can_be_read_between_its_points(tmp_path: Path):
    table, notes = measure_costs(CPU, ["rowwise"], tokens=(32, 64), sizes=(32, 64))
    assert notes == []
    assert (table.source, table.timing) == ("measured", "eager")
    assert {name: len(found) for name, found in table.entries.items()} == {BF16: 8, "rowwise": 8}
    table.save(tmp_path / "t.json")
    predicted = CostTable.load(tmp_path / "t.json").predict(48, 48, 48, "rowwise")
    assert predicted is not None
    assert all(ms > 0 for ms in predicted)


def test_a_table_of_replays_says_so():
    capture = Again()
    table, notes = measure_costs(CPU, ["rowwise"], tokens=(32,), sizes=(32,), capture=capture)
    assert (table.timing, notes) == ("graph", [])
    assert capture.replays > 0
    assert set(table.entries) == {BF16, "rowwise"}


def test_one_failed_capture_makes_a_table_of_calls():
    class Later(Refuses):
        def record(self, function):
            self.replays += 1
            return Again.record(self, function) if self.replays == 1 else super().record(function)

    table, notes = measure_costs(CPU, ["rowwise"], tokens=(32,), sizes=(32,), capture=Later())
    assert table.timing == "eager"
    assert {name: len(found) for name, found in table.entries.items()} == {BF16: 1, "rowwise": 1}
    (note,) = notes
    assert "timed by eager calls, with the waits for the host: a layer could not be captured: RuntimeError" in note


def test_what_memory_does_not_suffice_for_is_left_out():
    table, notes = measure_costs(CPU, ["rowwise"], tokens=(32,), sizes=(32,), capture=Refuses(torch.OutOfMemoryError))
    assert (table.entries, table.timing) == ({}, "graph")
    assert notes == ["32x32x32 left out: too large for the memory"]


def test_a_table_ends_with_its_budget():
    table, notes = measure_costs(CPU, ["rowwise"], tokens=(32, 64), sizes=(32,), budget_s=-1.0)
    assert table.entries == {}
    assert notes == ["2 of 2 shapes left out: -1 s were over"]


def test_other_backends_stand_beside_ours():
    pytest.importorskip("torchao")
    names = ["torchao:rowwise", "rowwise", "torchao:tensorwise"]
    table, notes = measure_costs(CPU, names, tokens=(32, 64), sizes=(32,))
    assert notes == []
    assert {name: len(found) for name, found in table.entries.items()} == {
        BF16: 2, "rowwise": 2, "torchao:rowwise": 2, "torchao:tensorwise": 2,
    }  # fmt: skip


def test_another_backend_that_fails_is_left_out_of_the_table(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("torchao")
    right = layers.worst_db
    is_ours = [True]
    monkeypatch.setattr(layers, "worst_db", lambda sample, exact: right(sample, exact) if is_ours[0] else 3.0)
    made = layers.Layer.__init__

    def note(self, operands, recipe):
        is_ours[0] = recipe is None or ":" not in recipe
        made(self, operands, recipe)

    monkeypatch.setattr(layers.Layer, "__init__", note)
    table, notes = measure_costs(CPU, ["rowwise", "torchao:rowwise"], tokens=(32, 64), sizes=(32,))
    assert {name: len(found) for name, found in table.entries.items()} == {BF16: 2, "rowwise": 2}
    assert notes == ["torchao:rowwise has no entries: its layer failed, or could not be captured"]
