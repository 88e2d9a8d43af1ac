"""``acceler8 config`` without questions: what it writes, shows, checks and converts."""

from __future__ import annotations

import io
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import acceler8
from acceler8.cli import main
from acceler8.config import merge, parse_flags, read_environment, read_yaml
from acceler8.config.registry import BY_ENV

SOURCE = Path(acceler8.__file__).parent.parent


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of its own, no terminal, and no variable that sets anything."""
    for name in BY_ENV:
        monkeypatch.delenv(name, raising=False)
    for name in ("HOME", "XDG_CONFIG_HOME", "HF_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setattr("sys.stdin", io.StringIO())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str | Path, code: int = 0) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["config", *map(str, arguments)])
    assert caught.value.code == code


def values(path: Path) -> dict:
    return merge([read_yaml(path)]).given()


def test_defaults_go_to_the_default_file(home: Path, capsys: pytest.CaptureFixture[str]):
    run("--defaults")
    path = home / "home" / "acceler8" / "config.yaml"
    assert capsys.readouterr().out == f"Wrote {path}\n"
    assert values(path)["mixed_precision"] == "no"
    run("show")
    shown = capsys.readouterr()
    assert f"mixed_precision      no     yaml {path}:" in shown.out
    assert shown.err == f"acceler8: reading {path}, the default file\n"


@pytest.mark.parametrize("option", ["--config_file", "--config-file"])
def test_set_starts_from_defaults_then_changes_the_file_that_is_there(home: Path, option: str):
    path = home / "run.yaml"
    run("--set", "mixed_precision=fp8", "--set", "backend=te", option, path)
    assert values(path)["fp8_config.amax_history_len"] == 1024
    run("--set", "fp8_config.margin=3", option, path, "--yes")
    assert values(path)["fp8_config.margin"] == 3
    assert values(path)["fp8_config.backend"] == "TE"


def test_a_file_that_differs_is_shown_and_kept_without_yes(home: Path, capsys: pytest.CaptureFixture[str]):
    path = home / "run.yaml"
    path.write_text("mixed_precision: bf16\n")
    run("--set", "mixed_precision=fp8", "--config_file", path, code=2)
    output = capsys.readouterr()
    assert "-mixed_precision: bf16\n+mixed_precision: fp8" in output.out
    assert "add --yes" in output.err
    assert path.read_text() == "mixed_precision: bf16\n"
    run("--set", "mixed_precision=fp8", "--config_file", path, "-y")
    assert path.read_text() == "mixed_precision: fp8\n"
    capsys.readouterr()
    run("--set", "mixed_precision=fp8", "--config_file", path)
    assert capsys.readouterr().out == f"{path}: nothing to change\n"


@pytest.mark.parametrize("option", ["--from-accelerate", "--from_accelerate"])
def test_a_file_of_accelerate_is_taken_over_with_notes(home: Path, option: str, capsys: pytest.CaptureFixture[str]):
    theirs = home / "theirs.yaml"
    theirs.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\ndowncast_bf16: 'no'\nmixed_precision: fp8\n"
        "fp8_config:\n  backend: te\n  amax_history_length: 16\n  override_linear_precision: (false, false, true)\n"
    )
    run(option, theirs, "--set", "margin=1", "--config_file", home / "ours.yaml")
    assert values(home / "ours.yaml") == {
        "distributed_type": "NO",
        "mixed_precision": "fp8",
        "fp8_config.backend": "TE",
        "fp8_config.margin": 1,
        "fp8_config.amax_history_len": 16,
        "fp8_config.override_linear_precision": (False, False, True),
    }
    assert f"{theirs}:7: amax_history_length is read as amax_history_len" in capsys.readouterr().err


def test_without_a_terminal_it_says_what_to_do(home: Path, capsys: pytest.CaptureFixture[str]):
    run(code=2)
    message = capsys.readouterr().err
    assert "--defaults" in message
    assert "--set" in message
    assert not (home / "home").exists()


@pytest.mark.parametrize("spelling", ["--mixed_precision", "--mixed-precision"])
@pytest.mark.parametrize("name", ["basic.yaml", "basic.json"])
def test_default_writes_a_basic_file(home: Path, spelling: str, name: str):
    run("default", spelling, "FP8", "--config_file", home / name)
    found = values(home / name)
    assert found["mixed_precision"] == "fp8"
    assert found["num_processes"] >= 1
    assert set(found) == {"distributed_type", "num_processes", "use_cpu", "mixed_precision"}


def test_show_names_the_source_that_won(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    path = home / "run.yaml"
    path.write_text("mixed_precision: fp8\nfp8_config: {backend: TE, margin: 1, interval: 2}\n")
    monkeypatch.setenv("ACCELERATE_FP8_INTERVAL", "3")
    run("show", "--json", "--config_file", path, "--fp8-margin", "2")
    shown = json.loads(capsys.readouterr().out)
    found = {key: (row["value"], row["source"]) for key, row in shown["settings"].items()}
    assert found["fp8_config.margin"] == (2, "flag --fp8_margin")
    assert found["fp8_config.interval"] == (3, "environment ACCELERATE_FP8_INTERVAL")
    assert found["fp8_config.backend"] == ("TE", f"yaml {path}:2")
    assert found["fp8_config.amax_compute_algo"] == ("most_recent", "default of TE")
    assert "num_processes" not in found
    run("show", "--all", "--json", "--config_file", path)
    assert json.loads(capsys.readouterr().out)["settings"]["num_processes"] == {
        "value": None,
        "text": "not given",
        "source": "default",
    }


def test_show_with_nothing_says_so(home: Path, capsys: pytest.CaptureFixture[str]):
    run("show")
    assert "sets anything" in capsys.readouterr().out


def test_validate(home: Path, capsys: pytest.CaptureFixture[str]):
    (home / "run.yaml").write_text("use_cpu: true\n")
    run("validate", "run.yaml")
    assert capsys.readouterr().out == "run.yaml: valid, 1 setting\n"


def test_schema_is_json(home: Path, capsys: pytest.CaptureFixture[str]):
    run("schema")
    assert "mixed_precision" in json.loads(capsys.readouterr().out)["properties"]


TEXT = """\
distributed_type: FSDP
num_processes: 2
environment:
  NCCL_A: it's; $HOME
