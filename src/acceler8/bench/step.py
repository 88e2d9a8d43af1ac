"""A training step in every variant, one process, the same weights and data.

Variants stay in memory side by side and take turns: ``turn`` steps each, in an order that moves on by one every round,
so that clocks, heat and other work on the machine meet all alike. Where they do not all fit, they run in groups that
do, and BF16 is a member of each: what is compared with BF16 is compared with that of its own group, and how far BF16
itself moved from group to group is said.

Before its time counts a variant must train: after the same steps from the same weights its loss is finite, begins where
BF16's does and falls as far, and every matrix that BF16 moves has moved. One that does not is shown as wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from acceler8.bench import timing
from acceler8.bench.facts import facts
from acceler8.bench.floor import Floor, measure_floor
from acceler8.bench.presets import Preset
from acceler8.bench.results import Result, Row, one_line
from acceler8.bench.timing import Spread
from acceler8.bench.variants import BASELINE, Variant
from acceler8.bench.work import Trainee, Work
from acceler8.errors import HardwareError

FIRST_LOSS_SHARE = 0.02
"""How far the first loss may lie from BF16's, of that loss: the forward pass alone, from equal weights."""
FALL_SHARE = 0.3
"""How far the last one may lie, of BF16's fall. Optimizers that hold stale parameters are near 1; delayed scaling that
begins with scales of 1 may lose its first gradients to underflow, and then lags one step of eight."""
MEMORY_SHARE = 0.8
"""Of the free memory that a group may take."""

Say = Callable[[str], None]


@dataclass
class Checked:
    """A trainee that took its first steps, and what was seen on the way. Bytes are 0 on a CPU."""

    trainee: Trainee
    losses: list[float]
    matrices: int
    moved: set[str]
    resident: int
    """Bytes that stay between steps: parameters, optimizer state, codes that are kept."""
    held: int
    """Bytes more after the forward than before: what is kept for backward, results of the model included."""
    peak: int
    """Largest number of bytes during a step."""


def sums(model: nn.Module) -> dict[str, float]:
    """A sum of each matrix, by name: another one after some steps if it moved."""
    named = [(name, p) for name, p in model.named_parameters() if p.ndim >= 2]
    if not named:
        return {}
    values = torch.stack([p.detach().float().sum().double() for _, p in named]).tolist()
    return dict(zip((name for name, _ in named), values, strict=True))


def take_first_steps(work: Work, variant: Variant) -> Checked:
    """Build the variant and run its first steps."""
    device = work.device
    before = timing.allocated(device)
    trainee = variant.build(work)
    trainee.activate()
    start = sums(trainee.model)
    losses: list[Tensor] = []
    held = 0

    def count_held() -> None:
        nonlocal held
        held = timing.allocated(device) - at_start

    for number in range(work.preset.check_steps):
        if number == 1:  # the first step compiles, and compilers try things out in memory
            timing.reset_peak(device)
        at_start = timing.allocated(device)
        losses.append(trainee.step(count_held))
    peak = timing.peak_allocated(device) - before
    end = sums(trainee.model)
    moved = {name for name, value in end.items() if value != start.get(name)}
    resident = timing.allocated(device) - before
    return Checked(trainee, [float(loss) for loss in losses], len(end), moved, resident, held, peak)


def what_is_wrong(got: Checked, baseline: Checked) -> str:
    """Why the result cannot be right; empty if it can."""
    first, last, steps = baseline.losses[0], baseline.losses[-1], len(baseline.losses)
    if not all(math.isfinite(loss) for loss in got.losses):
        return f"loss {got.losses[-1]} after {steps} steps"
    if abs(got.losses[0] - first) > FIRST_LOSS_SHARE * abs(first):
        return f"first loss {got.losses[0]:.4f}, BF16 {first:.4f}: the forward pass differs"
    allowed = max(FALL_SHARE * abs(first - last), FIRST_LOSS_SHARE * abs(first))
    if abs(got.losses[-1] - last) > allowed:
        return f"loss {got.losses[0]:.4f} to {got.losses[-1]:.4f} in {steps} steps, BF16 to {last:.4f}"
    if len(got.moved) < len(baseline.moved):
        return f"{len(got.moved)} matrices moved in {steps} steps, {len(baseline.moved)} in BF16"
    return ""


