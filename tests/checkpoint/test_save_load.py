from __future__ import annotations

import json
import random

import numpy
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from acceler8.checkpoint import FORMAT_VERSION, is_checkpoint, load, save
from acceler8.checkpoint.rng import gpu_difference
from acceler8.errors import CheckpointError
from tests.checkpoint.support import Net, assert_same


@pytest.fixture
def net(make_generator):
    return Net(make_generator(1))


def test_model_comes_back_bit_for_bit_in_the_same_parameters(tmp_path, make_generator, net):
    save(tmp_path / "c", model=net)
    other = Net(make_generator(2))
    before = dict(other.named_parameters())
    assert load(tmp_path / "c").restore(model=other) == ()
    assert_same(dict(other.state_dict()), dict(net.state_dict()))
    assert all(parameter is before[name] for name, parameter in other.named_parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_model_dtypes(tmp_path, make_generator, dtype):
    net, other = Net(make_generator(1), dtype), Net(make_generator(2), dtype)
    save(tmp_path / "c", model=net)
    load(tmp_path / "c").restore(model=other)
    assert_same(dict(other.state_dict()), dict(net.state_dict()))


def test_tied_weights_are_written_once_and_come_back_tied(tmp_path, make_generator, net):
    folder = save(tmp_path / "c", model=net)
    assert "head.weight" not in load_file(folder / "model.safetensors")
    assert json.loads((folder / "checkpoint.json").read_text())["tied"] == {"head.weight": "embed.weight"}
    state = load(folder).model_state()
    assert state["head.weight"] is state["embed.weight"]
    assert list(sorted(state)) == sorted(net.state_dict())
    other = Net(make_generator(2))
    load(folder).restore(model=other)
    assert other.head.weight is other.embed.weight


@pytest.mark.parametrize(
    ("saved", "current", "message"),
    [
        (True, False, "tied when saved but not in the model: embed.weight = head.weight"),
        (False, True, "tied in the model but not when saved: embed.weight = head.weight"),
    ],
)
def test_a_tie_that_is_not_as_saved_is_an_error(tmp_path, make_generator, saved, current, message):
    save(tmp_path / "c", model=Net(make_generator(1), tie=saved))
    other = Net(make_generator(2), tie=current)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path / "c").restore(model=other)
    assert load(tmp_path / "c").restore(model=other, strict=False) == (message,)


def test_equal_values_are_not_a_tie(tmp_path):
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    model["b"].load_state_dict(model["a"].state_dict())
    folder = save(tmp_path / "c", model=model)
    assert len(load_file(folder / "model.safetensors")) == 4


def test_parameters_in_one_flat_buffer_are_not_tied(tmp_path):
    flat = torch.arange(12.0)
    model = nn.Linear(3, 3)
    model.weight.data, model.bias.data = flat[:9].view(3, 3), flat[9:]
    folder = save(tmp_path / "c", model=model)
    assert_same(load_file(folder / "model.safetensors"), {"bias": flat[9:], "weight": flat[:9].view(3, 3)})


class Remembers(nn.Linear):
    """A module with extra state that is no tensor."""

    memory = None

    def get_extra_state(self):
        return {"history": (1, 2.5), "scale": torch.tensor([3.0])}

    def set_extra_state(self, state):
        self.memory = state


def test_extra_state_of_modules(tmp_path):
    model = nn.Sequential(Remembers(2, 2))
    save(tmp_path / "c", model=model)
    other = nn.Sequential(Remembers(2, 2))
    load(tmp_path / "c").restore(model=other)
    assert_same(other[0].memory, {"history": (1, 2.5), "scale": torch.tensor([3.0])})


