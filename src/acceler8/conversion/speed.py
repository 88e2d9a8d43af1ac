"""What a plan says of speed, from a cost table: milliseconds in BF16 and in FP8, and which layers FP8 would slow down.

A layer's cost is that of its shape, ``[tokens, in_features] -> [tokens, out_features]``, forward and backward, casts
included, and launches only where the table says so (``timing`` "eager"). Layers that run as one GEMM (q, k and v; gate
and up) are one layer whose out_features are theirs side by side: k and v alone are small, and would seem to lose where
the three together gain. BF16 runs them one by one, and so they are counted. Where their sum lies outside of the table
and each of them inside, the sum of their costs is taken, which one operation does not exceed.

What the table does not answer is not predicted, and stays in FP8: shapes outside of its grid, recipes that were not
measured, and layers whose weight is frozen, for the table has all three GEMMs. Of a recipe only what its work depends
on is compared, so ``eval``, names, and formats as such do not matter; nor does ``save_for_backward``, although
``fp8_compressed`` adds casts: the table was measured with the default.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from acceler8 import recipes as registry
from acceler8.backends import Fusion
from acceler8.costs import CostTable, entry_name, gpu_of, known_gpus
from acceler8.errors import PlanError, unknown_name
from acceler8.recipes import Recipe

MEASURE = "`acceler8 bench gemm --save`"


@dataclass(frozen=True, kw_only=True)
class Speed:
    """What a cost table predicts of a plan: milliseconds of the layers that it knows, forward and backward."""

    table: str
    """The table, in words: the GPU, its date, and whether it is derived."""
    gpu: str
    source: str
    """``measured`` or ``derived``."""
    tokens: int
    """Tokens of one forward on one GPU."""
    bf16_ms: float
    """All in BF16."""
    planned_ms: float
    """As planned."""
    fp8_bf16_ms: float
    """The planned FP8 layers, in BF16."""
    unknown: int
    """Rows of the plan without an answer."""

    @property
    def gain(self) -> float:
        """How many times as fast as BF16 the layers are as planned; 1 if none is known."""
        return self.bf16_ms / self.planned_ms if self.planned_ms else 1.0

    def __str__(self) -> str:
        share = self.fp8_bf16_ms / self.bf16_ms if self.bf16_ms else 0.0
        missing = f"; {self.unknown} layer{'s' * (self.unknown > 1)} not in the table" if self.unknown else ""
        if not self.bf16_ms:
            return f"predicted ({self.table}, {self.tokens} tokens): nothing{missing}"
        return (
            f"predicted ({self.table}, {self.tokens} tokens): linear layers, forward and backward,"
            f" {ms(self.bf16_ms)} ms in BF16, {ms(self.planned_ms)} ms as planned, {times(self.gain)}; the FP8 layers"
            f" are {share:.0%} of that BF16 time{missing}"
        )


@dataclass(frozen=True)
class Prediction:
    """Of layers that run as one in FP8, and one after the other in BF16: names, and milliseconds of all of them."""

    layers: tuple[str, ...]
    bf16_ms: float
    fp8_ms: float
    own_bf16_ms: float
    """This layer's part of them, and of those in FP8."""
    own_fp8_ms: float

    @property
    def is_slower(self) -> bool:
        """True if FP8 costs more than BF16."""
        return self.fp8_ms > self.bf16_ms

    def reason(self, table: CostTable) -> str:
        """Why the layer stays in BF16."""
        parts = [name.rpartition(".")[2] for name in self.layers]
        together = f" for {', '.join(parts)} together" if len(parts) > 1 else ""
        return (
            f"FP8 would be {times(self.bf16_ms / self.fp8_ms)} here: {ms(self.fp8_ms)} ms against"
            f" {ms(self.bf16_ms)} ms{together}, {table.said}"
        )


def ms(value: float) -> str:
    """Milliseconds with three figures or two decimals, whichever is more."""
    return f"{value:.2f}" if value >= 1 or value == 0 else f"{value:.3g}"


def times(gain: float) -> str:
    """``0.83x``, cut and not rounded, so that a loss never reads 1.00x."""
    return f"{math.floor(gain * 100 + 1e-9) / 100:.2f}x"


def check_tokens(tokens: Any, never_slower: Any) -> None:
    """Raise PlanError unless they are a number of tokens (or None) and a boolean."""
    if tokens is not None and (type(tokens) is not int or tokens < 1):
        raise PlanError(
            f"tokens={tokens!r}; allowed: an integer of 1 or more, the tokens of one forward on one GPU; give batch x"
            " sequence"
        )
    if type(never_slower) is not bool:
        raise PlanError(f"never_slower={never_slower!r}; allowed: True, False")


