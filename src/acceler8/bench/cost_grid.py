"""The cost table of a GPU: linear layers forward and backward over a grid of shapes, in BF16 and in each recipe."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence

import torch

from acceler8.bench import timing
from acceler8.bench.facts import device_name, facts
from acceler8.bench.layers import NoGraphError, Shape, capture_for, linear, said, timed_rows
from acceler8.conversion.graphed_step import Capture
from acceler8.costs import BF16, CostTable
from acceler8.errors import RunError

Say = Callable[[str], None]
Entries = dict[str, dict[Shape, float]]

GRID_TOKENS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
GRID_SIZES = (512, 1024, 2048, 4096, 8192, 16384)
GRID_BUDGET_S = 170.0
ROUNDS, ROUNDS_OF_LARGE, LARGE_FLOPS = 5, 3, 1e13
"""Turns of each layer; those that take 10 ms and more spread little."""


def measure_costs(
    device: torch.device,
    names: Sequence[str],
    *,
    tokens: Sequence[int] = GRID_TOKENS,
    sizes: Sequence[int] = GRID_SIZES,
    budget_s: float = GRID_BUDGET_S,
    say: Say = lambda message: None,
    capture: Capture | None = None,
) -> tuple[CostTable, list[str]]:
    """Layers over the grid of M in ``tokens``, K and N in ``sizes``, small ones first; and notes on what is missing.

    Recipes whose block does not divide a size are measured all the same, filled as they train. Points that do not fit
    into memory, or come behind ``budget_s`` seconds, are left out. ``capture``: None takes CUDA graphs on a GPU. If a
    layer cannot be captured the grid is begun anew with eager calls, as the table's ``timing`` then says. Recipes of
    other backends come behind, for as many seconds again; one whose layer cannot be captured has no entries. Raises
    RunError if a result of ours is wrong.
    """
    names, others = [n for n in names if ":" not in n], [n for n in names if ":" in n]
    capture = capture or capture_for(device)
    end = time.perf_counter() + budget_s
    grid = sorted(itertools.product(tokens, sizes, sizes), key=lambda shape: (math.prod(shape), shape))
    notes: list[str] = []
    measured = None
    try:
        measured = _measure_grid(grid, names, device, capture, end, say)
    except NoGraphError as error:
        notes.append(f"timed by eager calls, with the waits for the host: a layer could not be captured: {error}")
        capture = None
    entries, missing = measured or _measure_grid(grid, names, device, None, end, say)
    if left := len(grid) - len(missing) - len(entries.get(BF16, {})):
        notes.append(f"{left} of {len(grid)} shapes left out: {budget_s:.0f} s were over")
    notes += [f"{said(shape)} left out: too large for the memory" for shape in missing]
    if others:
        end = time.perf_counter() + budget_s
        found, _ = _measure_grid(grid, others, device, capture, end, say)
        entries |= {name: found[name] for name in others}
        notes += [
            f"{name} has no entries: its layer failed, or could not be captured" for name in others if not found[name]
        ]
    said_facts = facts(device)
    table = CostTable(
        gpu=device_name(device), torch=said_facts["torch"], date=said_facts["date"], commit=said_facts["commit"],
        source="measured", timing="eager" if capture is None else "graph",
        entries={name: found for name, found in entries.items() if found},
    )  # fmt: skip
    return table, notes


def _measure_grid(
    grid: Sequence[Shape],
    names: Sequence[str],
    device: torch.device,
    capture: Capture | None,
    end: float,
    say: Say,
) -> tuple[Entries, list[Shape]]:
    """Milliseconds of what could be measured until ``end``, and the shapes that memory did not suffice for."""
    entries: Entries = {name: {} for name in (BF16, *names)}
    missing = []
    largest = timing.free_bytes(device) * 0.8 if device.type == "cuda" else math.inf
    for number, shape in enumerate(grid):
        m, k, n = shape
        if not names or time.perf_counter() > end:
            break
        if number % 16 == 0:
            say(f"shape {number + 1} of {len(grid)}: {said(shape)}, {max(0.0, end - time.perf_counter()):.0f} s left")
        if 14 * m * (k + n) + 16 * k * n > largest:
            missing.append(shape)
            continue
        rounds = ROUNDS if 6.0 * m * k * n < LARGE_FLOPS else ROUNDS_OF_LARGE
        try:
            rows = timed_rows(
                linear(shape), names, device, capture, rounds=rounds, is_strict=not any(":" in name for name in names)
            )
        except torch.OutOfMemoryError:
            missing.append(shape)
            timing.release(device)
            continue
        for row in rows:
            if row.ms is None and ":" in row.name:
                names = [name for name in names if name != row.name]
                continue
            if row.ms is None:
                raise RunError(
                    f"{row.name} on {said(shape)} has {row.values['sqnr_db']:.1f} dB, which is wrong; no cost table is"
                    " made of it"
                )
            entries[row.name][shape] = row.ms.median
    return entries, missing


__all__ = ["measure_costs"]