def test_fp8_state(tmp_path, net):
    state = {
        "layer.amax_history": torch.tensor([[1.0, float("inf")], [0.0, 3.5]]),
        "layer.codes": torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn),
        "layer.block_scale": torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu),
        "clock.step": torch.tensor(7),
    }
    folder = save(tmp_path / "c", model=net, fp8_state=state)
    assert_same(dict(sorted(load(folder).fp8_state().items())), dict(sorted(state.items())))
    assert not any("amax" in name or "layer." in name for name in load_file(folder / "model.safetensors"))


def test_without_fp8_state_there_is_no_file(tmp_path, net):
    folder = save(tmp_path / "c", model=net, fp8_state={}, rng=False)
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint.json", "model.safetensors"]
    assert load(folder).fp8_state() == {}
    assert load(folder).contents == ("model",)


def test_progress_and_config_come_back_as_they_were(tmp_path, net):
    progress = {"step": 7, "loss": float("nan"), "best": (1.25, None)}
    config = {"recipe": {"name": "rowwise", "skip": ["lm_head"]}, "betas": (0.9, 0.95)}
    checkpoint = load(save(tmp_path / "c", model=net, progress=progress, config=config))
    assert_same(checkpoint.progress, progress)
    assert_same(checkpoint.config, config)
    assert checkpoint.versions["torch"] == torch.__version__


def test_checkpoint_json_is_readable_and_strict(tmp_path, net):
    folder = save(tmp_path / "c", model=net, progress={"loss": float("inf")})

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    content = json.loads((folder / "checkpoint.json").read_text(), parse_constant=refuse)
    assert content["format_version"] == FORMAT_VERSION
    listed = {name: entry["size"] for name, entry in content["files"].items()}
    assert listed == {path.name: path.stat().st_size for path in folder.iterdir() if path.name != "checkpoint.json"}


def test_random_generators_go_on_as_they_would_have(tmp_path, net):
    random.seed(1)
    numpy.random.seed(2)
    torch.manual_seed(3)
    numpy.random.standard_normal()  # leaves a cached second value, which is state too
    save(tmp_path / "c", model=net)

    def draw():
        return [
            random.random(),
            random.gauss(0, 1),
            numpy.random.standard_normal(3).tolist(),
            torch.rand(3).tolist(),
        ]

    expected = draw()
    draw()
    load(tmp_path / "c").restore()
    assert draw() == expected


def test_random_generators_are_left_alone_on_request(tmp_path, net):
    save(tmp_path / "c", model=net)
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    load(tmp_path / "c").restore(model=net, rng=False)
    assert torch.equal(torch.rand(2), expected)


def test_random_states_that_were_not_saved(tmp_path, net):
    save(tmp_path / "c", model=net, rng=False)
    with pytest.raises(CheckpointError, match="holds no rng, only model; pass rng=False"):
        load(tmp_path / "c").restore(model=net)
    assert load(tmp_path / "c").restore(model=net, strict=False) == ("no random states in the checkpoint",)


@pytest.mark.requires(gpus=1)
def test_gpu_generators_and_devices(tmp_path, make_generator):
    net = Net(make_generator(1)).cuda()
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    net(torch.zeros(2, 3, dtype=torch.int64, device="cuda")).sum().backward()
    optimizer.step()
    save(tmp_path / "c", model=net, optimizer=optimizer)
    expected = torch.rand(3, device="cuda").tolist()
    other = Net(make_generator(2)).cuda()
    fresh = torch.optim.AdamW(other.parameters(), fused=True)
    assert load(tmp_path / "c").restore(model=other, optimizer=fresh) == ()
    assert_same(dict(other.state_dict()), dict(net.state_dict()))
    assert_same(fresh.state_dict(), optimizer.state_dict())
    assert torch.rand(3, device="cuda").tolist() == expected


