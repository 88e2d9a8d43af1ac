from __future__ import annotations

import json
import struct

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from acceler8.checkpoint.tensorfile import read_tensors, write_tensors
from acceler8.errors import CheckpointError
from tests.checkpoint.support import assert_same

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.bool),
    *(
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint64,
        torch.uint32,
        torch.uint16,
        torch.uint8,
    ),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    torch.float8_e8m0fnu,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_keeps_its_bits(tmp_path, make_generator, dtype):
    raw = torch.randint(256, (4, 6, 8), dtype=torch.uint8, generator=make_generator(1))
    tensor = (raw % 2).bool() if dtype is torch.bool else raw.view(dtype)  # NaNs of every payload among them
    tensors = {"t": tensor, "empty": torch.empty((0, 3), dtype=dtype), "scalar": tensor.flatten()[0].clone()}
    write_tensors(tmp_path / "t.safetensors", tensors, "t")
    assert_same(dict(sorted(read_tensors(tmp_path / "t.safetensors").items())), dict(sorted(tensors.items())))


def test_all_codes_of_e4m3(tmp_path):
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    write_tensors(tmp_path / "t.safetensors", {"codes": codes}, "t")
    assert torch.equal(read_tensors(tmp_path / "t.safetensors")["codes"].view(torch.uint8), codes.view(torch.uint8))


def test_shared_and_strided_memory_gets_bytes_of_its_own(tmp_path, make_generator):
    base = torch.randn(6, 8, generator=make_generator())
    tensors = {
        "base": base,
        "same": base,
        "transposed": base.T,
        "slice": base[1:3, ::2],
        "expanded": base[:1].expand(5, 8),
        "conj": torch.view_as_complex(base.reshape(-1, 2)).conj(),
    }
    write_tensors(tmp_path / "t.safetensors", tensors, "t")
    loaded = read_tensors(tmp_path / "t.safetensors")
    assert set(loaded) == set(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name], tensor), name
    loaded["base"].zero_()
    assert torch.equal(loaded["same"], base)


def test_other_tools_can_read_it(tmp_path, make_generator):
    tensors = {"w": torch.randn(3, 5, generator=make_generator())}
    write_tensors(tmp_path / "t.safetensors", tensors, "t")
    assert_same(load_file(tmp_path / "t.safetensors"), tensors)
    raw = (tmp_path / "t.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]])
    assert header["__metadata__"] == {"format": "pt"}  # what transformers asks for


def test_unmapped_tensors_outlive_the_file(tmp_path):
    path = tmp_path / "t.safetensors"
    write_tensors(path, {"w": torch.arange(4096)}, "t")
    loaded = read_tensors(path)["w"]
    path.write_bytes(b"\0" * path.stat().st_size)
    assert torch.equal(loaded, torch.arange(4096))


class Wrapped(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("tensor", "problem"),
    [
        (torch.empty(2, device="meta"), "meta device.*materialise"),
        (nn.Parameter(torch.empty(2, device="meta")), "meta device"),
        (torch.eye(2).to_sparse(), "layout torch.sparse_coo.*dense"),
        (torch.zeros(2).as_subclass(Wrapped), "is a Wrapped, not a plain tensor"),
        (torch.zeros(2, dtype=torch.complex128), "complex128.*cast"),
    ],
)
def test_what_has_no_bytes_is_named(tmp_path, tensor, problem):
    with pytest.raises(CheckpointError, match=rf"^model\.layer\.w .*{problem}"):
        write_tensors(tmp_path / "t.safetensors", {"layer.w": tensor}, "model")


def test_garbage_is_an_error_that_names_the_file(tmp_path):
    (tmp_path / "t.safetensors").write_bytes(b"not a tensor file")
    with pytest.raises(CheckpointError, match=r"t\.safetensors is not a whole safetensors file"):
        read_tensors(tmp_path / "t.safetensors")


def test_a_file_that_leaves_while_it_is_opened(tmp_path, monkeypatch):
    """torch maps it by name a second time, and a writer may have replaced the folder between the two."""

    def gone(*_, **__):
        raise RuntimeError("unable to open file <t.safetensors> in read-only mode: No such file or directory (2)")

    monkeypatch.setattr("acceler8.checkpoint.tensorfile.safe_open", gone)
    with pytest.raises(CheckpointError, match=r"is not a whole safetensors file .*unable to open"):
        read_tensors(tmp_path / "t.safetensors")
