"""A checkpoint that is not whole is refused with a reason, and nothing is loaded from it."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from acceler8.checkpoint import FORMAT_VERSION, is_checkpoint, load, save
from acceler8.errors import CheckpointError
from tests.checkpoint.support import Net, assert_same, train_step

FILES = [
    "model.safetensors",
    "acceler8_state.safetensors",
    "optimizer.json",
    "optimizer.safetensors",
    "extra.json",
    "extra.safetensors",
    "rng.json",
    "rng.safetensors",
]


class Kept:
    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def build(make_generator, seed):
    net = Net(make_generator(seed))
    optimizer = torch.optim.AdamW(net.parameters())
    train_step(net, optimizer, seed)
    return net, optimizer, Kept(torch.tensor([float(seed)]))


@pytest.fixture
def folder(tmp_path, make_generator):
    net, optimizer, kept = build(make_generator, 1)
    fp8_state = {"amax": torch.arange(4.0)}
    return save(tmp_path / "c", model=net, optimizer=optimizer, extra={"kept": kept}, fp8_state=fp8_state)


def restore_must_raise(folder, make_generator, match):
    """Open and restore everything; the error must match and nothing may have changed."""
    net, optimizer, kept = build(make_generator, 2)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    step = optimizer.state[net.inner.weight]["exp_avg"].clone()
    generator = torch.get_rng_state()

    def restore_all():
        checkpoint = load(folder)
        checkpoint.fp8_state()
        checkpoint.restore(model=net, optimizer=optimizer, extra={"kept": kept})

    with pytest.raises(CheckpointError, match=match):
        restore_all()
    assert_same({name: value.clone() for name, value in net.state_dict().items()}, before)
    assert torch.equal(optimizer.state[net.inner.weight]["exp_avg"], step)
    assert kept.value == torch.tensor([2.0])
    assert torch.equal(torch.get_rng_state(), generator)


def test_the_list_of_files_is_complete(folder):
    assert sorted(path.name for path in folder.iterdir()) == sorted([*FILES, "checkpoint.json"])


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file(folder, make_generator, name):
    (folder / name).unlink()
    restore_must_raise(
        folder, make_generator, rf"{name} is missing, checkpoint\.json lists it with \d+ bytes; use another"
    )


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_file(folder, make_generator, name):
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[:-1])
    restore_must_raise(
        folder, make_generator, rf"{name} has {len(content) - 1} bytes, checkpoint\.json says {len(content)}"
    )


@pytest.mark.parametrize("name", FILES)
def test_one_flipped_bit(folder, make_generator, name):
    content = bytearray((folder / name).read_bytes())
    content[-2] ^= 1
    (folder / name).write_bytes(content)
    restore_must_raise(folder, make_generator, rf"{name} has sha256 .*changed or damaged after it was written")
    with pytest.raises(CheckpointError, match=name):
        load(folder).verify()


def test_a_file_from_another_checkpoint(folder, tmp_path, make_generator):
    net, optimizer, kept = build(make_generator, 3)
    other = save(tmp_path / "other", model=net, optimizer=optimizer, extra={"kept": kept}, rng=False)
    shutil.copy(other / "model.safetensors", folder)
    restore_must_raise(folder, make_generator, r"model\.safetensors has sha256")


def edit(folder, **changes):
    path = folder / "checkpoint.json"
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def test_a_newer_format(folder, make_generator):
    edit(folder, format_version=FORMAT_VERSION + 1, acceler8="9.0")
    message = rf"version {FORMAT_VERSION + 1}, this acceler8 reads up to {FORMAT_VERSION}; .* by acceler8 9\.0"
    restore_must_raise(folder, make_generator, message)
    assert is_checkpoint(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"format_version": "1"},
        {"format_version": None},
        {"files": None},
        {"files": {"model.safetensors": {"size": 3}}},
        {"files": ["model.safetensors"]},
        {"tied": 3},
        {"config": None},
    ],
    ids=str,
)
def test_a_damaged_description(folder, make_generator, changes):
    edit(folder, **changes)
    restore_must_raise(folder, make_generator, r"checkpoint\.json .*damaged")


def test_a_description_without_the_model(folder, make_generator):
    edit(folder, files={})
    restore_must_raise(folder, make_generator, "holds no extra, only ")


@pytest.mark.parametrize("text", ["", "{", "[]", '"text"', "{}", '{"format": "other"}', "\0\0"])
def test_a_description_that_is_none(folder, make_generator, text):
    (folder / "checkpoint.json").write_text(text)
    assert not is_checkpoint(folder)
    restore_must_raise(folder, make_generator, r"checkpoint\.json (cannot be read|is not from acceler8)")


def test_what_is_no_checkpoint(tmp_path, make_generator):
    restore_must_raise(tmp_path / "absent", make_generator, "is not a checkpoint: .*this does not exist")
    restore_must_raise(tmp_path, make_generator, "is not a checkpoint: .*this is a folder without one")
    (tmp_path / "file").write_text("")
    restore_must_raise(tmp_path / "file", make_generator, "is not a checkpoint: .*this is no folder")
