"""Which recipes a backend runs, on which GPUs, and under which way of spreading a model over processes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from acceler8.recipes import Recipe
from acceler8.scaling import ROWWISE, TENSORWISE, BLOCK_1x128, MX_1x32

STRATEGIES = ("single", "ddp", "fsdp2", "zero0", "zero1", "zero2", "zero3")
"""One process; every process the whole model; sharded by FSDP2; by DeepSpeed's engine, at each of its stages."""
_KINDS = {TENSORWISE: "tensorwise", ROWWISE: "rowwise", BLOCK_1x128: "blockwise", MX_1x32: "mxfp8"}


@dataclass(frozen=True, kw_only=True)
class Capability:
    """One row of a backend's table."""

    recipe: str
    """A word of the vocabulary: ``tensorwise``, ``rowwise``, ``blockwise``, ``delayed``, ``mxfp8``,
    ``activations_only``."""
    compute: tuple[int, int] | None = None
    """Least compute capability of the GPU, (9, 0) for Hopper; None: every device, the CPU too."""
    on_cpu: bool = False
    """True if it also runs on the CPU, emulated, where a GPU has to be of some capability."""
    below: tuple[int, int] | None = None
    """The compute capability from which on it does not run any more; None: none."""
    strategies: tuple[str, ...] = ("single", "ddp")
    why_not: Mapping[str, str] = field(default_factory=dict)
    """Of strategies that are not among these: the reason, and what to do instead."""
    gathers_fp8: bool = False
    """True if FSDP2 can gather this recipe's weights as FP8 codes."""

    def runs_on(self, device: torch.device) -> bool:
        """True on this device. A model on the meta device may come to any."""
        if self.compute is None and self.below is None:
            return True
        if device.type != "cuda":
            return device.type == "meta" or (self.on_cpu and device.type == "cpu")
        found = torch.cuda.get_device_capability(device)
        return found >= (self.compute or (0, 0)) and (self.below is None or found < self.below)


def kind_of(recipe: Recipe) -> str:
    """The word of the vocabulary that describes a recipe, whatever its own name is."""
    if recipe.is_delayed:
        return "delayed"
    if not recipe.fp8_gemms:
        return "activations_only"
    return _KINDS[recipe.granularity]


def lacking(
    backend: str, table: Iterable[Capability], recipe: Recipe, device: torch.device, strategy: str
) -> str | None:
    """Why a backend with this table does not run ``recipe`` there, with the recipes that it does run; None if it does.

    Got, allowed, what to do: ``backend 'torchao' has no recipe mxfp8; ...``.
    """
    table, kind = tuple(table), kind_of(recipe)
    here = tuple(row for row in table if row.runs_on(device) and strategy in row.strategies)
    if any(row.recipe == kind for row in here):
        return None
    allowed = ", ".join(dict.fromkeys(row.recipe for row in here)) or "none"
    rows = [row for row in table if row.recipe == kind]
    if not rows:
        what = f"has no recipe {kind}"
    elif not any(row.runs_on(device) for row in rows):
        what = f"does not run recipe {kind} on {device_said(device)} ({_needs(rows)})"
    else:
        reason = rows[0].why_not.get(strategy)
        what = f"does not run recipe {kind} under {strategy}" + (f" ({reason})" if reason else "")
    named = f"backend {backend!r}" if recipe.name == kind else f"backend {backend!r}, asked for {recipe.name!r},"
    return f"{named} {what}; allowed there: {allowed}; choose one of them, or another backend"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Whether one backend runs one recipe under one strategy, on devices that the recipe runs on."""

    backend: str
    recipe: str
    strategy: str
    runs: bool
    reason: str = ""
    """Why not."""
    gathers_fp8: bool = False
    """FSDP2 only: its weights can travel as FP8 codes."""


def cells(backend: str, table: Iterable[Capability]) -> list[Cell]:
    """A backend's table, one cell for each of its recipes and each strategy."""
    found = []
    for row in table:
        for strategy in STRATEGIES:
            runs = strategy in row.strategies
            reason = "" if runs else row.why_not.get(strategy, "not tested with this backend, and so refused")
            gathers = row.gathers_fp8 and runs and strategy == "fsdp2"
            found.append(
                Cell(
                    backend=backend, recipe=row.recipe, strategy=strategy, runs=runs, reason=reason, gathers_fp8=gathers
                )
            )
    return found


def needs(row: Capability) -> str:
    """The devices of one row: ``any device``, ``a GPU from compute capability 8.9, or the CPU``."""
    if row.compute is None and row.below is None:
        return "any device"
    return "a GPU " + _needs([row]).removeprefix("it needs a GPU ") + (", or the CPU" if row.on_cpu else "")


def device_said(device: torch.device) -> str:
    """``the CPU``, or the GPU's name and capability."""
    if device.type != "cuda":
        return "the CPU" if device.type == "cpu" else device.type
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} (sm_{major}{minor})"


def _needs(rows: list[Capability]) -> str:
    row = rows[0]
    least = f"from compute capability {row.compute[0]}.{row.compute[1]}" if row.compute else "up to"
    return f"it needs a GPU {least}" + (f" below {row.below[0]}.{row.below[1]}" if row.below else "")
