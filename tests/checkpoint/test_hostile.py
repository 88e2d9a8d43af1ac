"""Checkpoints that someone prepared: a clear error, no code run, and every live object as it was."""

from __future__ import annotations

import copy
import json
import os
import pickle
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from acceler8.checkpoint import load
from acceler8.checkpoint.manifest import file_sha256
from acceler8.errors import CheckpointError
from tests.checkpoint.runs import Run
from tests.checkpoint.support import assert_same


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    run = Run(0)
    run.train(3)
    return run.save(tmp_path_factory.mktemp("saved") / "c", max_shard_size="20KB")


@pytest.fixture(scope="module")
def live():
    """One training for all tests: a failed load changes nothing of it."""
    run = Run(1)
    run.train(1)
    return run


@pytest.fixture
def folder(saved, tmp_path):
    return Path(shutil.copytree(saved, tmp_path / "c"))


def sign(folder: Path) -> None:
    """Make sizes and hashes right, as an attacker would."""
    path = folder / "checkpoint.json"
    content = json.loads(path.read_text())
    for name, entry in content["files"].items():
        if (folder / name).is_file():
            entry.update(size=(folder / name).stat().st_size, sha256=file_sha256(folder / name))
    path.write_text(json.dumps(content))


def edit(folder: Path, name: str, change) -> None:
    content = json.loads((folder / name).read_text())
    change(content)
    (folder / name).write_text(json.dumps(content))
    sign(folder)


def edit_tensors(folder: Path, name: str, change) -> None:
    tensors = load_file(folder / name)
    change(tensors)
    save_file(tensors, folder / name, metadata={"format": "pt"})
    sign(folder)


def refused(live: Run, folder: Path, match: str) -> None:
    before = live.everything()
    with pytest.raises(CheckpointError, match=match) as caught:
        live.load(folder)
    assert len(str(caught.value)) < 2000
    assert_same(live.everything(), before)


def test_signing_alone_changes_nothing(folder, live):
    sign(folder)
    copy.deepcopy(live.accelerator.clock)
    other = Run(1)
    other.load(folder)
    assert other.accelerator.clock.ticks == 1


SHARD = "model-00002-of-00002.safetensors"


def truncate(folder):
    content = (folder / SHARD).read_bytes()
    (folder / SHARD).write_bytes(content[: len(content) // 2])


def truncate_signed(folder):
    truncate(folder)
    sign(folder)


def planted_pickle(folder):
    """A pickle that writes a file when it is loaded."""

    class Plant:
        def __reduce__(self):
            return os.system, (f"touch {folder}/planted",)

    (folder / SHARD).write_bytes(pickle.dumps(Plant()))
    sign(folder)


def huge_header(folder):
    (folder / SHARD).write_bytes(struct.pack("<Q", 2**62) + b"{}")
    sign(folder)


def overlapping(folder):
    one = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
    header = json.dumps({"a": one, "b": one}).encode()
    (folder / SHARD).write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 16)
    sign(folder)


def twice_in_header(folder):
    entry = '{"dtype":"F32","shape":[1],"data_offsets":[%d,%d]}'
    header = ('{"a":' + entry % (0, 4) + ',"a":' + entry % (4, 8) + "}").encode()
    (folder / SHARD).write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 8)
    sign(folder)


def with_link(folder):
    (folder / SHARD).rename(folder.parent / "elsewhere")
    (folder / SHARD).symlink_to(folder.parent / "elsewhere")


def with_linked_folder(folder):
    (folder.parent / "outside").mkdir()
    (folder.parent / "outside" / "x").write_text("x")
    (folder / "inside").symlink_to(folder.parent / "outside")
    edit(folder, "checkpoint.json", lambda c: c["files"].update({"inside/x": {"size": 1, "sha256": "0"}}))


def listed(name):
    def change(folder):
        (folder.parent / "secret").write_text("x")
        edit(folder, "checkpoint.json", lambda c: c["files"].update({name: {"size": 1, "sha256": "0"}}))

    return change


def tensors(name, change):
    return lambda folder: edit_tensors(folder, name, change)


def state(change):
    return lambda folder: edit(folder, "acceler8_state.json", change)


def index(change):
    return lambda folder: edit(folder, "model.safetensors.index.json", change)


