"""save_state and load_state: what comes back, what is refused, hooks, names, several of everything."""

from __future__ import annotations

import logging
import os
import random
import shutil

import numpy
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

from acceler8 import Accelerator, checkpoint, recipes
from acceler8.checkpoint import load
from acceler8.checkpoint.project import ProjectConfiguration, drop_oldest
from acceler8.errors import CheckpointError, ConfigError
from acceler8.nn import fp8_layers, fp8_state_dict
from acceler8.utils import DataLoaderConfiguration, NativeRecipeKwargs
from tests.checkpoint.runs import Counter, Run
from tests.checkpoint.support import assert_same


@pytest.fixture(autouse=True)
def _one_thread_of_randomness():
    state = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    yield
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    numpy.random.set_state(state[2])


MIXED = {"0": "delayed", "3": "tensorwise", "*": None}


# in the middle of a window, at a boundary, at the end of an epoch, in the second one
@pytest.mark.parametrize(
    ("stop", "recipe"), [(3, "delayed"), (4, "rowwise"), (7, "delayed"), (9, "delayed"), (5, MIXED)]
)
def test_a_resumed_training_equals_an_uninterrupted_one(tmp_path, stop, recipe):
    whole = Run(0, recipe=recipe)
    expected = whole.train(16)

    first = Run(0, recipe=recipe)
    losses = first.train(stop)
    first.save(tmp_path / "c")
    at_save = first.everything()

    second = Run(1, recipe=recipe)
    second.train(2)  # a live training, not a fresh one
    report = second.load(tmp_path / "c")
    assert_same(second.everything(), at_save)
    assert report.reset == ()
    losses += second.train(16 - stop)
    assert losses == expected
    assert_same(second.everything(), whole.everything())


def test_saving_does_not_change_the_training(tmp_path):
    whole = Run(0)
    expected = whole.train(9)
    other = Run(0)
    losses = []
    for _ in range(9):
        losses += other.train(1)
        other.save(tmp_path / "c")
    assert losses == expected
    assert_same(other.everything(), whole.everything())


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_other_precisions_resume_bit_for_bit(tmp_path, precision):
    expected = Run(0, precision=precision).train(8)
    first = Run(0, precision=precision)
    losses = first.train(3)
    first.save(tmp_path / "c")
    second = Run(1, precision=precision)
    assert second.load(tmp_path / "c").reset == ()
    assert losses + second.train(5) == expected


@pytest.mark.parametrize("steps", ["3:", ":3", "1:4"])
@pytest.mark.parametrize("stop", [4, 6, 7])  # before, at and behind the boundary of a window of micro-batches
def test_a_resume_goes_on_in_the_schedule(tmp_path, steps, stop):
    def run(seed):
        handler = NativeRecipeKwargs(recipe="delayed", fp8_steps=steps)
        return Run(seed, recipe=None, kwargs_handlers=[handler])

    whole = run(0)
    expected = whole.train(14)
    first = run(0)
    losses = first.train(stop)
    first.save(tmp_path / "c")
    second = run(1)
    assert second.load(tmp_path / "c").reset == ()
    assert losses + second.train(14 - stop) == expected
    assert_same(second.everything(), whole.everything())
    assert expected != Run(0).train(14)


@pytest.mark.parametrize("stop", [1, 2, 5, 6])  # windows are two micro-batches: in step 0, before 1, in 2, before 3
def test_a_resume_goes_on_by_depth(tmp_path, stop):
    def run(seed):
        handler = NativeRecipeKwargs(recipe="delayed", fp8_last_layers="1:1,3:all", fp8_steps=":6")
        return Run(seed, recipe=None, kwargs_handlers=[handler])

    whole = run(0)
    expected = whole.train(14)
    first = run(0)
    losses = first.train(stop)
    first.save(tmp_path / "c")
    second = run(1)
    assert second.load(tmp_path / "c").reset == ()
    assert losses + second.train(14 - stop) == expected
    assert_same(second.everything(), whole.everything())


def test_a_resume_says_that_the_schedule_is_another(tmp_path, caplog):
    def run(seed, **schedule):
        return Run(seed, recipe=None, kwargs_handlers=[NativeRecipeKwargs(recipe="delayed", **schedule)])

    first = run(0, fp8_steps="1:", fp8_last_layers="0:1,2:all")
    first.train(4)
    first.save(tmp_path / "c")
    same = run(1, fp8_steps="1:", fp8_last_layers={2: "all", 0: 1})
    assert same.load(tmp_path / "c").reset == ()
    with caplog.at_level(logging.WARNING, "acceler8"):
        report = run(1, fp8_last_layers="0:1,9:all").load(tmp_path / "c")
    assert report.reset == (
        "Sequential: fp8_steps was 1:, now :",
        "Sequential: fp8_last_layers was 0:1,2:all, now 0:1,9:all",
    )
    assert report.reset[1] in caplog.text
    none = run(1)
    none.save(tmp_path / "none")
    assert run(2, fp8_steps=":4").load(tmp_path / "none").reset == ("Sequential: fp8_steps was :, now :4",)


