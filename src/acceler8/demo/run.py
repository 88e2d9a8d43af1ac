"""One run of the demo: BF16, then FP8 from the same seed, then the comparison and the report.

A run moves through states that are all on disk: a training in progress is a checkpoint, a finished one a
``result-<precision>.json``, a finished run a ``summary.json``. Starting and resuming are therefore the same
walk, which skips what is there already.
"""

from __future__ import annotations

import contextlib
import gc
import os
import platform
import statistics
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from acceler8.checkpoint import compare_config
from acceler8.demo.evaluate import held_out_loss, measure_health
from acceler8.demo.interrupt import StopRequest
from acceler8.demo.processors import thread_count, threads_of
from acceler8.demo.report import write_report
from acceler8.demo.run_folder import Record, RunFolder
from acceler8.demo.settings import DemoSettings, resolve_device, resolve_settings
from acceler8.demo.text import Corpus, load_corpus
from acceler8.demo.training import PRECISIONS, Training, restore_training, start_training, train
from acceler8.errors import HardwareError, RunError


class Listener(Protocol):
    """What a run tells while it goes on; the command line shows it, a script may ignore it."""

    def note(self, message: str) -> None:
        """Take one line about what happens next."""

    def training_started(self, precision: str, step: int, steps: int) -> None:
        """A training goes on after ``step`` of ``steps``."""

    def step_done(self, record: Record) -> None:
        """Take one line of metrics."""

    def training_ended(self, precision: str) -> None:
        """All steps of a training are done, or it was stopped."""


def create_run(asked: Mapping[str, Any], parent: Path) -> tuple[RunFolder, Corpus]:
    """Check what was asked, read its text and make the run's folder below ``parent``.

    Raises: RunError, RecipeError or HardwareError before anything is written.
    """
    settings = resolve_settings(asked)
    corpus = load_corpus(settings.text, settings.seq)
    folder = RunFolder.create(
        parent,
        {
            "created": time.strftime("%Y-%m-%d %H:%M:%S %z"),
            "settings": settings.to_dict(),
            "text": describe_text(corpus),
            "environment": describe_environment(settings),
        },
    )
    return folder, corpus


def reopen_run(asked: Mapping[str, Any], path: Path) -> tuple[RunFolder, Corpus]:
    """Open the run at ``path`` to go on with it; options that were not given are the saved ones.

    Raises: RunError when it is no run, or when an option that was given, or the text, differs from the run's.
    """
    folder = RunFolder.open(path)
    settings = folder.settings
    _refuse_differences(settings, asked, path)
    try:
        resolve_device(settings.device)
    except HardwareError as error:
        raise HardwareError(f"the run in {str(path)!r} was made on {settings.device!r}: {error}") from error
    corpus = load_corpus(settings.text, settings.seq)
    saved = folder.read_json("config.json").get("text", {}).get("sha256")
    if saved != corpus.digest:
        raise RunError(
            f"the text of the run in {str(path)!r} has changed: SHA-256 was {saved}, {corpus.source} now has "
            f"{corpus.digest}; bring the text back (for the standard library: the same Python) or start a "
            "new run"
        )
    return folder, corpus


def _refuse_differences(saved: DemoSettings, asked: Mapping[str, Any], path: Path) -> None:
    wishes = {name: value for name, value in asked.items() if value is not None}
    if not wishes:
        return
    before = saved.to_dict()
    differing = compare_config(before, resolve_settings(before | wishes).to_dict())
    if differing:
        raise RunError(
            f"the run in {str(path)!r} was started with other settings ({'; '.join(map(str, differing))}); "
            "leave these options out to go on with the saved ones, or start a new run without --resume"
        )


def changed_environment(folder: RunFolder) -> list[str]:
    """Say what is not as it was when the run started: its curves may then differ in their last bits."""
    saved = folder.read_json("config.json").get("environment", {})
    return list(map(str, compare_config(saved, describe_environment(folder.settings))))


def execute_run(folder: RunFolder, corpus: Corpus, listener: Listener, stop: StopRequest) -> Record:
    """Do what the run still lacks and return its summary.

    Raises: RunInterruptedError when a stop was asked for; all that is needed to go on is then in the folder.
        RunError when a training diverges or the disk fails; HardwareError when the GPU's memory is not
        enough.
    """
    settings = folder.settings
    with threads_of(settings), _memory_errors(settings):
        for precision in PRECISIONS:
            if folder.result(precision) is None:
                result = _finish_training(precision, settings, folder, corpus, listener, stop)
                folder.write_json(f"result-{precision}.json", result)
            folder.drop_checkpoint(precision)
    summary = summarize(folder)
    folder.write_json("summary.json", summary)
    write_report(folder)
    return summary


