"""Trackers: files are read back, SDKs that are not installed are stood in for, and a broken one ends no training."""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import accelerate.tracking
import accelerate.utils
import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from acceler8 import Accelerator
from acceler8.accelerator.tracking import GeneralTracker, JsonlTracker, LoggerType, choose
from acceler8.accelerator.tracking.values import json_ready, plain
from acceler8.errors import ConfigError, MissingLibraryError, NotInThisVersionError
from acceler8.utils import ProjectConfiguration

SDKS = ("wandb", "trackio", "mlflow")


def strict(text: str) -> Any:
    """JSON without Python's NaN and Infinity."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [strict(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


class Recorder(GeneralTracker):
    """A script's own tracker; raises in the methods named."""

    name = "recorder"
    requires_logging_directory = False

    def __init__(self, *raises_in: str) -> None:
        super().__init__()
        self.raises_in, self.calls = raises_in, []

    @property
    def tracker(self) -> list[Any]:
        return self.calls

    def note(self, what: str, *seen: Any) -> None:
        self.calls.append((what, *seen))
        if what in self.raises_in:
            raise ConnectionError("the dashboard is away")

    def start(self) -> None:
        self.note("start")

    def store_init_configuration(self, values: Any) -> None:
        self.note("config", values)

    def log(self, values: Any, step: int | None = None, **kwargs: Any) -> None:
        self.note("log", values, step, kwargs)

    def finish(self) -> None:
        self.note("finish")


def make(tmp_path: Path | None, log_with: Any) -> Accelerator:
    return Accelerator(cpu=True, log_with=log_with, project_dir=tmp_path)


def test_tensorboard_and_the_lines_hold_what_was_logged(tmp_path: Path):
    accelerator = make(tmp_path, "tensorboard")
    config = {"lr": 1e-3, "layers": [1, 2], "name": "x", "fp8": True, "none": None}
    accelerator.init_trackers("run", config, {"tensorboard": {"flush_secs": 1}})
    for step in range(3):
        accelerator.log({"loss": torch.tensor(2.0**-step), "pair": {"a": 1, "b": 2}, "note": "hello"}, step=step)
    accelerator.get_tracker("tensorboard").log_images({"image": np.zeros((1, 3, 4, 4))}, step=0)
    writer = accelerator.get_tracker("tensorboard", unwrap=True)
    assert type(writer).__name__ == "SummaryWriter"
    accelerator.end_training()
    events = EventAccumulator(str(tmp_path / "run")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(0, 1.0), (1, 0.5), (2, 0.25)]
    assert "note/text_summary" in events.Tags()["tensors"]
    assert events.Tags()["images"] == ["image"]
    hparams = events.PluginTagToContent("hparams")
    assert b"layers" in b"".join(hparams.values())
    assert {path.name for path in (tmp_path / "run").iterdir() if path.is_dir()} == {"pair_a", "pair_b"}
    found = lines(tmp_path)
    assert [line["step"] for line in found] == [0, 1, 2]
    assert found[1]["values"] == {"loss": 0.5, "pair": {"a": 1, "b": 2}, "note": "hello"}
    assert [t.name for t in accelerator.trackers] == ["tensorboard"]
    saved = strict((tmp_path / "metrics_config.json").read_text())
    assert (saved["project"], saved["config"]) == ("run", config)


