"""Adam and AdamW as torch's: numbers, groups, schedulers, clipping, scaling, resuming."""

from __future__ import annotations

import copy
import io
import itertools
import math
import weakref

import pytest
import torch
from torch import nn

from acceler8 import Accelerator
from acceler8.errors import ConfigError, DtypeError, ShapeError
from acceler8.kernels.adam import MASTER_FORMATS, MOMENT_FORMATS
from acceler8.optim import Adam, AdamW, parameter_groups
from tests.optim.support import Net, loss_of, same, train

PAIRS = [(Adam, torch.optim.Adam), (AdamW, torch.optim.AdamW)]
B = torch.bfloat16


def furthest(a: nn.Module, b: nn.Module) -> float:
    parameters = a.parameters(), b.parameters()
    return max(float((p - q).detach().abs().max() / q.detach().abs().max()) for p, q in zip(*parameters, strict=True))


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
@pytest.mark.parametrize(
    "options",
    [
        {}, {"lr": 3e-3, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}, {"maximize": True},
        {"weight_decay": 0.0}, {"lr": torch.tensor(2e-3)},
    ],
    ids=["defaults", "numbers", "maximize", "no decay", "tensor lr"],
)  # fmt: skip
def test_in_fp32_it_is_torchs(device, ours, theirs, options):
    a, b = Net().to(device), Net().to(device)
    one, other = ours(a.parameters(), **options), theirs(b.parameters(), **options)
    for step in range(20):
        for net, optimizer in ((a, one), (b, other)):
            train(net, optimizer, range(step, step + 1))
        # The two round in other places, a few ulps a step of a tensor's largest weight; their gradients then differ.
        assert furthest(a, b) < 4 * (step + 1) * 2.0**-23


def test_defaults_are_torchs():
    for ours, theirs in PAIRS:
        one, other = (kind([nn.Parameter(torch.ones(2))]).defaults for kind in (ours, theirs))
        assert {key: one[key] for key in other} == other


def test_groups_and_schedulers_are_torchs():
    a, b = Net(), Net()
    optimizers = []
    for net, kind in ((a, AdamW), (b, torch.optim.AdamW)):
        matrices = [p for p in net.parameters() if p.ndim > 1]
        vectors = [p for p in net.parameters() if p.ndim < 2]
        optimizer = kind([{"params": matrices, "lr": 1e-2}], lr=1e-3)
        optimizer.add_param_group({"params": vectors, "weight_decay": 0.0})
        optimizers.append(optimizer)
    one, other = optimizers
    schedules = [torch.optim.lr_scheduler.OneCycleLR(o, max_lr=[1e-2, 2e-3], total_steps=30) for o in optimizers]
    for step in range(30):
        for net, optimizer, schedule in zip((a, b), optimizers, schedules, strict=True):
            train(net, optimizer, range(step, step + 1))
            schedule.step() if step < 29 else None
    assert one.param_groups[0]["betas"] == other.param_groups[0]["betas"] != (0.9, 0.999)  # OneCycleLR moves them
    assert furthest(a, b) < 1e-4


def test_clipping_and_closures_are_torchs():
    a, b = Net(), Net()
    for net, optimizer in ((a, AdamW(a.parameters())), (b, torch.optim.AdamW(b.parameters()))):
        train(net, optimizer, range(10), lambda _, net=net: nn.utils.clip_grad_norm_(net.parameters(), 0.05))
    assert furthest(a, b) < 1e-4
    optimizer = AdamW(a.parameters())
    assert optimizer.step(lambda: torch.tensor(3.5)).item() == 3.5


def test_a_parameter_without_gradient_is_left_alone_and_counts_its_own_steps():
    net = Net()
    optimizer = AdamW(net.parameters(), moments="fp8")
    train(net, optimizer, range(2))
    net.up.weight.requires_grad_(False)
    before = net.up.weight.clone()
    train(net, optimizer, range(2, 5))
    assert torch.equal(net.up.weight, before)
    assert optimizer.state[net.up.weight]["step"] == 2
    assert optimizer.state[net.down.weight]["step"] == 5


@pytest.mark.parametrize("moments", MOMENT_FORMATS)
@pytest.mark.parametrize("master", MASTER_FORMATS)
def test_every_format_trains(device, moments, master):
    net = Net(dtype=B).to(device)
    optimizer = AdamW(net.parameters(), lr=1e-2, moments=moments, master=master, quantize="all")
    first = train(net, optimizer, range(1))
    last = train(net, optimizer, range(1, 80))
    assert last < 0.5 * first
    assert all(p.dtype is B and p.isfinite().all() for p in net.parameters())