def group_size(first: Checked, device: torch.device, count: int) -> int:
    """How many variants, BF16 one of them, run beside each other: as many as fit, going by BF16, in groups alike."""
    if device.type != "cuda" or count <= 2:
        return count
    free = MEMORY_SHARE * (timing.free_bytes(device) + first.resident)
    working = 1.2 * (first.peak - first.resident)
    others = int(max(1, (free - working) // max(1, first.resident) - 1))
    groups = math.ceil((count - 1) / others)
    return 1 + math.ceil((count - 1) / groups)


@contextmanager
def many_compiled() -> Iterator[None]:
    """Inside, torch.compile takes as many versions of a layer as there are variants, and never falls back unseen."""
    from torch._dynamo import config

    with config.patch(recompile_limit=256, accumulated_recompile_limit=4096, fail_on_recompile_limit_hit=True):
        yield


def measure(
    preset: Preset,
    variants: Sequence[Variant],
    device: torch.device,
    *,
    say: Say = lambda message: None,
    with_floor: bool = True,
    command: str = "step",
    work: Work | None = None,
) -> Result:
    """Run the variants, of which the first is BF16, and return their rows in the same order.

    Raises: HardwareError if the preset needs a GPU or more memory than there is; what BF16 itself raises.
    """
    check_hardware(preset, device)
    result = Result(command=command, facts=facts(device), settings=preset.to_dict() | {"seed": 0}, rows=[])
    floor = None
    if with_floor and device.type == "cuda":
        say("the floor's parts")
        floor = measure_floor(preset, device, dict.fromkeys(v.recipe for v in variants))
        result.parts = floor.to_dict()
        result.settings["copy_tb_per_s"] = floor.copy_tb_per_s
    elif with_floor:
        result.notes.append("no floor: it is measured on a GPU")
    if device.type != "cuda":
        result.notes.append("no memory columns: PyTorch does not count the CPU's memory")
    run = _Run(preset, device, work or Work(preset, device), floor, say, result)
    if any(v.is_compiled for v in variants):
        with many_compiled():
            run.all_groups(variants)
    else:
        run.all_groups(variants)
    order = {v.name: i for i, v in enumerate(variants)}
    result.rows.sort(key=lambda row: order[row.name])
    return result


def check_hardware(preset: Preset, device: torch.device) -> None:
    """Raise HardwareError, saying what the preset needs, if the device has not got it."""
    if not preset.needs_gib:
        return
    if device.type != "cuda":
        raise HardwareError(
            f"preset {preset.name!r} got the CPU; it needs a CUDA GPU with about {preset.needs_gib:.0f} GiB free; use"
            " --preset tiny here"
        )
    free = timing.free_bytes(device) / 2**30
    if free < 0.5 * preset.needs_gib:
        raise HardwareError(
            f"preset {preset.name!r} got a GPU with {free:.1f} GiB free; it needs about {preset.needs_gib:.0f}; lower"
            " --layers, --batch or --length, or use --preset tiny"
        )


class _Run:
    """The state of one measurement."""

    def __init__(
        self, preset: Preset, device: torch.device, work: Work, floor: Floor | None, say: Say, result: Result
    ) -> None:
        self.preset, self.device, self.work, self.floor, self.say, self.result = (
            preset, device, work, floor, say, result
        )  # fmt: skip
        self.baselines: list[Spread] = []

    def all_groups(self, variants: Sequence[Variant]) -> None:
        baseline, others = variants[0], list(variants[1:])
        runnable = []
        for variant in others:
            if lacks := variant.missing():
                self.result.rows.append(self._row(variant, "not installed", f"{', '.join(lacks)} is not installed"))
            else:
                runnable.append(variant)
        size = None
        while size is None or runnable:
            timing.release(self.device)
            self.say(f"{baseline.name}: first steps")
            first = take_first_steps(self.work, baseline)
            if size is None:
                size = group_size(first, self.device, len(runnable) + 1)
            group, runnable = runnable[: size - 1], runnable[size - 1 :]
            self._group(baseline, first, group)
            del first
            if any(variant.is_compiled for variant in group):
                torch.compiler.reset()
        if len(self.baselines) > 1:
            medians = [spread.median for spread in self.baselines]
            drift = max(medians) / min(medians) - 1
            self.result.notes.append(
                f"{len(medians)} groups, since not all variants fit into memory at once; BF16 in each: "
                + ", ".join(f"{ms:.1f}" for ms in medians)
                + f" ms, {drift:.1%} apart"
            )

    def _group(self, baseline: Variant, first: Checked, variants: Sequence[Variant]) -> None:
        """Check the variants beside BF16, then time those that are right in turns."""
        checked = {baseline.name: first}
        rows = {baseline.name: self._row(baseline)}
        for variant in variants:
            self.say(f"{variant.name}: first steps")
            rows[variant.name] = row = self._row(variant)
            try:
                got = take_first_steps(self.work, variant)
            except Exception as error:
                row.status, row.detail = "error", one_line(error)
                del error
                timing.release(self.device)
                continue
            self._note_checks(row, got)
            if reason := what_is_wrong(got, first):
                row.status, row.detail = "wrong", reason
            else:
                checked[variant.name] = got
            del got
        self._note_checks(rows[baseline.name], first)
        self.say(f"{len(checked)} variants in turns")
        times = self._rounds({name: one.trainee for name, one in checked.items()}, rows)
        del checked
        base = Spread.of(times[baseline.name])
        self.baselines.append(base)
        for name, values in times.items():
            if rows[name].status == "ok":
                self._note_times(rows[name], Spread.of(values), base, rows[name].labels["recipe"])
        known = {row.name for row in self.result.rows}
        self.result.rows += [row for name, row in rows.items() if name not in known]

    def _rounds(self, trainees: dict[str, Trainee], rows: dict[str, Row]) -> dict[str, list[float]]:
        times: dict[str, list[float]] = {name: [] for name in trainees}
        names = list(trainees)
        rounds = math.ceil(self.preset.steps / self.preset.turn)
        for number in range(rounds):
            count = min(self.preset.turn, self.preset.steps - number * self.preset.turn)
            shift = number % len(names)
            for name in names[shift:] + names[:shift]:
                if rows[name].status != "ok":
                    continue
                try:
                    times[name] += self._turn(trainees[name], count)
                except Exception as error:
                    if name == BASELINE:
                        raise
                    rows[name].status, rows[name].detail = "error", one_line(error)
        return times

    def _turn(self, trainee: Trainee, count: int) -> list[float]:
        trainee.activate()

        def step() -> Tensor:
            return trainee.step(lambda: None)

        step()  # what the others left in caches and clocks is not this variant's
        timing.synchronize(self.device)
        return timing.turn_ms(step, count, self.device)

    def _row(self, variant: Variant, status: str = "ok", detail: str = "") -> Row:
        labels = {"group": variant.group, "recipe": variant.recipe}
        return Row(name=variant.name, status=status, detail=detail, labels=labels)  # type: ignore[arg-type]

    def _note_checks(self, row: Row, got: Checked) -> None:
        row.values |= {
            name: value
            for name, value in (("first_loss", got.losses[0]), ("last_loss", got.losses[-1]))
            if math.isfinite(value)
        }
        row.values |= {"matrices": float(got.matrices), "moved_matrices": float(len(got.moved))}
        if self.device.type == "cuda":
            row.values |= {
                "peak_bytes": float(got.peak),
                "held_bytes": float(got.held),
                "resident_bytes": float(got.resident),
            }

    def _note_times(self, row: Row, ms: Spread, base: Spread, recipe: str | None) -> None:
        row.ms = ms
        row.values |= {
            "speed_against_bf16": base.median / ms.median,
            "tokens_per_s": self.preset.tokens / ms.median * 1e3,
            "samples_per_s": self.preset.batch / ms.median * 1e3,
            "tflops": self.preset.flops() / ms.median / 1e9,
        }
        least = None if self.floor is None else self.floor.step_ms(recipe)
        if least is not None:
            row.values |= {"floor_ms": least, "share_of_floor": least / ms.median}
