"""Weights in one file or several, and which name of a tied tensor keeps its bytes."""

from __future__ import annotations

import json

import pytest
import torch

from acceler8.checkpoint.model import split_state
from acceler8.checkpoint.shards import parse_size, read_model, write_model
from acceler8.errors import CheckpointError
from tests.checkpoint.support import assert_same


@pytest.mark.parametrize(
    ("size", "in_bytes"),
    [(7, 7), ("7", 7), ("10GB", 10 * 10**9), ("5 MiB", 5 * 2**20), ("1.5kb", 1500), ("2TB", 2 * 10**12)],
)
def test_sizes(size, in_bytes):
    assert parse_size(size) == in_bytes


@pytest.mark.parametrize("size", [0, -1, "0", "", "GB", "1XB", "-5GB", "1e9", "nan", "5GB5", None, "٣GB"])
def test_sizes_that_are_none(size):
    with pytest.raises(CheckpointError, match="allowed: bytes above 0, or text such as '10GB'"):
        parse_size(size)


def test_shards_hold_each_tensor_once_in_order(tmp_path):
    tensors = {f"t{i}": torch.arange(float(i)) for i in (3, 5, 100, 2, 0)}
    names = write_model(tmp_path, "model_1", tensors, 40)
    assert names == [f"model_1-0000{i}-of-00003.safetensors" for i in (1, 2, 3)] + ["model_1.safetensors.index.json"]
    index = json.loads((tmp_path / names[-1]).read_text())
    assert index["metadata"] == {"total_size": 440}
    assert list(index["weight_map"]) == list(tensors)
    assert_same(read_model(names, tmp_path.joinpath, "model_1", mapped=False), tensors)
    (tmp_path / "model_1.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"holds model_1\.safetensors and its index"):
        read_model([*names, "model_1.safetensors"], tmp_path.joinpath, "model_1", mapped=False)


@pytest.mark.parametrize(("aliases", "kept"), [(None, "head"), (["head"], "embed"), ({"head": "embed"}, "embed")])
def test_the_name_that_transformers_ties_to_keeps_the_bytes(aliases, kept):
    shared = torch.ones(2)
    tensors, tied, rest = split_state({"head": shared, "embed": shared, "more": torch.zeros(1)}, aliases)
    assert set(tensors) == {kept, "more"}
    assert tied == {({"head", "embed"} - {kept}).pop(): kept}
    assert rest == {}