@pytest.mark.requires(gpus=2)
def test_a_process_restores_the_generator_of_its_own_gpu_alone(tmp_path, net):
    with torch.cuda.device(0):
        torch.cuda.manual_seed(3)
        save(tmp_path / "c", model=net)
        expected = torch.rand(3, device="cuda:0").tolist()
    first = torch.cuda.get_rng_state(0)
    with torch.cuda.device(1):  # as another local rank has it
        torch.cuda.manual_seed(4)
        load(tmp_path / "c").restore()
    assert torch.rand(3, device="cuda:1").tolist() == expected
    assert torch.equal(torch.cuda.get_rng_state(0), first)


@pytest.mark.parametrize(
    ("was_saved", "has_gpu", "is_in_use", "expected"),
    [
        (True, True, True, None),
        (True, True, False, None),  # takes it when CUDA wakes up
        (True, False, False, "a GPU's was saved and this process has no GPU"),
        (False, True, True, "none was saved for a GPU"),
        (False, True, False, None),
        (False, False, False, None),
    ],
)
def test_what_a_process_with_other_gpus_leaves(was_saved, has_gpu, is_in_use, expected):
    line = gpu_difference(was_saved=was_saved, has_gpu=has_gpu, is_in_use=is_in_use)
    assert line is None if expected is None else expected in line


def snapshot(model: nn.Module) -> dict:
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_another_model_is_left_as_it_was(tmp_path, make_generator, net):
    save(tmp_path / "c", model=net)
    other = Net(make_generator(2))
    other.inner = nn.Linear(16, 8)
    other.added = nn.Linear(2, 2)
    del other.norm
    before = snapshot(other)
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path / "c").restore(model=other)
    for part in (
        "does not fit the model, which is unchanged",
        "of another shape: inner.",
        "inner.weight: saved [16, 16], model [8, 16]",
        "inner.bias: saved [16], model [8]",
        "not in the checkpoint: added.weight, added.bias",
        "not in the model: norm.bias, norm.weight",
    ):
        assert part in str(caught.value)
    assert_same(snapshot(other), before)


def test_dtype_must_match_unless_asked(tmp_path, make_generator, net):
    save(tmp_path / "c", model=net)
    other = Net(make_generator(2), torch.bfloat16)
    with pytest.raises(
        CheckpointError, match=r"of another dtype: .*saved torch.float32, model torch.bfloat16.*strict=False"
    ):
        load(tmp_path / "c").restore(model=other)
    notes = load(tmp_path / "c").restore(model=other, strict=False)
    assert len(notes) == 1
    assert torch.equal(other.inner.weight, net.inner.weight.bfloat16())


def test_other_names_load_what_fits_when_asked(tmp_path, make_generator, net):
    save(tmp_path / "c", model=net)
    other = Net(make_generator(2))
    del other.norm
    other.added = nn.Linear(2, 2)
    notes = load(tmp_path / "c").restore(model=other, strict=False)
    assert sorted(notes) == [
        "not in the checkpoint: added.weight, added.bias",
        "not in the model: norm.bias, norm.weight",
    ]
    assert torch.equal(other.inner.weight, net.inner.weight)


def test_a_wrapper_is_recognised_by_its_prefix(tmp_path, make_generator, net):
    save(tmp_path / "c", model=net)
    wrapped = nn.ModuleDict({"module": Net(make_generator(2))})
    with pytest.raises(CheckpointError, match=r"the model's names begin with 'module\.', which a wrapper adds"):
        load(tmp_path / "c").restore(model=wrapped)
    save(tmp_path / "w", model=wrapped)
    with pytest.raises(CheckpointError, match=r"the saved names begin with 'module\.'"):
        load(tmp_path / "w").restore(model=net)


