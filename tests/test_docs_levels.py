"""The page about levels: its table is the registry's, its loop runs and prints what stands below it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from acceler8 import levels

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "levels.md").read_text(encoding="utf-8")


def test_the_table_is_the_registrys():
    assert f"\n\n{levels.table()}\n\n" in TEXT


def test_the_loop_runs_and_prints_what_the_page_says(capsys: pytest.CaptureFixture[str]):
    loop = next(code for code in re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL) if "initialize" in code)
    (said,) = re.findall(r"```text\n(.*?)```", TEXT, flags=re.DOTALL)
    exec(compile(loop, "docs/levels.md", "exec"), {"__name__": "example"})
    assert capsys.readouterr().out == said


def test_choices_on_the_page_are_there():
    words = re.findall(r"`(\w+)=\"(\w+)\"`", TEXT)
    assert {name for name, _ in words} == {"exp_avg_sq", "master", "gradient", "weight"}
    for name, word in words:
        levels.level("O1", **{"master": "none", name: word})
