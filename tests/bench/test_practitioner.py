"""The account: the search for the largest batch, and the three tables on a model that a CPU trains."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from acceler8.bench.practitioner import ACCURACY, MEMORY, THROUGHPUT, Account, TextWork, largest_batch, measure
from acceler8.bench.presets import Preset
from acceler8.bench.variants import select
from acceler8.cli.bench_display import ACCURACY_COLUMNS, THROUGHPUT_COLUMNS, BenchDisplay
from acceler8.demo.text import load_corpus
from acceler8.errors import RunError

CPU = torch.device("cpu")


@pytest.mark.parametrize("slope", [1.0, 0.7, 2.9])
@pytest.mark.parametrize("bend", [0.0, 3.0])
@pytest.mark.parametrize("budget", [5.0, 20.0, 24.5, 60.0])
def test_the_largest_batch_is_found_with_few_trials(slope: float, bend: float, budget: float):
    tried: list[int] = []

    def peak(batch: int) -> float:
        return 4.0 + slope * batch + bend * (batch % 2)

    def probe(batch: int) -> float:
        tried.append(batch)
        return peak(batch)

    found = largest_batch((8, peak(8)), budget, probe)
    assert found == 0 or peak(found) <= budget
    assert peak(found + 1) > budget
    assert len(tried) == len(set(tried)) <= 10


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text("abcabcabd" * 2000)
    return str(path)


def test_three_tables(least: Preset, text: str):
    preset = dataclasses.replace(least, loop="prepared", parameters="float32", length=32, lr=3e-3)
    account = Account(epochs=2, epoch_steps=12, held_out_bytes=512, text=text)
    variants = select("prepared", CPU, ["rowwise"])
    tables: list[dict[str, int]] = []
    result = measure(
        preset, variants, CPU, account, keep=lambda result: tables.append({k: len(v) for k, v in result.tables.items()})
    )
    # what is done is there before the rest is measured
    assert tables[0] == {MEMORY: 3, THROUGHPUT: 3}
    assert [made[ACCURACY] for made in tables[1:]] == [1, 2, 3]
    assert [row.name for row in result.rows] == ["bf16", "fp16-amp", "rowwise"]
    assert set(result.tables) == {MEMORY, THROUGHPUT, ACCURACY}
    accuracy = {row.name: row.values for row in result.tables[ACCURACY]}
    assert set(accuracy) == {"bf16", "fp16-amp", "rowwise"}
    for values in accuracy.values():  # chance is 1 of 256
        assert values["accuracy"] == values["epoch_2"] > 0.3
    assert accuracy["fp16-amp"]["against_fp16"] == 0.0
    throughput = {row.name: row for row in result.tables[THROUGHPUT]}
    assert throughput["fp16-amp"].values["speed_against_fp16"] == pytest.approx(1.0)
    assert throughput["rowwise"].labels["batch"] == preset.batch
    assert any("no largest batch" in note for note in result.notes)
    display = BenchDisplay()
    display.table(THROUGHPUT, result.tables[THROUGHPUT], THROUGHPUT_COLUMNS)
    display.table(ACCURACY, result.tables[ACCURACY], ACCURACY_COLUMNS)


def test_every_epoch_has_every_window_once(least: Preset, text: str):
    work = TextWork(least, CPU, load_corpus(text, least.length), steps=3)
    seen = []
    for epoch in range(2):
        windows = []
        for number in range(3):
            work.select(epoch, number)
            windows += [tuple(window) for window in work.tokens.tolist()]
        seen.append(windows)
    assert sorted(seen[0]) == sorted(seen[1])
    assert seen[0] != seen[1]


def test_what_no_account_can_be():
    for bad in ({"epochs": -1}, {"epoch_steps": 0}, {"budget_gb": 0.0}, {"budget_gb": float("nan")}):
        with pytest.raises(RunError, match="allowed"):
            Account(**bad)
