"""What a training script holds. Wires the layers below, computes nothing."""

from __future__ import annotations

from acceler8.accelerator.accelerator import Accelerator
from acceler8.accelerator.optimizer import AcceleratedOptimizer
from acceler8.accelerator.report import Fp8Report
from acceler8.accelerator.scheduler import AcceleratedScheduler
from acceler8.accelerator.tracking import GeneralTracker

__all__ = ["AcceleratedOptimizer", "AcceleratedScheduler", "Accelerator", "Fp8Report", "GeneralTracker"]
