"""The optimizer's benchmarks: what they count, what they choose, and that they run as a user runs them."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from acceler8.optim import AdamW

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def load_bench(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(FOLDER))

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)  # dataclasses look their module up
        spec.loader.exec_module(module)
        return module

    return load


@pytest.mark.parametrize(
    ("options", "bytes_a_parameter"),
    [
        # gradient read; moments with scales, remainder and parameter read and written
        ({"moments": "fp8", "master": "bf16_remainder"}, 2 + 2 * (2 + 8 / 128) + 2 * 2 + 2 * 2),
        ({"moments": "bf16"}, 2 + 2 * 4 + 2 * 2),
        ({"moments": "fp32", "master": "fp32"}, 2 + 2 * 8 + 2 * 4 + 2),
    ],
    ids=str,
)
def test_moved_bytes_are_each_tensor_once_in_and_once_out(load_bench, monkeypatch, options, bytes_a_parameter):
    bench = load_bench("bench_optimizer")
    monkeypatch.setattr(bench, "HIDDEN", 128)
    parameters = [p for p in bench.make_parameters(3 * 128**2, "cpu") if p.ndim == 2]
    assert [tuple(p.shape) for p in parameters] == [(128, 128)] * 3
    optimizer = AdamW(parameters, **options)
    optimizer.step()
    assert bench.moved_bytes(optimizer, parameters) == bytes_a_parameter * 3 * 128**2


def test_without_a_gpu_it_says_so():
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    command = [sys.executable, str(FOLDER / "bench_optimizer.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=FOLDER.parent)
    assert done.returncode == 1
    assert "bench_optimizer needs a CUDA GPU" in done.stderr


def test_the_codec_that_is_built_is_the_one_that_was_measured_best(load_bench):
    """The rule, run on the figures that are kept, gives the code that ``exp_avg_sq="fp8"`` has."""
    bench = load_bench("bench_moment_codecs")
    kept = json.loads(max((FOLDER / "results").glob("*-moment-codecs.json")).read_text())
    assert bench.choose(kept["settings"]) == kept["facts"]["chosen"] == "UE5M3, block 128, no zeros"


def test_codecs_are_told_apart_in_a_short_run(load_bench):
    bench = load_bench("bench_moment_codecs")
    names = ["E4M3, tensor, power of two", "UE5M3, block 128, no zeros", "logarithm, block 128", "dynamic, block 256"]
    names += ["COAT, block 128", "FP16, block 128", "UE5M3, block 128, no zeros, stochastic"]
    rows = bench.simulate(bench.Setting(0.95, 1.0, 0.1, 150), names, 2048)
    assert set(rows) == {"first moment alone", *names}
    assert rows["E4M3, tensor, power of two"]["median"] > 3
    for name in names[1:]:
        assert abs(rows[name]["median"] - 1) < 0.1
    assert rows["FP16, block 128"]["error"] <= rows["UE5M3, block 128, no zeros"]["error"]