@pytest.mark.parametrize("moments", MOMENT_FORMATS)
@pytest.mark.parametrize("master", MASTER_FORMATS)
def test_a_resume_is_bit_for_bit(device, moments, master):
    def build(net):
        return AdamW(net.parameters(), lr=1e-2, moments=moments, master=master, quantize="all")

    whole = Net(dtype=B).to(device)
    optimizer = build(whole)
    train(whole, optimizer, range(5))
    saved = copy.deepcopy((whole.state_dict(), optimizer.state_dict()))
    train(whole, optimizer, range(5, 9))

    resumed = Net(seed=1, dtype=B).to(device)
    again = build(resumed)
    again.load_state_dict(saved[1])  # before the model, as some scripts do
    resumed.load_state_dict(saved[0])
    train(resumed, again, range(5, 9))
    assert same(dict(resumed.state_dict()), dict(whole.state_dict()))
    assert same(again.state_dict(), optimizer.state_dict())


def test_copies_and_pickles_step_as_the_original():
    net = Net(dtype=B)
    optimizer = AdamW(net.parameters(), lr=1e-2, moments="fp8", master="fp16")
    train(net, optimizer, range(3))
    twin, its = copy.deepcopy((net, optimizer))
    buffer = io.BytesIO()
    torch.save((net, optimizer), buffer)
    buffer.seek(0)
    pickled, its_own = torch.load(buffer, weights_only=False)
    for model, steps in ((net, optimizer), (twin, its), (pickled, its_own)):
        train(model, steps, range(3, 6))
    assert same(dict(twin.state_dict()), dict(net.state_dict()))
    assert same(dict(pickled.state_dict()), dict(net.state_dict()))


def test_a_scaler_unscales_and_skips_on_the_device(device):
    """GradScaler hands over its scale and what it found, and neither weights nor state nor step move on an infinity."""
    plain, scaled = Net().to(device), Net().to(device)
    one, other = (AdamW(net.parameters(), moments="fp8", quantize="all") for net in (plain, scaled))
    scaler = torch.amp.GradScaler(device, init_scale=2.0**10, growth_interval=1000)
    train(plain, one, range(3))
    for step in range(3):
        other.zero_grad()
        scaler.scale(loss_of(scaled, step)).backward()
        scaler.step(other)
        scaler.update()
    assert furthest(scaled, plain) < 1e-5
    before = copy.deepcopy((dict(scaled.state_dict()), other.state_dict()))
    other.zero_grad()
    scaler.scale(loss_of(scaled, 3)).backward()
    scaled.up.weight.grad[0, 0] = math.inf
    scaler.step(other)
    scaler.update()
    assert same((dict(scaled.state_dict()), other.state_dict()), before)
    assert scaler.get_scale() == 2.0**9


def test_fp16_under_an_accelerator_skips_a_step_and_unscales_the_others():
    accelerator = Accelerator(mixed_precision="fp16", cpu=True)
    net = Net()
    net, optimizer = accelerator.prepare(net, AdamW(net.parameters(), lr=1e-2, moments="fp8", quantize="all"))
    for step in range(4):
        optimizer.zero_grad()
        accelerator.backward(loss_of(net, step))
        if step == 2:
            net.up.weight.grad[0, 0] = math.inf
        accelerator.clip_grad_norm_(net.parameters(), 1.0)
        before = copy.deepcopy(dict(net.state_dict()))
        optimizer.step()
        assert optimizer.step_was_skipped == same(dict(net.state_dict()), before) == (step == 2)
    assert optimizer.state[net.up.weight]["step"] == 3


def test_found_inf_alone_skips(device):
    net = Net().to(device)
    optimizer = AdamW(net.parameters())
    train(net, optimizer, range(1))
    before = copy.deepcopy(optimizer.state_dict())
    optimizer.found_inf = torch.ones((), device=device)
    train(net, optimizer, range(1, 2))
    assert same(optimizer.state_dict(), before)
    optimizer.found_inf.zero_()
    train(net, optimizer, range(1, 2))
    assert optimizer.state[net.up.weight]["step"] == 2


