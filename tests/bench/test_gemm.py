"""GEMMs and layers: a wrong one is not timed, and a cost table holds what was measured."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from acceler8.bench import gemm
from acceler8.costs import BF16, CostTable
from acceler8.errors import RunError

CPU = torch.device("cpu")


def test_sqnr_by_hand():
    exact = torch.tensor([3.0, 4.0])
    assert gemm.sqnr_db(torch.tensor([3.0, 4.5]), exact) == pytest.approx(20.0)
    assert gemm._finite(gemm.sqnr_db(exact, exact)) == 999.0
    assert gemm._finite(gemm.sqnr_db(torch.tensor([float("nan"), 0.0]), exact)) == -999.0


def test_shapes():
    assert gemm.parse_shapes("64x128x256, 1X16x32") == ((64, 128, 256), (1, 16, 32))
    for text in ("", "64x128", "64x128x-16", "ax16x16"):
        with pytest.raises(RunError, match="write MxKxN"):
            gemm.parse_shapes(text)


def test_a_wrong_product_is_not_timed(monkeypatch: pytest.MonkeyPatch):
    original = gemm.multiply

    def one_column_lost(a, b, **rest):
        y = original(a, b, **rest)
        y[:, 0] = 0
        return y

    monkeypatch.setattr(gemm, "multiply", one_column_lost)
    rows = {row.name: row for row in gemm.gemm_rows((32, 64, 32), CPU, rounds=1)}
    assert rows["bf16"].ms is not None
    assert rows["rowwise exact"].status == "wrong"
    assert "at least 22 are right" in rows["rowwise exact"].detail
    assert all(row.ms is None for name, row in rows.items() if name != "bf16")


def test_a_wrong_layer_is_not_timed_and_makes_no_table(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gemm, "check_layer", lambda layer, exact: 3.0)
    rows = gemm.layer_rows((32, 64, 32), ["rowwise"], CPU, rounds=1, calls=2)
    assert [(row.status, row.ms is None) for row in rows] == [("ok", False), ("wrong", True)]
    with pytest.raises(RunError, match="no cost table is made of it"):
        gemm.measure_costs(CPU, ["rowwise"], tokens=(32,), sizes=(32,))


def test_a_measured_table_can_be_read_between_its_points(tmp_path: Path):
    table, notes = gemm.measure_costs(CPU, ["rowwise"], tokens=(32, 64), sizes=(32, 64))
    assert notes == []
    assert table.source == "measured"
    assert {name: len(found) for name, found in table.entries.items()} == {BF16: 8, "rowwise": 8}
    table.save(tmp_path / "t.json")
    predicted = CostTable.load(tmp_path / "t.json").predict(48, 48, 48, "rowwise")
    assert predicted is not None
    assert all(ms > 0 for ms in predicted)


def test_a_table_ends_with_its_budget():
    table, notes = gemm.measure_costs(CPU, ["rowwise"], tokens=(32, 64), sizes=(32,), budget_s=-1.0)
    assert table.entries == {}
    assert notes == ["2 of 2 shapes left out: -1 s were over"]