def test_a_resume_says_in_what_a_recipe_of_the_same_name_differs(tmp_path):
    first = Run(0, recipe={"0": "delayed", "*": recipes.get("delayed", eval="fp8")})
    first.save(tmp_path / "c")
    second = Run(1, recipe={"0": recipes.get("delayed", margin=2), "*": "delayed"})
    assert second.load(tmp_path / "c").reset == (
        "Sequential: recipe was 0=delayed, *=delayed, now 0=delayed, *=delayed with other settings:"
        " layers.0.1.scaling.margin was 0, now 2; layers.1.1.eval was 'fp8', now 'high_precision'",
    )


def test_a_resume_says_that_something_else_is_kept_for_backward(tmp_path):
    first = Run(0, recipe=recipes.get("delayed", save_for_backward="bf16"))
    first.train(2)
    first.save(tmp_path / "c")
    second = Run(1)
    assert second.load(tmp_path / "c").reset == (
        "Sequential: recipe was delayed, now delayed with other settings: save_for_backward was 'bf16', now 'fp8'",
    )
    assert_same(fp8_state_dict(second.model), fp8_state_dict(first.model))  # the histories go on all the same


def test_a_resume_says_which_layers_had_another_recipe(tmp_path):
    first = Run(0, recipe=MIXED)
    first.train(4)
    first.save(tmp_path / "c")
    assert Run(1, recipe=dict(MIXED)).load(tmp_path / "c").reset == ()
    assert Run(1, recipe={"0": "delayed", "*": "rowwise"}).load(tmp_path / "c").reset == (
        "Sequential: recipe was 0=delayed, 3=tensorwise, *=none, now 0=delayed, *=rowwise",
        "Sequential: 1 layers are FP8 and were not, such as 4",
    )


def test_fp8_goes_on_in_bf16_and_back(tmp_path, caplog):
    first = Run(0)
    first.train(4)
    first.save(tmp_path / "fp8")

    middle = Run(1, precision="bf16")
    with caplog.at_level(logging.WARNING, "acceler8"):
        report = middle.load(tmp_path / "fp8")
    assert report.reset[0] == "Sequential: was FP8 (recipe delayed, backend native), now in high precision"
    assert "3 saved amax histories, such as 0.amax, have no use now" in report.reset[1]
    assert report.reset[0] in caplog.text
    assert_same(middle.model.state_dict()["0.weight"], first.model.state_dict()["0.weight"])
    assert_same(middle.optimizer.state_dict(), first.optimizer.state_dict())
    assert all(map(numpy.isfinite, middle.train(4)))
    middle.save(tmp_path / "bf16")

    last = Run(2)
    last.train(2)  # its histories must not survive
    report = last.load(tmp_path / "bf16")
    assert [line.partition(": ")[2] for line in report.reset] == [
        "was in high precision, now FP8 (recipe delayed, backend native)",
        "amax histories of 3 layers, such as 0.amax, start afresh",
    ]
    assert last.accelerator.clock.ticks == 4
    assert not last.everything()["fp8"]["0.amax"].any()
    assert_same(dict(last.model.state_dict()), dict(middle.model.state_dict()))
    assert all(map(numpy.isfinite, last.train(4)))


@pytest.mark.parametrize(("now", "says"), [("rowwise", "recipe was delayed, now rowwise"), ("delayed", "7 now")])
def test_another_recipe(tmp_path, now, says):
    from acceler8 import recipes

    first = Run(0)
    first.train(4)
    first.save(tmp_path / "c")
    recipe = recipes.get("delayed", amax_history_len=7) if says == "7 now" else now
    second = Run(1, recipe=recipe)
    report = second.load(tmp_path / "c")
    assert "recipe was delayed" in report.reset[0]
    assert any("amax histories" in line for line in report.reset)
    assert len(second.train(4)) == 4


def test_a_layer_less_keeps_the_other_histories(tmp_path):
    first = Run(0)
    first.train(4)
    first.save(tmp_path / "c")
    second = Run(1, skip=["4"])
    report = second.load(tmp_path / "c")
    assert "1 layers were FP8 and are not now, such as 4" in " ".join(report.reset)
    assert_same(second.everything()["fp8"]["0.amax"], first.everything()["fp8"]["0.amax"])


def test_another_accumulation_starts_the_step_anew(tmp_path):
    first = Run(0, window=2)
    first.train(3)
    first.save(tmp_path / "c")
    second = Run(1, window=3)
    report = second.load(tmp_path / "c")
    assert report.reset == (
        "gradient accumulation: was 2 micro-batches a step, now 3; the unfinished step starts anew",
        "loader 0: 1 batches of the unfinished step come again; it goes on behind the 8 samples that were used",
    )
    assert second.everything()["gradients"] == {}
    assert second.accelerator.gradients.micro_batch == 0


def test_the_model_file_is_the_plain_model(tmp_path):
    run = Run(0)
    run.train(2)
    run.save(tmp_path / "c", progress={"epoch": 3})
    state = load_file(tmp_path / "c" / "model.safetensors")
    plain = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(), nn.Linear(64, 32), nn.Linear(32, 32))
    plain.load_state_dict(state)
    assert {t.dtype for t in state.values()} == {torch.float32}
    saved = load(tmp_path / "c")  # the one format: the reader for one model opens it too
    assert saved.progress == {"epoch": 3}
    assert_same(dict(sorted(saved.model_state().items())), dict(sorted(plain.state_dict().items())))
    assert saved.fp8_state().keys() == {"0.amax", "3.amax", "4.amax", "steps"}
    assert Run(1).load(tmp_path / "c").progress == {"epoch": 3}


