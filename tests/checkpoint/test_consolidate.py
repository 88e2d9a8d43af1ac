"""Shards into plain weights: without a group, a GPU or the model's code, and with one tensor in memory at a time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from acceler8 import checkpoint
from acceler8.checkpoint import consolidate
from acceler8.checkpoint.folder import whole_folder
from acceler8.checkpoint.manifest import write_manifest
from acceler8.checkpoint.save import OWNED
from acceler8.checkpoint.sharded import HEADER, write_index
from acceler8.checkpoint.shards import write_model
from acceler8.checkpoint.tensorfile import write_tensors
from acceler8.errors import CheckpointError
from tests.checkpoint.support import assert_same

ROOT = Path(__file__).parent.parent.parent


def write_by_hand(
    folder: Path,
    tensors: dict[str, torch.Tensor],
    count: int,
    stem: str = "model",
    whole: dict[str, dict[str, torch.Tensor]] | None = None,
) -> Path:
    """What ``count`` processes that divide the rows would have written; ``whole`` are models that one wrote."""
    with whole_folder(folder, OWNED) as building:
        for number in range(count):
            own, offsets = {}, {}
            for name, tensor in tensors.items():
                parts = tensor.chunk(count) if tensor.ndim else (tensor,)
                if number < len(parts):
                    own[name] = parts[number]
                    first = number * len(parts[0]) if tensor.ndim else 0
                    offsets[name] = {"saved_offsets": [first, 0][: tensor.ndim]}
            name = f"{stem}.shard-{number + 1:05d}-of-{count:05d}.safetensors"
            write_tensors(building / name, own, stem, {HEADER: json.dumps(offsets)})
        write_index(building, stem, tensors, count)
        for other, state in (whole or {}).items():
            write_model(building, other, state, 100)
        (building / "config.json").write_text('{"model_type": "none"}')
        write_manifest(building, tied={}, progress={}, config={})
    return folder


@pytest.fixture
def tensors(make_generator):
    generator = make_generator()
    floats = {f"w{rows}": torch.randn(rows, 6, generator=generator) for rows in (1, 3, 8, 17)}
    return floats | {
        "half": torch.randn(5, 2, generator=generator).bfloat16(),
        "codes": torch.randn(4, 3, generator=generator).to(torch.float8_e4m3fn),
        "count": torch.tensor(7),
        "mask": torch.tensor([True, False, True]),
        "double": torch.randn(3, 1, generator=generator).double(),
    }


def in_order(state):
    return {name: state[name] for name in sorted(state)}


@pytest.mark.parametrize("count", [1, 3, 4])
def test_one_plain_file(tmp_path, tensors, count):
    folder = write_by_hand(tmp_path / "saved", tensors, count)
    (path,) = consolidate(folder)
    assert path == tmp_path / "saved-consolidated" / "model.safetensors"
    assert_same(in_order(load_file(path)), in_order(tensors))
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert json.loads((path.parent / "config.json").read_text()) == {"model_type": "none"}
    assert sorted(p.name for p in path.parent.iterdir()) == ["config.json", "model.safetensors"]
    checkpoint.load(folder).verify()


def test_several_files_have_the_index_that_transformers_reads(tmp_path, tensors):
    folder = write_by_hand(tmp_path / "saved", tensors, 3)
    consolidate(folder, tmp_path / "out")
    *files, index = consolidate(folder, tmp_path / "out", max_shard_size=300)
    count = len(files)
    assert [path.name for path in files] == [f"model-0000{i}-of-0000{count}.safetensors" for i in range(1, 1 + count)]
    content = json.loads(index.read_text())
    assert content["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in tensors.values())
    for path in files:
        assert sorted(load_file(path)) == sorted(n for n, file in content["weight_map"].items() if file == path.name)
    assert_same(in_order({k: v for path in files for k, v in load_file(path).items()}), in_order(tensors))
    assert not (tmp_path / "out" / "model.safetensors").exists()  # the one of before


@pytest.mark.parametrize("stem", ["model", "model_1"])
def test_a_whole_model_beside_one_of_shards_is_written_too(tmp_path, tensors, stem):
    other = {"model": "model_1", "model_1": "model"}[stem]
    small = {"a": torch.arange(30.0).reshape(5, 6), "b": torch.ones(3), "n": torch.tensor(2)}
    folder = write_by_hand(tmp_path / "saved", tensors, 3, stem, {other: small})
    written = consolidate(folder, tmp_path / "out")
    assert sorted(path.name for path in written) == ["model.safetensors", "model_1.safetensors"]
    assert_same(in_order(load_file(tmp_path / "out" / f"{stem}.safetensors")), in_order(tensors))
    assert_same(in_order(load_file(tmp_path / "out" / f"{other}.safetensors")), small)
    path = folder / f"{other}-00001-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match=f"{path.name} has sha256"):
        consolidate(folder, tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_transformers_loads_it(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=32, tie_word_embeddings=True, **sizes)
    model = transformers.LlamaForCausalLM(config)
    state = {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}
    folder = write_by_hand(tmp_path / "saved", state, 2)
    config.save_pretrained(tmp_path / "out")
    (folder / "config.json").unlink()
    manifest = json.loads((folder / "checkpoint.json").read_text())
    del manifest["files"]["config.json"]
    (folder / "checkpoint.json").write_text(json.dumps(manifest))
    consolidate(folder, tmp_path / "out")
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out")
    assert_same(dict(again.state_dict()), dict(model.state_dict()))
    assert again.lm_head.weight is again.model.embed_tokens.weight


def test_what_cannot_be_done_says_why_and_writes_nothing(tmp_path, tensors):
    folder = write_by_hand(tmp_path / "saved", tensors, 2)
    path = folder / "model.shard-00002-of-00002.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.shard-00002-of-00002\.safetensors has sha256"):
        consolidate(folder, tmp_path / "out")
    checkpoint.save(tmp_path / "plain", model=nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match=r"holds whole weights already, in model\.safetensors; allowed"):
        consolidate(tmp_path / "plain", tmp_path / "out")
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        consolidate(tmp_path / "none", tmp_path / "out")
    with pytest.raises(CheckpointError, match="max_shard_size='x'"):
        consolidate(folder, tmp_path / "out", "x")
    with pytest.raises(CheckpointError, match="holds no weights, only config, optimizer"):
        consolidate(write_by_hand(tmp_path / "o", {"t": torch.zeros(2)}, 1, stem="optimizer"))
    odd = write_by_hand(tmp_path / "odd", {"t": torch.zeros(2, dtype=torch.complex64)}, 1)
    with pytest.raises(CheckpointError, match=r"t is torch\.complex64"):
        consolidate(odd, tmp_path / "out")
    with pytest.raises(CheckpointError, match="the checkpoint itself"):
        consolidate(odd, odd)
    assert not [path for path in (tmp_path / "out").glob("*") if path.is_file()]


MEASURE = """
import sys
from pathlib import Path
from acceler8.checkpoint import consolidate

def kib(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key))

consolidate(sys.argv[1], sys.argv[2])  # of a small one: what is imported and allocated once
Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
before = kib("VmRSS")
consolidate(sys.argv[3], sys.argv[4])
print((kib("VmHWM") - before) * 1024)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_memory_holds_the_largest_tensor_and_not_the_model(tmp_path):
    large = 8 * 2**20  # bytes of one tensor; 24 of them
    small = write_by_hand(tmp_path / "small", {"t": torch.zeros(4, 4)}, 2)
    model = write_by_hand(tmp_path / "model", {f"t{i}": torch.full((64, large // 256), float(i)) for i in range(24)}, 2)
    command = [sys.executable, "-c", MEASURE, str(small), str(tmp_path / "a"), str(model), str(tmp_path / "b")]
    out = subprocess.run(command, capture_output=True, text=True, check=False, env=_environment(), timeout=120)
    assert out.returncode == 0, out.stderr
    assert int(out.stdout) < 10 * large  # measured: 30 to 70 MB, with 6 tensors as with 48; all would be 200 MB
    assert load_file(tmp_path / "b" / "model.safetensors")["t23"].unique().tolist() == [23.0]


def _environment() -> dict[str, str]:
    import os

    return os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
