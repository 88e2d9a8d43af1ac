"""The benchmark of graphed steps: runs as a user runs it, and times nothing whose numbers differ."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from acceler8.bench.work import Work

FILE = Path(__file__).parents[2] / "benchmarks" / "bench_cuda_graph.py"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # the file sets it where it is not
    spec = importlib.util.spec_from_file_location("bench_cuda_graph", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(tmp_path: Path, device: str, *arguments: str) -> tuple[str, list[dict]]:
    out = tmp_path / "rows.json"
    command = [sys.executable, str(FILE), "--size", "tiny", "--device", device, "--rounds", "1", "--out", str(out)]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(out.read_text(encoding="utf-8"))["rows"]


def test_on_a_cpu_it_says_that_there_are_no_graphs(tmp_path):
    said, rows = run(tmp_path, "cpu", "--recipes", "rowwise")
    assert "cpu has no CUDA graphs" in said
    assert [row["precision"] for row in rows] == ["bf16", "rowwise"]
    for row in rows:
        low, median, high = row["eager_ms"]
        assert 0 < low <= median <= high
        assert row["graphed_ms"] is None
        assert f"| tiny | {row['precision']} | {low:.2f} / {median:.2f} / {high:.2f} | - |" in said
    assert rows[0]["loss"] != rows[1]["loss"]  # the second one is in FP8


@pytest.mark.requires(sm=90)
def test_on_a_gpu_replays_are_the_eager_steps(tmp_path):
    _, rows = run(tmp_path, "cuda")
    assert [row["precision"] for row in rows] == ["bf16", "rowwise", "tensorwise", "delayed"]
    assert all(row["differs"] == "" and row["graphed_ms"] for row in rows)


def test_what_is_not_equal_is_found(bench):
    work = Work(bench.SIZES["tiny"], torch.device("cpu"))

    def variants() -> list:
        return [bench.Variant(work, "rowwise", graphed=graphed) for graphed in (False, True)]

    eager, graphed = variants()
    assert bench.what_differs(eager, graphed) == "no step of 10 was a replay"  # a CPU has none
    eager, other = variants()
    with torch.no_grad():
        other.model.lm_head.weight[0, 0] += 0.5
    assert "of step 0 is not the eager" in bench.what_differs(eager, other)
    eager, other = variants()
    with torch.no_grad():
        other.model.embed_tokens.weight[255] += 0.5  # of a token that no batch has
    for variant in (eager, other):
        variant._batches = [batch.clamp(max=254) for batch in variant._batches]
    assert bench.what_differs(eager, other) == "embed_tokens.weight differs after 10 steps"
