"""Whole runs: what they leave, that stopping changes nothing, and what a resume refuses."""

from __future__ import annotations

import itertools
import math
import signal
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from acceler8 import recipes
from acceler8.checkpoint import is_checkpoint
from acceler8.conversion import Plan
from acceler8.demo import training
from acceler8.demo.interrupt import RunInterruptedError, StopRequest
from acceler8.demo.run import changed_environment, create_run, execute_run, reopen_run, summarize
from acceler8.demo.run_folder import RunFolder
from acceler8.demo.settings import resolve_settings
from acceler8.errors import CheckpointError, RunError
from tests.demo.runs import STEPS, Recorder, curves


def test_a_run_leaves_its_files_and_no_checkpoint(finished: RunFolder):
    assert {path.name for path in finished.path.iterdir()} == {
        "config.json",
        "metrics.jsonl",
        "plan.json",
        "report.html",
        "result-bf16.json",
        "result-fp8.json",
        "summary.json",
    }


def test_metrics_have_one_line_a_step_and_precision(finished: RunFolder):
    records = finished.read_metrics()
    assert [(r["precision"], r["step"]) for r in records] == [
        (precision, step) for precision in ("bf16", "fp8") for step in range(1, STEPS + 1)
    ]
    for record in records:
        assert math.isfinite(record["loss"])
        assert record["tokens"] == record["step"] * 2 * 32
        assert record["time_ms"] > 0
        assert record["warm_up"] is (record["step"] <= STEPS // 2)


def test_both_trainings_start_alike_and_then_differ(finished: RunFolder):
    losses = {(r["precision"], r["step"]): r["loss"] for r in finished.read_metrics()}
    assert losses["fp8", 1] == pytest.approx(losses["bf16", 1], rel=5e-3)
    assert all(losses["fp8", step] == pytest.approx(losses["bf16", step], rel=5e-2) for step in range(1, STEPS + 1))
    assert losses["fp8", STEPS] != losses["bf16", STEPS]


def test_real_text_is_learned_alike_in_both_precisions(tmp_path: Path):
    text = str(Path(sysconfig.get_paths()["stdlib"]) / "logging")
    folder, corpus = create_run({"device": "cpu", "size": "tiny", "steps": 50, "text": text}, tmp_path)
    with StopRequest() as stop:
        summary = execute_run(folder, corpus, Recorder(), stop)
    assert folder.read_metrics()[0]["loss"] > 5  # nothing is known at the start: ln 256 = 5.5
    assert all(loss < 3.2 for loss in summary["held_out_loss"].values())
    assert all(abs(percent) < 1 for percent in summary["difference_percent"].values())


def test_the_plan_covers_all_but_the_head(finished: RunFolder):
    plan = Plan.from_dict(finished.read_json("plan.json"))
    assert (plan.totals.fp8_layers, plan.totals.layers) == (14, 15)
    assert [row.name for row in plan.rows if not row.is_fp8] == ["lm_head"]


def test_health_has_every_layer_and_operand(finished: RunFolder):
    rows = finished.read_json("result-fp8.json")["health"]
    plan = Plan.from_dict(finished.read_json("plan.json"))
    assert {(row["layer"], row["role"]) for row in rows} == {
        (name, role) for name in plan.fp8_names for role in ("x", "w", "dy")
    }
    for row in rows:
        assert row["elements"] > 0
        assert row["nonfinite"] == 0
        assert 20 < row["sqnr_db"] < 50


def test_summary_is_what_the_results_say(finished: RunFolder):
    summary = finished.read_json("summary.json")
    assert summary == summarize(finished)
    losses = summary["held_out_loss"]
    base = losses["trained_in_bf16"]
    assert base == finished.read_json("result-bf16.json")["held_out_loss"]["bf16"]
    in_fp8, in_bf16 = losses["trained_in_fp8_evaluated_in_fp8"], losses["trained_in_fp8_evaluated_in_bf16"]
    assert in_fp8 != in_bf16
    assert in_fp8 == pytest.approx(in_bf16, rel=2e-2)
    difference = summary["difference_percent"]["trained_in_fp8_evaluated_in_fp8"]
    assert difference == pytest.approx(100 * (in_fp8 / base - 1))
    assert summary["trainings"]["fp8"]["time_ms"] > 0
    assert "peak_mem_mib" not in summary["trainings"]["fp8"]


def _stop_at(what: str, step: int) -> Callable[[str, int], None]:
    def on_event(event: str, event_step: int) -> None:
        if event.startswith(what) and event_step == step:
            signal.raise_signal(signal.SIGINT)

    return on_event


@pytest.mark.parametrize(
    ("what", "step"),
    [
        ("bf16", 1),
        ("bf16", STEPS),
        ("measuring the bf16", 0),
        ("fp8", 4),
        ("fp8", STEPS),
        ("measuring the fp8", 0),
    ],
)
def test_a_stopped_run_goes_on_as_if_nothing_had_been(
    finished: RunFolder, wishes: dict[str, Any], tmp_path: Path, what: str, step: int
):
    folder, corpus = create_run(wishes, tmp_path)
    with StopRequest() as stop, pytest.raises(RunInterruptedError):
        execute_run(folder, corpus, Recorder(_stop_at(what, step)), stop)
    assert len(folder.read_metrics()) < 2 * STEPS or "fp8" in what
    again, corpus = reopen_run({}, folder.path)
    listener = Recorder()
    with StopRequest() as stop:
        execute_run(again, corpus, listener, stop)
    assert curves(again) == curves(finished)
    for precision in ("bf16", "fp8"):
        assert again.result(precision) == finished.result(precision)
    assert len(listener.records) == 2 * STEPS - (
        step if what == "bf16" else STEPS + step if what == "fp8" else STEPS if "bf16" in what else 2 * STEPS
    )


def test_a_crash_goes_on_from_the_last_checkpoint(
    finished: RunFolder, wishes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(training, "CHECKPOINT_EVERY_S", 0.0)
    folder, corpus = create_run(wishes, tmp_path)

    def crash(what: str, step: int) -> None:
        if (what, step) == ("fp8", 4):  # its line is written, its checkpoint is not
            raise ZeroDivisionError

    with StopRequest() as stop, pytest.raises(ZeroDivisionError):
        execute_run(folder, corpus, Recorder(crash), stop)
    assert folder.read_metrics()[-1]["step"] == 4
    listener = Recorder()
    with StopRequest() as stop:
        execute_run(folder, corpus, listener, stop)
    assert listener.started == [("fp8", 3, STEPS)]
    assert curves(folder) == curves(finished)


def test_a_run_that_was_never_started_can_be_resumed(finished: RunFolder, wishes: dict[str, Any], tmp_path: Path):
    folder, corpus = create_run(wishes, tmp_path)
    with StopRequest() as stop:
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(RunInterruptedError):
            execute_run(folder, corpus, Recorder(), stop)
    again, corpus = reopen_run({}, folder.path)
    with StopRequest() as stop:
        execute_run(again, corpus, Recorder(), stop)
    assert curves(again) == curves(finished)


def test_resuming_a_finished_run_computes_nothing(finished: RunFolder):
    before = curves(finished)
    listener = Recorder()
    folder, corpus = reopen_run({}, finished.path)
    with StopRequest() as stop:
        execute_run(folder, corpus, listener, stop)
    assert listener.started == []
    assert curves(finished) == before


def test_the_seed_decides(finished: RunFolder, wishes: dict[str, Any], tmp_path: Path):
    folder, corpus = create_run(wishes | {"seed": 4, "steps": 1}, tmp_path)
    with StopRequest() as stop:
        execute_run(folder, corpus, Recorder(), stop)
    assert curves(folder)[0][2] != curves(finished)[0][2]
    assert [r["warm_up"] for r in folder.read_metrics()] == [False, False]


def test_a_resume_with_other_settings_says_what_differs(finished: RunFolder, wishes: dict[str, Any]):
    asked = wishes | {"steps": 7, "recipe": "tensorwise"}
    with pytest.raises(
        RunError, match=r"other settings \(recipe: saved 'rowwise', now 'tensorwise'; steps: saved 6, now 7\)"
    ):
        reopen_run(asked, finished.path)
    reopen_run(wishes, finished.path)  # the same settings said again are no difference


def test_a_resume_with_other_text_says_so(wishes: dict[str, Any], tmp_path: Path):
    text = tmp_path / "text.txt"
    text.write_bytes(b"one text " * 100)
    folder, _ = create_run(wishes | {"text": str(text)}, tmp_path / "runs")
    text.write_bytes(b"two text " * 100)
    with pytest.raises(RunError, match=r"text of the run in .* has changed: SHA-256 was"):
        reopen_run({}, folder.path)


def test_a_checkpoint_of_other_settings_is_refused(wishes: dict[str, Any], tmp_path: Path):
    folder, corpus = create_run(wishes, tmp_path)
    with StopRequest() as stop, pytest.raises(RunInterruptedError):
        execute_run(folder, corpus, Recorder(_stop_at("bf16", 2)), stop)
    assert is_checkpoint(folder.checkpoint_path("bf16"))
    config = folder.read_json("config.json")
    config["settings"]["lr"] = 0.5
    folder.write_json("config.json", config)
    with StopRequest() as stop, pytest.raises(CheckpointError, match=r"different configuration: lr: saved"):
        execute_run(folder, corpus, Recorder(), stop)


def test_another_environment_is_named(finished: RunFolder, tmp_path: Path):
    config = finished.read_json("config.json")
    assert changed_environment(finished) == []
    config["environment"]["torch"] = "1.0"
    changed = RunFolder.create(tmp_path, config)
    assert len(changed_environment(changed)) == 1
    assert changed_environment(changed)[0].startswith("torch: saved '1.0', now")


def test_a_training_that_diverges_stops_with_the_step(wishes: dict[str, Any], tmp_path: Path):
    folder, corpus = create_run(wishes | {"lr": 1e30}, tmp_path)
    with (
        StopRequest() as stop,
        pytest.raises(RunError, match=r"step \d of the bf16 training .*--lr below 1e\+30"),
    ):
        execute_run(folder, corpus, Recorder(), stop)


def test_a_nan_in_an_fp8_layer_is_named_and_spares_the_weights(wishes: dict[str, Any]):
    settings = resolve_settings(wishes)
    fp8 = training.start_training(settings, "fp8")
    weights = dict(fp8.model.named_parameters())
    with torch.no_grad():
        weights["layers.1.mlp.up_proj.weight"][3, 5] = torch.nan
    other = weights["layers.0.mlp.up_proj.weight"].detach().clone()
    text = np.arange(5000, dtype=np.int64).astype(np.uint8)
    with pytest.raises(RunError, match=r"layers\.1\.mlp\.up_proj: \d of \d+ values of its weight are NaN or inf"):
        training._train_step(fp8, settings, text)
    assert torch.equal(weights["layers.0.mlp.up_proj.weight"], other)


def test_a_full_disk_stops_the_run_with_the_file(wishes: dict[str, Any], tmp_path: Path):
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full, a disk that is full")
    folder, corpus = create_run(wishes, tmp_path)

    def fill(what: str, step: int) -> None:
        if (what, step) == ("bf16", 2):
            (folder.path / "metrics.jsonl").unlink()
            (folder.path / "metrics.jsonl").symlink_to("/dev/full")

    with (
        StopRequest() as stop,
        pytest.raises(RunError, match=r"cannot write .*metrics.jsonl': No space left"),
    ):
        execute_run(folder, corpus, Recorder(fill), stop)


def test_an_unfinished_run_has_no_summary(wishes: dict[str, Any], tmp_path: Path):
    folder, _ = create_run(wishes, tmp_path)
    with pytest.raises(RunError, match=r"is not finished; go on with --resume"):
        summarize(folder)


def test_learning_rate_warms_up_and_decays():
    settings = resolve_settings({"device": "cpu", "steps": 100, "lr": 1.0})
    rates = [training.learning_rate(settings, step) for step in range(1, 101)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert all(a > b for a, b in itertools.pairwise(rates[4:]))
    assert rates[-1] == pytest.approx(training.FINAL_LR_SHARE)


@pytest.mark.parametrize(
    "recipe",
    [
        "delayed",  # the one with FP8 state of its own
        *(pytest.param(n, marks=pytest.mark.slow) for n in recipes.names() if n not in ("delayed", "rowwise")),
    ],
)
def test_each_recipe_stops_and_goes_on(wishes: dict[str, Any], tmp_path: Path, recipe: str):
    asked = wishes | {"recipe": recipe}
    whole, corpus = create_run(asked, tmp_path / "whole")
    with StopRequest() as stop:
        execute_run(whole, corpus, Recorder(), stop)
    parts, _ = create_run(asked, tmp_path / "parts")
    with StopRequest() as stop, pytest.raises(RunInterruptedError):
        execute_run(parts, corpus, Recorder(_stop_at("fp8", 3)), stop)
    with StopRequest() as stop:
        execute_run(parts, corpus, Recorder(), stop)
    assert curves(parts) == curves(whole)


@pytest.mark.requires(sm=89)
def test_a_gpu_run_uses_real_fp8_and_reports_memory(wishes: dict[str, Any], tmp_path: Path):
    folder, corpus = create_run(wishes | {"device": "cuda"}, tmp_path)
    with StopRequest() as stop:
        summary = execute_run(folder, corpus, Recorder(), stop)
    assert "tensor cores" in folder.read_json("config.json")["environment"]["fp8"]
    for values in summary["trainings"].values():
        assert values["peak_mem_mib"] > 0
        assert values["time_ms"] > 0