def test_a_sharded_model_comes_back(tmp_path):
    run = Run(0)
    run.save(tmp_path / "c", max_shard_size="5KB")
    names = {path.name for path in (tmp_path / "c").glob("model*")}
    assert "model.safetensors.index.json" in names
    assert "model-00002-of-00004.safetensors" in names
    other = Run(1)
    other.load(tmp_path / "c")
    assert_same(dict(other.model.state_dict()), dict(run.model.state_dict()))
    run.save(tmp_path / "c")  # one file replaces them
    assert {path.name for path in (tmp_path / "c").glob("model*")} == {"model.safetensors"}


@pytest.mark.parametrize("tie", [True, False])
def test_transformers_loads_it_and_computes_the_same(tmp_path, tie):
    transformers = pytest.importorskip("transformers")
    import acceler8

    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=tie,
    )
    torch.manual_seed(0)
    accelerator = Accelerator(mixed_precision="fp8", recipe="delayed", cpu=True)
    model = transformers.LlamaForCausalLM(config)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    tokens = torch.randint(64, (2, 16))
    for _ in range(2):
        accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
        optimizer.step()
        optimizer.zero_grad()
    assert any(True for _ in fp8_layers(model))
    accelerator.save_state(tmp_path / "c")
    accelerator.save_model(model, tmp_path / "m", max_shard_size="20KB")
    assert (tmp_path / "m" / "model.safetensors.index.json").is_file()
    accelerator.unwrap_model(model).save_pretrained(tmp_path / "p")
    for folder in ("c", "m"):
        accelerator.unwrap_model(model).config.save_pretrained(tmp_path / folder)
    assert accelerator.load_state(tmp_path / "c").steps == 2  # with a config.json beside it

    accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    plain = acceler8.restore(model).eval()
    assert (plain.lm_head.weight is plain.model.embed_tokens.weight) is tie
    with torch.no_grad():
        want = plain(input_ids=tokens).logits
        for folder in ("c", "m", "p"):
            loaded, info = transformers.LlamaForCausalLM.from_pretrained(tmp_path / folder, output_loading_info=True)
            assert not any(info.values()), info
            assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) is tie
            assert torch.equal(loaded.eval()(input_ids=tokens).logits, want)


def two_models(seed, tmp_path=None):
    torch.manual_seed(seed)
    accelerator = Accelerator(mixed_precision="fp8", recipe="delayed", cpu=True)
    one, two = nn.Sequential(nn.Linear(32, 32)), nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    both = torch.optim.AdamW([*one.parameters(), *two[0].parameters()], lr=1e-2)
    rest = torch.optim.SGD(two[1].parameters(), lr=1e-2, momentum=0.9)
    schedules = [torch.optim.lr_scheduler.StepLR(o, 2) for o in (both, rest)]
    accelerator.prepare(one, two, both, rest, *schedules)
    return accelerator, one, two, accelerator._optimizers


def train_two(accelerator, one, two, optimizers, seed=3):
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(seed))
    loss = (two(one(x)) - x).square().mean()
    accelerator.backward(loss)
    for part in (*optimizers, *accelerator._schedulers):
        part.step()
    for optimizer in optimizers:
        optimizer.zero_grad()
    return loss.item()


def test_several_models_and_optimizers(tmp_path):
    first = two_models(0)
    for _ in range(3):
        train_two(*first)
    first[0].save_state(tmp_path / "c")
    expected = train_two(*first)
    names = {path.name for path in (tmp_path / "c").iterdir()}
    assert {"model.safetensors", "model_1.safetensors", "optimizer.json", "optimizer_1.json"} <= names
    second = two_models(1)
    assert second[0].load_state(tmp_path / "c").reset == ()
    assert train_two(*second) == expected
    for one, other in zip(second[0]._schedulers, first[0]._schedulers, strict=True):
        assert one.state_dict() == other.state_dict()


def test_other_objects_than_saved_are_refused(tmp_path):
    two_models(0)[0].save_state(tmp_path / "two")
    run = Run(0)
    run.save(tmp_path / "c")
    before = run.everything()
    with pytest.raises(CheckpointError, match=r"state of 2 prepared models, this training has 1; prepare"):
        run.load(tmp_path / "two")
    run.accelerator.register_for_checkpointing(Counter())
    with pytest.raises(CheckpointError, match=r"1 objects registered for checkpointing, this training has 2"):
        run.load(tmp_path / "c")
    assert_same(run.everything(), before)
    with pytest.raises(CheckpointError, match=r"0\.weight: saved \[64, 32\], model \[96, 48\]"):
        Run(0, width=48).load(tmp_path / "c")


class Held:
    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"inner": [self.value]}

    def load_state_dict(self, state):
        self.value = state["inner"][0]


def test_registered_objects_come_back_and_need_no_pickle(tmp_path):
    run = Run(0)
    held = Held({"n": 1, "t": torch.arange(3), "pair": (1, None), "inf": float("inf")})
    run.accelerator.register_for_checkpointing(held, held)
    run.save(tmp_path / "c")
    other, back = Run(1), Held(None)
    other.accelerator.register_for_checkpointing(back)
    other.load(tmp_path / "c")
    assert_same(back.value, held.value)

    held.value = object()
    with pytest.raises(CheckpointError, match=r"custom_1, a Held, cannot be saved: state\.inner\.0 is a builtins"):
        run.save(tmp_path / "d")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c"]
    with pytest.raises(CheckpointError, match="argument 1, a int, has no state_dict and no load_state_dict; give it"):
        run.accelerator.register_for_checkpointing(Counter(), 3)


