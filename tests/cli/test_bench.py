"""``acceler8 bench`` as a person uses it: each subcommand on work that takes a moment, JSON, and bad input."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from acceler8.bench import variants
from acceler8.bench.variants import Variant
from acceler8.cli.app import app, main

STEP = ["bench", "step", "--device", "cpu", "--layers", "1", "--length", "16", "--steps", "1"]


def run_main(arguments: list[str]) -> int:
    """Run the command line in this process and return its status."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    return int(caught.value.code or 0)


def check_schema(data: dict, command: str) -> None:
    """The keys that docs/bench.md lists, and rows that are what they say."""
    assert data["format"] == "acceler8-bench"
    assert data["version"] == 1
    assert data["command"] == command
    assert set(data) == {
        *("format", "version", "command", "facts", "settings", "notes", "floor_ms", "rows", "tables"),
    }
    assert {"device", "torch", "triton", "date", "commit"} <= set(data["facts"])
    assert data["rows"]
    for row in [*data["rows"], *(row for rows in data["tables"].values() for row in rows)]:
        assert set(row) == {"name", "status", "detail", "labels", "ms", "values"}
        assert row["status"] in ("ok", "wrong", "error", "not installed")
        assert row["ms"] is None or row["ms"]["p20"] <= row["ms"]["median"] <= row["ms"]["p80"]
        assert row["detail"] or row["status"] == "ok"


def test_help_names_the_presets_without_torch():
    result = CliRunner().invoke(app, ["bench", "--help"])
    assert result.exit_code == 0
    for name in ("step", "gemm", "op", "model"):
        assert name in result.output
    shown = CliRunner().invoke(app, ["bench", "step", "--help"], env={"COLUMNS": "200"})
    assert "llama3-8b-4l" in re.sub(r"\s+", " ", shown.output)