def optimizer(change):
    return lambda folder: edit(folder, "optimizer.json", change)


def text(name, content):
    def change(folder):
        (folder / name).write_text(content)
        sign(folder)

    return change


def resized(key):
    return lambda t: t.update({key: torch.zeros(3)})


def filled(key, value, row=slice(None)):
    return lambda t: t[key][row].fill_(value)


def extra(change):
    return lambda folder: edit(folder, "extra.json", change)


def process(change):
    return lambda folder: edit(folder, "process_0.json", change)


NAN, INF = {"$float": "nan"}, {"$float": "inf"}
MOMENT = {"$tensor": "state.3.bias.exp_avg"}
OPTIONS = {
    f"option {key} {value}": (
        optimizer(lambda c, key=key, value=value: c["groups"][0]["options"].update({key: value})),
        f"optimizer group 0 has {key}=.*allowed: {allowed}; build the optimizer as it was saved",
    )
    for key, value, allowed in (
        ("lr", INF, "a number, finite and from 0"),
        ("lr", -5.0, "a number, finite and from 0"),
        ("lr", None, "a number, finite"),
        ("lr", MOMENT, "a number, finite"),
        ("weight_decay", INF, "a number, finite"),
        ("betas", {"$tuple": [NAN, 0.9]}, "2 finite numbers from 0 to 1"),
        ("betas", {"$tuple": [None, 0.9]}, "2 finite numbers from 0 to 1"),
        ("betas", {"$tuple": ["a", 0.9]}, "2 finite numbers from 0 to 1"),
        ("betas", {"$tuple": [1.5, 0.9]}, "2 finite numbers from 0 to 1"),
        ("betas", "zz", "2 finite numbers from 0 to 1"),
        ("amsgrad", 1, "True or False"),
        ("foreach", [], "None, True, False or a word"),
    )
} | {
    "option missing": (
        optimizer(lambda c: c["groups"][0]["options"].pop("lr") is None),
        "optimizer group 0 has no 'lr' in the checkpoint; build",
    ),
    "option unknown": (
        optimizer(lambda c: c["groups"][0]["options"].update(evil=1)),
        "optimizer group 0 has 'evil' in the checkpoint and not now; build",
    ),
}
STATES = {
    f"state {key} {value}": (
        optimizer(lambda c, key=key, value=value: c["state"]["3.bias"].update({key: value})),
        rf"the optimizer's {key} of 3\.bias is .*; allowed: {allowed}",
    )
    for key, value, allowed in (
        ("exp_avg", None, "a floating tensor of the parameter's shape"),
        ("exp_avg", 3, "a floating tensor of the parameter's shape"),
        ("exp_avg", [1.0], "a floating tensor of the parameter's shape"),
        ("exp_avg_sq", NAN, "a floating tensor of the parameter's shape"),
        ("step", "a", "one number"),
        ("step", -3.0, "finite and from 0"),
        ("step", NAN, "finite and from 0"),
        ("step", MOMENT, "one number"),
    )
} | {
    "state missing": (
        optimizer(lambda c: c["state"]["3.bias"].pop("exp_avg") is None),
        r"the optimizer's state of 3\.bias lacks exp_avg; the checkpoint is damaged",
    ),
    "state as a list": (optimizer(lambda c: c["state"].update({"3.bias": [1]})), r"the state of 3\.bias is a list"),
    "moment in integers": (
        tensors("optimizer.safetensors", lambda t: t.update({"state.3.bias.exp_avg": torch.ones(32).long()})),
        r"exp_avg of 3\.bias is a tensor of torch\.int64, .*; allowed: a floating tensor",
    ),
    "moment inf": (
        tensors("optimizer.safetensors", filled("state.3.bias.exp_avg", float("inf"))),
        r"exp_avg of 3\.bias holds NaN or inf; .*force=True",
    ),
    "square below 0": (
        tensors("optimizer.safetensors", filled("state.3.bias.exp_avg_sq", -1.0)),
        r"exp_avg_sq of 3\.bias holds values below 0",
    ),
}
HISTORY = "0.amax"
ATTACKS = {
    "truncated": (truncate, r"has \d+ bytes, checkpoint\.json says"),
    "truncated, signed": (truncate_signed, "is not a whole safetensors file"),
    "pickle": (planted_pickle, "is not a whole safetensors file"),
    "huge header": (huge_header, "is not a whole safetensors file"),
    "overlapping tensors": (overlapping, "is not a whole safetensors file"),
    "one name twice": (twice_in_header, "is not a whole safetensors file|disagree"),
    "link": (with_link, "is a link; a checkpoint holds plain files only"),
    "linked folder": (with_linked_folder, "inside is a link"),
    "name above": (listed("../secret"), r"lists '\.\./secret'; allowed are names of files inside"),
    "name within above": (listed("a/../../secret"), "allowed are names of files inside"),
    "absolute name": (listed("/etc/passwd"), "lists '/etc/passwd'; allowed"),
    "windows name": (listed("..\\secret"), "allowed are names"),
    "empty name": (listed(""), "allowed are names"),
    "model shape": (tensors(SHARD, resized("4.bias")), r"of another shape: 4\.bias: saved \[3\], model \[32\]"),
    "model dtype": (tensors(SHARD, lambda t: t.update({"4.bias": t["4.bias"].half()})), "of another dtype: 4.bias"),
    "model NaN": (tensors(SHARD, filled("4.bias", float("nan"))), r"4\.bias holds 32 of 32 values NaN or inf"),
    "extra tensor": (tensors(SHARD, lambda t: t.update(extra=torch.zeros(1))), "disagree about 1 tensors.*'extra'"),
    "missing tensor": (tensors(SHARD, lambda t: t.pop("4.bias") is None), r"disagree about 1 tensors.*'4\.bias'"),
    "extra key": (index(lambda c: c["weight_map"].update(extra=SHARD)), "disagree about 1 tensors.*'extra'"),
    "shard above": (index(lambda c: c["weight_map"].update({"4.bias": "../x"})), r"names '\.\./x', no shard of model"),
    "shard unlisted": (
        index(lambda c: c["weight_map"].update({"4.bias": "model-00009-of-00009.safetensors"})),
        "lists no model-00009-of-00009|disagree",
    ),
    "no weight map": (index(lambda c: c.update(weight_map=[])), "has no 'weight_map' of tensor names to files"),
    "tied to itself": (
        state(lambda c: c["models"][0].update(tied={"3.bias": "0.bias"})),
        r"ties '3\.bias' to '0\.bias', but its model holds both",
    ),
    "tied to nothing": (state(lambda c: c["models"][0].update(tied={"x": "y"})), "ties 'x' to 'y', but .* no such"),
    "tied to a list": (state(lambda c: c["models"][0].update(tied={"x": []})), r"models\.0\.tied\.x is a list"),
    "schedule as a list": (
        state(lambda c: c["models"][0]["fp8"][0].update(fp8_steps=[])),
        r"models\.0\.fp8\.0\.fp8_steps is a list, not a str",
    ),
    "schedule missing": (
        state(lambda c: c["models"][0]["fp8"][0].pop("fp8_last_layers") is None),
        r"models\.0\.fp8\.0 lacks or must not have 'fp8_last_layers'",
    ),
    "NaN in a history": (
        tensors("acceler8_state.safetensors", filled(HISTORY, float("nan"), 2)),
        r"FP8 state '0\.amax' .* is none that a training writes; it must be float32",
    ),
    "inf in use": (tensors("acceler8_state.safetensors", filled(HISTORY, float("inf"), 1)), "finite and from 0"),
    "negative staging": (tensors("acceler8_state.safetensors", filled(HISTORY, -1.0, 0)), "finite and from 0"),
    "history shape": (tensors("acceler8_state.safetensors", resized(HISTORY)), "and its tensors disagree"),
    "history missing": (tensors("acceler8_state.safetensors", lambda t: t.pop(HISTORY) is None), "tensors disagree"),
    "newer state": (state(lambda c: c.update(format_version=9)), "format_version 9, this acceler8 reads up to 1"),
    "newer format": (
        lambda folder: edit(folder, "checkpoint.json", lambda c: c.update(format_version=9)),
        "format_version 9, this acceler8 reads up to",
    ),
    "negative steps": (state(lambda c: c.update(steps=-1)), "damaged: steps is -1, not between 0 and"),
    "huge steps": (state(lambda c: c.update(steps=10**300)), "damaged: steps is 1000.*not between 0 and"),
    "steps as text": (state(lambda c: c.update(steps="1")), "damaged: steps is a str, not a int"),
    "missing field": (state(lambda c: c.pop("window") is None), "damaged: the whole lacks or must not have 'window'"),
    "unknown field": (state(lambda c: c.update(run="code")), "damaged: the whole lacks or must not have 'run'"),
    "models as a number": (state(lambda c: c.update(models=1)), "damaged: models is a int, not a list"),
    "deep JSON": (text("acceler8_state.json", '{"a":' * 100_000), "cannot be read .*deep"),
    "NaN in JSON": (text("acceler8_state.json", '{"format_version": NaN}'), "cannot be read .*NaN is no JSON"),
    "a key twice": (text("extra.json", '{"custom_0": 1, "custom_0": 2}'), "key 'custom_0' stands twice"),
    "long number": (text("extra.json", '{"custom_0": ' + "9" * 10_000 + "}"), "cannot be read"),
    "a list for an object": (text("optimizer.json", "[]"), "optimizer.* is damaged"),
    "unknown word": (text("extra.json", '{"custom_0": {"$object": "os.system"}}'), "unknown word"),
    "tensor of elsewhere": (text("extra.json", '{"custom_0": {"$tensor": "../x"}}'), "is damaged"),
    "no scheduler": (text("extra.json", "{}"), "holds no state of scheduler_0"),
    "scheduler attribute": (
        lambda folder: edit(folder, "extra.json", lambda c: c["scheduler_0"]["state"].update(step=3)),
        "scheduler_0 has no 'step', which the checkpoint sets",
    ),
    "lr NaN": (
        optimizer(lambda c: c["groups"][0]["options"].update(lr={"$float": "nan"})),
        "optimizer group 0 has lr=nan; allowed: a number",
    ),
    "lr as text": (optimizer(lambda c: c["groups"][0]["options"].update(lr="x")), "has lr='x'; allowed: a number"),
    "no groups": (optimizer(lambda c: c.pop("groups") is None), r"optimizer's state is damaged \(KeyError"),
    "moment shape": (
        tensors("optimizer.safetensors", resized("state.3.bias.exp_avg")),
        r"exp_avg of 3\.bias has shape \[3\], the parameter \[32\]",
    ),
    "moment NaN": (
        tensors("optimizer.safetensors", filled("state.3.bias.exp_avg", float("nan"))),
        r"exp_avg of 3\.bias holds NaN",
    ),
    "random state": (
        tensors("process_0.safetensors", resized("rng.torch")),
        "random state of torch is none that it takes",
    ),
    **OPTIONS,
    **STATES,
    **{
        f"scheduler {key} {value}": (
            extra(lambda c, key=key, value=value: c["scheduler_0"]["state"].update({key: value})),
            f"scheduler_0: the saved {key} is .*; allowed: {allowed}",
        )
        for key, value, allowed in (
            ("base_lrs", [], "a list of 1 finite numbers"),
            ("base_lrs", [NAN], "a list of 1 finite numbers"),
            ("base_lrs", None, "a list of 1 finite numbers"),
            ("_last_lr", "x", "a list of 1 finite numbers"),
            ("last_epoch", "a", "an integer from -1"),
            ("T_max", NAN, "a number, not NaN"),
        )
    },
    "scheduler empty": (
        extra(lambda c: c["scheduler_0"].update(state={})),
        "scheduler_0: the saved state lacks 'T_max'",
    ),
    **{
        f"loader {key} {value}": (
            process(lambda c, key=key, value=value: c["loaders"][0].update({key: value})),
            rf"loader 0 rejects its saved state \(.* {key}=.*allowed: {allowed}",
        )
        for key, value, allowed in (
            ("iteration", "a", "an integer from 0"),
            ("iteration", -1, "an integer from 0"),
            ("skipped", "a", "an integer from 0"),
            ("order", "a", "a generator's state"),
            ("seed", "a", "an integer or None"),
        )
    },
    "gradient NaN": (
        tensors("process_0.safetensors", filled("gradients.3.bias", float("nan"))),
        r"the gradient of '3\.bias' holds NaN or inf; .*force=True",
    ),
    "no gradients": (process(lambda c: c.update(gradients={})), "holds no gradients of its unfinished step.* 3 micro"),
    "gradients as a list": (process(lambda c: c.update(gradients=[])), r"process_0\.json is damaged"),
    "rng as a list": (process(lambda c: c.update(rng=[])), r"process_0\.json is damaged"),
    "rng as a number": (process(lambda c: c.update(rng=3)), r"process_0\.json is damaged"),
    "rng of a GPU": (process(lambda c: c["rng"].update(cuda=3)), "random state of cuda is 3, allowed: a tensor"),
    "full window": (
        state(lambda c: c["window"].update(micro_batch=4)),
        r"window\.micro_batch is 4 of 2 in an unfinished step",
    ),
    "no window": (state(lambda c: c["window"].update(num_steps=0)), r"window\.num_steps is 0, not from 1"),
    "version 0": (state(lambda c: c.update(format_version=0)), "format_version is 0, not from 1"),
    "random words": (
        lambda folder: edit(folder, "process_0.json", lambda c: c["rng"].update(python=[1])),
        "random state of python is none that it takes",
    ),
    "no loader": (
        lambda folder: edit(folder, "process_0.json", lambda c: c.update(loaders={})),
        r"process_0\.json is damaged",
    ),
    "gradient shape": (
        tensors("process_0.safetensors", resized("gradients.3.bias")),
        r"the gradient of '3\.bias' fits no parameter",
    ),
    "no process": (
        lambda folder: edit(folder, "checkpoint.json", lambda c: c["files"].pop("process_0.json") is None),
        "holds no part of process 0",
    ),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_hostile_checkpoint_is_refused(folder, live, attack):
    change, match = ATTACKS[attack]
    change(folder)
    refused(live, folder, match)
    assert not (folder / "planted").exists()


def test_a_foreign_recipe_and_schedule_are_reported_in_short(folder, live):
    def change(content):
        part, deep = content["models"][0]["fp8"][0], []
        for _ in range(400):
            deep = [deep]
        part["recipe"]["x" * 1000] = deep
        part["fp8_steps"] = "9" * 10_000

    edit(folder, "acceler8_state.json", change)
    report = Run(1).load(folder)
    assert "fp8_steps was 999" in report.reset[1]
    assert all(len(line) < 400 for line in report.reset)


def test_a_json_of_absurd_size_is_not_read(folder, live, monkeypatch):
    monkeypatch.setattr("acceler8.checkpoint.manifest.MAX_JSON_BYTES", 1000)
    refused(live, folder, r"cannot be read \(\d+ bytes, allowed are 1000\)")


def test_a_checkpoint_of_one_model_is_told_apart(tmp_path, live):
    from acceler8.checkpoint import save

    refused(live, save(tmp_path / "c", model=live.model), r"save_state did not write it; read it with checkpoint\.load")


def test_a_link_in_a_hooks_folder_is_not_saved(tmp_path):
    run = Run(0)
    run.accelerator.register_save_state_pre_hook(
        lambda models, weights, folder: os.symlink("/etc/passwd", f"{folder}/x")
    )
    with pytest.raises(CheckpointError, match="is no plain file; a checkpoint holds plain files only"):
        run.save(tmp_path / "c")
    assert not any(tmp_path.iterdir())


def test_a_checkpoint_folder_may_itself_be_reached_through_a_link(folder, tmp_path):
    (tmp_path / "latest").symlink_to(folder)
    assert load(tmp_path / "latest").folder == folder.resolve()
    assert Run(1).load(tmp_path / "latest").steps == 1


def test_random_numbers_of_a_gpu_go_on_without_one(saved, live, folder):
    """Not damage, but another machine: the rest of the checkpoint is taken, and a line says what has no use."""
    edit_tensors(folder, "process_0.safetensors", lambda t: t.update({"rng.cuda": torch.zeros(16, dtype=torch.uint8)}))
    edit(folder, "process_0.json", lambda c: c["rng"].update(cuda={"$tensor": "rng.cuda"}))
    reset = live.load(folder).reset
    random_state = live.everything()["random"]
    if torch.cuda.is_available():
        assert reset == ()
    else:
        (line,) = reset
        assert line.startswith("random generators: a GPU's was saved")
    live.load(saved)
    assert_same(live.everything()["random"], random_state)
