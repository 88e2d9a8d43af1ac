"""``acceler8 checkpoint``: as a user runs it."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

from acceler8 import Accelerator
from acceler8.cli.app import app, main
from tests.checkpoint.support import assert_same
from tests.checkpoint.test_consolidate import write_by_hand


def run(*arguments):
    return CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])


def test_consolidate_writes_and_names_the_files(tmp_path):
    tensors = {"a": torch.randn(5, 3), "b": torch.randn(4)}
    folder = write_by_hand(tmp_path / "saved", tensors, 2)
    out = run("consolidate", folder)
    assert out.exit_code == 0, out.output
    assert f"{tmp_path / 'saved-consolidated' / 'model.safetensors'}  " in out.output
    assert_same(load_file(tmp_path / "saved-consolidated" / "model.safetensors"), tensors)
    out = run("consolidate", folder, "--output", tmp_path / "out", "--max_shard_size", "50")
    assert sorted(path.name for path in (tmp_path / "out").glob("model*")) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]


def test_what_is_no_checkpoint_of_shards_is_one_message(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["checkpoint", "consolidate", str(tmp_path)])
    assert "is not a checkpoint" in capsys.readouterr().err


def test_show_says_what_is_inside(tmp_path):
    accelerator = Accelerator("fp8", recipe="delayed", cpu=True)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.ones(16, 32)).sum())
    optimizer.step()
    accelerator.save_state(tmp_path / "c", progress={"epoch": 2})
    out = run("show", tmp_path / "c", "--verify").output
    for text in (
        "every file is as it was written",
        "1 steps; fp8; 1 processes",
        "Sequential: 2 FP8 layers, recipe delayed, backend native",
        "progress: {'epoch': 2}",
        "model: 1 file, 8.6 KiB",
        "process: 2 files",
    ):
        assert text in out
    found = json.loads(run("show", tmp_path / "c", "--json").output)
    assert found["models"][0]["fp8_layers"] == 2
    assert found["processes"] == 1
    assert "verified" not in found
