"""A practitioner's account, measured: what FP8 gives to somebody who trains a model on one GPU in FP16.

Three tables, as such accounts have them: memory at the same batch, what is kept for backward apart; throughput at the
same batch and at the largest that fits into the memory that FP16 takes; accuracy by epoch, and how many epochs it takes
to FP16's. The model learns to predict the next byte of the source of Python's own standard library, from scratch;
accuracy is the share of bytes of files that it never saw that it predicts right. FP16 is PyTorch's automatic mixed
precision with its loss scaler; BF16 and FP8 are ``acceler8.Accelerator``'s.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from acceler8.bench import step, timing
from acceler8.bench.presets import Preset
from acceler8.bench.results import Result, Row, one_line
from acceler8.bench.step import Checked, Say, take_first_steps
from acceler8.bench.timing import Spread
from acceler8.bench.variants import Variant, find
from acceler8.bench.work import Trainee, Work
from acceler8.demo.settings import STANDARD_LIBRARY
from acceler8.demo.text import Corpus, held_out_windows, load_corpus, training_windows
from acceler8.errors import RunError

Keep = Callable[[Result], None]

FP16 = "fp16-amp"
DEFAULT_VARIANTS = ("rowwise", "delayed", "delayed-half-compressed", "delayed-compressed")
"""Beside BF16 and FP16; each is trained for epochs."""
NEAR = 0.002
"""An accuracy as good as FP16's: within 0.2 points of its last."""
MOST_TRIES = 8

MEMORY, THROUGHPUT, ACCURACY = "Memory at the same batch", "Throughput", "Accuracy on held-out bytes"


@dataclass(frozen=True, kw_only=True)
class Account:
    """What is measured beside the step."""

    epochs: int = 3
    """Passes over the training windows; 0 leaves the third table out."""
    epoch_steps: int = 80
    """Steps of an epoch, each of the preset's batch."""
    held_out_bytes: int = 2**19
    budget_gb: float | None = None
    """Memory that the largest batch may take, 10^9 bytes; None: what FP16 takes at the preset's batch."""
    text: str = STANDARD_LIBRARY

    def __post_init__(self) -> None:
        if self.epochs < 0 or self.epoch_steps < 1:
            raise RunError(f"got epochs={self.epochs}, epoch_steps={self.epoch_steps}; allowed: 0 or more, 1 or more")
        if self.budget_gb is not None and not (math.isfinite(self.budget_gb) and self.budget_gb > 0):
            raise RunError(f"budget_gb={self.budget_gb} is not allowed; it must be a number above 0")


class TextWork(Work):
    """The same model on text: ``select`` puts the windows of a step in place."""

    def __init__(self, preset: Preset, device: torch.device, corpus: Corpus, steps: int) -> None:
        super().__init__(preset, device)
        count = steps * preset.batch
        self._windows = training_windows(corpus.train, seed=0, step=0, batch=count, seq=preset.length)

    def select(self, epoch: int, number: int) -> None:
        """The windows of a step: each epoch has all of them, in an order of its own."""
        order = np.random.default_rng((1, epoch)).permutation(len(self._windows))
        size = self.preset.batch
        self.tokens = self._windows[order[number * size : (number + 1) * size]].to(self.device)


def measure(
    preset: Preset,
    variants: Sequence[Variant],
    device: torch.device,
    account: Account,
    *,
    say: Say = lambda message: None,
    keep: Keep = lambda result: None,
    with_floor: bool = True,
) -> Result:
    """The step as ``step.measure`` has it, FP16 among the variants, and the three tables.

    ``keep`` gets the result as far as it is whenever something was added: all of it takes minutes.
    """
    baseline, others = variants[0], [v for v in variants[1:] if v.name != FP16]
    chosen = [baseline, find(FP16, preset.loop), *others]
    result = step.measure(preset, chosen, device, say=say, with_floor=with_floor)
    result.settings |= {"account": dataclasses.asdict(account)}
    rows = {row.name: row for row in result.rows}
    right = [v for v in chosen if rows[v.name].status == "ok"]
    result.tables[MEMORY] = [_memory_row(rows[v.name]) for v in right]
    result.tables[THROUGHPUT] = throughput = [_throughput_row(rows[v.name], preset.batch, rows) for v in right]
    keep(result)
    if device.type == "cuda":
        for row in _at_the_largest_batch(preset, right, rows, device, account, say, result):
            throughput.append(row)
            keep(result)
    else:
        result.notes.append("no largest batch: PyTorch does not count the CPU's memory")
    if account.epochs:
        result.tables[ACCURACY] = accuracy = []
        for row in _accuracies(preset, right, device, account, say, result):
            accuracy.append(row)
            keep(result)
    return result


