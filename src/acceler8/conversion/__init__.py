"""Plan, convert, restore, verify: deciding what becomes FP8, making it so, and proving it."""

from __future__ import annotations

from acceler8.conversion.convert import Attachment, attach, convert, evaluate_in_fp8, restore, step, window
from acceler8.conversion.graphed_step import GraphedStep
from acceler8.conversion.head_loss import fused_head_loss
from acceler8.conversion.plan import AlsoRow, Plan, PlanRow, plan
from acceler8.conversion.verify import VerifyReport, verify

__all__ = [
    "AlsoRow",
    "Attachment",
    "GraphedStep",
    "Plan",
    "PlanRow",
    "VerifyReport",
    "attach",
    "convert",
    "evaluate_in_fp8",
    "fused_head_loss",
    "plan",
    "restore",
    "step",
    "verify",
    "window",
]
