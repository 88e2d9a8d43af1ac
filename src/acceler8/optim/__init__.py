"""Optimizers whose moments and master weights are in few bits: drop-ins for ``torch.optim``'s."""

from __future__ import annotations

from acceler8.optim.adam import Adam, AdamW
from acceler8.optim.base import Row, StateFormatsOptimizer
from acceler8.optim.groups import parameter_groups
from acceler8.optim.state import Moment
from acceler8.optim.summary import StateSummary, SummaryRow
from acceler8.optim.watch import StateHealth, StateWatch, watch_states

__all__ = [
    "Adam",
    "AdamW",
    "Moment",
    "Row",
    "StateFormatsOptimizer",
    "StateHealth",
    "StateSummary",
    "StateWatch",
    "SummaryRow",
    "parameter_groups",
    "watch_states",
]
