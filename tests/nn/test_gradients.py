"""Gradients that are stored in FP8: against plain ones, through windows, and for everyone who reads ``p.grad``."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import Tensor, nn

import acceler8
from acceler8.errors import GradientError, PlanError, ShapeError
from acceler8.formats import E4M3_BLOCK, decode_blocks, encode_blocks
from acceler8.nn.gradients import (
    close_windows,
    gradient_of,
    open_windows,
    release_gradients,
    set_gradient,
    store_gradients,
    stored_gradient,
)
from acceler8.optim import AdamW
from tests.models import batch, converted


def layer(dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(70, 48).to(dtype)


def backward(linear: nn.Linear, seed: int) -> None:
    x = torch.randn(16, 70, generator=torch.Generator().manual_seed(seed)).to(linear.weight.dtype)
    linear(x).float().square().mean().backward()


def rounded(gradient: Tensor) -> Tensor:
    return decode_blocks(*encode_blocks(gradient.float(), E4M3_BLOCK), E4M3_BLOCK)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
def test_a_gradient_is_that_of_pytorch_rounded_once(dtype):
    plain, stored = layer(dtype), layer(dtype)
    store_gradients([stored.weight])
    backward(plain, 1)
    backward(stored, 1)
    assert stored.weight.grad is None
    found = gradient_of(stored.weight)
    assert torch.equal(found, rounded(plain.weight.grad))
    assert found.dtype is torch.float32
    assert torch.equal(stored.bias.grad, plain.bias.grad)
    assert gradient_of(stored.bias) is stored.bias.grad


def test_micro_batches_of_a_window_are_rounded_once():
    plain, stored = layer(), layer()
    store_gradients([stored.weight])
    opened = open_windows(stored)
    for seed in range(4):
        backward(plain, seed)
        backward(stored, seed)
        assert torch.equal(stored.weight.grad, plain.weight.grad)
        assert torch.equal(gradient_of(stored.weight), plain.weight.grad)
    close_windows(stored, opened)
    assert stored.weight.grad is None
    assert torch.equal(gradient_of(stored.weight), rounded(plain.weight.grad))


def test_without_a_window_sums_are_rounded_again_and_that_is_said():
    plain, stored = layer(torch.float32), layer(torch.float32)
    store_gradients([stored.weight])
    backward(stored, 1)
    with pytest.warns(UserWarning, match="rounds the sums to FP8 again; put the micro-batches of a step into"):
        backward(stored, 2)
    backward(stored, 3)  # said once
    backward(plain, 1)
    expected = rounded(plain.weight.grad)
    for seed in (2, 3):
        plain.zero_grad()
        backward(plain, seed)
        expected = rounded(expected + plain.weight.grad)
    assert torch.equal(gradient_of(stored.weight), expected)


def test_one_rounding_of_the_sum_beats_one_for_each_micro_batch(make_generator):
    """The figures in the module's docstring."""
    generator = make_generator(0)
    parts = [torch.randn(2**14, generator=generator).bfloat16() for _ in range(8)]
    exact = torch.stack([part.double() for part in parts]).sum(0)
    in_bf16, each = torch.zeros_like(parts[0]), rounded(parts[0])
    for part in parts:
        in_bf16 += part
    for part in parts[1:]:
        each = rounded(each + part.float())

    def error(value: Tensor) -> float:
        return float((value.double() - exact).norm() / exact.norm())

    assert error(in_bf16) == pytest.approx(0.0037, abs=0.0005)
    assert error(rounded(in_bf16)) == pytest.approx(0.026, abs=0.001)
    assert error(rounded(exact.float())) == pytest.approx(0.026, abs=0.001)
    assert error(each) == pytest.approx(0.054, abs=0.003)


@pytest.mark.parametrize("clears", ["optimizer", "set to zero", "step alone"])
def test_the_next_backward_starts_anew(clears):
    """After a step also where only ``p.grad`` is cleared by hand, which cannot be seen."""
    stored = layer()
    optimizer = AdamW(stored.parameters(), lr=0.0)
    store_gradients([stored.weight])
    backward(stored, 1)
    if clears == "step alone":
        optimizer.step()
        assert gradient_of(stored.weight) is not None  # until then
    else:
        optimizer.zero_grad(set_to_none=clears == "optimizer")
        assert gradient_of(stored.weight) is None
    stored.weight.grad = stored.bias.grad = None
    backward(stored, 2)
    other = layer()
    backward(other, 2)
    assert torch.equal(gradient_of(stored.weight), rounded(other.weight.grad))


def test_a_step_in_an_open_window_rounds_and_reads_what_added_up():
    moved = []
    for is_open in (True, False):
        stored = layer()
        optimizer = AdamW(stored.parameters(), lr=0.1, master="stochastic")
        store_gradients([stored.weight])
        opened = open_windows(stored) if is_open else []
        backward(stored, 1)
        optimizer.step()
        close_windows(stored, opened)
        moved.append(stored.weight.detach().clone())
    assert torch.equal(*moved)
    assert not torch.equal(moved[0], layer().weight)


def test_steps_read_the_codes_and_repeat_them_as_pytorchs_do():
    """The step of codes is the step of their numbers; a second step without a backward takes the same gradient."""
    stored, plain = layer(torch.float32), layer(torch.float32)
    mine, theirs = AdamW(stored.parameters(), lr=0.1), AdamW(plain.parameters(), lr=0.1)
    store_gradients([stored.weight])
    backward(stored, 1)
    backward(plain, 1)
    plain.weight.grad = rounded(plain.weight.grad)
    for _ in range(2):
        mine.step()
        theirs.step()
        assert torch.equal(stored.weight, plain.weight)