class Refuses(Held):
    def load_state_dict(self, state):
        if state["inner"][0] == "saved":
            raise KeyError("no")
        super().load_state_dict(state)


def test_an_object_that_rejects_its_state_leaves_all_as_it_was(tmp_path):
    run = Run(0)
    run.accelerator.register_for_checkpointing(Refuses("saved"))
    run.train(3)
    run.save(tmp_path / "c")
    other = Run(1)
    other.accelerator.register_for_checkpointing(Refuses("own"))
    other.train(2)
    before = other.everything()
    with pytest.raises(CheckpointError, match=r"custom_1 rejects its saved state \('no'\); everything is as before"):
        other.load(tmp_path / "c")
    assert_same(other.everything(), before)


def test_hooks_save_and_load_in_place_of_the_accelerator(tmp_path):
    """As diffusers' training scripts do: LoRA weights only, in a folder of their own."""
    first = two_models(0)
    seen = []

    def save_hook(models, weights, output_dir):
        seen.append((len(models), len(weights)))
        os.makedirs(os.path.join(output_dir, "adapter"))
        torch.save(weights.pop(0), os.path.join(output_dir, "adapter", "one.bin"))

    def load_hook(models, input_dir):
        model = models.pop(0)
        model.load_state_dict(torch.load(os.path.join(input_dir, "adapter", "one.bin"), weights_only=True))

    handle = first[0].register_save_state_pre_hook(save_hook)
    for _ in range(2):  # the second replaces the first, its folder too
        train_two(*first)
        first[0].save_state(tmp_path / "c")
    assert seen == [(2, 2), (2, 2)]
    names = {path.name for path in (tmp_path / "c").iterdir()}
    assert "adapter" in names
    assert "model.safetensors" not in names
    assert "model_1.safetensors" in names

    second = two_models(1)
    with pytest.raises(CheckpointError, match=r"no weights of model 0 \(Sequential\): a save hook took them; register"):
        second[0].load_state(tmp_path / "c")
    load_handle = second[0].register_load_state_pre_hook(load_hook)
    second[0].load_state(tmp_path / "c")
    assert train_two(*second) == train_two(*first)

    (tmp_path / "c" / "adapter" / "one.bin").write_bytes(b"changed")
    with pytest.raises(CheckpointError, match=r"one\.bin has 7 bytes"):
        second[0].load_state(tmp_path / "c")
    handle.remove()
    load_handle.remove()
    first[0].save_state(tmp_path / "c")
    second[0].load_state(tmp_path / "c")
    assert not (tmp_path / "c" / "adapter").exists()
    assert len(seen) == 2


def test_a_hook_that_fails_leaves_the_checkpoint_before(tmp_path):
    run = Run(0)
    run.save(tmp_path / "c")
    run.train(2)

    def hook(models, weights, output_dir):
        raise RuntimeError("hook")

    run.accelerator.register_save_state_pre_hook(hook)
    with pytest.raises(RuntimeError, match="hook"):
        run.save(tmp_path / "c")
    assert [p.name for p in tmp_path.iterdir()] == ["c"]
    assert Run(1).load(tmp_path / "c").steps == 0


def project(tmp_path, **options):
    return ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, **options)


def names(tmp_path):
    return sorted(path.name for path in (tmp_path / "checkpoints").iterdir())


def test_automatic_names_keep_the_newest(tmp_path, caplog):
    run = Run(0, project_config=project(tmp_path, total_limit=2))
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "mine").mkdir()  # is nobody's checkpoint
    for n in range(4):
        run.train(2)
        assert run.accelerator.save_iteration == n
        assert run.save(None).name == f"checkpoint_{n}"
    assert names(tmp_path) == ["checkpoint_2", "checkpoint_3", "mine"]
    after = run.train(2)

    again = Run(1, project_config=project(tmp_path, total_limit=2))
    again.accelerator.project_configuration.iteration = 2
    with pytest.raises(CheckpointError, match=r"checkpoint_3 exists already, .* is 2; load_state\(\) first"):
        again.save(None)
    assert again.load().steps == 4
    assert again.train(2) == after
    assert again.save(None).name == "checkpoint_4"

    (tmp_path / "checkpoints" / "checkpoint_4" / "optimizer.json").unlink()
    third = Run(1, project_config=project(tmp_path, total_limit=2))
    with caplog.at_level(logging.WARNING, "acceler8"):
        assert third.load().folder.name == "checkpoint_3"
    assert "skipping checkpoint_4, which is not whole" in caplog.text
    assert third.save(None).name == "checkpoint_5"
    assert names(tmp_path) == ["checkpoint_3", "checkpoint_4", "checkpoint_5", "mine"]


def test_automatic_names_do_not_begin_below_those_of_an_older_run(tmp_path):
    run = Run(0, project_config=project(tmp_path, total_limit=1))
    for _ in range(3):
        run.save(None)
    assert names(tmp_path) == ["checkpoint_2"]
    other = Run(1, project_config=project(tmp_path, total_limit=1))
    with pytest.raises(CheckpointError, match=r"checkpoint_2 exists already, .* is 0; .* its own project_dir"):
        other.save(None)
    assert names(tmp_path) == ["checkpoint_2"]


