"""Times with their spread, on a GPU between its own events and on a CPU by its clock; and what memory is held."""

from __future__ import annotations

import gc
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from acceler8.errors import RunError

FLUSH_BYTES = 2**28
"""More than any L2 cache: writing it in front of a call leaves nothing of the call's input there."""


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` (0 to 1) of ``values`` lies, linear between neighbours.

    Raises: RunError for no values or a share outside of 0 to 1.
    """
    if not values or not 0.0 <= share <= 1.0:
        raise RunError(f"percentile got {len(values)} values and share {share!r}; allowed: at least one value, 0 to 1")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Median of some times and where the middle three fifths of them lie, milliseconds."""

    p20: float
    median: float
    p80: float
    count: int

    @classmethod
    def of(cls, times_ms: Sequence[float]) -> Spread:
        """From single times."""
        return cls(
            p20=percentile(times_ms, 0.2),
            median=percentile(times_ms, 0.5),
            p80=percentile(times_ms, 0.8),
            count=len(times_ms),
        )

    def divided(self, by: int) -> Spread:
        """Of one part, where the times were those of ``by`` equal ones."""
        return Spread(p20=self.p20 / by, median=self.median / by, p80=self.p80 / by, count=self.count)


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def turn_ms(work: Callable[[], object], count: int, device: torch.device) -> list[float]:
    """Milliseconds of each of ``count`` calls in a row; on a GPU nothing waits for it between them."""
    if device.type != "cuda":
        times = []
        for _ in range(count):
            start = time.perf_counter()
            work()
            times.append((time.perf_counter() - start) * 1e3)
        return times
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        work()
        event.record()
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) for start, end in itertools.pairwise(events)]


def call_ms(
    work: Callable[[], object],
    device: torch.device,
    *,
    repeats: int = 15,
    warmup: int = 3,
    flush: bool = True,
    sample_ms: float = 0.0,
) -> Spread:
    """Milliseconds of one call. ``flush`` empties the L2 cache before each and lets the host run ahead.

    With ``sample_ms`` and without ``flush`` each sample is as many calls in a row as take about that long: what the
    call costs in a loop, the host's share included.
    """
    for _ in range(warmup):
        work()
    synchronize(device)
    if device.type != "cuda" or not flush:
        inner = 1
        if sample_ms:
            inner = max(1, min(20, round(sample_ms / max(1e-6, turn_ms(work, 2, device)[-1]))))
        return Spread.of([sum(turn_ms(work, inner, device)) / inner for _ in range(repeats)])
    cache = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
    pairs = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        cache.zero_()
        start.record()
        work()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize(device)
    return Spread.of([start.elapsed_time(end) for start, end in pairs])


def rounds_ms(
    works: Mapping[str, Callable[[], object]], device: torch.device, *, rounds: int = 10, calls: int = 1
) -> dict[str, Spread]:
    """Milliseconds of one call of each, taking turns of ``calls`` calls in an order that moves on every round.

    One call that is not timed opens each turn. A single call is timed behind an emptied L2 cache.
    """
    times: dict[str, list[float]] = {name: [] for name in works}
    names = list(works)
    cache = torch.empty(FLUSH_BYTES if device.type == "cuda" else 0, dtype=torch.uint8, device=device)
    for number in range(rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            works[name]()
            if calls == 1:
                cache.zero_()
            times[name] += [sum(turn_ms(works[name], calls, device)) / calls]
    return {name: Spread.of(values) for name, values in times.items()}


def queued_ms(
    works: Mapping[str, Callable[[], object]],
    once_ms: Mapping[str, float],
    device: torch.device,
    *,
    rounds: int = 5,
    sample_ms: float = 1.0,
) -> dict[str, Spread]:
    """Milliseconds of one call of each on a GPU that never waits for the host: for replays, which cost it little.

    ``once_ms`` is about how long each takes. Turns of as many calls as take ``sample_ms``, at least one, in an order
    that moves on every round; all are queued before the first is waited for. One call that is not timed opens them.
    """
    calls = {name: max(1, min(20, round(sample_ms / max(1e-6, once)))) for name, once in once_ms.items()}
    names = list(works)
    works[names[-1]]()
    turns: dict[str, list[Callable[[], float]]] = {name: [] for name in names}
    for number in range(rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            turns[name].append(_queue(works[name], calls[name], device))
    synchronize(device)
    return {name: Spread.of([total() / calls[name] for total in found]) for name, found in turns.items()}


def _queue(work: Callable[[], object], count: int, device: torch.device) -> Callable[[], float]:
    """Call it ``count`` times; what the result gives, behind a synchronisation, is the milliseconds of all."""
    if device.type != "cuda":
        total = sum(turn_ms(work, count, device))
        return lambda: total
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(count):
        work()
    end.record()
    return lambda: start.elapsed_time(end)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes read plus written in a second by a large copy on the device."""
    size = 2**31 if device.type == "cuda" else 2**24
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / (call_ms(lambda: target.copy_(source), device, repeats=10).median * 1e-3)


def allocated(device: torch.device) -> int:
    """Bytes that live tensors hold on a GPU; 0 on a CPU, where PyTorch does not count."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def peak_allocated(device: torch.device) -> int:
    """The most that ``allocated`` was since ``reset_peak``."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def reset_peak(device: torch.device) -> None:
    """Begin ``peak_allocated`` anew."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def release(device: torch.device) -> None:
    """Collect what is unreachable and give cached memory back."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def free_bytes(device: torch.device) -> int:
    """Memory that a GPU has left for this process, cached blocks included; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
