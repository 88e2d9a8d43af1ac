"""A preset's layers run as in its model, and what FP8 makes slower is said."""

from __future__ import annotations

import dataclasses
from types import ModuleType

import pytest
import torch
from torch import nn

from acceler8.bench import preset_layers
from acceler8.bench.layers import Layer, Operands, layer_rows, worst_db
from acceler8.bench.llama import Llama
from acceler8.bench.presets import PRESETS, Preset
from acceler8.bench.results import Row
from acceler8.bench.timing import Spread
from acceler8.nn import group, mlp

CPU = torch.device("cpu")


@pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS)
def test_the_layers_are_those_of_the_model(preset: Preset):
    with torch.device("meta"):
        model = Llama(dataclasses.replace(preset, layers=1))
        of_units = {
            tuple(child.weight.shape for child in unit.make().modules() if isinstance(child, nn.Linear)): unit.name
            for unit in preset_layers.units(preset)
        }
    shapes = {name.rpartition(".")[2]: m.weight.shape for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    expected = {
        "q, k, v": ("q_proj", "k_proj", "v_proj"),
        "o": ("o_proj",),
        "gate, up": ("gate_proj", "up_proj"),
        "down": ("down_proj",),
        "gate, up, down": ("gate_proj", "up_proj", "down_proj"),
    }
    assert of_units == {tuple(shapes[part] for part in parts): name for name, parts in expected.items()}
    assert all(unit.tokens == preset.tokens for unit in preset_layers.units(preset))


@pytest.mark.parametrize("parameters", ["bfloat16", "float32"])
def test_they_run_as_one_where_the_model_does(least: Preset, parameters: str, monkeypatch: pytest.MonkeyPatch):
    calls = []

    def counted(module: ModuleType, name: str) -> None:
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, **rest: (calls.append(name), original(*args, **rest))[1])

    counted(group, "linears")
    counted(mlp, "run_as_one")
    units = {unit.name: unit for unit in preset_layers.units(dataclasses.replace(least, parameters=parameters))}
    for name, operation in (("q, k, v", "linears"), ("gate, up", "linears"), ("gate, up, down", "run_as_one")):
        operands = Operands(units[name], CPU)
        exact, layer = Layer(operands, None).run(), Layer(operands, "rowwise")
        for _ in range(2):
            assert worst_db(layer.run(), exact) > 22
            assert calls.pop() == operation
            assert not calls


def test_sums_are_those_of_the_model(least: Preset):
    result = preset_layers.measure(dataclasses.replace(least, layers=3), ["rowwise"], CPU, rounds=1)
    ms = {(row.name, row.labels["layer"]): row for row in result.rows}
    assert len(result.rows) == 2 * 6
    for name in ("bf16", "rowwise"):
        parts = sum(ms[name, part].ms.median for part in ("q, k, v", "o", "gate, up, down"))
        assert ms[name, "all"].values["layers_ms"] == pytest.approx(3 * parts)
    of_bf16 = ms["bf16", "all"].values["layers_ms"] / ms["rowwise", "all"].values["layers_ms"]
    assert ms["rowwise", "all"].values["speed_against_bf16"] == pytest.approx(of_bf16)
    assert ms["bf16", "o"].labels["timing"] == "eager"
    assert result.settings["preset"] == "tiny"


def test_what_is_not_measured_is_not_summed(least: Preset):
    rows = layer_rows(preset_layers.units(least)[0], ["rowwise"], CPU, None, rounds=1)
    assert preset_layers._sums(rows, least) == []


def test_a_slower_layer_is_said_with_what_plans_make_of_it():
    def row(speed: float, **labels: str) -> Row:
        labels = {"layer": "o"} | labels
        return Row(name="rowwise", labels=labels, ms=Spread.of([1.0]), values={"speed_against_bf16": speed})

    rows = [row(1.2, planned="FP8"), row(0.95, planned="BF16"), row(0.999, planned="FP8"), row(0.5)]
    assert preset_layers._slower(rows) == [
        "rowwise makes o slower: 0.950x; plans leave it in BF16",
        "rowwise makes o slower: 0.999x; plans make it FP8",
        "rowwise makes o slower: 0.500x",
    ]


def test_without_a_gpu_no_plan_is_asked(least: Preset):
    assert preset_layers.planned(preset_layers.units(least)[1], "rowwise", CPU) is None


@pytest.mark.requires(sm=90)
def test_a_plan_is_asked_by_the_table_of_this_gpu():
    device = torch.device("cuda", torch.cuda.current_device())
    large = preset_layers.units(PRESETS["llama3-8b-4l"])[4]
    assert preset_layers.planned(large, "rowwise", device) in (None, "FP8")