def test_saving_goes_on_above_what_is_no_whole_checkpoint(tmp_path, caplog):
    folder = tmp_path / "checkpoints"
    (folder / "checkpoint_6").mkdir(parents=True)
    run = Run(0, project_config=project(tmp_path))
    with pytest.raises(CheckpointError, match="holds no whole checkpoint_N"):
        run.load()
    with caplog.at_level(logging.WARNING, "acceler8"):
        assert run.save(None).name == "checkpoint_7"
    assert "saving goes on with checkpoint_7" in caplog.text
    assert run.save(None).name == "checkpoint_8"
    assert names(tmp_path) == ["checkpoint_6", "checkpoint_7", "checkpoint_8"]


def test_a_damaged_checkpoint_does_not_count_for_the_limit(tmp_path):
    run = Run(0, project_config=project(tmp_path, total_limit=2))
    for _ in range(2):
        run.train(1)
        run.save(None)
    weights = tmp_path / "checkpoints" / "checkpoint_1" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(bytes(data))
    again = Run(0, project_config=project(tmp_path, total_limit=2))
    assert again.load().folder.name == "checkpoint_0"
    again.save(None)
    assert names(tmp_path) == ["checkpoint_0", "checkpoint_1", "checkpoint_2"]  # two whole ones


def test_the_folder_just_written_stays(tmp_path):
    run = Run(0)
    folders = [run.save(tmp_path / f"checkpoint_{n}") for n in (1, 5, 9)]
    assert drop_oldest(tmp_path, 2, folders[0]) == [folders[1]]
    assert drop_oldest(tmp_path, 1, folders[0]) == [folders[2]]
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint_1"]


class _Killed(BaseException):
    """Stands for the end of the process: nothing catches it."""


def test_what_a_killed_removal_leaves_is_named_and_goes_behind_the_next_save(tmp_path, monkeypatch, caplog):
    run = Run(0, project_config=project(tmp_path, total_limit=1))
    run.save(None)

    def killed(*_, **__):
        raise _Killed

    monkeypatch.setattr("acceler8.checkpoint.folder.shutil.rmtree", killed)
    with pytest.raises(_Killed):
        run.save(None)
    monkeypatch.undo()
    assert names(tmp_path) == [".checkpoint_0.leaving", "checkpoint_1"]

    again = Run(1, project_config=project(tmp_path, total_limit=1))
    with caplog.at_level(logging.WARNING, "acceler8"):
        assert again.load().folder.name == "checkpoint_1"
    assert "had begun to remove .checkpoint_0.leaving; the next save with a total_limit does" in caplog.text
    assert names(tmp_path) == [".checkpoint_0.leaving", "checkpoint_1"]  # reading deletes nothing
    again.save(None)
    assert names(tmp_path) == ["checkpoint_2"]


def test_an_old_checkpoint_takes_along_what_a_killed_writer_left_beside_it(tmp_path):
    """A writer that dies behind its last rename leaves its lock, one that replaced a checkpoint the older one too."""
    run = Run(0, project_config=project(tmp_path, total_limit=1))
    old = run.save(None)
    (old.parent / ".checkpoint_0.lock").touch()
    shutil.copytree(old, old.parent / ".checkpoint_0.previous")
    (old.parent / ".checkpoint_9.lock").touch()  # of a checkpoint that is not removed
    run.save(None)
    assert names(tmp_path) == [".checkpoint_9.lock", "checkpoint_1"]


def test_a_half_removed_checkpoint_that_is_the_last_whole_one_stays_and_is_named(tmp_path):
    run = Run(0, project_config=project(tmp_path))
    for n in (2, 10):  # the newest by number, not by text
        run.accelerator.project_configuration.iteration = n
        folder = run.save(tmp_path / "elsewhere")
        folder.rename(folder.with_name(f".{folder.name}.leaving"))
    with pytest.raises(CheckpointError, match=r"but \.checkpoint_10\.leaving, .* rename it to checkpoint_10 to resume"):
        run.load()
    assert drop_oldest(tmp_path / "checkpoints", 1) == []
    assert names(tmp_path) == [".checkpoint_10.leaving", ".checkpoint_2.leaving"]
    (tmp_path / "checkpoints" / ".checkpoint_10.leaving" / "checkpoint.json").unlink()
    with pytest.raises(CheckpointError, match=r"but \.checkpoint_2\.leaving"):
        run.load()


def test_the_oldest_goes_only_when_the_new_one_is_whole(tmp_path, monkeypatch):
    run = Run(0, project_config=project(tmp_path, total_limit=1))
    run.save(None)
    monkeypatch.setattr("acceler8.checkpoint.training.write_model", _full_disk)
    with pytest.raises(CheckpointError, match=r"could not write .*checkpoint_1: .*No space left.*check space"):
        run.save(None)
    assert names(tmp_path) == ["checkpoint_0"]
    assert run.accelerator.save_iteration == 1
    monkeypatch.undo()
    run.save(None)
    assert names(tmp_path) == ["checkpoint_1"]


def _full_disk(*_):
    raise OSError(28, "No space left on device")


