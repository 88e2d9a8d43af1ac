"""The page about optimizers: its examples run and print what stands below them, its table is the kept measurement."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "optimizers.md").read_text(encoding="utf-8")
SHOWN = "beta2 0.999, log-sigma 1.0, gradients falling to 10%, 2500 steps"


def test_the_examples_run_and_print_what_the_page_says(capsys: pytest.CaptureFixture[str]):
    first, second = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
    (said,) = re.findall(r"```text\n(.*?)```", TEXT, flags=re.DOTALL)
    scope = {"__name__": "example"}
    exec(compile(first, "docs/optimizers.md", "exec"), scope)
    assert capsys.readouterr().out == said
    exec(compile(second, "docs/optimizers.md", "exec"), scope)
    assert len(scope["watch"].rows()) == 5


def test_the_table_is_the_kept_measurement():
    kept = max((ROOT / "benchmarks" / "results").glob("*-moment-codecs.json"))
    measured = json.loads(kept.read_text())["settings"][SHOWN]
    rows = re.findall(
        r"^\| (?:\*\*)?([^|]+?)(?:\*\*)? \| ([\d.]+) \| ([\d.]+) % \| ([\d.]+) \|$", TEXT, flags=re.MULTILINE
    )
    assert len(rows) >= 8
    for name, median, zeros, error in rows:
        row = measured[name]
        assert (f"{row['median']:.2f}", f"{100 * row['zeros']:.3f}", f"{row['error']:.3g}") == (median, zeros, error)
