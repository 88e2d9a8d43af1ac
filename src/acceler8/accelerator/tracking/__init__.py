"""Where a run's numbers go: TensorBoard, W&B, Trackio, MLflow, a script's own tracker, and always lines of JSON."""

from __future__ import annotations

from acceler8.accelerator.tracking.base import GeneralTracker
from acceler8.accelerator.tracking.jsonl import JsonlTracker
from acceler8.accelerator.tracking.mlflow import MLflowTracker
from acceler8.accelerator.tracking.tensorboard import TensorBoardTracker
from acceler8.accelerator.tracking.tracking import Tracking
from acceler8.accelerator.tracking.trackio import TrackioTracker
from acceler8.accelerator.tracking.wandb import WandBTracker
from acceler8.config.enums import LoggerType

__all__ = [
    "GeneralTracker",
    "JsonlTracker",
    "LoggerType",
    "MLflowTracker",
    "TensorBoardTracker",
    "Tracking",
    "TrackioTracker",
    "WandBTracker",
]
