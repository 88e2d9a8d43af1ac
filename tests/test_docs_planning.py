"""The page about planning: its example prints what stands below it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from acceler8.bench.derive import DERIVED
from acceler8.costs import known_gpus

TEXT = (Path(__file__).parent.parent / "docs" / "planning.md").read_text(encoding="utf-8")


def test_the_example_prints_what_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))  # the shipped table, whoever runs this
    (code, said) = re.findall(r"```(?:python)?\n(.*?)```", TEXT, flags=re.DOTALL)
    exec(compile(code, "docs/planning.md", "exec"), {"__name__": "example"})
    assert capsys.readouterr().out == said


def test_the_shipped_tables_are_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert all(gpu in TEXT for gpu in known_gpus())
    (rule,) = DERIVED
    assert f"0.4328 = {rule.origin_bandwidth / 1e12:.1f} / {rule.bandwidth / 1e12:.2f} - 1" in TEXT