def test_models_in_another_order_are_told_apart(tmp_path):
    def prepared(is_swapped, wide=8):
        accelerator, models = Accelerator(cpu=True), [nn.Linear(4, 4), nn.Linear(4, wide)]
        optimizers = [torch.optim.SGD(model.parameters(), 0.1, momentum=0.9) for model in models]
        order = [1, 0] if is_swapped else [0, 1]
        for i in order:
            models[i] = accelerator.prepare(models[i])
        for i in [0, 1] if wide == 4 else order:
            optimizers[i] = accelerator.prepare(optimizers[i])
        for model, optimizer in zip(models, optimizers, strict=True):
            model(torch.ones(4)).sum().backward()
            optimizer.step()
        return accelerator

    for wide, match in (
        (8, r"model 0, a Linear: .* of another shape: .*; prepare models in the same order"),
        (4, r"names are those of another model, 'model_1:'; prepare in the same order as when saved"),
    ):
        prepared(False, wide).save_state(tmp_path / "c")
        with pytest.raises(CheckpointError, match=match):
            prepared(True, wide).load_state(tmp_path / "c")


@pytest.mark.parametrize("name", ["", "a\0b", "/", ".", 3, b"c", "~nobody-here/c"], ids=repr)
def test_a_folder_that_is_none(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    run = Run(0)
    with pytest.raises(CheckpointError, match=r"save_state: output_dir is .*(give|name a folder)"):
        run.save(name)
    with pytest.raises(CheckpointError, match=r"save: folder is .*(give|name a folder)"):
        checkpoint.save(name, model=run.model)
    if name not in ("/", "."):
        with pytest.raises(CheckpointError, match=r"load_state: input_dir is .*; give"):
            run.load(name)
        with pytest.raises(CheckpointError, match=r"save_model: save_directory is .*; give"):
            run.accelerator.save_model(run.model, name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("progress", [[1], "x", 3])
def test_progress_that_is_no_dict(tmp_path, progress):
    with pytest.raises(CheckpointError, match=r"progress is a .*; allowed: a dict of plain values"):
        Run(0).save(tmp_path / "c", progress=progress)


def test_a_class_is_not_registered():
    with pytest.raises(CheckpointError, match=r"argument 1 is the class Counter; allowed: objects"):
        Accelerator(cpu=True).register_for_checkpointing(Counter(), Counter)


def test_no_name_and_no_checkpoint(tmp_path):
    run = Run(0)
    with pytest.raises(CheckpointError, match="save_state got no output_dir"):
        run.save(None)
    with pytest.raises(CheckpointError, match="load_state got no input_dir"):
        run.load()
    with pytest.raises(CheckpointError, match=r"is not a checkpoint: .*this does not exist"):
        run.load(tmp_path / "none")
    run = Run(0, project_config=project(tmp_path))
    with pytest.raises(CheckpointError, match="holds no whole checkpoint_N; save one first"):
        run.load()
    with pytest.raises(ConfigError, match="total_limit=0; allowed: an integer from 1"):
        ProjectConfiguration(total_limit=0)
    named = Run(0, project_dir=tmp_path, project_config=ProjectConfiguration(logging_dir="logs"))
    assert named.accelerator.project_dir == str(tmp_path)
    assert named.accelerator.logging_dir == "logs"


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_model_that_is_not_finite_is_refused(tmp_path, value):
    run = Run(0)
    run.save(tmp_path / "c")
    with torch.no_grad():
        run.model[3].bias[2] = value
    for save in (lambda: run.save(tmp_path / "c"), lambda: run.accelerator.save_model(run.model, tmp_path / "m")):
        with pytest.raises(CheckpointError, match=r"3\.bias holds 1 of 32 values NaN or inf; .*force=True"):
            save()
    assert not (tmp_path / "m").exists()
    run.save(tmp_path / "forced", force=True)
    other = Run(1)
    with pytest.raises(CheckpointError, match=r"3\.bias holds 1 of 32 values NaN or inf; use an earlier"):
        other.load(tmp_path / "forced")
    other.load(tmp_path / "forced", force=True)
    assert not other.model[3].bias.isfinite().all()
    other.load(tmp_path / "c")


def test_a_folder_that_cannot_be_written(tmp_path):
    run = Run(0)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"could not write .*check space and permissions"):
        run.save(tmp_path / "file" / "c")
    with pytest.raises(CheckpointError, match="is a file; a checkpoint is a folder"):
        run.save(tmp_path / "file")
    with pytest.raises(CheckpointError, match=r"could not write .*check space"):
        run.accelerator.save_model(run.model, tmp_path / "file" / "m")
    with pytest.raises(CheckpointError, match="max_shard_size='many'; allowed: bytes above 0"):
        run.save(tmp_path / "c", max_shard_size="many")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_save_model_replaces_an_earlier_export_and_nothing_else(tmp_path):
    run = Run(0)
    (tmp_path / "config.json").write_text("{}")
    run.accelerator.save_model(run.model, tmp_path, max_shard_size="5KB")
    assert len(list(tmp_path.glob("model-*"))) == 4
    run.accelerator.save_model(run.model, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert_same(load_file(tmp_path / "model.safetensors"), dict(sorted(run.model.state_dict().items())))
    for call in (run.accelerator.save_state, lambda *a, **k: run.accelerator.save_model(run.model, *a, **k)):
        with pytest.raises(CheckpointError, match="would write a pickle, which runs code"):
            call(tmp_path / "pickle", safe_serialization=False)


def test_save_writes_whole_files(tmp_path):
    accelerator = Accelerator(cpu=True)
    accelerator.save({"a": torch.ones(2)}, tmp_path / "a.safetensors")
    assert_same(load_file(tmp_path / "a.safetensors"), {"a": torch.ones(2)})
    accelerator.save({"a": [1]}, str(tmp_path / "a.pt"))
    assert torch.load(tmp_path / "a.pt", weights_only=True) == {"a": [1]}
    with (tmp_path / "b.pt").open("wb") as file:
        accelerator.save(3, file)
    with pytest.raises(CheckpointError, match=r"b\.safetensors as safetensors holds a dict of tensors, got a list"):
        accelerator.save([1], tmp_path / "b.safetensors")
    with pytest.raises(CheckpointError, match="could not write"):
        accelerator.save(1, tmp_path / "none" / "c.pt")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.pt", "a.safetensors", "b.pt"]


def test_get_state_dict_has_plain_names():
    run = Run(0)
    compiled = nn.Module()  # as torch.compile wraps a model
    compiled._orig_mod = run.model
    assert list(run.accelerator.get_state_dict(compiled)) == list(run.model.state_dict())
    assert next(iter(run.accelerator.get_state_dict(compiled, unwrap=False))).startswith("_orig_mod.")


def test_deterministic_asks_torch_and_says_what_a_gpu_needs(monkeypatch):
    from acceler8.accelerator.checkpoints import _make_deterministic

    try:
        Accelerator(cpu=True, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
        with pytest.raises(ConfigError, match="CUBLAS_WORKSPACE_CONFIG is None; allowed: :4096:8 or :16:8; set it"):
            _make_deterministic(torch.device("cuda"), {})
        _make_deterministic(torch.device("cuda"), {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"})
    finally:
        torch.use_deterministic_algorithms(False)


def test_skipping_batches_after_a_resume_leaves_the_next_epoch_whole(tmp_path):
    """The way of scripts written for Accelerate, which place themselves in the epoch."""

    def start():
        accelerator = Accelerator(cpu=True)
        data = torch.utils.data.TensorDataset(torch.arange(6.0)[:, None])
        return accelerator, accelerator.prepare(torch.utils.data.DataLoader(data, batch_size=1))

    accelerator, loader = start()
    batches = iter(loader)
    next(batches)
    next(batches)
    accelerator.save_state(tmp_path / "state")
    accelerator, loader = start()
    accelerator.load_state(tmp_path / "state")
    assert [int(batch[0]) for batch in accelerator.skip_first_batches(loader, 2)] == [2, 3, 4, 5]
    assert [int(batch[0]) for batch in loader] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("is_seedable", [False, True])
@pytest.mark.parametrize("epochs", [0, 1])
def test_skipping_batches_after_a_resume_keeps_the_order_of_the_epoch(tmp_path, is_seedable, epochs):
    def start():
        torch.manual_seed(0)
        config = DataLoaderConfiguration(use_seedable_sampler=is_seedable)
        accelerator = Accelerator(cpu=True, dataloader_config=config)
        data = torch.utils.data.TensorDataset(torch.arange(23))
        return accelerator, accelerator.prepare(torch.utils.data.DataLoader(data, batch_size=4, shuffle=True))

    def read(batches):
        return [batch[0].tolist() for batch in batches]

    accelerator, loader = start()
    for _ in range(epochs):
        read(loader)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    accelerator.save_state(tmp_path / "state")
    rest, following = read(batches), read(loader)
    accelerator, loader = start()
    accelerator.load_state(tmp_path / "state")
    batches = iter(accelerator.skip_first_batches(loader, 3))
    assert next(batches)[0].tolist() == rest[0]
    accelerator.save_state(tmp_path / "again")
    assert read(batches) == rest[1:]
    assert read(loader) == following
    accelerator, loader = start()
    accelerator.load_state(tmp_path / "again")
    assert read(accelerator.skip_first_batches(loader, 4)) == rest[1:]
    assert read(loader) == following


def test_a_seed_and_the_epoch_decide_the_order_of_every_kind_of_loader(tmp_path):
    def start(kind, seed=0):
        torch.manual_seed(seed)
        config = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=3)
        accelerator = Accelerator(cpu=True, dataloader_config=config)
        return accelerator, accelerator.prepare(kind(range(12), batch_size=4, shuffle=True))

    orders = []
    for seed, kind in enumerate((torch.utils.data.DataLoader, StatefulDataLoader)):
        accelerator, loader = start(kind, seed)
        orders.append([[batch.tolist() for batch in loader] for _ in range(2)])
        batches = iter(loader)
        next(batches)
        accelerator.save_state(tmp_path / kind.__name__)
        rest = [batch.tolist() for batch in batches]
        accelerator, loader = start(kind, seed + 7)
        accelerator.load_state(tmp_path / kind.__name__)
        assert [batch.tolist() for batch in loader] == rest
    assert orders[0] == orders[1]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"dataset": range(30)}, "samples was 23, now 30"),
        ({"shuffle": False}, "now torch.utils.data.sampler.SequentialSampler"),
        ({"kind": StatefulDataLoader}, "now torchdata.stateful_dataloader.sampler.RandomSampler"),
    ],
)
def test_another_loader_starts_the_epoch_from_its_beginning(tmp_path, caplog, change, says):
    def start(kind=torch.utils.data.DataLoader, dataset=range(23), **options):
        torch.manual_seed(0)
        accelerator = Accelerator(cpu=True)
        return accelerator, accelerator.prepare(kind(dataset, **{"batch_size": 4, "shuffle": True} | options))

    accelerator, loader = start()
    list(loader)
    batches = iter(loader)
    next(batches)
    accelerator.save_state(tmp_path / "c")
    state = loader.state_dict()
    accelerator, loader = start(**change)
    (reset,) = accelerator.load_state(tmp_path / "c").reset
    assert says in reset
    assert reset.endswith("its epoch starts from its beginning")
    assert loader.iteration == 1
    count = len(change.get("dataset", range(23)))
    for _ in range(2):
        assert sorted(torch.cat(list(loader)).tolist()) == list(range(count))
    caplog.clear()
    loader.load_state_dict(state)
    assert says in caplog.text
    assert sum(map(len, loader)) == count
    del state["of"]  # as the first versions saved it
    accelerator, loader = start()
    loader.load_state_dict(state)
    assert sum(map(len, loader)) == 23 - 4


