"""GEMMs: a wrong one is not timed."""

from __future__ import annotations

import pytest
import torch

from acceler8.bench import gemm
from acceler8.errors import RunError

CPU = torch.device("cpu")


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
