from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from acceler8.checkpoint import load, save
from acceler8.errors import CheckpointError
from tests.checkpoint.support import OPTIMIZERS, Factored, Net, assert_same, train_step, two_groups


@pytest.fixture
def net(make_generator):
    return Net(make_generator(1))


def trained(net, build):
    torch.manual_seed(0)
    optimizer = build(two_groups(net))
    for step in range(3):
        train_step(net, optimizer, step)
    return optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_dict_comes_back_exactly(tmp_path, make_generator, name, dtype):
    net = Net(make_generator(1), dtype)
    optimizer = trained(net, OPTIMIZERS[name])
    save(tmp_path / "c", model=net, optimizer=optimizer)
    other = Net(make_generator(2), dtype)
    fresh = OPTIMIZERS[name](two_groups(other))
    load(tmp_path / "c").restore(model=other, optimizer=fresh)
    assert_same(fresh.state_dict(), optimizer.state_dict())


def test_fp32_moments_of_bf16_weights_keep_their_bits(tmp_path, make_generator):
    net = Net(make_generator(1), torch.bfloat16)
    optimizer = trained(net, OPTIMIZERS["factored"])
    saved = copy.deepcopy(optimizer.state_dict())
    save(tmp_path / "c", model=net, optimizer=optimizer)
    fresh = Factored(two_groups(net))
    load(tmp_path / "c").restore(model=net, optimizer=fresh)
    state = fresh.state_dict()["state"]
    assert state[0]["factors"][0].dtype is torch.float32
    assert state[0]["codes"].dtype is torch.float8_e4m3fn
    assert state[0]["meta"] == {"kind": "row", "n": (1, None)}
    assert_same(state, saved["state"])
    # This is what torch's own loading does to them, and why the values are put right after it.
    plain = Factored(two_groups(net))
    plain.load_state_dict(saved)
    assert plain.state_dict()["state"][0]["codes"].dtype is torch.bfloat16


def test_before_the_first_step_there_is_no_state(tmp_path, net):
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.5)
    save(tmp_path / "c", model=net, optimizer=optimizer)
    fresh = torch.optim.AdamW(net.parameters(), lr=0.25)
    load(tmp_path / "c").restore(model=net, optimizer=fresh)
    assert_same(fresh.state_dict(), optimizer.state_dict())


def test_restoring_does_not_share_memory_between_two_runs(tmp_path, net):
    optimizer = trained(net, OPTIMIZERS["adamw"])
    checkpoint = load(save(tmp_path / "c", model=net, optimizer=optimizer))
    first, second = (OPTIMIZERS["adamw"](two_groups(net)) for _ in range(2))
    checkpoint.restore(model=net, optimizer=first)
    checkpoint.restore(model=net, optimizer=second)
    first.state[net.inner.weight]["exp_avg"].zero_()
    assert_same(second.state_dict(), optimizer.state_dict())


def test_state_follows_the_name_not_the_order(tmp_path, net):
    optimizer = trained(net, OPTIMIZERS["adamw"])
    save(tmp_path / "c", model=net, optimizer=optimizer)
    matrices, vectors = two_groups(net)
    swapped = [vectors | {"params": vectors["params"][::-1]}, matrices | {"params": matrices["params"][::-1]}]
    fresh = OPTIMIZERS["adamw"](swapped)
    load(tmp_path / "c").restore(model=net, optimizer=fresh)
    assert [group["weight_decay"] for group in fresh.param_groups] == [0.0, 0.1]
    for parameter in net.parameters():
        assert_same(fresh.state[parameter], optimizer.state[parameter])


def test_a_frozen_parameter_without_state(tmp_path, net):
    net.inner.weight.requires_grad_(False)
    optimizer = trained(net, OPTIMIZERS["adamw"])
    save(tmp_path / "c", model=net, optimizer=optimizer)
    fresh = OPTIMIZERS["adamw"](two_groups(net))
    load(tmp_path / "c").restore(model=net, optimizer=fresh)
    assert net.inner.weight not in fresh.state
    assert_same(fresh.state_dict(), optimizer.state_dict())


