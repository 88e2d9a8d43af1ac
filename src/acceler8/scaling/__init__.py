"""Scales: which elements share one (granularity), and from which amax it comes (time)."""

from __future__ import annotations

from acceler8.scaling.clock import StepClock
from acceler8.scaling.delayed import LINE, AmaxSlot, AmaxState
from acceler8.scaling.granularity import (
    GRANULARITIES,
    ROWWISE,
    TENSORWISE,
    BLOCK_1x128,
    BLOCK_128x128,
    Granularity,
    MX_1x32,
    expand_groups,
    group_amax,
    multiply_groups,
)
from acceler8.scaling.scale import AMAX_FLOOR, compute_scale, compute_scale_e8m0
from acceler8.scaling.schedule import LastLayers, Schedule, StepWindow, check_schedule

__all__ = [
    "AMAX_FLOOR",
    "GRANULARITIES",
    "LINE",
    "ROWWISE",
    "TENSORWISE",
    "AmaxSlot",
    "AmaxState",
    "BLOCK_1x128",
    "BLOCK_128x128",
    "Granularity",
    "LastLayers",
    "MX_1x32",
    "Schedule",
    "StepClock",
    "StepWindow",
    "check_schedule",
    "compute_scale",
    "compute_scale_e8m0",
    "expand_groups",
    "group_amax",
    "multiply_groups",
]
