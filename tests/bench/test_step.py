"""Variants of a step: those that are right are timed, and those that are not say why."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import acceler8
import acceler8.bench.step as bench_step
from acceler8.bench.floor import BF16, FASTEST, measure_floor
from acceler8.bench.presets import PRESETS, Preset, preset_named
from acceler8.bench.step import measure
from acceler8.bench.variants import VARIANTS, Variant, find, select
from acceler8.bench.work import Trainee, Work, plain_trainee
from acceler8.errors import HardwareError, NotInThisVersionError, RecipeError, RunError
from acceler8.nn import fp8_layers

CPU = torch.device("cpu")


def _variant(name: str, build, **rest) -> Variant:
    return Variant(name=name, group="acceler8", loops=("plain",), build=build, **rest)


def _wrong_forward(work: Work) -> Trainee:
    model = work.make_model()
    with torch.no_grad():
        model.lm_head.weight.mul_(3.0)
    return plain_trainee(work, model)


def _stale_optimizer(work: Work) -> Trainee:
    """An optimizer that holds other tensors than the model uses: what wrapping after the optimizer was made gives."""
    model = work.make_model()
    trainee = plain_trainee(work, model)
    for linear in [m for m in model.modules() if isinstance(m, nn.Linear)]:
        linear.weight = nn.Parameter(linear.weight.detach().clone())
    return trainee


def _not_a_number(work: Work) -> Trainee:
    model = work.make_model()
    trainee = plain_trainee(work, model)
    return dataclasses.replace(trainee, step=lambda after: trainee.step(after) * float("nan"))


def _raises(work: Work) -> Trainee:
    raise ValueError("two\nlines")


def test_what_is_wrong_is_shown_and_not_timed(least: Preset):
    preset = dataclasses.replace(least, check_steps=3)
    planted = [
        _variant("head", _wrong_forward),
        _variant("stale", _stale_optimizer),
        _variant("nan", _not_a_number),
        _variant("raises", _raises),
        _variant("absent", _raises, needs=("a_module_that_is_not_there",)),
        find("rowwise", "plain"),
    ]
    result = measure(preset, [find("bf16", "plain"), *planted], CPU)
    rows = {row.name: row for row in result.rows}
    assert list(rows) == ["bf16", "head", "stale", "nan", "raises", "absent", "rowwise"]
    assert {name for name, row in rows.items() if row.ms is not None} == {"bf16", "rowwise"}
    assert rows["head"].status == rows["stale"].status == rows["nan"].status == "wrong"
    assert "the forward pass differs" in rows["head"].detail
    assert "matrices moved" in rows["stale"].detail or "loss" in rows["stale"].detail
    assert rows["raises"].status == "error"
    assert rows["raises"].detail == "ValueError: two lines"
    assert rows["absent"].status == "not installed"
    assert "a_module_that_is_not_there is not installed" in rows["absent"].detail
    assert {row.name for row in result.own_failures} == {"head", "stale", "nan", "raises"}


def test_all_variants_begin_with_the_same_weights_and_data(least: Preset):
    work = Work(least, CPU)
    first, second = work.make_model(), work.make_model()
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert torch.equal(work.tokens, Work(least, CPU).tokens)


def test_rows_hold_time_rate_and_loss(least: Preset):
    result = measure(least, select("plain", CPU, ["bf16"], None), CPU)
    (row,) = result.rows
    assert row.ms is not None
    assert row.ms.count == least.steps
    assert row.values["speed_against_bf16"] == 1.0
    assert row.values["tokens_per_s"] == pytest.approx(least.tokens / row.ms.median * 1e3)
    assert row.values["moved_matrices"] == row.values["matrices"] == 9.0
    assert row.values["last_loss"] < row.values["first_loss"]
    assert "peak_bytes" not in row.values
    assert any("no memory columns" in note for note in result.notes)


def test_variants_take_turns_in_an_order_that_moves_on(least: Preset, monkeypatch: pytest.MonkeyPatch):
    turns: list[tuple[int, int]] = []
    original = bench_step._Run._turn

    def spy(self, trainee: Trainee, count: int) -> list[float]:
        turns.append((id(trainee), count))
        return original(self, trainee, count)

    monkeypatch.setattr(bench_step._Run, "_turn", spy)
    preset = dataclasses.replace(least, steps=3, turn=2)
    measure(preset, select("plain", CPU, ["rowwise"]), CPU)
    (a, first), (b, second), (c, third), (d, fourth) = turns
    assert (first, second, third, fourth) == (2, 2, 1, 1)
    assert (a, b) == (d, c)
    assert a != b


def test_groups_share_the_baseline_and_say_how_far_it_moved(least: Preset, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bench_step, "group_size", lambda *arguments: 2)
    result = measure(least, select("plain", CPU, ["rowwise", "tensorwise"]), CPU)
    assert [row.name for row in result.rows] == ["bf16", "rowwise", "tensorwise"]
    assert all(row.ms is not None for row in result.rows)
    assert any(note.startswith("2 groups") and "apart" in note for note in result.notes)


def test_groups_are_even_and_fit(monkeypatch: pytest.MonkeyPatch):
    gib = 2**30
    monkeypatch.setattr(bench_step.timing, "free_bytes", lambda device: 100 * gib)
    first = bench_step.Checked(
        trainee=None, losses=[], matrices=0, moved=set(), resident=10 * gib, held=0, peak=30 * gib
    )
    cuda = torch.device("cuda")
    # 0.8 * 110 GiB, less 1.2 * 20 to work in, are six models of 10: BF16 and five others
    sizes = {count: bench_step.group_size(first, cuda, count) for count in (1, 2, 6, 7, 11, 12)}
    assert sizes == {1: 1, 2: 2, 6: 6, 7: 4, 11: 6, 12: 5}
    assert bench_step.group_size(first, CPU, 12) == 12


def test_selection():
    default = [v.name for v in select("plain", CPU)]
    assert default[0] == "bf16"
    assert {"rowwise", "mxfp8", "te-delayed", "torchao-tensorwise"} <= set(default)
    assert not any("compile" in name for name in default)
    assert [v.name for v in select("plain", CPU, ["te-*"])] == ["bf16", "te-delayed", "te-current", "te-block"]
    only = [v.name for v in select("plain", CPU, None, ["delayed"]) if v.group == "acceler8"]
    assert only == ["delayed"]
    with pytest.raises(RunError, match="did you mean 'rowwise'"):
        select("plain", CPU, ["rowwis"])
    with pytest.raises(RecipeError, match="did you mean 'rowwise'"):
        select("plain", CPU, None, ["rowwis"])
    with pytest.raises(RunError, match="unknown variant of a prepared loop 'te-delayed'"):
        select("prepared", CPU, ["te-delayed"])


def test_presets():
    assert (
        PRESETS["llama3-8b-4l"].parameter_count() == 4 * (4096 * 6144 + 4096**2 + 3 * 4096 * 14336) + 2 * 32000 * 4096
    )
    assert preset_named("tiny", layers=3, batch=None).layers == 3
    with pytest.raises(RunError, match="layers=0 is not allowed"):
        preset_named("tiny", layers=0)
    with pytest.raises(RunError, match="did you mean 'tiny'"):
        preset_named("tiney")
    for name in set(PRESETS) - {"tiny"}:
        with pytest.raises(HardwareError, match=r"needs a CUDA GPU with about .* use --preset tiny"):
            measure(PRESETS[name], [find("bf16", PRESETS[name].loop)], CPU)


def test_what_this_version_lacks_is_said(least: Preset):
    wanted = dataclasses.replace(least, save_for_backward="nothing that there is")
    result = measure(wanted, select("plain", CPU, ["rowwise"]), CPU)
    assert result.rows[1].status == "error"
    with pytest.raises(NotInThisVersionError, match="a preset whose loop is plain"):
        VARIANTS["rowwise"]["prepared"].build(Work(dataclasses.replace(least, fuse=False), CPU))


def test_head_loss_is_given_to_bf16_too(least: Preset, monkeypatch: pytest.MonkeyPatch):
    shapes = []

    def head_loss(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        shapes.append((tuple(hidden.shape), tuple(weight.shape), tuple(labels.shape)))
        return nn.functional.cross_entropy((hidden @ weight.t()).float(), labels)

    monkeypatch.setattr(acceler8, "head_loss", head_loss, raising=False)
    preset = dataclasses.replace(least, head_loss=True)
    result = measure(preset, select("plain", CPU, ["bf16-head-loss", "rowwise"]), CPU)
    assert [row.status for row in result.rows] == ["ok", "ok", "ok"]
    assert set(shapes) == {((32, 64), (256, 64), (32,))}


@pytest.mark.parametrize("name", ["bf16", "rowwise", "fp16-amp", "bf16-amp"])
def test_prepared_loops_train(least: Preset, name: str):
    preset = dataclasses.replace(least, loop="prepared", parameters="float32")
    result = measure(preset, select("prepared", CPU, [name]), CPU)
    assert [row.status for row in result.rows] == ["ok"] * len(result.rows), result.rows


def test_recipes_are_compiled_block_by_block_in_prepared_loops(least: Preset):
    preset = dataclasses.replace(least, loop="prepared", parameters="float32", layers=2)
    work = Work(preset, CPU)
    variants = select("prepared", CPU, ["*-compile"], ["rowwise"])
    found = {v.name: v for v in variants if v.group != "Accelerate"}
    assert list(found) == ["bf16", "bf16-compile", "rowwise-compile"]
    for name, layers in (("bf16-compile", 0), ("rowwise-compile", 14)):
        assert found[name].is_compiled
        model = found[name].build(work).model
        assert [block._compiled_call_impl is not None for block in work.blocks(model)] == [True, True]
        assert model._compiled_call_impl is None
        assert len(list(fp8_layers(model))) == layers
    assert "rowwise-compile" not in [v.name for v in select("prepared", CPU)]


def test_compiled_blocks_of_hugging_face_fill_no_cache(least: Preset):
    pytest.importorskip("transformers")
    work = Work(dataclasses.replace(least, loop="prepared", model="hf-llama", parameters="float32"), CPU)
    model = VARIANTS["bf16-compile"]["prepared"].build(work).model
    assert model.config.use_cache is False
    assert VARIANTS["bf16"]["prepared"].build(work).model.config.use_cache is True


def test_a_peers_library_through_us_trains_as_by_itself(least: Preset):
    pytest.importorskip("torchao")
    chosen = select("plain", CPU, ["torchao-tensorwise", "acceler8-torchao-tensorwise"])
    result = measure(least, chosen, CPU)
    losses = {row.name: row.values.get("last_loss") for row in result.rows}
    assert [row.status for row in result.rows] == ["ok"] * 3, result.rows
    assert losses["acceler8-torchao-tensorwise"] == losses["torchao-tensorwise"] != losses["bf16"]


@pytest.mark.parametrize("loop", ["plain", "prepared"])
def test_half_compressed_compresses_every_second_layer(least: Preset, loop: str):
    work = Work(dataclasses.replace(least, loop=loop, parameters="float32", layers=4), CPU)
    model = VARIANTS["delayed-half-compressed"][loop].build(work).model
    kept = {name.split("layers.")[1][0]: layer._acceler8_layer.recipe for name, layer in fp8_layers(model)}
    assert {n: r.save_for_backward for n, r in kept.items()} == {
        "0": "fp8_compressed", "1": "fp8", "2": "fp8_compressed", "3": "fp8",
    }  # fmt: skip
    assert all(recipe.is_delayed for recipe in kept.values())


@pytest.mark.slow  # needs a C++ compiler, and its time
@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be inst:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # Dynamo's own
def test_compiled_blocks_train_in_fp8(least: Preset):
    preset = dataclasses.replace(least, loop="prepared", parameters="float32")
    result = measure(preset, select("prepared", CPU, ["rowwise-compile"]), CPU)
    assert [(row.name, row.status) for row in result.rows] == [("bf16", "ok"), ("rowwise-compile", "ok")], result.rows
    assert result.rows[1].ms is not None


def test_the_floor_is_the_sum_of_its_parts(least: Preset):
    floor = measure_floor(least, CPU, [None, "rowwise"])
    assert set(floor.gemms) == {BF16}  # a CPU multiplies no FP8
    assert FASTEST not in floor.gemms
    rest = floor.attention + floor.elementwise + floor.head + floor.optimizer
    assert floor.step_ms(None) == pytest.approx(floor.gemms[BF16] + rest)
    assert floor.step_ms("rowwise") is None
