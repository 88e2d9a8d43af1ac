"""Default files, and writing whole or not at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from acceler8.config import files
from acceler8.config.files import accelerate_default_file, default_file, own_default_file, write_file
from acceler8.config.yaml_file import read_yaml
from acceler8.errors import ConfigError
from tests.config.support import effective_of

FP8 = effective_of({"mixed_precision": "fp8", "fp8_config.margin": 2})


def put(path: Path, text: str = "debug: true\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.skipif(os.name == "nt", reason="paths of Windows")
@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"XDG_CONFIG_HOME": "/x", "HOME": "/h"}, "/x/acceler8/config.yaml"),
        ({"XDG_CONFIG_HOME": "relative", "HOME": "/h"}, "/h/.config/acceler8/config.yaml"),
        ({"XDG_CONFIG_HOME": "", "HOME": "/h"}, "/h/.config/acceler8/config.yaml"),
    ],
)
def test_own_default_file(environ: dict[str, str], expected: str):
    assert own_default_file(environ) == Path(expected)


@pytest.mark.parametrize(
    ("variable", "folder"),
    [
        ("HF_HOME", "accelerate"),
        ("XDG_CACHE_HOME", "huggingface/accelerate"),
        ("HOME", ".cache/huggingface/accelerate"),
    ],
)
@pytest.mark.parametrize("name", ["default_config.yaml", "default_config.json"])
def test_accelerates_default_file(variable: str, folder: str, name: str, tmp_path: Path):
    environ = {"HOME": str(tmp_path / "home"), variable: str(tmp_path)}
    assert accelerate_default_file(environ) is None
    assert default_file(environ) == (None, "")
    path = put(tmp_path / folder / name)
    assert accelerate_default_file(environ) == path
    found, note = default_file(environ)
    assert found == path
    assert "Accelerate's default file" in note


def test_yaml_before_json_and_own_before_accelerates(tmp_path: Path):
    environ = {"HF_HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path / "own"), "HOME": str(tmp_path)}
    put(tmp_path / "accelerate" / "default_config.json")
    yaml_file = put(tmp_path / "accelerate" / "default_config.yaml")
    assert default_file(environ)[0] == yaml_file
    own = put(own_default_file(environ))
    found, note = default_file(environ)
    assert found == own
    assert note == f"reading {own}, the default file"


def test_a_tilde_is_the_home_of_the_environment(tmp_path: Path):
    path = put(tmp_path / "hf" / "accelerate" / "default_config.yaml")
    assert accelerate_default_file({"HOME": str(tmp_path), "HF_HOME": "~/hf"}) == path


@pytest.mark.parametrize("name", ["run.yaml", "deep/er/run.yml", "run.json"])
def test_a_written_file_reads_back_and_leaves_nothing_else(name: str, tmp_path: Path):
    path = tmp_path / name
    write_file(path, FP8)
    assert {key: value.value for key, value in read_yaml(path).values.items()} == FP8.given()
    assert [found for found in path.parent.iterdir() if found != path] == []
    assert path.read_bytes().startswith(b"{") == name.endswith("json")


@pytest.mark.skipif(os.name == "nt", reason="POSIX modes")
def test_mode_and_link_are_kept(tmp_path: Path):
    path, link = put(tmp_path / "a.yaml"), tmp_path / "b.yaml"
    path.chmod(0o640)
    link.symlink_to(path)
    write_file(link, FP8)
    assert link.is_symlink()
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert "margin: 2" in path.read_text()


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_the_old_file_stays_if_anything_fails(step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = put(tmp_path / "run.yaml", "debug: true\n")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, step, fail)
    with pytest.raises(ConfigError, match=r"run.yaml: cannot be written \(No space left"):
        write_file(path, FP8)
    assert path.read_text() == "debug: true\n"
    assert list(tmp_path.iterdir()) == [path]


def test_a_text_that_reads_back_otherwise_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(files, "render", lambda path, effective: "debug: true\n")
    with pytest.raises(AssertionError, match="read back"):
        write_file(tmp_path / "run.yaml", FP8)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_a_file(tmp_path: Path):
    put(tmp_path / "file")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_file(tmp_path / "file" / "run.yaml", FP8)