def find_costs(
    costs: CostTable | Path | str | None, gpu: str | None, tokens: int | None, device: torch.device
) -> tuple[CostTable | None, list[str]]:
    """The table to predict from, None if there is none or no ``tokens``; and what the plan should say about that.

    ``costs`` is the table or its file, ``gpu`` the name of a GPU that has one; with neither it is that of the GPU that
    ``device`` is. Raises: PlanError for both of them, either without ``tokens``, and an unknown GPU; RunError for a
    table that cannot be read.
    """
    given = [f"{name}={value!r}" for name, value in (("gpu", gpu), ("costs", costs and str(_path(costs)))) if value]
    if len(given) > 1:
        raise PlanError(f"plan got {' and '.join(given)}; allowed: one of them; the table says for which GPU it is")
    if given and tokens is None:
        raise PlanError(f"plan got {given[0]} without tokens, which costs depend on; give tokens=batch x sequence")
    if costs is not None:
        if not isinstance(costs, CostTable | str | os.PathLike):
            raise PlanError(f"costs got {costs!r}; allowed: a CostTable, or the path of its file")
        return (costs if isinstance(costs, CostTable) else CostTable.load(costs)), []
    if gpu is not None:
        table = CostTable.for_this_gpu(gpu) if isinstance(gpu, str) else None
        if table is None:
            raise PlanError(f"{unknown_name('GPU of a cost table', gpu, known_gpus())}; measure it there: {MEASURE}")
        return table, []
    return _costs_here(tokens, device)


def _costs_here(tokens: int | None, device: torch.device) -> tuple[CostTable | None, list[str]]:
    here = gpu_of(device)
    if here is None:
        asked = f"speed not predicted: the model is on {device.type}; gpu= predicts for a GPU that is not here, such as"
        return None, [f"{asked} {', '.join(map(repr, known_gpus()))}"] if tokens is not None else []
    table = CostTable.for_this_gpu(here)
    if table is None:
        return None, [f"speed not measured here: there is no cost table of {here}; {MEASURE} makes one"]
    if tokens is None:
        return None, [
            "speed not predicted: give tokens= (batch x sequence, of one GPU), and layers that FP8 would slow down stay"
            " in BF16"
        ]
    return table, []


def _path(costs: CostTable | Path | str) -> object:
    return (costs.path or costs.gpu) if isinstance(costs, CostTable) else costs


class Forecast:
    """Predictions from one table for one number of tokens."""

    def __init__(self, table: CostTable, tokens: int, backend: str = "native") -> None:
        self.table, self.tokens = table, tokens
        self._entry = partial(entry_name, backend)
        known = [registry.get(name) for name in registry.names() if self._entry(name) in table.entries]
        self._names = {_work(recipe): self._entry(recipe.name) for recipe in known}

    @property
    def knows_backend(self) -> bool:
        """True if any recipe of the backend was measured."""
        return bool(self._names)

    def bf16_ms(self, layer: nn.Linear) -> float | None:
        """Milliseconds of a layer in BF16."""
        if not layer.weight.requires_grad:
            return None
        return self.table.ms(self.tokens, layer.in_features, layer.out_features)

    def of_layers(
        self, layers: Mapping[str, nn.Linear], recipes: Mapping[str, Recipe], fusions: Iterable[Fusion]
    ) -> dict[str, Prediction]:
        """Of each layer that becomes FP8, given with its recipe, what the table answers."""
        found: dict[str, Prediction] = {}
        for names in _units(recipes, fusions):
            unit = [layers[name] for name in names]
            costs = self._costs(unit, recipes[names[0]])
            if costs is not None:
                bf16, fp8 = costs
                width = sum(layer.out_features for layer in unit)
                found |= {
                    name: Prediction(names, sum(bf16), fp8, own, fp8 * layer.out_features / width)
                    for name, layer, own in zip(names, unit, bf16, strict=True)
                }
        return found

    def _costs(self, unit: list[nn.Linear], recipe: Recipe) -> tuple[list[float], float] | None:
        """Milliseconds of each in BF16, and of all in FP8, where they run as one if the table has their width."""
        name = self._names.get(_work(recipe))
        if name is None or not all(layer.weight.requires_grad for layer in unit):
            return None
        k, widths = unit[0].in_features, [layer.out_features for layer in unit]
        parts = [self.table.predict(self.tokens, k, width, name) for width in widths]
        answered = [part for part in parts if part is not None]
        merged = self.table.predict(self.tokens, k, sum(widths), name)
        if len(answered) == len(parts):
            return [bf16 for bf16, _ in answered], sum(fp8 for _, fp8 in answered) if merged is None else merged[1]
        if merged is None:
            return None
        return [merged[0] * width / sum(widths) for width in widths], merged[1]  # a part is too narrow for the table


def _units(recipes: Mapping[str, Recipe], fusions: Iterable[Fusion]) -> list[tuple[str, ...]]:
    """The layers, each once, those together that run as one GEMM. Layers that only share a cast are by themselves."""
    groups = []
    for fusion in fusions:
        if fusion.kind == "merged linears":
            groups.append(fusion.layers)
        elif fusion.kind == "gated MLP":
            groups.append(fusion.layers[:-1])  # gate and up; the last one is down
    merged = {name for group in groups for name in group}
    return [*groups, *((name,) for name in recipes if name not in merged)]


def _work(recipe: Recipe) -> tuple[Any, ...]:
    """What the time of a layer depends on: which operands are cast, how scales are made, and how GEMMs accumulate."""
    gemms = [
        (*((operand.is_fp8, operand.granularity.name) for operand in (gemm.a, gemm.b)), gemm.fast_accum)
        for gemm in (recipe.fprop, recipe.dgrad, recipe.wgrad)
    ]
    casts_x_once = recipe.fprop.a.format is recipe.wgrad.b.format
    return type(recipe.scaling), casts_x_once, *gemms


__all__ = ["Forecast", "Prediction", "Speed", "check_tokens", "find_costs", "ms", "times"]
