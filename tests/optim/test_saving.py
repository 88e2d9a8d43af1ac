"""States to and from torch, between formats, in checkpoints; and those of other optimizers, refused by name."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from acceler8 import Accelerator
from acceler8.checkpoint import load, save
from acceler8.errors import CheckpointError
from acceler8.kernels.adam import MASTER_FORMATS, MOMENT_FORMATS
from acceler8.optim import Adam, AdamW
from acceler8.optim.state import read_moment
from tests.optim.support import Net, loss_of, same, train

B = torch.bfloat16


def trained(kind, steps: int = 3, dtype: torch.dtype = torch.float32, **options):
    net = Net(dtype=dtype)
    optimizer = kind(net.parameters(), lr=1e-2, **options)
    train(net, optimizer, range(steps))
    return net, optimizer


def fp32_moments(optimizer: AdamW) -> list[list[torch.Tensor]]:
    return [[read_moment(s, moment) for moment in optimizer.MOMENTS] for s in optimizer.state.values()]


@pytest.mark.parametrize("moments", MOMENT_FORMATS)
def test_torch_loads_what_is_exported_and_goes_on(moments):
    net, optimizer = trained(AdamW, moments=moments, quantize="all")
    other = torch.optim.AdamW(net.parameters(), lr=1.0)
    exported = optimizer.export_state_dict()
    other.load_state_dict(exported)
    assert same([[s["exp_avg"], s["exp_avg_sq"]] for s in other.state.values()], fp32_moments(optimizer))
    assert other.param_groups[0]["lr"] == 1e-2
    assert set(other.param_groups[0]) == set(torch.optim.AdamW(net.parameters()).param_groups[0])
    twin = copy.deepcopy(net)
    theirs = torch.optim.AdamW(twin.parameters())
    theirs.load_state_dict(exported)
    train(twin, theirs, range(3, 4))
    train(net, optimizer, range(3, 4))
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        assert (p - q).abs().max() < 1e-6


@pytest.mark.parametrize("moments", MOMENT_FORMATS)
def test_what_torch_saved_is_taken_over(moments):
    """In FP32 exactly, else rounded once; the formats are this optimizer's own, learning rates are torch's."""
    net, theirs = trained(torch.optim.AdamW)
    ours = AdamW(net.parameters(), lr=1.0, moments=moments, quantize="all")
    ours.load_state_dict(theirs.state_dict())
    assert (ours.param_groups[0]["lr"], ours.param_groups[0]["exp_avg_format"]) == (1e-2, moments)
    for s, (m, v) in zip(theirs.state.values(), fp32_moments(ours), strict=True):
        largest_m, largest_v = s["exp_avg"].abs().max(), s["exp_avg_sq"].max()
        half_ulp = {"fp32": 0.0, "bf16": 2.0**-8, "fp16": 2.0**-11, "fp8": 2.0**-4}[moments]
        assert (m - s["exp_avg"]).abs().max() <= half_ulp * largest_m
        assert (v - s["exp_avg_sq"]).abs().max() <= half_ulp * largest_v
    assert all(s["step"] == 3 for s in ours.state.values())
    back = torch.optim.AdamW(net.parameters())
    back.load_state_dict(ours.export_state_dict())
    if moments == "fp32":
        assert same(back.state_dict(), theirs.state_dict())


@pytest.mark.parametrize("now", MOMENT_FORMATS)
@pytest.mark.parametrize("before", MOMENT_FORMATS)
def test_moments_change_format_through_fp32_and_only_once(before, now):
    net, optimizer = trained(AdamW, moments=before, quantize="all")
    other = AdamW(net.parameters(), moments=now, quantize="all")
    other.load_state_dict(optimizer.state_dict())
    if before == now or now == "fp32":
        assert same(fp32_moments(other), fp32_moments(optimizer))
    again = AdamW(net.parameters(), moments=now, quantize="all")
    again.load_state_dict(other.state_dict())
    assert same(again.state_dict()["state"], other.state_dict()["state"])
    assert all(
        s["exp_avg"].dtype is t["exp_avg"].dtype
        for s, t in zip(
            other.state.values(), trained(AdamW, moments=now, quantize="all")[1].state.values(), strict=True
        )
    )


@pytest.mark.parametrize("now", MASTER_FORMATS)
@pytest.mark.parametrize("before", MASTER_FORMATS)
def test_masters_change_format_or_are_refused(before, now):
    net, optimizer = trained(AdamW, dtype=B, master=before, quantize="all")
    other = AdamW(net.parameters(), master=now, quantize="all")
    held = {"none": False, "stochastic": False}
    if held.get(before, True) and held.get(now, True) and (before == "bf16_remainder") != (now == "bf16_remainder"):
        with pytest.raises(CheckpointError, match=rf"master={now!r}; allowed: a BF16 parameter's remainder only where"):
            other.load_state_dict(optimizer.state_dict())
        assert not other.state
        return
    other.load_state_dict(optimizer.state_dict())
    if before == now or (before, now) == ("fp16", "fp32"):
        assert same(list(other.master_weights().values()), list(optimizer.master_weights().values()))
    train(net, other, range(3, 5))  # masters that were not saved are made from the parameters
    for p in net.parameters():
        assert ("master" in other.state[p]) == held.get(now, True)


def test_masters_follow_weights_that_are_replaced_when_asked():
    for master in ("fp32", "fp16", "bf16_remainder"):
        net, optimizer = trained(AdamW, dtype=B, master=master, quantize="all")
        net.load_state_dict(Net(seed=5, dtype=B).state_dict())
        if master != "bf16_remainder":
            stale = optimizer.master_weights()[net.up.weight]
            assert (stale - net.up.weight.float()).abs().max() > 0.1
        optimizer.sync_masters()
        for p, weight in optimizer.master_weights().items():
            assert torch.equal(weight.to(B), p)


OTHERS = [
    (lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9), "the state of SGD or Muon: it holds"),
    (lambda ps: torch.optim.RMSprop(ps), "the state of RMSprop or Adadelta"),
    (lambda ps: torch.optim.Adagrad(ps), "the state of Adagrad"),
    (lambda ps: torch.optim.NAdam(ps), "the state of NAdam"),
    (lambda ps: torch.optim.Adam(ps), "holds the state of Adam; this is AdamW, whose weight decay differs"),
    (lambda ps: torch.optim.AdamW(ps, amsgrad=True), "the state of Adam or AdamW with amsgrad=True"),
    (lambda ps: Adam(ps), "holds the state of Adam; this is AdamW"),
]


@pytest.mark.parametrize(("build", "message"), OTHERS, ids=[message for _, message in OTHERS])
def test_another_optimizers_state_is_refused_by_name(build, message):
    net = Net()
    theirs = build(net.parameters())
    train(net, theirs, range(1))
    ours = AdamW(net.parameters())
    train(net, ours, range(1))
    before = copy.deepcopy(ours.state_dict())
    with pytest.raises(CheckpointError, match=message):
        ours.load_state_dict(theirs.state_dict())
    assert same(ours.state_dict(), before)


def damaged(state: dict, change) -> dict:
    state = copy.deepcopy(state)
    change(state["state"][1])
    return state


DAMAGE = [
    (
        lambda s: s.update(exp_avg=s["exp_avg"][1:]),
        r"parameter 1: exp_avg is \[127, 64\]; allowed: a tensor of the par",
    ),
    (
        lambda s: s.update(exp_avg_scale=s["exp_avg_scale"][1:]),
        r"exp_avg_scale is torch.float32 with 63 numbers; allow",
    ),
    (lambda s: s.pop("exp_avg_sq_scale"), r"exp_avg_sq is torch.uint8 without scales; allowed: float32, bfloat16"),
    (lambda s: s.pop("exp_avg"), r"the state of another optimizer: it holds \['exp_avg_scale'"),
    (lambda s: s.update(exp_avg=s["exp_avg_sq"]), r"exp_avg is torch.uint8 with scales; allowed: codes that acceler8"),
    (lambda s: s.update(step=torch.tensor(-1.0)), r"step is -1.0; allowed: finite and from 0"),
    (lambda s: s.update(qmap1=torch.ones(1)), r"the state of bitsandbytes' 8-bit optimizers"),
    (lambda s: (s.pop("exp_avg_sq_scale"), s.update(exp_avg_sq=torch.full((128, 64), -1.0))), "holds values below 0"),
]


@pytest.mark.parametrize(("change", "message"), DAMAGE, ids=[message[:40] for _, message in DAMAGE])
def test_a_damaged_state_is_refused(change, message):
    net, optimizer = trained(AdamW, moments="fp8")
    fresh = AdamW(net.parameters(), moments="fp8")
    with pytest.raises(CheckpointError, match=message):
        fresh.load_state_dict(damaged(optimizer.state_dict(), change))
    assert not fresh.state


def test_other_groups_are_refused():
    _, optimizer = trained(AdamW)
    fresh = AdamW([nn.Parameter(torch.ones(2))])
    with pytest.raises(ValueError, match=r"got groups of \[7\] parameters; this optimizer has \[1\]"):
        fresh.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("moments", MOMENT_FORMATS)
@pytest.mark.parametrize("master", MASTER_FORMATS)
def test_a_checkpoint_holds_the_codes(tmp_path, moments, master):
    net, optimizer = trained(AdamW, dtype=B, moments=moments, master=master, quantize="all")
    save(tmp_path / "c", model=net, optimizer=optimizer)
    other = Net(seed=1, dtype=B)
    fresh = AdamW(other.parameters(), lr=1e-2, moments=moments, master=master, quantize="all")
    load(tmp_path / "c").restore(model=other, optimizer=fresh)
    assert same(fresh.state_dict(), optimizer.state_dict())
    train(net, optimizer, range(3, 6))
    train(other, fresh, range(3, 6))
    assert same(dict(other.state_dict()), dict(net.state_dict()))


def test_a_checkpoint_of_another_optimizer_is_refused_by_name(tmp_path):
    net, theirs = trained(torch.optim.AdamW)
    save(tmp_path / "theirs", model=net, optimizer=theirs)
    ours = AdamW(net.parameters(), moments="fp8")
    with pytest.raises(CheckpointError, match=r"holds the state of torch.optim.adamw.AdamW, the optimizer is acceler8"):
        load(tmp_path / "theirs").restore(model=net, optimizer=ours)
    load(tmp_path / "theirs").restore(model=net, optimizer=ours, strict=False)
    assert ours.state[net.up.weight]["exp_avg"].dtype is torch.float8_e4m3fn
    train(net, ours, range(3, 4))
    save(tmp_path / "ours", model=net, optimizer=ours)
    for strict in (True, False):
        with pytest.raises(CheckpointError, match=r"the codes of acceler8|holds the state of acceler8"):
            load(tmp_path / "ours").restore(model=net, optimizer=theirs, strict=strict)


def test_accelerator_prepares_saves_and_resumes_it(tmp_path):
    def run(seed: int):
        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        net = Net(seed)
        optimizer = AdamW(net.named_parameters(), lr=1e-2, moments="fp8")
        return accelerator, *accelerator.prepare(net, optimizer)

    def steps(accelerator, net, optimizer, which):
        for step in which:
            optimizer.zero_grad()
            accelerator.backward(loss_of(net, step))
            accelerator.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()

    whole = run(0)
    steps(*whole, range(3))
    whole[0].save_state(str(tmp_path / "c"))
    steps(*whole, range(3, 6))
    assert "E4M3 / 128" in str(whole[2].summary())
    resumed = run(1)
    resumed[0].load_state(str(tmp_path / "c"))
    steps(*resumed, range(3, 6))
    assert same(dict(resumed[1].state_dict()), dict(whole[1].state_dict()))
    assert same(resumed[2].state_dict(), whole[2].state_dict())