def _labels(row: Row, **more: object) -> dict[str, object]:
    return {"group": row.labels["group"], "recipe": row.labels["recipe"]} | more


def _memory_row(row: Row) -> Row:
    keys = {"peak_bytes", "held_bytes"}
    values = {key: value for key, value in row.values.items() if key in keys}
    if keys <= values.keys():
        values["rest_bytes"] = values["peak_bytes"] - values["held_bytes"]
    return Row(name=row.name, labels=_labels(row), values=values)


def _throughput_row(row: Row, batch: int, rows: dict[str, Row]) -> Row:
    made = Row(name=row.name, labels=_labels(row, batch=batch), ms=row.ms)
    _note_rates(made, batch, rows)
    return made


def _note_rates(row: Row, batch: int, rows: dict[str, Row]) -> None:
    """Samples a second, and against FP16 at the preset's batch."""
    if row.ms is None:
        return
    row.values["samples_per_s"] = batch / row.ms.median * 1e3
    fp16 = rows[FP16].values.get("samples_per_s")
    if fp16:
        row.values["speed_against_fp16"] = row.values["samples_per_s"] / fp16


def _with_batch(preset: Preset, batch: int, device: torch.device) -> Work:
    return Work(dataclasses.replace(preset, batch=batch), device)


def _peak(preset: Preset, variant: Variant, device: torch.device, batch: int) -> float:
    """Bytes of a step at that batch; infinite if the GPU has not got them."""
    timing.release(device)
    try:
        return float(take_first_steps(_with_batch(preset, batch, device), variant).peak)
    except torch.OutOfMemoryError:
        return math.inf