def test_parameter_names_given_to_torch(tmp_path, net):
    optimizer = trained(net, lambda _: torch.optim.AdamW(net.named_parameters()))
    save(tmp_path / "c", model=net, optimizer=optimizer)
    fresh = torch.optim.AdamW(net.named_parameters())
    load(tmp_path / "c").restore(model=net, optimizer=fresh)
    assert_same(fresh.state_dict(), optimizer.state_dict())


def refused(tmp_path, net, optimizer) -> str:
    """The message of a restore that must raise and change neither model nor optimizer."""
    model_before = {name: value.clone() for name, value in net.state_dict().items()}
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path / "c").restore(model=net, optimizer=optimizer)
    assert_same(optimizer.state_dict(), before)
    assert_same({name: value.clone() for name, value in net.state_dict().items()}, model_before)
    return str(caught.value)


def test_other_groups_are_an_error(tmp_path, net):
    save(tmp_path / "c", model=net, optimizer=trained(net, OPTIMIZERS["adamw"]))
    train_step(net, OPTIMIZERS["sgd"](two_groups(net)), 9)
    message = refused(tmp_path, net, torch.optim.AdamW(net.parameters()))
    assert "optimizer group 0 holds 5 parameters (embed.weight, ...); when saved, embed.weight was in" in message
    matrices, vectors = two_groups(net)
    moved = [
        matrices | {"params": [*matrices["params"], vectors["params"][0]]},
        vectors | {"params": vectors["params"][1:]},
    ]
    assert "make the groups as they were saved" in refused(tmp_path, net, torch.optim.AdamW(moved))


def test_other_parameters_are_an_error(tmp_path, net):
    save(tmp_path / "c", model=net, optimizer=trained(net, OPTIMIZERS["adamw"]))
    fewer = torch.optim.AdamW([p for name, p in net.named_parameters() if "norm" not in name])
    assert "not in the optimizer: norm.weight, norm.bias" in refused(tmp_path, net, fewer)


def test_another_class_is_an_error_unless_asked(tmp_path, net):
    save(tmp_path / "c", model=net, optimizer=trained(net, OPTIMIZERS["adamw"]))
    message = refused(tmp_path, net, OPTIMIZERS["sgd"](two_groups(net)))
    assert "holds the state of torch.optim.adamw.AdamW, the optimizer is torch.optim.sgd.SGD" in message
    adam = torch.optim.Adam(two_groups(net))
    load(tmp_path / "c").restore(model=net, optimizer=adam, strict=False)
    assert adam.state[net.inner.weight]["step"] == 3


def test_a_renamed_model_is_recognised(tmp_path, net):
    save(tmp_path / "c", model=net, optimizer=trained(net, OPTIMIZERS["adamw"]))
    wrapper = nn.ModuleDict({"module": net})
    message = refused(tmp_path, wrapper, OPTIMIZERS["adamw"](two_groups(net)))
    assert "the optimizer's names begin with 'module.', which a wrapper adds" in message


def test_an_optimizer_of_another_model_is_named(tmp_path, make_generator, net):
    stranger = Net(make_generator(2))
    with pytest.raises(
        CheckpointError,
        match=r"parameter 0 of optimizer group 0, shape \[11, 16\], is not one of the model's",
    ):
        save(tmp_path / "c", model=net, optimizer=torch.optim.SGD(stranger.parameters()))


def test_an_optimizer_needs_its_model(tmp_path, net):
    optimizer = trained(net, OPTIMIZERS["adamw"])
    save(tmp_path / "c", model=net, optimizer=optimizer)
    with pytest.raises(CheckpointError, match="needs model="):
        load(tmp_path / "c").restore(optimizer=optimizer)
