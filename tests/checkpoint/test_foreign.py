"""Folders of others: Accelerate's own save_state and bare weights are told apart, never opened, and lead on."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_model, save_file
from torch import nn

from acceler8 import Accelerator, checkpoint
from acceler8.errors import CheckpointError

_WRITES = """
import sys, torch
from torch.utils.data import DataLoader
from accelerate import Accelerator

torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
accelerator.prepare(model, optimizer, schedule, DataLoader(torch.randn(8, 4), shuffle=True))
accelerator.save_state(sys.argv[1], safe_serialization=sys.argv[2] == "safe")
torch.save(model.state_dict(), sys.argv[3])
"""


class _Opened:
    """Unpickling it raises in the name of whatever a hostile pickle would run."""

    def __reduce__(self):
        return eval, ("1 / 0",)


def prepared() -> Accelerator:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(4, 4)
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    return accelerator


@pytest.mark.parametrize("kind", ["safe", "pickled"])
def test_a_folder_that_accelerate_wrote_says_so_and_its_weights_can_be_taken(tmp_path, kind):
    pytest.importorskip("accelerate")
    folder, plain = tmp_path / "theirs", tmp_path / "plain.pt"
    subprocess.run([sys.executable, "-c", _WRITES, folder, kind, plain], check=True, timeout=300)
    assert {"optimizer.bin", "scheduler.bin", "random_states_0.pkl"} <= {path.name for path in folder.iterdir()}

    for read in (prepared().load_state, checkpoint.load):
        with pytest.raises(CheckpointError) as caught:
            read(folder)
        said = str(caught.value)
        assert "Hugging Face Accelerate's save_state" in said
        assert "optimizer.bin" in said
        assert "pickles, which run code when they are loaded" in said
        assert "begin afresh" in said
    assert not checkpoint.is_checkpoint(folder)

    model = nn.Linear(4, 4)
    told = re.search(r"before prepare: (.*); then save_state", said)  # the line is run as a reader would
    names = {"model": model, "torch": torch, "safetensors": __import__("safetensors.torch")}
    exec(told[1].removeprefix("if you trust who wrote it, "), names)
    expected = torch.load(plain, weights_only=True)
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model.bin", "model.safetensors.index.json"])
def test_weights_alone_are_told_apart(tmp_path, weights):
    (tmp_path / weights).write_bytes(b"")
    with pytest.raises(CheckpointError, match=f"it holds weights only .{weights}., and nothing to resume from"):
        prepared().load_state(tmp_path)


def test_a_state_without_weights_leads_back_to_accelerate(tmp_path):
    torch.save(_Opened(), tmp_path / "optimizer.bin")
    torch.save(_Opened(), tmp_path / "random_states_0.pkl")
    with pytest.raises(CheckpointError, match="load it with Accelerate, and save_model there"):
        prepared().load_state(tmp_path)


def test_no_pickle_is_opened_beside_a_checkpoint(tmp_path):
    accelerator = prepared()
    folder = tmp_path / "c"
    accelerator.save_state(folder)
    torch.save(_Opened(), folder / "optimizer.bin")
    accelerator.load_state(folder)  # ours, whatever lies beside it


def test_other_folders_are_described_as_before(tmp_path):
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(CheckpointError, match="this is a folder without one"):
        prepared().load_state(tmp_path)
    save_file({"weight": torch.zeros(4, 4), "bias": torch.zeros(4)}, tmp_path / "model.safetensors")
    model = nn.Linear(4, 4)
    load_model(model, tmp_path / "model.safetensors")
    assert not model.weight.any()