def largest_batch(known: tuple[int, float], budget: float, probe: Callable[[int], float]) -> int:
    """The largest batch whose peak is within ``budget``; 0 if none is.

    ``known`` is a batch and its peak; ``probe`` measures another. Peaks grow about linearly: two points say where to
    look, and neighbours are measured until one fits and the next does not.
    """
    batch, peak = known
    peak_at = {batch: peak}

    def fits(size: int) -> bool:
        if size not in peak_at:
            peak_at[size] = probe(size)
        return peak_at[size] <= budget

    second = max(batch + 1, batch * 3 // 2) if peak <= budget else max(1, batch // 2)
    fits(second)
    slope = (peak_at[second] - peak) / (second - batch) if second != batch else 0.0
    guess = batch
    if math.isfinite(slope) and slope > 0:
        guess = max(1, int(batch + (budget - peak) / slope))
    for _ in range(MOST_TRIES):
        if not fits(guess):
            guess -= 1
            if guess == 0:
                return 0
        elif not fits(guess + 1):
            return guess
        else:
            guess += 1
    return max((size for size, found in peak_at.items() if found <= budget), default=0)


def _at_the_largest_batch(
    preset: Preset,
    variants: Sequence[Variant],
    rows: dict[str, Row],
    device: torch.device,
    account: Account,
    say: Say,
    result: Result,
) -> Iterator[Row]:
    """Time each variant at its largest batch, FP16 once more at the end."""
    peaks = {v.name: rows[v.name].values["peak_bytes"] for v in variants}
    if account.budget_gb is None and FP16 not in peaks:
        result.notes.append(f"no largest batch: {FP16} did not train, so its memory is not known; give --budget-gb")
        return
    budget = peaks[FP16] if account.budget_gb is None else account.budget_gb * 1e9
    result.notes.append(f"largest batch within {budget / 1e9:.1f} GB")
    fp16: list[Spread] = []
    ordered = sorted(variants, key=lambda v: v.name != FP16)
    for variant in [*ordered, *(v for v in ordered[:1] if v.name == FP16)]:
        say(f"{variant.name}: largest batch")
        row = Row(name=variant.name, labels=_labels(rows[variant.name]))
        try:
            known = (preset.batch, peaks[variant.name])
            batch = largest_batch(known, budget, functools.partial(_peak, preset, variant, device))
            row.labels["batch"] = batch
            if not batch:
                row.detail = "no batch fits"
                yield row
                continue
            timing.release(device)
            got = take_first_steps(_with_batch(preset, batch, device), variant)
            row.ms = Spread.of(_times(got, preset, device))
            row.values["peak_bytes"] = float(got.peak)
            _note_rates(row, batch, rows)
            del got
        except Exception as error:
            row.status, row.detail = "error", one_line(error)
        timing.release(device)
        if variant.name == FP16 and row.ms is not None:
            fp16.append(row.ms)
            if len(fp16) == 2:
                result.notes.append(
                    f"{FP16} at its largest batch, first and last: {fp16[0].median:.1f} and {fp16[1].median:.1f} ms"
                )
                continue
        yield row


def _times(got: Checked, preset: Preset, device: torch.device) -> list[float]:
    got.trainee.activate()
    timing.synchronize(device)
    return timing.turn_ms(lambda: got.trainee.step(lambda: None), preset.steps, device)


@torch.no_grad()
def _accuracy(trainee: Trainee, windows: Sequence[Tensor], device: torch.device) -> float:
    """Share of the windows' bytes that the model predicts right, as it evaluates by default."""
    trainee.model.eval()
    right = torch.zeros((), dtype=torch.int64, device=device)
    count = 0
    for batch in windows:
        tokens = batch.to(device)
        with trainee.context():
            logits = trainee.model(tokens[:, :-1])
        right += (logits.argmax(-1) == tokens[:, 1:]).sum()
        count += tokens[:, 1:].numel()
    trainee.model.train()
    return int(right) / count


def _accuracies(
    preset: Preset, variants: Sequence[Variant], device: torch.device, account: Account, say: Say, result: Result
) -> Iterator[Row]:
    """Train each variant for the epochs, FP16 first, and compare with FP16's last accuracy."""
    corpus = load_corpus(account.text, preset.length)
    held_out = held_out_windows(corpus.held_out, batch=preset.batch, seq=preset.length, tokens=account.held_out_bytes)
    result.notes.append(
        f"accuracy: next byte of {corpus.source}, {account.epoch_steps * preset.tokens:,} bytes an epoch,"
        f" {sum(w[:, 1:].numel() for w in held_out):,} held out"
    )
    goal = math.nan
    for variant in sorted(variants, key=lambda v: v.name != FP16):
        row = Row(name=variant.name, labels={"group": variant.group, "recipe": variant.recipe})
        timing.release(device)
        try:
            found = _train(preset, variant, device, account, corpus, held_out, say)
        except Exception as error:
            row.status, row.detail = "error", one_line(error)
            yield row
            continue
        if variant.name == FP16:
            goal = found[-1]
        row.values = {f"epoch_{i}": value for i, value in enumerate(found, 1)} | {"accuracy": found[-1]}
        if not math.isnan(goal):
            row.values["against_fp16"] = found[-1] - goal
            reached = next((i for i, value in enumerate(found, 1) if value >= goal - NEAR), None)
            if reached is not None:
                row.values["epochs_to_fp16"] = float(reached)
        yield row


def _train(
    preset: Preset,
    variant: Variant,
    device: torch.device,
    account: Account,
    corpus: Corpus,
    held_out: Sequence[Tensor],
    say: Say,
) -> list[float]:
    """Accuracy behind each epoch."""
    work = TextWork(preset, device, corpus, account.epoch_steps)
    trainee = variant.build(work)
    trainee.activate()
    found = []
    for epoch in range(account.epochs):
        for number in range(account.epoch_steps):
            work.select(epoch, number)
            trainee.step(lambda: None)
        found.append(_accuracy(trainee, held_out, device))
        say(f"{variant.name}: epoch {epoch + 1} of {account.epochs}, accuracy {found[-1]:.2%}")
    return found


__all__ = ["ACCURACY", "DEFAULT_VARIANTS", "MEMORY", "THROUGHPUT", "Account", "largest_batch", "measure"]
