"""``acceler8 plan`` as a user runs it."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import acceler8
from acceler8 import backends
from acceler8.backends.torchao import library
from acceler8.bench.model import on_meta
from acceler8.cli import main
from acceler8.conversion.compare import compare
from acceler8.errors import Acceler8Error

NAMED = ("native", "torchao")
needs_torchao = pytest.mark.skipif(library.unavailable() is not None, reason=f"torchao: {library.unavailable()}")


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(64, 128, bias=False), nn.Linear(64, 128, bias=False)
        self.down_proj = nn.Linear(128, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


def small() -> nn.Module:
    return nn.Sequential(Mlp(), Mlp())


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(["plan", *arguments])
    captured = capsys.readouterr()
    assert end.value.code == 0, captured.err
    return captured.out


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(["plan", *arguments])
    assert end.value.code == 2
    return capsys.readouterr().err


def test_a_preset_is_planned_without_memory(capsys):
    said = run(capsys, "llama3-8b-4l", "--recipe", "rowwise", "--gpu", "NVIDIA H200")
    assert "FP8: 28 of 29 layers" in said
    assert "predicted (NVIDIA H200 table" in said
    assert "16384 tokens" in said
    assert {p.device.type for p in on_meta("llama3-8b-4l")[0].parameters()} == {"meta"}


def test_a_function_a_configuration_and_json(capsys, tmp_path):
    data = json.loads(run(capsys, "tests.cli.test_plan:small", "--skip", "0.up_proj", "--json", "-"))
    assert [row["name"] for row in data["rows"] if not row["is_fp8"]] == ["0.up_proj"]
    assert acceler8.Plan.from_dict(data).fp8_names[0] == "0.gate_proj"
    pytest.importorskip("transformers")
    config = {"model_type": "llama", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config | {"num_hidden_layers": 1, "num_attention_heads": 2}))
    assert "FP8: 7 of 8 layers" in run(capsys, str(file), "--json", str(tmp_path / "plan.json"))
    assert json.loads((tmp_path / "plan.json").read_text())["totals"]["fp8_layers"] == 7


def test_what_cannot_be_planned_is_one_line(capsys):
    said = fails(capsys, "llama3-8b-4l", "--compare", "--gpu", "NVIDIA H300")
    assert "unknown GPU of a cost table 'NVIDIA H300'" in said
    assert "cannot take 'tests.cli.test_plan:smal'" in fails(capsys, "tests.cli.test_plan:smal")
    assert "--backend native and --compare" in fails(capsys, "tiny", "--backend", "native", "--compare")
    assert "unknown backend 'torcha'; did you mean 'torchao'" in fails(capsys, "tiny", "--backend", "torcha")
    assert "unknown recipe 'rowwize'; did you mean 'rowwise'" in fails(capsys, "tiny", "--recipe", "rowwize")


@needs_torchao
def test_backends_side_by_side(capsys):
    said = run(capsys, "llama3-8b-4l", "--recipe", "rowwise", "--gpu", "NVIDIA H200", "--compare")
    native, torchao = (next(line for line in said.splitlines() if f"{name} (rowwise)" in line) for name in NAMED)
    assert "28 of 29" in native
    assert "27 of 29" in torchao  # it leaves the first too
    assert "not measured here" in torchao
    assert "3.38 of BF16's 3.38 GiB" in torchao
    lacking = run(capsys, "tiny", "--recipe", "delayed", "--compare")
    assert "torchao: backend 'torchao' has no recipe delayed; allowed there: tensorwise, rowwise" in lacking


@needs_torchao
def test_numbers_are_those_of_the_plans():
    with torch.device("meta"):
        model = small()
    rows = {row.backend: row for row in compare(model, "tensorwise", tokens=16384, gpu="NVIDIA H200")}
    assert tuple(rows) == backends.names()
    for name in NAMED:
        totals = acceler8.plan(model, "tensorwise", name).totals
        assert rows[name].fp8_layers == totals.fp8_layers
        assert rows[name].flops_share == totals.flops_share
    # gate and up read one input: 64 once and 128 a block, two bytes each in BF16 and one in codes
    assert rows["native"].bf16_kept_bytes == rows["torchao"].kept_bytes == 2 * 2 * (64 + 128)
    assert rows["native"].kept_bytes == 2 * (64 + 128)
    plan = acceler8.plan(model, "tensorwise", tokens=16384, gpu="NVIDIA H200")
    assert rows["native"].planned_ms == (plan.speed.planned_ms if plan.speed and plan.speed.bf16_ms else None)
    assert rows["torchao"].planned_ms is None


def test_codes_are_shared_only_where_layers_run_together(monkeypatch):
    """TransformerEngine's layers keep codes of their input, each its own."""
    engine = backends.find("transformer_engine")
    monkeypatch.setattr(type(engine), "unavailable", lambda self: None)
    monkeypatch.setattr(type(engine), "lacks", lambda self, recipe, device, strategy="single": None)
    with torch.device("meta"):
        model = small()
    rows = {row.backend: row for row in compare(model, "tensorwise")}
    assert rows["transformer_engine"].kept_bytes == 2 * (64 + 64 + 128)
    assert rows["transformer_engine"].bf16_kept_bytes == rows["native"].bf16_kept_bytes


def test_a_backend_that_cannot_run_says_why(monkeypatch):
    monkeypatch.setattr(backends.find("torchao"), "unavailable", lambda: "torchao 0.1 is installed; needed: more")
    rows = {row.backend: row for row in compare(small(), "rowwise")}
    assert rows["torchao"].problem == "backend 'torchao' cannot be used: torchao 0.1 is installed; needed: more"
    assert rows["native"].problem == ""


def test_help_needs_no_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert "MODULE:FUNCTION" in run(capsys, "--help")


def nothing() -> int:
    return 3


def test_a_function_that_returns_no_model() -> None:
    with pytest.raises(Acceler8Error, match=r"returned a int; allowed: an nn\.Module"):
        on_meta("tests.cli.test_plan:nothing")