def test_lines_are_strict_json_and_there_at_once(tmp_path: Path):
    accelerator = make(tmp_path, "jsonl")
    accelerator.init_trackers("run")
    values = {
        "nan": math.nan,
        "inf": torch.tensor(math.inf),
        "low": np.float32(-math.inf),
        "list": [1, math.nan],
        "bf16": torch.tensor(1.5, dtype=torch.bfloat16),
        "ones": torch.ones(2, 2),
        "array": np.arange(2),
        "one": np.ones((1, 1)),
        "object": torch.float8_e4m3fn,
        "none": None,
        "yes": True,
        3: "key",
        "text": "a\nb ü \ud800",
    }
    accelerator.log(values, step=torch.tensor(7))
    (line,) = lines(tmp_path)  # not finished, and on the disk
    assert line["step"] == 7
    assert line["time"] > 1.7e9
    assert line["values"] == {
        **{"nan": "NaN", "inf": "Infinity", "low": "-Infinity", "list": [1, "NaN"], "bf16": 1.5},
        **{"ones": [[1.0, 1.0], [1.0, 1.0]], "array": [0, 1], "one": 1.0, "object": "torch.float8_e4m3fn"},
        **{"none": None, "yes": True, "3": "key", "text": "a\nb ü \ud800"},
    }
    accelerator.log({"x": 1})
    assert lines(tmp_path)[1]["step"] is None
    assert accelerator.get_tracker("jsonl", unwrap=True).name.endswith("metrics.jsonl")
    accelerator.end_training()