def test_step_runs_ours_and_names_absent_peers(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "result.json"
    assert run_main([*STEP, "--json", str(path)]) == 0
    shown = capsys.readouterr()
    assert "tiny: 1 layers, 2 x 16 tokens a step" in shown.out
    assert "rowwise" in shown.out
    assert "note: no floor" in shown.out
    assert "commit" in shown.out
    assert "first steps ..." in shown.err
    data = json.loads(path.read_text())
    check_schema(data, "step")
    rows = {row["name"]: row for row in data["rows"]}
    assert rows["bf16"]["values"]["speed_against_bf16"] == 1.0
    for name in ("tensorwise", "rowwise", "blockwise", "delayed", "mxfp8", "activations_only"):
        assert rows[name]["status"] == "ok", rows[name]
    if rows["te-delayed"]["status"] != "ok":
        assert "transformer_engine is not installed" in shown.out


def test_gemm_checks_and_times_products_and_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "result.json"
    arguments = ["bench", "gemm", "--device", "cpu", "--shapes", "32x64x128", "--recipes", "rowwise,delayed"]
    assert run_main([*arguments, "--json", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "SQNR against float64" in shown
    assert "FP8 is emulated" in shown
    data = json.loads(path.read_text())
    check_schema(data, "gemm")
    assert {row["labels"]["shape"] for row in data["rows"]} == {"32x64x128"}
    assert all(row["values"]["sqnr_db"] > 25 and row["ms"] for row in data["rows"])
    (layers,) = data["tables"].values()
    assert [row["name"] for row in layers] == ["bf16", "rowwise", "delayed"]
    assert {row["labels"]["timing"] for row in layers} == {"eager"}


def test_gemm_measures_the_layers_of_a_preset(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "result.json"
    arguments = ["bench", "gemm", "--device", "cpu", "--preset", "tiny", "--recipes", "rowwise"]
    assert run_main([*arguments, "--json", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "Linear layers of tiny, 64 tokens, bfloat16 weights; all: of 2 layers" in shown
    assert "64x64x64+32+32" in shown
    data = json.loads(path.read_text())
    check_schema(data, "gemm")
    layers = list(dict.fromkeys(row["labels"]["layer"] for row in data["rows"]))
    assert layers == ["q, k, v", "o", "gate, up", "down", "gate, up, down", "all"]
    assert all(row["values"]["speed_against_bf16"] > 0 for row in data["rows"])


def test_op_checks_and_times_operations(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "result.json"
    arguments = ["bench", "op", "--device", "cpu", "--shapes", "32x128", "--json", str(path)]
    assert run_main([*arguments, "--ops", "quantize rowwise*,amax*,gated*1x128*,norm*"]) == 0
    assert "GB/s" in capsys.readouterr().out
    data = json.loads(path.read_text())
    check_schema(data, "op")
    names = {row["name"] for row in data["rows"]}
    assert {"quantize rowwise both", "amax tensor", "gated backward 1x128", "norm backward"} <= names
    assert all(row["values"]["gb_per_s"] > 0 for row in data["rows"])


def test_model_trains_what_a_function_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "my_model_of_bench.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "def make():\n"
        "    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)), (torch.randn(16, 32),)\n"
    )
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "result.json"
    arguments = ["bench", "model", "my_model_of_bench:make", "--device", "cpu", "--steps", "1", "--lr", "0.01"]
    assert run_main([*arguments, "--recipes", "rowwise", "--json", str(path)]) == 0
    assert "4,192 parameters" in capsys.readouterr().out
    data = json.loads(path.read_text())
    check_schema(data, "model")
    assert [row["name"] for row in data["rows"] if row["status"] == "ok"] == ["bf16", "rowwise"]
    assert "tokens_per_s" not in data["rows"][0]["values"]


def test_model_takes_a_hugging_face_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = {"model_type": "llama", "vocab_size": 64, "num_key_value_heads": 1} | sizes
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    arguments = ["bench", "model", str(path), "--device", "cpu", "--batch", "1", "--length", "16", "--steps", "1"]
    assert run_main([*arguments, "--recipes", "tensorwise"]) == 0
    shown = capsys.readouterr().out
    assert "tensorwise" in shown
    assert "config.json" in shown


def test_a_wrong_result_of_ours_ends_with_status_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def build(work):
        trainee = variants.find("bf16", "plain").build(work)
        with torch.no_grad():
            trainee.model.lm_head.weight.mul_(3.0)
        return trainee

    monkeypatch.setattr(variants, "VARIANTS", dict(variants.VARIANTS))
    variants.register(Variant(name="planted", group="acceler8", loops=("plain",), build=build))
    assert run_main([*STEP, "--variants", "planted"]) == 1
    shown = capsys.readouterr()
    assert "wrong: first loss" in shown.out
    assert "planted: wrong or failed, which is a bug" in shown.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["step", "--preset", "tinny"], "unknown preset 'tinny'; did you mean 'tiny'?"),
        (["step", "--variants", "bf17"], "unknown variant of a plain loop 'bf17'"),
        (["step", "--recipes", "rowise"], "unknown recipe 'rowise'; did you mean 'rowwise'?"),
        (["step", "--layers", "0"], "layers=0 is not allowed"),
        (["step", "--steps", "0"], "steps=0 is not allowed"),
        (["step", "--device", "gpu"], "unknown device 'gpu'"),
        (["step", "--device", "cuda:77"], "device 'cuda:77' is not here"),
        (["step", "--preset", "llama3-8b-4l", "--device", "cpu"], "it needs a CUDA GPU with about 32 GiB free"),
        (["step", "--json", "absent/x.json"], "cannot write 'absent/x.json'"),
        (["step", "--json", "."], "cannot write '.'"),
        (["gemm", "--shapes", "16x16"], "shape '16x16' is not allowed; write MxKxN"),
        (["gemm", "--shapes", "16x17x16"], "FP8 GEMMs take K and N in multiples of 16"),
        (["gemm", "--recipes", "rowise"], "unknown recipe 'rowise'"),
        (["step", "--preset", "practitioner", "--device", "cpu"], "it needs a CUDA GPU with about 40 GiB free"),
        (["step", "--epochs", "2"], "--epochs is for --preset practitioner; got it with 'tiny'"),
        (["op", "--ops", "quantise*"], "unknown operation 'quantise*'"),
        (["op", "--shapes", "16"], "shape '16' is not allowed; write ROWSxCOLUMNS"),
        (["op", "--shapes", "16x100"], "rows are multiples of 16, columns of 128"),
        (["model", "absent_module:make"], "cannot take 'absent_module:make'"),
        (["model", "json:loads_"], "cannot take 'json:loads_'"),
        (["gemm", "table.json"], "got the file 'table.json' without --save"),
        (["gemm", "--save", "--device", "cpu"], "a cost table is measured on the GPU that it is for"),
        (["gemm", "--save", "--shapes", "16x16x16"], "--save goes without --shapes"),
        (["gemm", "--save", "--preset", "tiny"], "--save goes without --shapes, --preset"),
        (["gemm", "--preset", "tinny"], "unknown preset 'tinny'; did you mean 'tiny'?"),
        (["gemm", "--preset", "tiny", "--shapes", "16x16x16"], "got --preset and --shapes; allowed: one of them"),
        (["gemm", "--preset", "hf-llama-1b", "--device", "cpu"], "it needs a CUDA GPU with about 64 GiB free"),
    ],
)
def test_bad_input_is_one_message(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    assert run_main(["bench", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("acceler8: error: ")
    assert message in captured.err
    assert "Traceback" not in captured.err


def test_a_picture(tmp_path: Path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "x.png"
    assert run_main([*STEP, "--variants", "rowwise", "--png", str(path)]) == 0
    assert path.read_bytes()[:4] == b"\x89PNG"


def test_a_picture_needs_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run_main([*STEP, "--png", str(tmp_path / "x.png")]) == 2
    assert "--png needs matplotlib, which is not installed; pip install matplotlib" in capsys.readouterr().err
