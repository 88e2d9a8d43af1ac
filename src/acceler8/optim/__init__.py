"""Optimizers whose moments and master weights are in few bits: drop-ins for ``torch.optim``'s."""

from __future__ import annotations

from acceler8.optim.adam import Adam, AdamW
from acceler8.optim.base import Row, StateFormatsOptimizer
from acceler8.optim.groups import parameter_groups
from acceler8.optim.state import Moment
from acceler8.optim.summary import StateSummary, SummaryRow

__all__ = [
    "Adam",
    "AdamW",
    "Moment",
    "Row",
    "StateFormatsOptimizer",
    "StateSummary",
    "SummaryRow",
    "parameter_groups",
]