def test_a_resume_goes_on_behind_a_line_that_was_cut(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "time": 1.0, "values": {}}\n{"step": 1, "ti')
    for step in (1, 2):
        accelerator = make(tmp_path, None)
        accelerator.init_trackers("run")
        accelerator.log({"x": step}, step=step)
        accelerator.end_training()
    texts = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert texts[1] == '{"step": 1, "ti'
    assert [strict(texts[i])["values"] for i in (2, 3)] == [{"x": 1}, {"x": 2}]


def test_a_logging_dir_of_its_own_gets_the_files(tmp_path: Path):
    config = ProjectConfiguration(project_dir=str(tmp_path), logging_dir=str(tmp_path / "deep" / "logs"))
    accelerator = Accelerator(cpu=True, log_with=["jsonl"], project_config=config)
    accelerator.init_trackers("run", config={"a": 1})
    accelerator.end_training()
    assert {p.name for p in (tmp_path / "deep" / "logs").iterdir()} == {"metrics.jsonl", "metrics_config.json"}
    assert accelerator.logging_dir == str(tmp_path / "deep" / "logs")


def test_a_broken_tracker_ends_nothing_and_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    broken, sound = Recorder("log", "config", "finish"), Recorder()
    sound.name = "sound"
    accelerator = make(tmp_path, [broken, sound])
    accelerator.init_trackers("run", config={"a": 1})
    caplog.clear()
    for step in range(5):
        accelerator.log({"x": step}, step=step)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert (
        "tracker recorder failed in log and the run goes on (ConnectionError: the dashboard is away)" in record.message
    )
    assert str(tmp_path / "metrics.jsonl") in record.message
    assert len([call for call in broken.calls if call[0] == "log"]) == 5  # it may have come back
    assert [call[2] for call in sound.calls if call[0] == "log"] == list(range(5))
    assert len(lines(tmp_path)) == 5
    accelerator.end_training()
    assert sound.calls[-1] == ("finish",)


def test_an_interrupt_passes(tmp_path: Path):
    class Interrupted(Recorder):
        def log(self, values: Any, step: int | None = None, **kwargs: Any) -> None:
            raise KeyboardInterrupt

    accelerator = make(tmp_path, Interrupted())
    accelerator.init_trackers("run")
    with pytest.raises(KeyboardInterrupt):
        accelerator.log({"x": 1})
    accelerator.end_training()


def test_a_tracker_that_cannot_start_raises_and_leaves_none_open(tmp_path: Path):
    first, second = Recorder(), Recorder("start")
    second.name = "second"
    accelerator = make(tmp_path, [first, second])
    with pytest.raises(ConnectionError):
        accelerator.init_trackers("run")
    assert first.calls == [("start",), ("finish",)]
    assert accelerator.trackers == []
    accelerator.end_training()
    assert len(first.calls) == 2


def test_the_end_comes_once(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    recorder = Recorder()
    accelerator = make(tmp_path, recorder)
    accelerator.init_trackers("run")
    with pytest.raises(ConfigError, match="end_training"):
        accelerator.init_trackers("run")
    accelerator.end_training()
    accelerator.end_training()
    assert [call[0] for call in recorder.calls] == ["start", "finish"]
    accelerator.log({"x": 1})
    accelerator.log({"x": 1})
    assert [call[0] for call in recorder.calls] == ["start", "finish"]
    assert [r.message for r in caplog.records] == ["log was called without running trackers; call init_trackers first"]
    accelerator.init_trackers("again")  # a notebook's next run
    accelerator.log({"x": 2})
    accelerator.end_training()
    assert recorder.calls[2:] == [("start",), ("log", {"x": 2}, None, {}), ("finish",)]


def test_more_arguments_reach_the_tracker_they_name(tmp_path: Path):
    recorder = Recorder()
    accelerator = make(None, recorder)
    accelerator.init_trackers("run", config={"lr": 0.1})
    accelerator.log({"x": torch.tensor([3])}, 4, log_kwargs={"recorder": {"commit": False}, "wandb": {"a": 1}})
    assert recorder.calls == [("start",), ("config", {"lr": 0.1}), ("log", {"x": 3}, 4, {"commit": False})]
    assert accelerator.get_tracker("recorder") is recorder
    assert accelerator.get_tracker("recorder", unwrap=True) is recorder.calls
    with pytest.raises(ConfigError, match="unknown tracker 'wandb'; valid: recorder"):
        accelerator.get_tracker("wandb")
    accelerator.end_training()
    with pytest.raises(ConfigError, match="unknown tracker in init_kwargs 'tensorbord'"):
        accelerator.init_trackers("run", init_kwargs={"tensorbord": {}})


def test_without_trackers_all_calls_do_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    accelerator = make(None, None)
    accelerator.log({"x": 1})
    accelerator.init_trackers("run", config={})
    accelerator.log({"x": 1})
    blank = accelerator.get_tracker("wandb", unwrap=True)
    blank.log({"x": 1}, step=1)
    blank.log_images({})
    accelerator.end_training()
    assert not caplog.records
    assert not list(tmp_path.iterdir())


WORKER = """
import sys
from acceler8 import Accelerator
accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=sys.argv[1])
accelerator.init_trackers("run", config={"a": 1})
for step in range(2):
    accelerator.log({"rank": accelerator.process_index}, step=step)
print(len(accelerator.trackers), accelerator.get_tracker("tensorboard").name)
accelerator.get_tracker("tensorboard").log({"x": 1})
accelerator.wait_for_everyone()
accelerator.end_training()
accelerator.end_training()
"""


def test_only_the_main_process_writes(tmp_path: Path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    workers = []
    for rank in range(2):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        env = {**os.environ, **{k: str(v) for k, v in place.items()}, "OMP_NUM_THREADS": "1"}
        env["PYTHONPATH"] = str(Path(__file__).parents[2] / "src")
        command = [sys.executable, "-c", WORKER, str(tmp_path)]
        workers.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    outputs = [worker.communicate(timeout=120) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], outputs
    assert [out.strip() for out, _ in outputs] == ["1 tensorboard", "0 blank"]
    assert [line["values"] for line in lines(tmp_path)] == [{"rank": 0}, {"rank": 0}]
    events = EventAccumulator(str(tmp_path / "run")).Reload()
    assert [e.value for e in events.Scalars("rank")] == [0.0, 0.0]


@pytest.fixture
def sdk(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Stand-ins for the SDKs that are not installed: every call is noted. They show wiring only."""
    calls: list[Any] = []

    def note(name: str, result: Any = None) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append((name, args, kwargs))
            return result

        return call

    for name in SDKS:
        module = ModuleType(name)
        module.__spec__ = SimpleNamespace(name=name)  # type: ignore[assignment]
        config = SimpleNamespace(update=note(f"{name}.config.update")) if name == "wandb" else {}
        run = SimpleNamespace(config=config, log=note(f"{name}.run.log"), finish=note(f"{name}.run.finish"))
        module.__dict__.update(
            init=note(f"{name}.init", run),
            Image=lambda image: ("Image", image),
            Table=lambda **kwargs: ("Table", kwargs),
            get_experiment_by_name=note("mlflow.get_experiment_by_name"),
            create_experiment=note("mlflow.create_experiment", "7"),
            set_experiment=note("mlflow.set_experiment"),
            start_run=note("mlflow.start_run", run),
            log_params=note("mlflow.log_params"),
            log_metrics=note("mlflow.log_metrics"),
            end_run=note("mlflow.end_run"),
        )
        monkeypatch.setitem(sys.modules, name, module)
    return calls


def test_wandb_is_called_as_documented(tmp_path: Path, sdk: list[Any]):
    accelerator = make(tmp_path, "wandb")
    accelerator.init_trackers("project", {"lr": 0.1}, {"wandb": {"tags": ["a"]}})
    accelerator.log({"loss": torch.tensor(1.0)}, step=3, log_kwargs={"wandb": {"commit": False}})
    tracker = accelerator.get_tracker("wandb")
    tracker.log_images({"samples": [1, 2]}, step=3)
    tracker.log_table("table", columns=["a"], data=[[1]])
    accelerator.end_training()
    assert sdk == [
        ("wandb.init", (), {"project": "project", "tags": ["a"]}),
        ("wandb.config.update", ({"lr": 0.1},), {"allow_val_change": True}),
        ("wandb.run.log", ({"loss": 1.0},), {"step": 3, "commit": False}),
        ("wandb.run.log", ({"samples": [("Image", 1), ("Image", 2)]},), {"step": 3}),
        (
            "wandb.run.log",
            ({"table": ("Table", {"columns": ["a"], "data": [[1]], "dataframe": None})},),
            {"step": None},
        ),
        ("wandb.run.finish", (), {}),
    ]
    assert lines(tmp_path)[0]["values"] == {"loss": 1.0}


def test_trackio_is_called_as_documented(sdk: list[Any]):
    accelerator = make(None, LoggerType.TRACKIO)
    accelerator.init_trackers("project", {"lr": 0.1})
    assert accelerator.get_tracker("trackio", unwrap=True).config == {"lr": 0.1}
    accelerator.log({"loss": 1.0}, step=3)
    accelerator.end_training()
    assert sdk == [
        ("trackio.init", (), {"project": "project"}),
        ("trackio.run.log", ({"loss": 1.0},), {"step": 3}),
        ("trackio.run.finish", (), {}),
    ]


def test_mlflow_is_called_as_documented(
    sdk: list[Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    accelerator = make(None, "mlflow")
    config = {f"p{i}": i for i in range(150)} | {"long": "x" * 6001}
    accelerator.init_trackers("experiment", config, {"mlflow": {"run_name": "r", "logging_dir": "artifacts"}})
    for step in (1, 2):
        accelerator.log({"loss": 1.0, "note": "text"}, step=step)
    accelerator.end_training()
    options = {"run_id": None, "run_name": "r", "nested": False, "tags": None, "description": None}
    assert sdk[:4] == [
        ("mlflow.get_experiment_by_name", ("experiment",), {}),
        ("mlflow.create_experiment", ("experiment",), {"artifact_location": "artifacts"}),
        ("mlflow.set_experiment", ("experiment",), {}),
        ("mlflow.start_run", (), options),
    ]
    assert [(name, len(args[0])) for name, args, _ in sdk[4:6]] == [
        ("mlflow.log_params", 100),
        ("mlflow.log_params", 50),
    ]
    assert sdk[6:] == [
        ("mlflow.log_metrics", ({"loss": 1.0},), {"step": 1}),
        ("mlflow.log_metrics", ({"loss": 1.0},), {"step": 2}),
        ("mlflow.end_run", (), {}),
    ]
    assert [r.message.split(",")[0] for r in caplog.records] == ["mlflow: left out long", "mlflow: left out note"]
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "other")
    accelerator.init_trackers("experiment")
    assert ("mlflow.set_experiment", ("other",), {}) in sdk


def test_all_takes_what_is_installed_and_has_a_folder(tmp_path: Path, sdk: list[Any], monkeypatch: pytest.MonkeyPatch):
    assert [str(t) for t in make(tmp_path, "all").log_with] == ["tensorboard", "wandb", "trackio", "mlflow", "jsonl"]
    assert [str(t) for t in make(None, ["all"]).log_with] == ["wandb", "trackio", "mlflow"]
    own = Recorder()
    assert make(None, [own, "all", "wandb"]).log_with[:2] == [own, "wandb"]
    for name in SDKS:
        monkeypatch.setitem(sys.modules, name, None)
    assert [str(t) for t in make(tmp_path, "all").log_with] == ["tensorboard", "jsonl"]


@pytest.mark.parametrize("name", SDKS)
def test_a_missing_library_is_named_with_its_command(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingLibraryError, match=f"pip install {name}"):
        make(None, name)


REFUSED = [
    ("tensorboad", ConfigError, "did you mean 'tensorboard'"),
    ("tensorboard", ConfigError, "project_dir"),
    ("jsonl", ConfigError, "project_dir"),
    ("comet_ml", NotInThisVersionError, "GeneralTracker subclass"),
    (accelerate.utils.LoggerType.AIM, NotInThisVersionError, "GeneralTracker subclass"),
    (3, ConfigError, "log_with got a int"),
    (Recorder, ConfigError, r"log_with got the class Recorder; allowed: an object: Recorder\(...\)"),
]


@pytest.mark.parametrize(("log_with", "error", "text"), REFUSED, ids=lambda v: str(v)[:20])
def test_what_cannot_be_a_tracker_is_refused_at_once(log_with: Any, error: type[Exception], text: str):
    with pytest.raises(error, match=text):
        make(None, log_with)


def test_enums_of_both_libraries_and_repeats_are_read(tmp_path: Path):
    theirs = accelerate.utils.LoggerType.TENSORBOARD
    asked = [LoggerType.TENSORBOARD, theirs, "TensorBoard", "jsonl"]
    assert make(tmp_path, asked).log_with == ["tensorboard", "jsonl"]
    assert make(tmp_path, theirs).log_with == ["tensorboard"]


def test_a_tracker_written_for_accelerate_works():
    class Theirs(accelerate.tracking.GeneralTracker):
        name = "theirs"
        requires_logging_directory = False
        seen: list[Any] = []  # noqa: RUF012

        @property
        def tracker(self) -> None:
            return None

        def log(self, values: Any, step: int | None = None, **kwargs: Any) -> None:
            self.seen.append((values, step))

    accelerator = make(None, Theirs())
    accelerator.init_trackers("run", config={"a": 1})
    accelerator.log({"x": 1}, step=2)
    accelerator.end_training()
    assert Theirs.seen == [({"x": 1}, 2)]


def test_an_incomplete_tracker_says_what_it_lacks():
    class Incomplete(GeneralTracker):
        name = "incomplete"

    with pytest.raises(ConfigError, match="Incomplete has no requires_logging_directory, tracker"):
        Incomplete()


def test_lines_are_closed_to_use_outside(tmp_path: Path):
    tracker = JsonlTracker("run", tmp_path)
    with pytest.raises(ConfigError, match="between init_trackers and end_training"):
        tracker.log({"x": 1})
    tracker.finish()
    assert choose.choose(None, None) == []
    assert json_ready(plain({"a": (1, 2)})) == {"a": [1, 2]}
