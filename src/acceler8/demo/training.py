"""One training of the demo: the model in one precision, its loop, and its state on disk.

Both trainings start from the same weights and see the same batches, so all that differs is
``mixed_precision``. The learning rate and the batch are functions of the step, so model, optimizer, FP8 state
and the step number are the whole state of a training.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from acceler8 import checkpoint, fp8_state_dict, load_fp8_state_dict, record_statistics
from acceler8.accelerator import Accelerator
from acceler8.demo.interrupt import StopRequest
from acceler8.demo.model import build_model, next_byte_loss
from acceler8.demo.run_folder import Record, RunFolder
from acceler8.demo.settings import DemoSettings
from acceler8.demo.text import Bytes, training_windows
from acceler8.errors import RunError

PRECISIONS = ("bf16", "fp8")
"""The two trainings of a run, in their order."""

WARM_UP_STEPS = 5
"""Steps after a start or a resume that are left out of step time and peak memory: they compile, allocate and
cache.
"""

CHECKPOINT_EVERY_S = 120.0
"""Seconds between checkpoints that nobody asked for: what a power cut may cost. The clock does not touch the
curves.
"""

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
MAX_GRAD_NORM = 1.0
FINAL_LR_SHARE = 0.01
"""Almost nothing, so that the trainings settle. It and the rates of the sizes are low because a short training is
chaotic: at four times the rate of "small", with a tenth here, weights changed by 1e-3 of themselves moved the held-out
loss by 3 %, which would drown whatever FP8 does; now they move it by 0.06 %."""


@dataclass
class Training:
    """A prepared model with its optimizer, and how far it has come."""

    precision: str
    accelerator: Accelerator
    model: nn.Module
    optimizer: Any
    step: int = 0


def learning_rate(settings: DemoSettings, step: int) -> float:
    """Return the rate of ``step`` (from 1): linear warm-up over 5 % of the steps, then a cosine to almost 0."""
    warm_up = max(1, settings.steps // 20)
    if step <= warm_up:
        return settings.lr * step / warm_up
    progress = (step - warm_up) / max(1, settings.steps - warm_up)
    share = FINAL_LR_SHARE + (1 - FINAL_LR_SHARE) * (1 + math.cos(math.pi * progress)) / 2
    return settings.lr * share


def start_training(settings: DemoSettings, precision: str) -> Training:
    """Build the model from the seed and prepare it in ``precision`` ("bf16" or "fp8") on the run's device."""
    if settings.device != "cpu":
        torch.cuda.reset_peak_memory_stats(settings.device)
    accelerator = Accelerator(
        mixed_precision=precision,
        device=settings.device,
        recipe=settings.recipe if precision == "fp8" else None,
    )
    model = build_model(settings.model_size, settings.seed)
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=BETAS, fused=True)
    prepared, optimizer = accelerator.prepare(model, optimizer)
    return Training(precision, accelerator, prepared, optimizer)


def train(
    training: Training,
    settings: DemoSettings,
    text: Bytes,
    folder: RunFolder,
    stop: StopRequest,
    on_step: Callable[[Record], None],
) -> None:
    """Train from where ``training`` stands to the last step, with one line of metrics a step, and save the end.

    Raises: RunInterruptedError after saving, when a stop was asked for; RunError when the loss stops being a
    number, and when the disk fails.
    """
    folder.forget_after(training.precision, training.step)
    training.model.train()
    first = training.step
    saved_at = time.monotonic()
    while training.step < settings.steps:
        is_warm_up = training.step - first < min(WARM_UP_STEPS, (settings.steps - first) // 2)
        record = _train_step(training, settings, text) | {"warm_up": is_warm_up}
        if settings.device != "cpu":
            record["peak_mem_mib"] = _peak_memory(settings.device, reset=is_warm_up)
        folder.append_metrics(record)
        on_step(record)
        must_stop = stop.is_requested  # read once: a signal after this waits for the next step, which saves first
        if must_stop or time.monotonic() - saved_at > CHECKPOINT_EVERY_S:
            save_training(training, settings, folder)
            saved_at = time.monotonic()
        if must_stop:
            stop.check()
    save_training(training, settings, folder)


def _train_step(training: Training, settings: DemoSettings, text: Bytes) -> Record:
    """Do one optimizer step and return its line of metrics; ``item`` waits for the device, so times are honest."""
    started = time.perf_counter()
    step = training.step + 1
    accelerator, optimizer = training.accelerator, training.optimizer
    windows = training_windows(text, seed=settings.seed, step=step, batch=settings.batch, seq=settings.seq)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(settings, step)
    windows = windows.to(accelerator.device)
    loss = next_byte_loss(training.model, windows)
    accelerator.backward(loss)
    grad_norm = accelerator.clip_grad_norm_(training.model.parameters(), MAX_GRAD_NORM)
    value, norm = loss.item(), float(grad_norm)
    if not (math.isfinite(value) and math.isfinite(norm)):  # before the step, which would spread it to every weight
        raise RunError(
            f"step {step} of the {training.precision} training has loss {value} and gradient norm {norm}, "
            f"which must be finite; start a new run with an --lr below {settings.lr}"
            + _where_it_began(training, windows)
        )
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    training.step = step
    elapsed = time.perf_counter() - started
    return {
        "precision": training.precision,
        "step": step,
        "loss": value,
        "lr": learning_rate(settings, step),
        "grad_norm": norm,
        "tokens": step * settings.tokens_per_step,
        "time_ms": round(elapsed * 1e3, 3),
        "tokens_per_s": round(settings.tokens_per_step / elapsed, 1),
    }


def _where_it_began(training: Training, windows: Tensor) -> str:
    """Run the step once more, recording its casts, and name the FP8 layers that met NaN or inf."""
    if training.precision != "fp8":
        return ""
    with record_statistics(training.model) as statistics:
        training.accelerator.backward(next_byte_loss(training.model, windows))
    problems = statistics.problems()
    return "; " + "; ".join(problems[:3]) if problems else "; no FP8 layer met NaN or inf: look outside of them"


def _peak_memory(device: str, *, reset: bool) -> float:
    """Return the peak of allocated GPU memory in MiB; ``reset`` starts the count anew, after reading it."""
    peak = torch.cuda.max_memory_allocated(device) / 2**20
    if reset:
        torch.cuda.reset_peak_memory_stats(device)
    return round(peak, 1)


def save_training(training: Training, settings: DemoSettings, folder: RunFolder) -> None:
    """Write the whole state of the training to its checkpoint, replacing the one before."""
    model = training.model
    checkpoint.save(
        folder.checkpoint_path(training.precision),
        model=model,
        optimizer=training.optimizer,
        fp8_state=fp8_state_dict(model) if training.precision == "fp8" else None,
        progress={"precision": training.precision, "step": training.step},
        config=settings.to_dict(),
    )


def restore_training(training: Training, settings: DemoSettings, folder: RunFolder) -> None:
    """Bring a fresh training to the state of its checkpoint; nothing happens where there is none.

    Raises: CheckpointError when the checkpoint is damaged or was written with other settings.
    """
    path = folder.checkpoint_path(training.precision)
    if not checkpoint.is_checkpoint(path):
        return
    saved = checkpoint.load(path)
    saved.check_config(settings.to_dict())
    saved.restore(model=training.model, optimizer=training.optimizer)
    if training.precision == "fp8":
        load_fp8_state_dict(training.model, saved.fp8_state())
    training.step = int(saved.progress["step"])
