"""The run folder: whole files, metrics that survive a kill, and folders that are no run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from acceler8.demo.run_folder import FORMAT_VERSION, KIND, RunFolder
from acceler8.demo.settings import resolve_settings
from acceler8.errors import RunError


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path, {"settings": resolve_settings({"device": "cpu"}).to_dict()})


def test_a_new_run_can_be_opened_at_once(run: RunFolder):
    assert re.fullmatch(r"\d{8}-\d{6}", run.path.name)
    again = RunFolder.open(run.path)
    assert again.settings == resolve_settings({"device": "cpu"})
    assert again.read_metrics() == []
    assert again.result("bf16") is None


def test_runs_of_one_second_get_folders_of_their_own(tmp_path: Path):
    folders = {RunFolder.create(tmp_path, {}).path for _ in range(5)}
    assert len(folders) == 5


def test_metrics_come_back_as_written(run: RunFolder):
    records = [{"precision": p, "step": s, "loss": 0.1 + s / 3} for p in ("bf16", "fp8") for s in (1, 2, 3)]
    for record in records:
        run.append_metrics(record)
    assert run.read_metrics() == records


def test_forgetting_keeps_earlier_steps_and_the_other_training(run: RunFolder):
    for precision in ("bf16", "fp8"):
        for step in (1, 2, 3):
            run.append_metrics({"precision": precision, "step": step})
    run.forget_after("fp8", 1)
    kept = [(r["precision"], r["step"]) for r in run.read_metrics()]
    assert kept == [("bf16", 1), ("bf16", 2), ("bf16", 3), ("fp8", 1)]


def test_a_line_cut_short_by_a_kill_is_left_out_and_overwritten(run: RunFolder):
    run.append_metrics({"precision": "bf16", "step": 1})
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"precision": "bf16", "st')
    assert [r["step"] for r in run.read_metrics()] == [1]
    run.forget_after("bf16", 1)
    run.append_metrics({"precision": "bf16", "step": 2})
    assert [r["step"] for r in run.read_metrics()] == [1, 2]


def test_a_damaged_line_in_the_middle_is_an_error(run: RunFolder):
    (run.path / "metrics.jsonl").write_text('{"step"\n{"step": 2}\n')
    with pytest.raises(RunError, match=r"line 1 is damaged"):
        run.read_metrics()


def test_a_number_that_json_cannot_hold_is_never_written(run: RunFolder):
    with pytest.raises(ValueError, match="JSON"):
        run.append_metrics({"loss": float("nan")})
    assert run.read_metrics() == []


def test_files_are_replaced_whole(run: RunFolder, monkeypatch: pytest.MonkeyPatch):
    run.write_json("summary.json", {"a": 1})

    def fail(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(RunError, match=r"cannot write '.*summary.json': No space left on device; check"):
        run.write_json("summary.json", {"a": 2})
    monkeypatch.undo()
    assert run.read_json("summary.json") == {"a": 1}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a disk that is full")
def test_a_full_disk_is_an_error_that_names_the_file(run: RunFolder):
    (run.path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(RunError, match=r"cannot write '.*metrics.jsonl': No space left on device"):
        run.append_metrics({"step": 1})


def test_a_parent_that_is_a_file_is_an_error(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"cannot make a run folder in '.*file'.*name another folder with --out"):
        RunFolder.create(tmp_path / "file", {})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "has no config.json"),
        ("not json", r"config.json' is damaged"),
        ("[1, 2]", "does not say kind"),
        (json.dumps({"kind": "something else"}), "does not say kind"),
        (
            json.dumps({"kind": KIND, "format_version": FORMAT_VERSION + 1}),
            "format_version 2, this version reads 1",
        ),
    ],
)
def test_folders_that_are_no_run(tmp_path: Path, content: str | None, message: str):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(RunError, match=message):
        RunFolder.open(tmp_path)


def test_a_path_that_is_no_folder(tmp_path: Path):
    with pytest.raises(RunError, match=r"absent' is not a folder; --resume takes"):
        RunFolder.open(tmp_path / "absent")


def test_a_run_without_settings_is_an_error(tmp_path: Path):
    run = RunFolder.create(tmp_path, {})
    with pytest.raises(RunError, match="has no settings"):
        _ = run.settings


def test_dropping_a_checkpoint_leaves_the_other(run: RunFolder):
    for name in ("bf16", ".bf16.previous", ".bf16.writing-0123", "fp8"):
        (run.path / "checkpoint" / name).mkdir(parents=True)
        (run.path / "checkpoint" / name / "model.safetensors").touch()
    run.drop_checkpoint("bf16")
    assert [path.name for path in (run.path / "checkpoint").iterdir()] == ["fp8"]
    run.drop_checkpoint("fp8")
    assert not (run.path / "checkpoint").exists()
    run.drop_checkpoint("fp8")