def test_an_optimizer_that_takes_plain_gradients_gets_them_decoded():
    class Sign(acceler8.optim.StateFormatsOptimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.5, "master": "none", "quantize": "matrices"})

        def update(self, device, rows):
            for row in rows:
                row.param.sub_(self.param_groups[row.group]["lr"] * row.grad.sign().to(row.param.dtype))

    stored, plain = layer(torch.float32), layer(torch.float32)
    store_gradients([stored.weight])
    for linear in (stored, plain):
        backward(linear, 1)
        Sign(linear.parameters()).step()
    same = rounded(plain.weight.grad).sign() == plain.weight.grad.sign()
    assert torch.equal(stored.weight[same], plain.weight[same])
    assert same.float().mean() > 0.99


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_an_optimizer_that_would_step_over_it_is_refused(kind):
    stored = layer()
    store_gradients([stored.weight])
    optimizer = kind(stored.parameters(), lr=0.1)
    optimizer.step()  # nothing waits
    backward(stored, 1)
    with pytest.raises(GradientError, match=r"would leave out a parameter of shape \[48, 70\].*acceler8.optim.Adam"):
        optimizer.step()
    other = kind([nn.Parameter(torch.ones(2, 2))], lr=0.1)
    other.param_groups[0]["params"][0].grad = torch.ones(2, 2)
    other.step()


def test_a_grad_scaler_is_refused():
    stored = layer(torch.float32)
    store_gradients([stored.weight])
    optimizer = AdamW(stored.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    x = torch.randn(4, 70)
    scaler.scale(stored(x).square().mean()).backward()
    before = stored.weight.detach().clone()
    with pytest.raises(GradientError, match="neither unscales nor checks; allowed: one of them; leave GradScaler out"):
        scaler.step(optimizer)
    assert torch.equal(stored.weight, before)
    scaler.unscale_(optimizer)
    with pytest.raises(GradientError, match="leave GradScaler out"):
        scaler.step(optimizer)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_sight(value):
    stored = layer(torch.float32)
    store_gradients([stored.weight])
    x = torch.ones(4, 70)
    x[0, 3] = value
    stored(x).sum().backward()
    assert gradient_of(stored.weight).isnan().any()
    AdamW(stored.parameters(), lr=0.1).step()
    assert stored.weight.isnan().any()


def test_a_gradient_can_be_set():
    stored = layer()
    store_gradients([stored.weight])
    wanted = torch.randn(48, 70, generator=torch.Generator().manual_seed(3)).bfloat16()
    set_gradient(stored.weight, wanted)
    assert torch.equal(gradient_of(stored.weight), rounded(wanted))
    with pytest.raises(GradientError, match=r"set p.grad instead"):
        set_gradient(stored.bias, stored.bias)


def test_copies_and_files_of_a_model_have_plain_gradients():
    stored = layer()
    store_gradients([stored.weight])
    backward(stored, 1)
    file = io.BytesIO()
    torch.save(stored, file)
    file.seek(0)
    for other in (copy.deepcopy(stored), torch.load(file, weights_only=False)):
        assert stored_gradient(other.weight) is None
        other.zero_grad()
        backward(other, 2)
        assert other.weight.grad is not None
    assert gradient_of(stored.weight) is not None


def test_release_gives_gradients_back():
    stored, plain = layer(), layer()
    store_gradients([stored.weight])
    backward(stored, 1)
    backward(plain, 1)
    release_gradients(stored.parameters())
    assert torch.equal(stored.weight.grad.float(), rounded(plain.weight.grad).bfloat16().float())
    stored.zero_grad()
    backward(stored, 1)
    assert torch.equal(stored.weight.grad, plain.weight.grad)


def test_a_gradient_that_is_there_is_stored():
    stored, plain = layer(), layer()
    backward(stored, 1)
    backward(plain, 1)
    store_gradients([stored.weight])
    assert stored.weight.grad is None
    assert torch.equal(gradient_of(stored.weight), rounded(plain.weight.grad))


def test_a_parameter_that_blocks_do_not_run_along_is_refused():
    with pytest.raises(ShapeError, match=r"not contiguous \(strides \[1, 4\]\)"):
        store_gradients([nn.Parameter(torch.ones(3, 4).t())])


def test_a_model_that_moved_between_backward_and_step_is_said():
    stored = layer()
    store_gradients([stored.weight])
    optimizer = AdamW(stored.parameters(), lr=0.1)
    backward(stored, 1)
    stored.weight.data = stored.weight.data[:, :64].contiguous()
    with pytest.raises(ShapeError, match=r"has shape \[48, 70\]; allowed: that of the parameter"):
        optimizer.step()


def test_a_window_of_the_model_adds_up_its_gradients():
    """``acceler8.window`` is that of gradients too."""
    model = converted(width=128, hidden=256)
    store_gradients([model.up.weight])
    with acceler8.window(model):
        for seed in (1, 2):
            model(batch(width=128, seed=seed)).square().mean().backward()
            assert model.up.weight.grad is not None
    assert model.up.weight.grad is None
    assert gradient_of(model.up.weight).norm() > 0


def test_a_captured_step_is_refused():
    model = converted(width=128, hidden=256)
    store_gradients([model.up.weight])
    with pytest.raises(PlanError, match="hooks that a graph does not replay"):
        acceler8.GraphedStep(lambda: None, model, AdamW(model.parameters()))
