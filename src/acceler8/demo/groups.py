"""Coverage and health by layer group: many layers folded into tables that fit a screen.

Layers of one kind (all ``q_proj``, say) see like data and fail alike, so they make a group; the three
operands of a linear layer (x, w, dy) fail apart, so each has its own row of health.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

ROLES = ("x", "w", "dy")


@dataclass(frozen=True, kw_only=True)
class GroupCoverage:
    """One group of layers in the plan."""

    group: str
    """Last part of the layers' names, such as ``q_proj``."""
    shape: str
    """Of the weights, out_features x in_features; "several" where they differ."""
    fp8_layers: int
    """Layers of the group that are FP8."""
    layers: int
    """All layers of the group."""
    flops_share: float
    """The group's share of the FLOPs of all matrices, 0 to 1."""
    reason: str
    """What is FP8, or why not."""


def group_coverage(rows: Iterable[Mapping[str, Any]]) -> list[GroupCoverage]:
    """Fold the rows of a plan (as ``Plan.to_dict`` has them) into one a group, in the model's order."""
    gathered: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        gathered[_group_of(row["name"])].append(row)
    total = sum(row["flops_per_token"] for members in gathered.values() for row in members)
    return [_fold_plan(group, members, total) for group, members in gathered.items()]


def _group_of(layer: str) -> str:
    return layer.rpartition(".")[2]


def _fold_plan(group: str, rows: list[Mapping[str, Any]], total_flops: int) -> GroupCoverage:
    shapes = dict.fromkeys(" x ".join(map(str, row["shape"])) for row in rows)
    return GroupCoverage(
        group=group,
        shape=next(iter(shapes)) if len(shapes) == 1 else "several",
        fp8_layers=sum(row["is_fp8"] for row in rows),
        layers=len(rows),
        flops_share=sum(row["flops_per_token"] for row in rows) / max(total_flops, 1),
        reason="; ".join(dict.fromkeys(row["reason"] for row in rows)),
    )


@dataclass(frozen=True, kw_only=True)
class GroupHealth:
    """One operand of one group of layers."""

    group: str
    """Last part of the layers' names, such as ``q_proj``."""
    role: str
    """``x``, ``w`` or ``dy``."""
    layers: int
    """Number of layers folded into this row."""
    amax: float | None
    """Largest absolute value in any of them; None when one is not finite."""
    saturated: float
    """Share of elements that were cut to the format's largest value, 0 to 1."""
    underflowed: float
    """Share of elements that became zero without being zero, 0 to 1."""
    nonfinite: int
    """Number of NaN and infinite elements."""
    mean_sqnr_db: float | None
    """Mean over the layers of signal to quantisation noise; None when none has both signal and noise."""
    worst_sqnr_db: float | None
    """The lowest of them."""
    worst_layer: str
    """Name of that layer; empty when no layer has a ratio."""


def group_health(rows: Iterable[Mapping[str, Any]]) -> list[GroupHealth]:
    """Fold the rows of ``record_statistics`` into one a group and role, groups in the model's order."""
    gathered: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    groups: dict[str, None] = {}
    for row in rows:
        group = _group_of(row["layer"])
        groups.setdefault(group)
        gathered[group, row["role"]].append(row)
    return [
        _fold(group, role, gathered[group, role]) for group in groups for role in ROLES if (group, role) in gathered
    ]


def _fold(group: str, role: str, rows: list[Mapping[str, Any]]) -> GroupHealth:
    elements = max(sum(row["elements"] for row in rows), 1)
    ratios = {row["layer"]: row["sqnr_db"] for row in rows if row["sqnr_db"] is not None}
    worst = min(ratios, key=lambda layer: float(ratios[layer]), default="")
    return GroupHealth(
        group=group,
        role=role,
        layers=len({row["layer"] for row in rows}),
        amax=None if any(row["amax"] is None for row in rows) else max(row["amax"] for row in rows),
        saturated=sum(row["saturated"] for row in rows) / elements,
        underflowed=sum(row["underflowed"] for row in rows) / elements,
        nonfinite=sum(row["nonfinite"] for row in rows),
        mean_sqnr_db=statistics.fmean(ratios.values()) if ratios else None,
        worst_sqnr_db=ratios[worst] if ratios else None,
        worst_layer=worst,
    )