@contextlib.contextmanager
def _memory_errors(settings: DemoSettings) -> Iterator[None]:
    """Turn an exhausted GPU into a HardwareError that says what to ask for instead."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise HardwareError(
            f"the memory of {settings.device} is not enough for size={settings.size}, batch={settings.batch}, "
            f"seq={settings.seq} ({error}); start a new run with a smaller --size or --batch"
        ) from error


def _finish_training(
    precision: str,
    settings: DemoSettings,
    folder: RunFolder,
    corpus: Corpus,
    listener: Listener,
    stop: StopRequest,
) -> Record:
    """Train in ``precision`` to the end and measure the model; its memory is free again when this returns."""
    stop.check()
    training = start_training(settings, precision)
    restore_training(training, settings, folder)
    if training.accelerator.plan is not None:  # there is one in FP8
        folder.write_json("plan.json", training.accelerator.plan.to_dict())
    listener.training_started(precision, training.step, settings.steps)
    try:
        train(training, settings, corpus.train, folder, stop, listener.step_done)
    finally:
        listener.training_ended(precision)
    listener.note(f"measuring the {precision} model on held-out text")
    result = _measure(training, settings, corpus, stop)
    del training
    gc.collect()  # modules refer to themselves in circles; the next peak memory must not count them
    if settings.device != "cpu":
        torch.cuda.empty_cache()
    return result


def _measure(training: Training, settings: DemoSettings, corpus: Corpus, stop: StopRequest) -> Record:
    in_bf16 = held_out_loss(training, settings, corpus.held_out, stop)
    if training.precision == "bf16":
        return {"held_out_loss": {"bf16": in_bf16}}
    in_fp8 = held_out_loss(training, settings, corpus.held_out, stop, in_fp8=True)
    return {
        "held_out_loss": {"fp8": in_fp8, "bf16": in_bf16},
        "health": measure_health(training, settings, corpus.train),
    }


def summarize(folder: RunFolder) -> Record:
    """Compare the two finished trainings of a run.

    Returns: held-out losses in nats per byte and their differences in percent of BF16; per precision the mean
        training loss of the last tenth of the steps, and without warm-up the median step time and, on a GPU,
        the peak memory.
    Raises: RunError when a training is not finished.
    """
    settings, metrics = folder.settings, folder.read_metrics()
    bf16, fp8 = (folder.result(precision) for precision in PRECISIONS)
    if bf16 is None or fp8 is None:
        raise RunError(f"the run in {str(folder.path)!r} is not finished; go on with --resume {folder.path}")
    losses = {
        "trained_in_bf16": bf16["held_out_loss"]["bf16"],
        "trained_in_fp8_evaluated_in_fp8": fp8["held_out_loss"]["fp8"],
        "trained_in_fp8_evaluated_in_bf16": fp8["held_out_loss"]["bf16"],
    }
    base = losses["trained_in_bf16"]
    return {
        "held_out_loss": losses,
        "difference_percent": {
            name: 100 * (loss - base) / base for name, loss in losses.items() if name != "trained_in_bf16"
        },
        "trainings": {
            precision: _training_summary([r for r in metrics if r["precision"] == precision], settings)
            for precision in PRECISIONS
        },
    }


def _training_summary(records: list[Record], settings: DemoSettings) -> Record:
    measured = [record for record in records if not record["warm_up"]]
    time_ms = statistics.median(record["time_ms"] for record in measured)
    summary = {
        "last_training_loss": statistics.fmean(r["loss"] for r in records[-max(1, len(records) // 10) :]),
        "time_ms": time_ms,
        "tokens_per_s": 1e3 * settings.tokens_per_step / time_ms,
    }
    if settings.device != "cpu":
        summary["peak_mem_mib"] = max(record["peak_mem_mib"] for record in measured)
    return summary


def describe_text(corpus: Corpus) -> Record:
    """Say what text a run reads, and the digest that a resume checks."""
    return {
        "source": corpus.source,
        "split": corpus.split,
        "train_bytes": len(corpus.train),
        "train_files": corpus.train_files,
        "held_out_bytes": len(corpus.held_out),
        "held_out_files": corpus.held_out_files,
        "sha256": corpus.digest,
    }


def describe_environment(settings: DemoSettings) -> Record:
    """Say what a run was computed with: versions, processor, and how its FP8 GEMMs are done."""
    import acceler8

    found = {
        "acceler8": acceler8.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "processors": os.cpu_count(),
        "threads": thread_count(settings),
        "device": settings.device,
        "fp8": _describe_fp8(settings),
    }
    if settings.device == "cpu":
        return found
    properties = torch.cuda.get_device_properties(settings.device)
    return found | {
        "gpu": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "gpu_memory_gib": round(properties.total_memory / 2**30, 1),
        "cuda": torch.version.cuda,
    }


def _describe_fp8(settings: DemoSettings) -> str:
    from acceler8 import recipes
    from acceler8.kernels import has_hardware_matmul

    operand = recipes.get(settings.recipe).fprop.a
    if operand.format is None:
        return "only in activations kept for backward: this recipe multiplies in 16 bit"
    if has_hardware_matmul(torch.device(settings.device), operand.granularity):
        return "multiplied by the GPU's FP8 tensor cores"
    return "emulated: FP8 values, multiplied in FP32, so its speed says nothing about an FP8 GPU"
