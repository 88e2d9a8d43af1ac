"""Groups: how rows of a plan and of statistics are folded."""

from __future__ import annotations

from typing import Any

import pytest

from acceler8.demo.groups import group_coverage, group_health


def _row(layer: str, role: str, **values: Any) -> dict[str, Any]:
    base = {"amax": 1.0, "elements": 100, "saturated": 0, "underflowed": 0, "nonfinite": 0, "sqnr_db": 31.0}
    return {"layer": layer, "role": role} | base | values


def test_counts_are_added_before_they_become_shares():
    rows = [
        _row("layers.0.q_proj", "x", elements=100, saturated=10, underflowed=1),
        _row("layers.1.q_proj", "x", elements=900, saturated=0, underflowed=4, amax=3.0, nonfinite=2),
    ]
    (group,) = group_health(rows)
    assert (group.group, group.role, group.layers) == ("q_proj", "x", 2)
    assert group.saturated == pytest.approx(0.01)
    assert group.underflowed == pytest.approx(0.005)
    assert (group.amax, group.nonfinite) == (3.0, 2)


def test_the_worst_layer_is_named():
    rows = [_row(f"layers.{i}.up_proj", "dy", sqnr_db=db) for i, db in enumerate((31.0, 12.0, 29.0))]
    (group,) = group_health(rows)
    assert group.mean_sqnr_db == pytest.approx(24.0)
    assert (group.worst_sqnr_db, group.worst_layer) == (12.0, "layers.1.up_proj")


def test_operands_without_a_ratio_or_a_finite_amax():
    (group,) = group_health([_row("lone", "w", sqnr_db=None, amax=None, elements=0)])
    assert (group.group, group.mean_sqnr_db, group.worst_sqnr_db, group.worst_layer, group.amax) == (
        "lone",
        None,
        None,
        "",
        None,
    )
    assert group.saturated == 0.0


def test_order_is_that_of_the_model_then_x_w_dy():
    rows = [_row(f"layers.{i}.{n}", role) for role in ("dy", "w", "x") for i in (0, 1) for n in ("q_proj", "a_proj")]
    assert [(g.group, g.role) for g in group_health(rows)] == [
        (name, role) for name in ("q_proj", "a_proj") for role in ("x", "w", "dy")
    ]


def test_coverage_of_a_plan():
    def row(name: str, *, is_fp8: bool, flops: int, reason: str, shape: tuple[int, int] = (32, 16)) -> dict[str, Any]:
        return {"name": name, "is_fp8": is_fp8, "flops_per_token": flops, "reason": reason, "shape": shape}

    groups = group_coverage(
        [
            row("layers.0.q_proj", is_fp8=True, flops=30, reason="fprop dgrad wgrad"),
            row("layers.1.q_proj", is_fp8=False, flops=30, reason="skipped", shape=(16, 16)),
            row("lm_head", is_fp8=False, flops=40, reason="output head"),
        ]
    )
    assert [(g.group, g.fp8_layers, g.layers, g.shape) for g in groups] == [
        ("q_proj", 1, 2, "several"),
        ("lm_head", 0, 1, "32 x 16"),
    ]
    assert groups[0].reason == "fprop dgrad wgrad; skipped"
    assert groups[0].flops_share == pytest.approx(0.6)
