"""``acceler8 demo`` as a person uses it: whole runs, Ctrl-C and resume, and every bad input."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import acceler8
from acceler8.cli.app import main
from acceler8.demo.run_folder import RunFolder
from tests.demo.runs import curves

SOURCE = Path(acceler8.__file__).parent.parent
SHORT = ["--size", "tiny", "--device", "cpu", "--steps", "20", "--batch", "2", "--seq", "32", "--seed", "1"]
LONGER = [*SHORT, "--steps", "40"]


@pytest.fixture(scope="module")
def text_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"{i} times {i} is {i * i}\n" for i in range(2000)))
    return path


def run_main(arguments: list[str]) -> int:
    """Run the command line in this process and return its status."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    return int(caught.value.code or 0)


def start(arguments: list[str], folder: Path) -> subprocess.Popen[str]:
    """Start the command line as its own process, so that it can be sent a signal."""
    code = "from acceler8.cli import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", code, "demo", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(SOURCE), "PYTHONUNBUFFERED": "1"},
    )


def test_a_run_prints_lines_and_tables_and_leaves_a_report(
    text_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert run_main(["demo", *SHORT, "--text", str(text_path), "--out", str(tmp_path / "runs")]) == 0
    (folder,) = (tmp_path / "runs").iterdir()
    output = capsys.readouterr().out
    assert f"Run {folder}" in output
    assert f"Report: {folder / 'report.html'}" in output
    assert (folder / "report.html").is_file()
    progress = [line for line in output.splitlines() if re.match(r"(bf16|fp8): step", line)]
    assert len(progress) == 20  # ten a training, however many steps
    assert re.fullmatch(r"fp8: step 20/20  loss \d\.\d{3}  [\d,]+ tokens/s  ETA 0 s", progress[-1])
    assert "\r" not in output
    assert "\x1b" not in output
    for word in (
        "trained in bf16",
        "evaluated in fp8",
        "14 of 15",
        "q_proj",
        "down_proj",
        "lm_head",
        "saturated",
    ):
        assert word in output
    summary = RunFolder(folder).read_json("summary.json")
    for loss in summary["held_out_loss"].values():
        assert f"{loss:.4f}" in output


@pytest.fixture(scope="module")
def whole(text_path: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """The run that nobody stopped."""
    parent = tmp_path_factory.mktemp("whole")
    process = start([*LONGER, "--text", str(text_path), "--out", "."], parent)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    (folder,) = parent.iterdir()
    return RunFolder(folder)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_ctrl_c_leaves_a_run_that_resume_goes_on_with(
    whole: RunFolder, text_path: Path, tmp_path: Path, precision: str
):
    process = start([*LONGER, "--text", str(text_path)], tmp_path)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(f"{precision}: step 4/"):
            process.send_signal(signal.SIGINT)
            break
    output, errors = process.communicate(timeout=600)
    assert process.returncode == 130, errors
    assert errors == ""
    command = re.search(r"acceler8 demo --resume (\S+)", output)
    assert command, output
    stopped = RunFolder.open(tmp_path / command[1])
    done = [record["precision"] for record in stopped.read_metrics()].count(precision)
    assert 4 <= done < 40
    assert stopped.checkpoint_path(precision).is_dir()

    process = start(["--resume", command[1]], tmp_path)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    assert curves(stopped) == curves(whole)
    for name in ("bf16", "fp8"):
        assert stopped.result(name) == whole.result(name)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recipe", "rowise"], "unknown recipe 'rowise'; did you mean 'rowwise'?"),
        (["--size", "smal"], "unknown size 'smal'; did you mean 'small'?"),
        (["--device", "cdua"], "unknown device 'cdua'; did you mean 'cuda'?"),
        (["--device", "cuda:77"], "device 'cuda:77' is not here"),
        (["--steps", "0"], "steps=0 is not allowed; it must be at least 1"),
        (["--steps", "-3"], "steps=-3 is not allowed"),
        (["--batch", "0"], "batch=0 is not allowed"),
        (["--seq", "0"], "seq=0 is not allowed"),
        (["--lr", "-1"], "lr=-1.0 is not allowed"),
        (["--lr", "nan"], "lr=nan is not allowed"),
        (["--seed", "-1"], "seed=-1 is not allowed"),
        (["--text", "absent.txt"], "absent.txt' does not exist"),
        (["--text", "empty.txt"], "has no text at all"),
        (["--text", "short.txt"], "has 40 bytes of text; seq=128 needs at least 258"),
        (["--out", "short.txt"], "cannot make a run folder in 'short.txt'"),
        (["--out", "short.txt/deeper"], "cannot make a run folder in 'short.txt/deeper'"),
        (["--resume", "absent"], "'absent' is not a folder"),
        (["--resume", "."], "'.' is not a run: it has no config.json"),
        (["--resume", "short.txt"], "'short.txt' is not a folder"),
    ],
)
def test_bad_input_is_one_message_and_nothing_written(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").touch()
    Path("short.txt").write_bytes(b"x" * 40)
    assert run_main(["demo", *([] if "--device" in arguments else ["--device", "cpu"]), *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("acceler8: error: ")
    assert message in captured.err
    assert "Traceback" not in captured.err
    assert {path.name for path in tmp_path.iterdir()} == {"empty.txt", "short.txt"}


def test_a_value_of_the_wrong_type_is_a_usage_error(capsys: pytest.CaptureFixture[str]):
    assert run_main(["demo", "--steps", "many"]) == 2
    assert "Invalid value for '--steps'" in capsys.readouterr().err


def test_resume_with_other_options_says_what_differs(
    text_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    arguments = [*SHORT, "--steps", "1", "--text", str(text_path)]
    assert run_main(["demo", *arguments, "--out", str(tmp_path)]) == 0
    (folder,) = tmp_path.iterdir()
    assert run_main(["demo", "--resume", str(folder), "--steps", "5", "--size", "small"]) == 2
    error = capsys.readouterr().err
    assert "size: saved 'tiny', now 'small'; steps: saved 1, now 5" in error
    assert run_main(["demo", "--resume", str(folder), "--steps", "1"]) == 0