@pytest.mark.parametrize(
    ("change", "says"),
    [({"batch_size": 3}, "batch_size was 4, now 3"), ({"num_workers": 1}, "num_workers was 0, now 1")],
)
@pytest.mark.parametrize("kind", [torch.utils.data.DataLoader, StatefulDataLoader])
def test_other_batches_of_the_same_samples_go_on_behind_those_that_were_used(tmp_path, kind, change, says):
    def start(**options):
        torch.manual_seed(len(options))
        accelerator = Accelerator(cpu=True)
        return accelerator, accelerator.prepare(kind(range(23), **{"batch_size": 4, "shuffle": True} | options))

    accelerator, loader = start()
    list(loader)
    batches = iter(loader)
    used = torch.cat([next(batches) for _ in range(2)]).tolist()
    accelerator.save_state(tmp_path / "c")
    rest = torch.cat(list(batches)).tolist()
    accelerator, loader = start(**change)
    (reset,) = accelerator.load_state(tmp_path / "c").reset
    assert says in reset
    assert reset.endswith("it goes on behind the 8 samples that were used")
    again = list(loader)
    assert torch.cat(again).tolist() == rest
    assert [len(batch) for batch in again][:-1] == [change.get("batch_size", 4)] * (len(again) - 1)
    assert sorted(used + rest) == list(range(23))
    assert sorted(torch.cat(list(loader)).tolist()) == list(range(23))  # the next epoch is whole


