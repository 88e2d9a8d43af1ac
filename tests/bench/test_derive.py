"""Derived cost tables: the rule by hand, and that the shipped file is what it gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from acceler8.bench import derive
from acceler8.bench.derive import DERIVED, derived_ms
from acceler8.costs import BF16, SHIPPED, CostTable, file_name

H100 = DERIVED[0]
SHAPE = (1000, 2000, 3000)  # 2 + 6 + 3 = 11 M elements


def test_the_rule_by_hand():
    # 66 MB at 3.35 TB/s are 0.0197 ms
    assert derived_ms(1.0, SHAPE, BF16, H100) == 1.0
    assert derived_ms(0.01, SHAPE, BF16, H100) == pytest.approx(0.0197015, rel=1e-5)
    # 154 MB at 4.8 TB/s are 0.0320833 ms, which become 0.0459701
    assert derived_ms(1.0, SHAPE, "rowwise", H100) == pytest.approx(1.0138868, rel=1e-6)
    assert derived_ms(0.02, SHAPE, "rowwise", H100) == pytest.approx(0.02 * 4.8 / 3.35)


@pytest.mark.parametrize("rule", DERIVED, ids=lambda rule: rule.gpu)
def test_the_shipped_table_is_what_the_rule_gives(rule: derive.Derived):
    origin = CostTable.load(SHIPPED / file_name(rule.origin))
    shipped = CostTable.load(SHIPPED / file_name(rule.gpu))
    assert shipped == derive.derive(origin, rule), "run python -m acceler8.bench.derive"
    assert (origin.source, shipped.source, shipped.gpu) == ("measured", "derived", rule.gpu)
    assert shipped.derivation == (
        "from the NVIDIA H200 table, for 3.35 TB/s of memory in place of 4.80; bf16: max(ms, 6 e / 3.35 TB/s);"
        " recipes: ms + 0.4328 min(ms, 14 e / 4.80 TB/s); e = m k + n k + m n elements"
    )
    for recipe in shipped.recipes:  # never better for FP8 than on the GPU that was measured
        for shape, ms in shipped.entries[recipe].items():
            gain, measured = (
                shipped.entries[BF16][shape] / ms,
                origin.entries[BF16][shape] / origin.entries[recipe][shape],
            )
            assert gain <= measured, (recipe, shape)


def test_the_command_writes_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / file_name("NVIDIA H200")).write_bytes((SHIPPED / file_name("NVIDIA H200")).read_bytes())
    monkeypatch.setattr(derive, "SHIPPED", tmp_path)
    assert derive.main([]) == 0
    name = file_name("NVIDIA H100 80GB HBM3")
    assert (tmp_path / name).read_bytes() == (SHIPPED / name).read_bytes()
