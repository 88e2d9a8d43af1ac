"""The linear layers of a preset's model, as they run in it: does FP8 make any of them slower?

q, k and v are one module whose layers read one input, and so are gate and up; a gated MLP is also measured whole, for
in FP8 it is one operation. Inputs are BF16. What a model adds is not in the times: norms that write codes beside their
results, so that the layers behind them cast less, and casts of a residual stream in FP32, which the layers in BF16 pay
as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

import acceler8
from acceler8.bench import timing
from acceler8.bench.facts import facts
from acceler8.bench.layers import Unit, capture_for, layer_rows
from acceler8.bench.llama import MLP
from acceler8.bench.presets import Preset
from acceler8.bench.results import Result, Row
from acceler8.bench.step import check_hardware
from acceler8.costs import BF16

ALL = "all"
"""The layer of the rows that hold the sums."""
LEAST_SQNR_DB_OF_MLP = 14.0
"""Two products in a row, the second of what the first and a cast made: 4 dB less than a layer's."""


class Readers(nn.Module):
    """Linear layers by name and width that read one input of width ``k``; x [..., k] -> a result of each."""

    def __init__(self, k: int, widths: dict[str, int]) -> None:
        super().__init__()
        for name, width in widths.items():
            self.add_module(name, nn.Linear(k, width, bias=False))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Each layer's result, in the order in which they were given."""
        return tuple(layer(x) for layer in self.children())


def units(preset: Preset) -> tuple[Unit, ...]:
    """What is measured: q/k/v, o, gate/up, down, and the MLP as a whole."""
    width, ffn, tokens = preset.width, preset.ffn, preset.tokens
    dtype: torch.dtype = getattr(torch, preset.parameters)

    def readers(name: str, widths: dict[str, int]) -> Unit:
        label = f"{tokens}x{width}x{'+'.join(map(str, widths.values()))}"
        return Unit(
            name=name, tokens=tokens, k=width, widths=tuple(widths.values()), label=label, weight_dtype=dtype,
            make=lambda: Readers(width, widths),
        )  # fmt: skip

    down = replace(
        readers("down", {"down_proj": width}), k=ffn, label=f"{tokens}x{ffn}x{width}",
        make=lambda: Readers(ffn, {"down_proj": width}),
    )  # fmt: skip
    mlp = Unit(
        name="gate, up, down", tokens=tokens, k=width, widths=(width,), label=f"{tokens}x{width}x{ffn}+{ffn}, {width}",
        make=lambda: MLP(preset), weight_dtype=dtype, least_sqnr_db=LEAST_SQNR_DB_OF_MLP,
    )  # fmt: skip
    return (
        readers("q, k, v", {"q_proj": width, "k_proj": preset.kv_width, "v_proj": preset.kv_width}),
        readers("o", {"o_proj": width}),
        readers("gate, up", {"gate_proj": ffn, "up_proj": ffn}),
        down,
        mlp,
    )


SUMMED = ("q, k, v", "o", "gate, up, down")
"""Those that are a layer of the model together."""


def planned(unit: Unit, recipe: str, device: torch.device) -> str | None:
    """What a plan makes of it by this GPU's cost table: ``FP8``, ``BF16``, or FP8 in ``part``; None without a table."""
    if device.type != "cuda":
        return None
    with torch.device("meta"):
        plan = acceler8.plan(nn.ModuleList([unit.make()]), recipe, tokens=unit.tokens)
    if plan.speed is None:
        return None
    in_fp8 = [row.is_fp8 for row in plan.rows]
    return "FP8" if all(in_fp8) else "part" if any(in_fp8) else "BF16"


def measure(
    preset: Preset,
    names: Sequence[str],
    device: torch.device,
    *,
    say: Callable[[str], None] = lambda message: None,
    rounds: int = 10,
) -> Result:
    """One row for each unit in BF16 and in each recipe, and the sums over the model. Raises HardwareError."""
    check_hardware(preset, device)
    settings = {"preset": preset.name, "tokens": preset.tokens, "weights": preset.parameters, "recipes": list(names)}
    result = Result(command="gemm", facts=facts(device), settings=settings, rows=[])
    capture = capture_for(device)
    for unit in units(preset):
        say(f"{unit.name}: {unit.label}")
        rows = layer_rows(unit, names, device, capture, rounds=rounds)
        for row in rows[1:]:
            if (choice := planned(unit, row.name, device)) is not None:
                row.labels["planned"] = choice
        result.rows += rows
        if device.type == "cuda":
            result.notes += _slower(rows)
        timing.release(device)
    result.rows += _sums(result.rows, preset)
    if device.type == "cpu":
        result.notes.append("on a CPU FP8 is emulated: times say nothing about a GPU")
    return result


def _slower(rows: list[Row]) -> list[str]:
    """A sentence for each recipe that makes the layers slower, and whether a plan leaves them in BF16."""
    said = []
    for row in rows:
        if row.values.get("speed_against_bf16", 1.0) < 1.0:
            plan = {"BF16": "; plans leave it in BF16", "FP8": "; plans make it FP8", "part": "; plans make a part FP8"}
            what = plan.get(row.labels.get("planned", ""), "")
            said.append(f"{row.name} makes {row.labels['layer']} slower: {row.values['speed_against_bf16']:.3f}x{what}")
    return said


def _sums(rows: list[Row], preset: Preset) -> list[Row]:
    """Over all layers of the model, where all of a layer's were measured."""
    sums = []
    for name in dict.fromkeys(row.name for row in rows):
        parts = [row for row in rows if row.name == name and row.labels["layer"] in SUMMED]
        times = [row.ms for row in parts if row.ms is not None]
        if len(times) < len(SUMMED):
            continue
        labels = {key: parts[0].labels[key] for key in ("group", "recipe")} | {"layer": ALL}
        row = Row(name=name, labels=labels)
        row.values["layers_ms"] = preset.layers * sum(spread.median for spread in times)
        sums.append(row)
    for plain in [row.values["layers_ms"] for row in sums if row.name == BF16]:
        for row in sums:
            row.values["speed_against_bf16"] = plain / row.values["layers_ms"]
    return sums


__all__ = ["Readers", "measure", "planned", "units"]