mixed_precision: fp8
fp8_config:
  backend: TE
  override_linear_precision: [false, false, true]
fsdp_config:
  fsdp_version: 2
  fsdp_transformer_layer_cls_to_wrap: [A, B]
"""


def convert(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    capsys.readouterr()
    run("convert", *arguments)
    return capsys.readouterr().out


def test_convert_goes_round(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    path = home / "run.yaml"
    path.write_text(TEXT)
    expected = values(path)
    flags = convert(capsys, path, "--to", "flags")
    assert merge([parse_flags(shlex.split(flags)).route]).given() == expected
    exports = convert(capsys, "--from", "flags", *shlex.split(flags), "--to", "env")
    script = f"{exports}\n{sys.executable} -c 'import json, os; print(json.dumps(dict(os.environ)))'"
    done = subprocess.run(["sh", "-c", script], env={}, capture_output=True, text=True, check=True)
    variables = json.loads(done.stdout)
    assert merge([read_environment(variables)]).given() == expected
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    assert convert(capsys, "--from", "env", "--to", "yaml") == TEXT


def test_convert_takes_the_file_first_or_last_and_flags_over_it(home: Path, capsys: pytest.CaptureFixture[str]):
    (home / "run.yaml").write_text("num_processes: 2\n")
    for arguments in (["run.yaml", "--debug", "--to", "yaml"], ["--to", "yaml", "--debug=true", "run.yaml"]):
        assert yaml.safe_load(convert(capsys, *arguments)) == {"num_processes": 2, "debug": True}
    assert yaml.safe_load(convert(capsys, "run.yaml", "--num_processes=3", "--to", "yaml")) == {"num_processes": 3}


def test_convert_to_python_names_what_it_leaves_out(home: Path, capsys: pytest.CaptureFixture[str]):
    (home / "run.yaml").write_text(TEXT)
    run("convert", "run.yaml", "--to", "python")
    output = capsys.readouterr()
    compile(output.out, "script", "exec")
    assert "TERecipeKwargs(override_linear_precision=(False, False, True))" in output.out
    assert "acceler8: not expressed in python: num_processes=2" in output.err


def test_options_before_a_subcommand_are_refused(home: Path, capsys: pytest.CaptureFixture[str]):
    run("--defaults", "show", code=2)
    assert "stand after it" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["config", "--help"], ["config", "show", "--help"], ["config", "convert", "-h"]])
def test_help_is_quick_for_it_imports_little(arguments: list[str]):
    code = (
        "import sys\nfrom acceler8.cli import main\ntry:\n"
        f"    main({arguments!r})\nfinally:\n"
        "    heavy = {'torch', 'numpy', 'yaml', 'questionary', 'acceler8.config'} & set(sys.modules)\n"
        "    assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": str(SOURCE)}, check=False
    )
    assert done.returncode == 0, done.stderr


def test_reading_and_checking_do_without_torch(home: Path):
    (home / "run.yaml").write_text("mixed_precision: fp8\nfp8_config: {backend: TE}\n")
    code = (
        "import sys\nfrom acceler8.cli import main\ntry:\n    main(['config', 'validate', 'run.yaml'])\n"
        "finally:\n    assert 'torch' not in sys.modules\n"
    )
    environ = {"PYTHONPATH": str(SOURCE), "HOME": str(home)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ, check=False)
    assert done.returncode == 0, done.stderr