def test_autograd_knows_that_weights_changed(device):
    """A graph that saved a weight must not run through one that an optimizer has changed since."""
    net = nn.Linear(4, 4, bias=False, device=device)
    optimizer = AdamW(net.parameters())
    loss = (net(torch.ones(2, 4, requires_grad=True, device=device)) ** 2).sum()
    loss.backward(retain_graph=True)
    version = net.weight._version
    optimizer.step()
    assert net.weight._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_gradients_and_parameters_may_lie_in_other_orders(make_generator):
    """Transposed gradients, a channels-last weight: as torch's."""
    weights = [torch.randn(8, 16, generator=make_generator(0)), torch.randn(4, 8, 3, 3, generator=make_generator(1))]
    weights[1] = weights[1].to(memory_format=torch.channels_last)
    grads = [torch.randn(16, 8, generator=make_generator(2)).t(), torch.randn(4, 8, 3, 3, generator=make_generator(3))]
    results = []
    for kind, options in ((AdamW, {"moments": "fp8"}), (AdamW, {}), (torch.optim.AdamW, {})):
        ps = [nn.Parameter(w.clone(memory_format=torch.preserve_format)) for w in weights]
        optimizer = kind(ps, lr=1e-2, **options)
        for p, g in zip(ps, grads, strict=True):
            p.grad = g.clone() if p.ndim == 4 else g
        optimizer.step()
        results.append(ps)
    for ours in results[:2]:
        for p, q in zip(ours, results[2], strict=True):
            assert (p - q).abs().max() < 1e-6


BAD = [
    ({"lr": -1.0}, ConfigError, r"lr=-1.0; allowed: from 0"),
    ({"lr": "1e-3"}, ConfigError, r"lr='1e-3'; allowed: a number from 0"),
    ({"betas": 0.9}, ConfigError, r"betas=0.9; allowed: two numbers"),
    ({"betas": (0.9,)}, ConfigError, r"betas=\(0.9,\); allowed: two numbers"),
    ({"betas": (1.0, 0.9)}, ConfigError, r"betas\[0\]=1.0; allowed: from 0 to below 1"),
    ({"eps": -1e-8}, ConfigError, r"eps=-1e-08; allowed"),
    ({"weight_decay": math.nan}, ConfigError, r"weight_decay=nan; allowed"),
    ({"lr": torch.ones(2)}, ConfigError, r"lr is a tensor of 2 elements; allowed: one"),
    ({"amsgrad": True}, ConfigError, r"amsgrad=True is not offered; allowed: False; use torch.optim.AdamW"),
    ({"differentiable": True}, ConfigError, r"differentiable=True is not offered"),
    ({"moments": "fp4"}, DtypeError, r"unknown exp_avg_format 'fp4'; did you mean 'fp[18]6?'\? valid: bf16, fp16"),
    ({"exp_avg_sq": "int8"}, DtypeError, r"unknown exp_avg_sq_format 'int8'"),
    ({"master": "remainder"}, DtypeError, r"unknown master 'remainder'; did you mean 'bf16_remainder'\?"),
    ({"quantize": "some"}, DtypeError, r"unknown quantize 'some'; valid: all, level, matrices, none"),
]


@pytest.mark.parametrize(("options", "error", "message"), BAD, ids=lambda value: str(value)[:30])
def test_what_is_wrong_is_said(options, error, message):
    with pytest.raises(error, match=message):
        AdamW([nn.Parameter(torch.ones(2, 2))], **options)


def test_a_group_takes_the_constructors_words_for_formats():
    def weight() -> nn.Parameter:
        return nn.Parameter(torch.ones(128, 128))

    optimizer = AdamW(
        [
            {"params": [weight()], "moments": "fp8"},
            {"params": [weight()], "moments": "fp16", "exp_avg": "bf16"},
            {"params": [weight()]},
        ]
    )
    optimizer.add_param_group({"params": [weight()], "exp_avg_sq": "fp8"})
    asked = [(group["exp_avg_format"], group["exp_avg_sq_format"]) for group in optimizer.param_groups]
    assert asked == [("fp8", "fp8"), ("bf16", "fp16"), ("fp32", "fp32"), ("fp32", "fp8")]
    for group in optimizer.param_groups:
        group["params"][0].grad = torch.ones(128, 128)
    optimizer.step()
    dtypes = [optimizer.state[group["params"][0]]["exp_avg"].dtype for group in optimizer.param_groups]
    assert dtypes == [torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.float32]
    net = Net()
    formats = [group["exp_avg_format"] for group in AdamW(parameter_groups(net, moments="fp8")).param_groups]
    assert set(formats) == {"fp8"}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"moments": "fp5"}, DtypeError, "unknown exp_avg_format 'fp5'"),
        ({"amsgrad": True}, ConfigError, "amsgrad=True is not offered"),
        ({"differentiable": True}, ConfigError, "differentiable=True is not offered"),
    ],
)
def test_what_is_wrong_with_a_group_is_said(options, error, message):
    p = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(error, match=message):
        AdamW([{"params": [p], **options}])
    optimizer = AdamW([nn.Parameter(torch.ones(2, 2))])
    with pytest.raises(error, match=message):
        optimizer.add_param_group({"params": [p], **options})
    assert len(optimizer.param_groups) == 1