def test_a_model_without_memory_is_refused(tmp_path, make_generator, net):
    save(tmp_path / "c", model=net)
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(2, 2))
    save(tmp_path / "s", model=nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(CheckpointError, match="on the meta device; materialise"):
        load(tmp_path / "s").restore(model=empty)


class Counter:
    """An object of a user's."""

    def __init__(self, state=None):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        if state == "reject":
            raise RuntimeError("cannot take it")
        self.state = state


def test_extra_objects(tmp_path, net):
    state = {"seen": 3, "window": [torch.arange(3), (1.5, None)], 4: "four"}
    save(tmp_path / "c", model=net, extra={"counter": Counter(state), "none": Counter()})
    counter, none = Counter(), Counter("other")
    load(tmp_path / "c").restore(extra={"counter": counter, "none": none})
    assert_same(counter.state, state)
    assert none.state is None


def test_an_extra_object_without_a_state_is_named(tmp_path, net):
    with pytest.raises(CheckpointError, match=r"extra\['bad'\] is a object without state_dict\(\)"):
        save(tmp_path / "c", model=net, extra={"bad": object()})
    with pytest.raises(CheckpointError, match=r"extra\.bad\.f is a builtins\.function"):
        save(tmp_path / "c", model=net, extra={"bad": Counter({"f": snapshot})})
    assert not (tmp_path / "c").exists()


def test_an_unknown_extra_names_the_nearest(tmp_path, net):
    save(tmp_path / "c", model=net, extra={"scheduler": Counter(1)})
    with pytest.raises(CheckpointError, match="unknown extra 'shceduler'; did you mean 'scheduler'"):
        load(tmp_path / "c").restore(extra={"shceduler": Counter()})


def test_an_extra_that_rejects_leaves_model_and_optimizer(tmp_path, make_generator, net):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    save(tmp_path / "c", model=net, optimizer=optimizer, extra={"a": Counter("reject")})
    other = Net(make_generator(2))
    fresh = torch.optim.SGD(other.parameters(), lr=0.25)
    before = snapshot(other)
    with pytest.raises(
        CheckpointError,
        match=r"extra\['a'\] rejects its saved state: cannot take it; model and optimizer are unchanged",
    ):
        load(tmp_path / "c").restore(model=other, optimizer=fresh, extra={"a": Counter()})
    assert_same(snapshot(other), before)
    assert fresh.param_groups[0]["lr"] == 0.25


def test_a_part_that_is_not_there_is_named(tmp_path, net):
    save(tmp_path / "c", model=net)
    optimizer = torch.optim.SGD(net.parameters())
    with pytest.raises(CheckpointError, match="holds no optimizer, only model, rng; restore without it"):
        load(tmp_path / "c").restore(model=net, optimizer=optimizer)


def test_tensors_do_not_belong_in_progress(tmp_path, net):
    with pytest.raises(
        CheckpointError, match=r"progress\.loss is a tensor; progress holds plain values: use \.item\(\)"
    ):
        save(tmp_path / "c", model=net, progress={"loss": torch.tensor(1.0)})


def test_resume_from_a_different_configuration_says_what_differs(tmp_path, net):
    saved = {"recipe": {"name": "rowwise"}, "steps": 20, "seed": 1}
    checkpoint = load(save(tmp_path / "c", model=net, config=saved))
    checkpoint.check_config(saved)
    checkpoint.check_config(saved | {"steps": 40}, ignore=frozenset({"steps"}))
    with pytest.raises(CheckpointError) as caught:
        checkpoint.check_config({"recipe": {"name": "tensorwise"}, "steps": 40, "seed": 1})
    assert "different configuration: recipe.name: saved 'rowwise', now 'tensorwise'; steps: saved 20, now 40" in str(
        caught.value
    )
    with pytest.raises(CheckpointError, match=r"configuration: steps: saved 20, now 40; resume"):
        checkpoint.check_config({"recipe": {}, "steps": 40, "seed": 1}, ignore=frozenset({"recipe"}))


def test_is_checkpoint(tmp_path, net):
    assert is_checkpoint(save(tmp_path / "c", model=net))
    assert not is_checkpoint(tmp_path)
    assert not is_checkpoint(tmp_path / "absent")
    (tmp_path / "checkpoint.json").write_text('{"format": "something else"}')
    assert not is_checkpoint(tmp_path)
