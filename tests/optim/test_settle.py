"""State follows its parameter: formats of a step are those of what is stored, in its order of memory, on its device."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from acceler8 import Accelerator
from acceler8.errors import DtypeError, HardwareError
from acceler8.kernels.adam import MASTER_FORMATS, MOMENT_FORMATS
from acceler8.optim import AdamW
from acceler8.optim.base import _gradient
from tests.optim.support import Net, same, train

B, F = torch.bfloat16, torch.float32
STORED = {"fp32": F, "bf16": B, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}
CHANNELS_LAST = torch.channels_last


class Recorder(AdamW):
    """Keeps the rows of its last step."""

    def update(self, device, rows):
        self.rows = rows
        super().update(device, rows)


def assert_formats_are_those_stored(optimizer: Recorder) -> None:
    for row in optimizer.rows:
        first, second = row.formats.moments
        assert row.state["exp_avg"].dtype is STORED[first]
        assert row.state["exp_avg_sq"].dtype is (torch.uint8 if second == "fp8" else STORED[second])
        assert ("exp_avg_scale" in row.state) == (first in ("fp16", "fp8"))
        assert ("exp_avg_sq_scale" in row.state) == (second in ("fp16", "fp8"))
        assert optimizer.formats_of(row.owner) == row.formats


@pytest.mark.parametrize("is_named", [False, True])
@pytest.mark.parametrize("saved_by", [torch.optim.AdamW, AdamW])
def test_names_that_were_saved_do_not_change_formats(saved_by, is_named):
    net = Net()
    options = {"moments": "fp8"} if saved_by is AdamW else {}
    before = saved_by(net.parameters() if is_named else net.named_parameters(), lr=1e-2, **options)
    train(net, before, range(2))
    after = Recorder(net.named_parameters() if is_named else net.parameters(), moments="fp8")
    own = copy.deepcopy(after.param_groups[0].get("param_names"))
    after.load_state_dict(before.state_dict())
    assert after.param_groups[0].get("param_names") == own
    embedding = net.embed_tokens.weight
    assert after.state[embedding]["exp_avg"].dtype is (F if is_named else torch.float8_e4m3fn)
    train(net, after, range(2, 4))
    assert_formats_are_those_stored(after)


@pytest.mark.parametrize("now", MOMENT_FORMATS)
@pytest.mark.parametrize("before", MOMENT_FORMATS)
def test_options_that_change_after_a_step_leave_state_as_it_is_until_it_is_loaded(before, now):
    net, other = Net(), Net()
    optimizer, twin = (Recorder(n.parameters(), lr=1e-2, moments=before, quantize="all") for n in (net, other))
    train(net, optimizer, range(2))
    train(other, twin, range(2))
    optimizer.param_groups[0].update(exp_avg_format=now, exp_avg_sq_format=now)
    extra = nn.Parameter(torch.ones(4, 4))
    optimizer.add_param_group({"params": [extra]})
    train(net, optimizer, range(2, 4))
    train(other, twin, range(2, 4))
    assert_formats_are_those_stored(optimizer)
    assert same(dict(net.state_dict()), dict(other.state_dict()))
    assert {row.formats.reason for row in optimizer.rows} == ({""} if now == before else {"as its state is stored"})
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.formats_of(net.up.weight).moments == (now, now)
    assert optimizer.state[net.up.weight]["exp_avg"].dtype is STORED[now]


def test_state_of_no_format_is_refused_and_a_parameter_that_was_cast():
    net = Net(dtype=B)
    optimizer = AdamW(net.parameters(), master="bf16_remainder")
    train(net, optimizer, range(1))
    state = optimizer.state[net.up.weight]
    state["exp_avg"] = state["exp_avg"].half()
    with pytest.raises(
        DtypeError, match=r"exp_avg of a torch.bfloat16 parameter of shape \[128, 64\] is torch.float16 wi"
    ):
        train(net, optimizer, range(1))
    state["exp_avg"] = state["exp_avg"].float()
    with pytest.raises(DtypeError, match=r"master='bf16_remainder' got a float16 parameter"):
        train(net.half(), optimizer, range(1))
    train(net.float(), optimizer, range(1))
    assert "master" not in state  # a float32 parameter is its own


# -- order of memory


def convnet(memory_format: torch.memory_format = torch.contiguous_format) -> nn.Sequential:
    generator = torch.Generator().manual_seed(0)
    net = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 8, 3, padding=1))
    for p in net.parameters():
        p.data = torch.randn(p.shape, generator=generator) * 0.1
    return net.to(B).to(memory_format=memory_format)


def steps(net: nn.Module, optimizer: AdamW, which: range) -> None:
    """Steps by gradients that are each element's own, whatever its place in memory: of 4 decades, falling fast."""
    for step in which:
        for index, p in enumerate(net.parameters()):
            generator = torch.Generator().manual_seed(index)
            size = torch.randn(p.shape, generator=generator) * 10 ** torch.empty(p.shape).uniform_(
                -4, 0, generator=generator
            )
            p.grad = torch.empty_like(p).copy_(size / (1 + step))
        optimizer.step()


def weights(optimizer: AdamW) -> torch.Tensor:
    return torch.cat([w.flatten() for w in optimizer.master_weights().values()])


def assert_same_way(got: AdamW, expected: AdamW, start: torch.Tensor, is_exact: bool) -> None:
    difference, way = weights(got) - weights(expected), weights(expected) - start
    assert difference.norm() <= (0.0 if is_exact else 0.12) * way.norm()