def test_parameters_and_gradients_that_cannot_be_stepped_are_refused():
    with pytest.raises(DtypeError, match=r"master='stochastic' got a float16 parameter of shape \[2, 2\]; allowed"):
        AdamW([nn.Parameter(torch.ones(2, 2).half())], master="stochastic")
    with pytest.raises(DtypeError, match=r"a parameter of shape \[2\] is torch.complex64; allowed: float32"):
        AdamW([nn.Parameter(torch.ones(2, dtype=torch.complex64))])
    optimizer = AdamW([nn.Parameter(torch.ones(2, 2))])
    with pytest.raises(DtypeError, match="float64"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2).double())]})
    assert len(optimizer.param_groups) == 1
    embedding = nn.Embedding(4, 4, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(ShapeError, match=r"torch.sparse_coo; allowed: torch.strided; build the embedding with sparse"):
        AdamW(embedding.parameters()).step()


def test_same_numbers_on_the_gpu_as_on_the_cpu(device, make_generator):
    """Given the same gradients, whatever the formats."""
    if device == "cpu":
        pytest.skip("needs a CUDA GPU")
    shapes = [(64, 128), (130,), (3, 5, 7)]
    for moments, master in itertools.product(MOMENT_FORMATS, MASTER_FORMATS):
        generator = make_generator(0)
        ps = [torch.randn(shape, generator=generator).to(B) for shape in shapes]
        here, there = ([nn.Parameter(p.to(d)) for p in ps] for d in ("cpu", device))
        options = {"lr": 1e-2, "moments": moments, "master": master, "quantize": "all"}
        one, other = AdamW(here, **options), AdamW(there, **options)
        for _ in range(3):
            for p, q in zip(here, there, strict=True):
                p.grad = torch.randn(p.shape, generator=generator).to(B)
                q.grad = p.grad.to(device)
            one.step()
            other.step()
        assert same(one.state_dict()["state"], other.state_dict()["state"])
        assert same([p.data for p in here], [p.data for p in there])


def test_parameter_groups_of_a_model_keep_embeddings_and_heads():
    net = Net()
    groups = parameter_groups(net, lr=1e-2)
    assert [[name for name, _ in group["params"]] for group in groups] == [
        ["up.weight", "up.bias", "norm.weight", "norm.bias", "down.weight"],
        ["embed_tokens.weight", "lm_head.weight"],
    ]
    optimizer = AdamW(groups, moments="fp8")
    train(net, optimizer, range(1))
    dtypes = {name: optimizer.state[p]["exp_avg"].dtype for name, p in net.named_parameters()}
    small = torch.float8_e4m3fn
    assert [name for name, dtype in dtypes.items() if dtype is small] == ["up.weight", "down.weight"]
    named = AdamW(net.named_parameters(), moments="fp8")
    assert {name: named.formats_of(p).moments[0] for name, p in net.named_parameters()} == {
        name: "fp8" if dtype is small else "fp32" for name, dtype in dtypes.items()
    }


def test_a_step_keeps_no_gradient_and_sees_state_that_was_replaced():
    """What is kept between steps of a parameter's row is neither its gradient nor, unseen, state of before."""
    p = nn.Parameter(torch.ones(4, 128))
    optimizer = AdamW([p], lr=1e-2, moments="fp16")
    p.grad = torch.ones(4, 128)
    alive = weakref.ref(p.grad)
    optimizer.step()
    optimizer.zero_grad()
    assert alive() is None
    moment = optimizer.state[p]["exp_avg"] = torch.zeros_like(optimizer.state[p]["exp_avg"])
    p.grad = torch.ones(4, 128)
    optimizer.step()
    assert optimizer.state[p]["exp_avg"] is moment
    assert moment.count_nonzero() == moment.numel()
