"""What is measured after a training: held-out loss, and the health of its FP8 layers."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch

from acceler8 import evaluate_in_fp8, record_statistics
from acceler8.demo.interrupt import StopRequest
from acceler8.demo.model import next_byte_loss
from acceler8.demo.settings import DemoSettings
from acceler8.demo.text import Bytes, held_out_windows, training_windows
from acceler8.demo.training import Training

HELD_OUT_TOKENS = {"cpu": 65_536, "cuda": 1_048_576}
"""Bytes predicted in one evaluation, by kind of device: a few seconds each. The error of the mean of 65,536
is about 0.01 nats, but both models read the same bytes, so their difference is known far better.
"""

EVALUATION_TOKENS = 2048
"""Fewest bytes predicted at once; the small batches of a small training would take longer for the same sum.
"""


def held_out_loss(
    training: Training, settings: DemoSettings, held_out: Bytes, stop: StopRequest, *, in_fp8: bool = False
) -> float:
    """Mean loss in nats per byte over the held-out text; the same windows for every training.

    ``in_fp8`` runs the FP8 layers in FP8, as in training; else they run in BF16, which is what ``eval()``
    means.
    Raises: RunInterruptedError when a stop is asked for.
    """
    model = training.model
    tokens = HELD_OUT_TOKENS["cpu" if settings.device == "cpu" else "cuda"]
    batch = max(settings.batch, EVALUATION_TOKENS // settings.seq)
    total, count = 0.0, 0
    model.eval()
    mode = evaluate_in_fp8(model) if in_fp8 else contextlib.nullcontext()
    with torch.no_grad(), mode:
        for windows in held_out_windows(held_out, batch=batch, seq=settings.seq, tokens=tokens):
            stop.check()
            predicted = windows[:, 1:].numel()
            total += next_byte_loss(model, windows.to(settings.device)).item() * predicted
            count += predicted
    model.train()
    return total / count


def measure_health(training: Training, settings: DemoSettings, text: Bytes) -> list[dict[str, Any]]:
    """Statistics of every FP8 layer's operands over one forward and backward of the last training batch.

    Returns: one row a layer and role, as ``record_statistics`` gives them but as JSON. No weight changes;
    gradients are dropped.
    """
    model = training.model
    windows = training_windows(text, seed=settings.seed, step=settings.steps, batch=settings.batch, seq=settings.seq)
    model.train()
    with record_statistics(model) as statistics:
        training.accelerator.backward(next_byte_loss(model, windows.to(settings.device)))
    model.zero_grad(set_to_none=True)
    return [{key: _as_json(value) for key, value in row.items()} for row in statistics.rows()]


def _as_json(value: Any) -> Any:
    """Replace what JSON cannot hold: an infinite or undefined SQNR or amax becomes None."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