def test_loaders_in_another_order_start_from_their_beginning(tmp_path):
    def start(sizes):
        accelerator = Accelerator(cpu=True)
        return accelerator, *accelerator.prepare(*(torch.utils.data.DataLoader(range(n), 4) for n in sizes))

    accelerator, _, long = start((16, 40))
    batches = iter(long)
    for _ in range(7):
        next(batches)
    accelerator.save_state(tmp_path / "c")
    accelerator, long, short = start((40, 16))
    assert accelerator.load_state(tmp_path / "c").reset == (
        "loader 1: samples was 40, now 16; its epoch starts from its beginning",
    )
    assert [len(list(loader)) for loader in (long, short)] == [10, 4]


@pytest.mark.parametrize("stop", [2, 3])  # behind a round of both optimizers, and within one
def test_two_optimizers_go_on_in_their_round(tmp_path, stop):
    def start():
        torch.manual_seed(0)
        accelerator = Accelerator(mixed_precision="fp8", recipe="delayed", cpu=True)
        models = [nn.Linear(32, 32) for _ in range(2)]
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in models]
        return accelerator, accelerator.prepare(*models, *optimizers)

    def train(accelerator, prepared, first, last):
        losses, ticks = [], []
        for i in range(first, last):
            model, optimizer = prepared[i % 2], prepared[2 + i % 2]
            loss = (prepared[1](prepared[0](torch.ones(16, 32))) - 2).square().mean()
            model.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            losses.append(loss.item())
            ticks.append(accelerator.clock.ticks)
        return losses, ticks

    accelerator, prepared = start()
    train(accelerator, prepared, 0, stop)
    accelerator.save_state(tmp_path / "c")
    expected = train(accelerator, prepared, stop, 8)
    accelerator, prepared = start()
    assert accelerator.load_state(tmp_path / "c").reset == ()
    assert train(accelerator, prepared, stop, 8) == expected
    assert expected[1][-1] == 4


def test_skipping_no_batches_after_a_resume_counts_as_the_epoch(tmp_path):
    """As scripts do that were stopped between two epochs."""

    def start():
        config = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=3)
        accelerator = Accelerator(cpu=True, dataloader_config=config)
        return accelerator, accelerator.prepare(torch.utils.data.DataLoader(range(12), 4, shuffle=True))

    accelerator, loader = start()
    list(loader)
    accelerator.save_state(tmp_path / "c")
    expected = [torch.cat(list(loader)).tolist() for _ in range(2)]
    accelerator, loader = start()
    accelerator.load_state(tmp_path / "c")
    found = [torch.cat(list(batches)).tolist() for batches in (accelerator.skip_first_batches(loader, 0), loader)]
    assert found == expected