@pytest.mark.parametrize("master", MASTER_FORMATS)
@pytest.mark.parametrize("moments", MOMENT_FORMATS)
def test_state_is_laid_out_anew_with_its_parameter(moments, master):
    """Codes in blocks become FP32 on the way, and random bits go by places in memory; all else is bit for bit."""
    is_exact = moments == "fp32" and master in ("none", "fp32", "bf16_remainder")
    options = {"lr": 2.0**-7, "moments": moments, "master": master, "quantize": "all", "weight_decay": 0.0}
    plain, moved, resumed = convnet(), convnet(), convnet(CHANNELS_LAST)
    expected, optimizer = AdamW(plain.parameters(), **options), Recorder(moved.parameters(), **options)
    start = weights(expected)
    for net, each in ((plain, expected), (moved, optimizer)):
        steps(net, each, range(4))
    # a contiguous state, loaded where parameters are channels-last
    other = Recorder(resumed.parameters(), **options)
    resumed.load_state_dict(plain.state_dict())
    other.load_state_dict(copy.deepcopy(expected.state_dict()))
    steps(resumed, other, range(4, 8))
    # laid out anew between steps, and back
    moved.to(memory_format=CHANNELS_LAST)
    steps(moved, optimizer, range(4, 6))
    for p in (moved[0].weight, moved[2].weight):
        assert not p.is_contiguous()
        for name in ("exp_avg", "exp_avg_sq", "master"):
            assert name not in optimizer.state[p] or optimizer.state[p][name].stride() == p.stride()
    assert_formats_are_those_stored(optimizer)
    moved.to(memory_format=torch.contiguous_format)
    steps(moved, optimizer, range(6, 8))
    steps(plain, expected, range(4, 8))
    assert_same_way(optimizer, expected, start, is_exact)
    assert_same_way(other, expected, start, is_exact)


def test_formats_are_found_anew_for_a_model_laid_out_before_its_first_step():
    net = convnet()
    optimizer = Recorder(net.parameters(), moments="fp8", master="fp16")
    assert optimizer.summary().rows[0].formats.moments == ("fp8", "fp8")
    steps(net.to(memory_format=CHANNELS_LAST), optimizer, range(2))
    assert_formats_are_those_stored(optimizer)
    assert optimizer.formats_of(net[0].weight) == (("fp32", "fp32"), "fp32", "not contiguous")


@pytest.mark.parametrize("master", ["none", "fp32", "bf16_remainder", "fp16"])
def test_a_channels_last_training_resumes_where_it_was(tmp_path, master):
    x = torch.randn(2, 8, 8, 8, generator=torch.Generator().manual_seed(3)).to(B).to(memory_format=CHANNELS_LAST)

    def run():
        accelerator, net = Accelerator(cpu=True), convnet(CHANNELS_LAST)
        return accelerator, *accelerator.prepare(net, AdamW(net.parameters(), lr=1e-2, master=master))

    def losses(accelerator, net, optimizer, count):
        found = []
        for _ in range(count):
            optimizer.zero_grad()
            loss = (net(x).float() - 1).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            found.append(float(loss.detach()))
        return found

    whole, resumed = run(), run()
    losses(*whole, 8)
    whole[0].save_state(str(tmp_path / "c"))
    resumed[0].load_state(str(tmp_path / "c"))
    assert losses(*resumed, 6) == losses(*whole, 6)


def test_state_that_lies_well_is_not_touched():
    net = convnet(CHANNELS_LAST)
    optimizer = AdamW(net.parameters(), master="fp32")
    steps(net, optimizer, range(1))
    optimizer.state[net[0].weight]["mine"] = torch.zeros(3)
    before = {id(t) for s in optimizer.state.values() for t in s.values()}
    steps(net, optimizer, range(1, 3))
    assert {id(t) for s in optimizer.state.values() for t in s.values()} == before


# -- whose state, and where


def test_a_parameter_that_left_its_group_is_let_go():
    p = nn.Parameter(torch.randn(128, 128))
    optimizer = AdamW([p])
    optimizer.summary()
    gone = weakref.ref(p)
    p = optimizer.param_groups[0]["params"][0] = nn.Parameter(torch.randn(128, 128))
    p.grad = torch.randn(128, 128)
    optimizer.step()
    gc.collect()
    assert gone() is None
    assert list(optimizer.state) == [p]


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq_scale", "master", "step"])
def test_state_without_memory_is_refused(name):
    p = nn.Parameter(torch.randn(128, 128).to(B))
    optimizer = AdamW([p], moments="fp8", master="fp32")
    p.grad = torch.ones_like(p)
    optimizer.step()
    state, before = optimizer.state[p], p.detach().clone()
    state[name] = state[name].to("meta")
    with pytest.raises(
        HardwareError, match=r"shape \[128, 128\]: it and the parameter are on \['cpu', 'meta'\]; allow"
    ):
        optimizer.step()
    assert torch.equal(p, before)


def test_a_gradient_on_another_device_is_refused():
    """torch lets ``p.data = p.data.cuda()`` leave one behind; between CPU and meta it does not."""
    p = torch.randn(2, 3)
    with pytest.raises(
        HardwareError, match=r"shape \[2, 3\] is on meta; allowed: cpu, where the parameter is; move mo"
    ):
        _gradient(p, torch.ones(2, 3, device="meta"), p)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a second device with memory")
@pytest.mark.parametrize("moments", MOMENT_FORMATS)
def test_state_follows_a_model_to_the_gpu_and_back(moments):
    options = {"lr": 1e-2, "moments": moments, "master": "fp32", "quantize": "all"}
    plain, moved = convnet(), convnet()
    expected, optimizer = AdamW(plain.parameters(), **options), AdamW(moved.parameters(), **options)
    for device in ("cpu", "cuda", "cpu"):
        moved.to(device)
        steps(moved, optimizer, range(2))
        steps(plain, expected, range(2))
    assert same(optimizer.state_dict()["state"], expected.state_dict()["state"])
