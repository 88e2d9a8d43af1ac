"""The page about configuration: tables as the schema has them, examples that work."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from acceler8.cli import main
from acceler8.config import ENTRIES, merge, parse_flags, read_environment, read_yaml
from acceler8.config.docs import fill
from acceler8.config.docs import main as write_tables
from acceler8.config.registry import BY_ENV
from acceler8.errors import ConfigError

PAGE = Path(__file__).parent.parent / "docs" / "configuration.md"
TEXT = PAGE.read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", TEXT, flags=re.DOTALL)


def test_tables_are_fresh():
    assert fill(TEXT) == TEXT, "run python -m acceler8.config.docs docs/configuration.md"


def test_a_stale_or_missing_table_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    page = tmp_path / "page.md"
    page.write_text(TEXT.replace("Headroom of delayed scales.", "Something else."), encoding="utf-8")
    assert write_tables([str(page), "--check"]) == 1
    assert "stale" in capsys.readouterr().err
    assert write_tables([str(page)]) == 0
    assert page.read_text(encoding="utf-8") == TEXT
    assert write_tables([str(page), "--check"]) == 0
    with pytest.raises(ConfigError, match="the tables in the text"):
        fill(TEXT.replace("table: top", "table: tip"))


@pytest.mark.parametrize("path", ENTRIES)
def test_every_setting_is_on_the_page(path: str):
    entry = ENTRIES[path]
    row = next(line for line in TEXT.splitlines() if line.startswith(f"| `{entry.key}` | `--"))
    assert all(f"`{name}`" in row for name in entry.setting.env)


def test_the_routes_on_the_page_are_equal(tmp_path: Path):
    yaml_text = next(text for kind, text in BLOCKS if kind == "yaml")
    (tmp_path / "run.yaml").write_text(yaml_text)
    flags = next(text for kind, text in BLOCKS if text.startswith("acceler8 launch --mixed"))
    exports = next(text for kind, text in BLOCKS if text.startswith("export"))
    expected = {"mixed_precision": "fp8", "fp8_config.backend": "TE", "fp8_config.margin": 2}
    assert merge([read_yaml(tmp_path / "run.yaml")]).given() == expected
    assert merge([parse_flags(shlex.split(flags)[2:]).route]).given() == expected
    variables = dict(word.split("=") for word in shlex.split(exports)[1:])
    assert merge([read_environment(variables)]).given() == expected


README = PAGE.parent.parent / "README.md"
README_BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
LINES = [
    line
    for kind, text in [*BLOCKS, *README_BLOCKS]
    if not kind
    for line in text.splitlines()
    if line.startswith("acceler8 config ") and "schema >" not in line
]


@pytest.mark.parametrize("line", LINES)
def test_every_command_on_the_page_runs(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in BY_ENV:
        monkeypatch.delenv(name, raising=False)
    for name in ("HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.delenv("HF_HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("mixed_precision: fp8\nfp8_config: {margin: 2, backend: TE}\n")
    theirs = tmp_path / ".cache" / "huggingface" / "accelerate" / "default_config.yaml"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("mixed_precision: bf16\n")
    Path("examples").symlink_to(README.parent / "examples")
    words = [word.replace("~", str(tmp_path)) for word in shlex.split(line, comments=True)[1:]]
    is_wizard = words == ["config"]
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == (2 if is_wizard else 0)  # 2: there is no terminal here
