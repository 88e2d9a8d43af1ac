"""Checkpoints of models that no process holds whole: saved by some processes, resumed by others, in another form."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from acceler8.checkpoint import consolidate, load
from acceler8.checkpoint.sharded import Chunk, Stored, read_shards, write_index, write_shard
from acceler8.errors import CheckpointError
from tests.checkpoint.sharded_training import RESUMED, SAVED, SLOW_RESUMED, SLOW_SAVED, folder_of
from tests.checkpoint.support import assert_same

ROOT = Path(__file__).parent.parent.parent
WITH_BLOCKS = ("embed.weight", "up.weight", "mid.weight")  # rows of 128: FP8 moments in every form

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    return run(tmp_path_factory.mktemp("sharded"), "quick")


def run(folder, kinds):
    command = [sys.executable, "-W", "ignore", "-m", "tests.checkpoint.sharded_training", str(folder), kinds]
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    out = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert out.returncode == 0, out.stderr[-5000:]
    return folder, torch.load(folder / "facts.pt", weights_only=False)


def test_every_process_has_the_same_state(outcome):
    for processes in (*outcome[1]["saved"].values(), *outcome[1]["resumed"].values()):
        for one in processes[1:]:
            assert_same(one["state"], processes[0]["state"])


@pytest.mark.parametrize(("source", "now"), RESUMED, ids=str)
def test_state_comes_back_in_any_form_and_number_of_processes(outcome, source, now):
    check_resumed(outcome, source, now)


def check_resumed(outcome, source, now):
    saved, (resumed, *_) = outcome[1]["saved"][source][0], outcome[1]["resumed"][source, now]
    for part in ("model", "groups", "fp8", "steps"):
        assert_same(resumed["state"][part], saved["state"][part])
    assert saved["state"]["fp8"]
    if source[2] == "adamw" or source[0] == now[0]:
        assert_same(resumed["state"]["optimizer"], saved["state"]["optimizer"])
    for name, moments in saved["moments"].items():
        for key, moment in moments.items():
            got = resumed["moments"][name][key]
            if source[2] == "adamw" or now[0] == "shards" or name in WITH_BLOCKS:
                assert_same(got, moment)
            else:  # FP32 under FSDP2, now FP8: half a step of 3 bits, or of the second moment's, at most
                assert got.sub(moment).abs().max() <= moment.abs().max() / 16


def test_the_same_form_goes_on_bit_for_bit(outcome):
    same = [(source, now) for source, now in outcome[1]["resumed"] if source[:2] == now]
    assert same
    for source, now in same:
        for one, other in zip(outcome[1]["saved"][source], outcome[1]["resumed"][source, now], strict=True):
            assert other["losses"] == one["losses"]
            assert_same(other["last"], one["last"])
            assert other["reset"] == ()


@pytest.mark.slow
def test_more_forms_and_numbers_of_processes(tmp_path):
    outcome = run(tmp_path, "slow")
    test_every_process_has_the_same_state(outcome)
    test_the_same_form_goes_on_bit_for_bit(outcome)
    for source, now in SLOW_RESUMED:
        check_resumed(outcome, source, now)
    for form, count, optimizer in SLOW_SAVED:
        check_exports(outcome, form, count, optimizer)
    for found in outcome[1]["gathers"]:
        for losses, resumed in found.values():
            assert losses == resumed


def test_shards_hold_everything_once_and_no_process_writes_all(outcome):
    folder = folder_of(outcome[0], "shards", 4, "fp8")
    for part in ("model", "optimizer"):
        whole = sum(stored.whole().numel() for stored in load(folder).stored(part, {}).values())
        sizes = [sum(t.numel() for t in load_file(path).values()) for path in folder.glob(f"{part}.shard-*")]
        assert len(sizes) == 4
        assert sum(sizes) == whole
        assert max(sizes) < 0.3 * whole
    assert not (folder / "model.safetensors").exists()
    assert not [path for path in folder.iterdir() if path.suffix not in (".json", ".safetensors")]  # no pickle


def test_a_whole_checkpoint_is_as_one_process_writes_it(outcome):
    folder, facts = outcome
    whole, single = (folder_of(folder, *key) for key in (("whole", 2, "adamw"), ("single", 1, "adamw")))
    own = {f"process_1.{end}" for end in ("json", "safetensors")}
    assert {path.name for path in whole.iterdir()} - own == {path.name for path in single.iterdir()}
    kept = facts["saved"]["whole", 2, "adamw"][0]["state"]["model"]
    state = load(whole).weights("model", {"head.weight": "embed.weight"}, mapped=False)
    assert_same(in_order(state), in_order(kept))


@pytest.mark.parametrize(("form", "count", "optimizer"), SAVED, ids=str)
def test_get_state_dict_and_save_model_give_the_plain_model(outcome, form, count, optimizer):
    check_exports(outcome, form, count, optimizer)


def check_exports(outcome, form, count, optimizer):
    folder, facts = outcome
    first, *others = facts["saved"][form, count, optimizer]
    assert first["exported"] == sorted(first["last"])
    assert all(one["exported"] == ([] if form in ("shards", "whole") else first["exported"]) for one in others)
    exported = load_file(folder / "exports" / f"{form}-{count}-{optimizer}" / "model.safetensors")
    assert_same(in_order(exported), in_order({name: first["last"][name] for name in exported}))
    assert sorted({*exported, "head.weight"}) == first["exported"]  # the tie once


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # what no_dist=True asks for
def test_pytorch_reads_the_folder_with_its_own_reader(outcome):
    folder, facts = outcome
    want = facts["saved"]["shards", 4, "fp8"][0]["state"]
    state = {name: torch.zeros_like(value) for name, value in want["model"].items() if name != "head.weight"}
    state["state.up.weight.exp_avg"] = torch.zeros(100, 128, dtype=torch.float8_e4m3fn)
    reader = dcp.HuggingFaceStorageReader(str(folder_of(folder, "shards", 4, "fp8")))
    dcp.load(state, storage_reader=reader, no_dist=True)
    assert_same(state.pop("state.up.weight.exp_avg"), want["optimizer"]["up.weight"]["exp_avg"])
    assert_same(state, {name: want["model"][name] for name in state})


def test_shards_become_one_plain_file_with_the_tie_once(outcome, tmp_path):
    folder, facts = outcome
    (path,) = consolidate(folder_of(folder, "shards", 4, "fp8"), tmp_path)
    want = facts["saved"]["shards", 4, "fp8"][0]["state"]["model"]
    assert_same(in_order(load_file(path)), in_order({name: want[name] for name in want if name != "head.weight"}))


def test_gradients_that_an_engine_keeps_start_anew_and_that_is_said(outcome):
    for found in outcome[1]["windows"]:
        assert found["window"] == 0
        assert found["steps"] == 2  # one before the save, one of two micro-batches after it
        assert [line for line in found["reset"] if "keeps gradients of an unfinished step" in line]


def test_what_is_damaged_is_named_in_every_process_and_changes_nothing(outcome):
    says = {
        "missing": "optimizer.shard-00002-of-00004.safetensors is missing",
        "flipped": "model.shard-00003-of-00004.safetensors has sha256",
        "fewer": "holds no optimizer.shard-00001-of-00003.safetensors, which optimizer.shards.json needs",
        "larger": "the shards do not make up 'state.up.weight.exp_avg', [101, 128]",
        "nameless": "holds 'state.up.bias.exp_avg', which optimizer.shards.json has not so",
    }
    for found in outcome[1]["damaged"]:
        assert found.keys() == says.keys()
        for name, text in says.items():
            assert text in found[name], name


def test_a_killed_process_leaves_the_old_checkpoint_or_the_new(outcome):
    for (victim, _), found in outcome[1]["killed"].items():
        assert found["steps"] in (1, 2)
        assert all(told for rank, told in enumerate(found["told"]) if rank != victim)
        assert all(loss == loss for loss in found["resumed"])
    assert {found["steps"] for found in outcome[1]["killed"].values()} == {1}  # both died before the swap


def test_every_placement_comes_back_in_every_other(outcome):
    """What the worker did not raise for; here, that nothing was written twice."""
    for found in outcome[1]["layouts"]:
        assert all(found[kind] == found["expected"] for kind in ("rows", "hybrid", "both", "columns", "replicas"))
        assert "x is placed as (Partial(sum), Replicate()); allowed: shards and replicas" in found["partial"]


def test_chunks_must_fill_the_tensor_each_element_once(tmp_path):
    def read(shape, *chunks):
        count = len(chunks)
        write_index(tmp_path, "x", {"t": torch.zeros(shape)}, count)
        for number, chunk in enumerate(chunks):
            write_shard(tmp_path, "x", {}, number, count)
            if chunk is not None:
                _write_chunk(tmp_path / f"x.shard-0000{number + 1}-of-0000{count}.safetensors", chunk)
        return read_shards([path.name for path in tmp_path.iterdir()], tmp_path.joinpath, "x")["t"]

    part = torch.ones(2, 3)
    both = read((4, 3), Chunk((2, 0), part * 2), Chunk((0, 0), part)).whole()
    assert both[:, 0].tolist() == both[:, 2].tolist() == [1, 1, 2, 2]
    assert read((2, 3), Chunk((0, 0), part), None).whole().shape == (2, 3)
    for shape, *chunks in (
        ((4, 3), Chunk((0, 0), part)),
        ((4, 3), Chunk((0, 0), part), Chunk((0, 0), part)),
        ((4, 3), Chunk((0, 0), part), Chunk((1, 0), part)),
        ((4, 3), Chunk((0, 0), part), Chunk((3, 0), part)),
        ((4, 3), Chunk((0, 0), part), Chunk((2,), torch.ones(6))),
        ((4, 4), Chunk((0, 0), part), Chunk((1, 1), part), Chunk((2, 0), torch.ones(2, 2))),
        ((4, 3), None, None),
    ):
        with pytest.raises(CheckpointError, match="the shards do not make up 't'"):
            read(shape, *chunks)


def in_order(state):
    return {name: state[name] for name in sorted(state)}


def _write_chunk(path: Path, chunk: Chunk) -> None:
    from acceler8.checkpoint.tensorfile import write_tensors

    header = f'{{"t": {{"saved_offsets": {list(chunk.offset)}}}}}'
    write_tensors(path, {"t": chunk.tensor}, "x", {"DCP_SHARDING_INFO": header})


@pytest.mark.parametrize("header", ["", "[]", '{"t": {}}', '{"t": {"saved_offsets": ["a"]}}', '{"t": [-1]}', "{"])
def test_a_header_that_says_nothing_is_refused(tmp_path, header):
    from acceler8.checkpoint.tensorfile import write_tensors

    write_index(tmp_path, "x", {"t": torch.zeros(2)}, 1)
    write_tensors(
        tmp_path / "x.shard-00001-of-00001.safetensors", {"t": torch.zeros(2)}, "x", {"DCP_SHARDING_INFO": header}
    )
    with pytest.raises(CheckpointError, match="does not say where its tensors belong"):
        read_shards([path.name for path in tmp_path.iterdir()], tmp_path.joinpath, "x")


@pytest.mark.parametrize(
    "index",
    [
        "{}",
        '{"processes": 0, "tensors": {}}',
        '{"processes": 9999999999, "tensors": {}}',
        '{"processes": 1, "tensors": {"t": {"shape": [-1], "dtype": "float32", "sharded": true}}}',
        '{"processes": 1, "tensors": {"t": {"shape": [1], "dtype": "load", "sharded": true}}}',
        '{"processes": 1, "tensors": []}',
    ],
)
def test_an_index_that_is_none_is_refused(tmp_path, index):
    (tmp_path / "x.shards.json").write_text(index)
    with pytest.raises(CheckpointError, match=r"x\.shards\.json is damaged"):
        read_shards(["x.shards.json"], tmp_path.joinpath, "x")


def test_a_copy_does_not_lie_in_the_file():
    tensor = torch.zeros(3)
    stored = Stored.whole_of(tensor)
    assert stored.whole().data_ptr() == tensor.data_ptr()
    assert stored.whole(copy=True).data_ptr() != tensor.data_ptr()
