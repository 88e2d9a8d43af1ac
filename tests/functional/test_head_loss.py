"""Head and loss as one operation: against float64, next to PyTorch's own head and loss in the same dtype."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import acceler8
from acceler8.errors import ConfigError, DoubleBackwardError, DtypeError, LabelError, ShapeError
from acceler8.functional import head_loss
from acceler8.functional.head_loss import chunk_size
from tests.functional.support import Largest
from tests.kernels.support import DTYPES

GPU = pytest.param("cuda", marks=pytest.mark.requires(sm=90))
each_device = pytest.mark.parametrize("device", ["cpu", GPU])
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
U = 2.0**-24


def make(
    tokens: int = 75, width: int = 24, vocabulary: int = 101, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> tuple[list[Tensor], Tensor]:
    """Leaves hidden, weight, bias that require grad, and labels, every seventh ignored."""
    g = torch.Generator().manual_seed(tokens + vocabulary)
    shapes = ((tokens, width), (vocabulary, width), (vocabulary,))
    leaves = [torch.randn(s, generator=g).to(device, dtype).requires_grad_() for s in shapes]
    labels = torch.randint(0, vocabulary, (tokens,), generator=g)
    labels[::7] = -100
    return leaves, labels.to(device)


def plainly(leaves: list[Tensor | None], labels: Tensor, **options: Any) -> Tensor:
    """The usual head and loss; in float64 the reference."""
    x, w, b = leaves
    logits = F.linear(x, w, b)
    logits = logits if logits.dtype is torch.float64 else logits.float()
    logits = logits * options.get("logit_scale", 1.0)
    if cap := options.get("softcap"):
        logits = cap * torch.tanh(logits / cap)
    items = options.get("num_items")
    loss = F.cross_entropy(
        logits, labels, ignore_index=options.get("ignore_index", -100),
        reduction="sum" if items is not None else options.get("reduction", "mean"),
        label_smoothing=options.get("label_smoothing", 0.0),
    )  # fmt: skip
    return loss if items is None else loss / items


def gradients(loss: Tensor, leaves: list[Tensor | None], upstream: float) -> list[Tensor | None]:
    loss.backward(torch.tensor(upstream, dtype=loss.dtype, device=loss.device))
    found = [None if t is None or t.grad is None else t.grad.double().cpu() for t in leaves]
    for t in leaves:
        if t is not None:
            t.grad = None
    return found


def off(got: Tensor, want: Tensor) -> float:
    return ((got.double().cpu() - want).norm() / want.norm()).item()


def compare(leaves: list[Tensor | None], labels: Tensor, upstream: float = -0.37, **options: Any) -> None:
    """Against float64: no further off than twice plain PyTorch in the same dtype, and two roundings more.

    Those are of dx: from the GEMM to its dtype as in PyTorch, and again when backward multiplies it.
    """
    wide = [None if t is None else t.detach().cpu().double().requires_grad_() for t in leaves]
    chunk = options.pop("chunk_tokens", None)
    exact = plainly(wide, labels.cpu(), **options)
    stock = plainly(leaves, labels, **options)
    ours = head_loss(leaves[0], leaves[1], labels, bias=leaves[2], chunk_tokens=chunk, **options)
    assert (ours.dtype, ours.shape) == (torch.float32, ())
    last = {torch.float32: U, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[leaves[0].dtype]
    assert off(ours, exact) <= 2 * off(stock, exact) + 8 * U
    exact_gradients = gradients(exact, wide, upstream)
    stock_gradients = gradients(stock, leaves, upstream)
    for got, plain, want in zip(gradients(ours, leaves, upstream), stock_gradients, exact_gradients, strict=True):
        assert (got is None) == (want is None)
        if got is not None:
            assert off(got, want) <= 2 * off(plain, want) + 2 * last + 8 * U


OPTIONS = [
    {},
    {"reduction": "sum"},
    {"label_smoothing": 0.1},
    {"logit_scale": 0.25, "softcap": 3.0},
    {"num_items": 61},
    {"num_items": torch.tensor(61)},
    {"num_items": torch.tensor(61.0)},
    {"ignore_index": 5, "label_smoothing": 0.3},
]


@each_device
@dtypes
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_against_float64(options, dtype, device):
    leaves, labels = make(dtype=dtype, device=device)
    if options.get("ignore_index") == 5:
        labels[::7] = 5
    for bias in (leaves[2], None):
        compare([*leaves[:2], bias], labels, chunk_tokens=32, **options)


@each_device
@dtypes
@pytest.mark.parametrize(
    ("tokens", "vocabulary", "chunk"),
    [(1, 1, None), (1, 7, 1), (64, 64, 32), (65, 127, 64), (130, 999, 128), (33, 9001, 16), (200, 50, None)],
)
def test_shapes_against_float64(tokens, vocabulary, chunk, dtype, device):
    leaves, labels = make(tokens, 16, vocabulary, dtype, device)
    labels[0] = 0
    if vocabulary == 1:  # the loss is 0, and so is every gradient
        ours = head_loss(leaves[0], leaves[1], labels)
        ours.backward()
        assert (ours.item(), leaves[0].grad.count_nonzero().item()) == (0, 0)
    else:
        compare(leaves, labels, chunk_tokens=chunk)


@each_device
def test_any_leading_dimensions_and_strides(device):
    (x, w, b), labels = make(60, device=device)
    flat = head_loss(x, w, labels, bias=b, chunk_tokens=16)
    want = gradients(flat, [x, w, b], 1.0)
    strided = x.detach().t().contiguous().t().reshape(3, 20, 24).transpose(0, 1).contiguous().transpose(0, 1)
    strided.requires_grad_()
    by_columns = w.detach().t().contiguous().t().requires_grad_()
    loss = head_loss(strided, by_columns, labels.view(3, 20), bias=b, chunk_tokens=16)
    torch.testing.assert_close(loss, flat, rtol=1e-6, atol=0)
    got = gradients(loss, [strided, by_columns, b], 1.0)
    for g, e in zip(got, want, strict=True):
        torch.testing.assert_close(g.reshape(e.shape), e, rtol=1e-5, atol=1e-6)


@each_device
@pytest.mark.parametrize("chosen", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2)])
def test_frozen_parts_get_no_gradient_and_cost_no_memory(chosen, device):
    leaves, labels = make(device=device)
    for i, t in enumerate(leaves):
        t.requires_grad_(i in chosen)
    loss = head_loss(leaves[0], leaves[1], labels, bias=leaves[2])
    assert [t is not None for t in loss.grad_fn.saved_tensors[:3]] == [i in chosen for i in range(3)]
    loss.backward()
    assert [t.grad is not None for t in leaves] == [i in chosen for i in range(3)]


@each_device
def test_without_gradients_only_the_loss(device):
    (x, w, b), labels = make(device=device)
    want = head_loss(x, w, labels, bias=b)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            got = head_loss(x, w, labels, bias=b)
        assert torch.equal(got, want)
        assert not got.requires_grad


@each_device
@dtypes
def test_backward_twice_adds_up_and_once_frees(dtype, device):
    leaves, labels = make(dtype=dtype, device=device)
    once = gradients(head_loss(leaves[0], leaves[1], labels, bias=leaves[2]), leaves, 0.5)
    loss = head_loss(leaves[0], leaves[1], labels, bias=leaves[2])
    for _ in range(2):
        (loss * 0.5).backward(retain_graph=True)
        again = [t.grad.double().cpu() for t in leaves]
        for t in leaves:
            t.grad = None
        assert all(torch.equal(a, b) for a, b in zip(again, once, strict=True))
    (loss * 0.5).backward()
    with pytest.raises(RuntimeError, match="second time"):
        (loss * 0.5).backward()


@each_device
def test_a_gradient_takes_the_memory_that_it_was_made_in(device):
    (x, w, b), labels = make(device=device)
    loss = head_loss(x, w, labels, bias=b)
    made = [t.data_ptr() for t in loss.grad_fn.saved_tensors[:3]]
    loss.backward()
    assert [t.grad.data_ptr() for t in (x, w, b)] == made


@each_device
def test_fp16_under_a_scaled_loss_loses_nothing_to_underflow(device):
    """A probability of 1/2000 over 4096 tokens is 1.2e-7, two steps of FP16 from zero; scaled later, it is not."""
    leaves, labels = make(4096, 16, 2000, torch.float16, device)
    with torch.no_grad():
        leaves[1] *= 0.05
    compare(leaves, labels, upstream=2.0**14, chunk_tokens=1024)
    wide = [t.detach().cpu().double().requires_grad_() for t in leaves]
    exact = gradients(plainly(wide, labels.cpu()), wide, 2.0**14)
    ours = gradients(head_loss(leaves[0], leaves[1], labels, bias=leaves[2]), leaves, 2.0**14)
    assert all(off(o, e) < 2**-9 for o, e in zip(ours, exact, strict=True))


@each_device
def test_the_upstream_gradient_is_not_rounded(device):
    """1.498 is 1.5 in BF16; rounded so, every element would be 0.13 % too large."""
    leaves, labels = make(dtype=torch.bfloat16, device=device)
    one, more = (
        gradients(head_loss(leaves[0], leaves[1], labels, reduction="sum"), leaves, u)[0] for u in (1.0, 1.498)
    )
    torch.testing.assert_close(more, one * 1.498, rtol=2**-8, atol=1e-6)
    mean = ((more / one)[one.abs() > 1e-2]).mean().item()  # rounding to nearest has no drift, a rounded factor has
    assert abs(mean - 1.498) < 1e-3


@each_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype, device):
    leaves, labels = make(device=device)
    narrow = [t.detach().to(dtype).requires_grad_() for t in leaves]
    with torch.autocast(device, dtype):
        loss = head_loss(leaves[0], leaves[1], labels, bias=leaves[2], chunk_tokens=32)
        mixed = head_loss(narrow[0], leaves[1], labels, bias=leaves[2], chunk_tokens=32)
    want = head_loss(narrow[0], narrow[1], labels, bias=narrow[2], chunk_tokens=32)
    assert torch.equal(loss, want)
    assert torch.equal(mixed, want)
    expected = gradients(want, narrow, 1.0)
    loss.backward()
    for t, e in zip(leaves, expected, strict=True):
        assert t.grad.dtype is torch.float32
        assert off(t.grad, e) <= (2.0**-8 if dtype is torch.bfloat16 else 2.0**-11)


@each_device
@pytest.mark.parametrize("tokens", [0, 8])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_nothing_to_learn_from(reduction, tokens, device):
    leaves, labels = make(tokens, device=device)
    labels[:] = -100
    want = plainly(leaves, labels, reduction=reduction)
    stock = gradients(want, leaves, 1.0)
    got = head_loss(leaves[0], leaves[1], labels, bias=leaves[2], reduction=reduction)
    torch.testing.assert_close(got, want, equal_nan=True)
    assert got.isnan().item() == (reduction == "mean")
    for ours, theirs in zip(gradients(got, leaves, 1.0), stock, strict=True):
        assert torch.equal(ours, theirs)
        assert ours.count_nonzero() == 0


@each_device
def test_gradients_of_micro_batches_add_up(device):
    """Sums over half the tokens each, divided by all tokens' number, are the whole batch's mean."""
    leaves, labels = make(80, device=device)
    want = gradients(head_loss(leaves[0], leaves[1], labels, bias=leaves[2]), leaves, 1.0)
    items = (labels != -100).sum()
    for half in (slice(0, 30), slice(30, 80)):
        head_loss(leaves[0][half], leaves[1], labels[half], bias=leaves[2], num_items=items).backward()
    for t, e in zip(leaves, want, strict=True):
        torch.testing.assert_close(t.grad.double().cpu(), e, rtol=1e-5, atol=1e-6)


@each_device
@pytest.mark.parametrize("of", [0, 1, 2])
def test_a_second_derivative_is_a_typed_error(of, device):
    leaves, labels = make(device=device)
    loss = head_loss(leaves[0], leaves[1], labels, bias=leaves[2])
    (gradient,) = torch.autograd.grad(loss, leaves[of], create_graph=True)
    with pytest.raises(DoubleBackwardError, match="second derivative"):
        (loss + gradient.square().sum()).backward()


@each_device
def test_the_loss_may_be_changed_in_place(device):
    leaves, labels = make(device=device)
    loss = head_loss(leaves[0], leaves[1], labels)
    loss += leaves[0].square().mean()  # as models of experts add their balance to it
    loss.backward()
    assert leaves[0].grad is not None


@each_device
@dtypes
def test_no_tensor_is_larger_than_the_logits_of_a_chunk(dtype, device):
    (x, w, _), labels = make(512, 8, 1000, dtype, device)
    with Largest() as seen:
        head_loss(x, w, labels, chunk_tokens=64).backward()
    assert seen.elements == 64 * 1000
    with Largest() as plain:
        plainly([x, w, None], labels).backward()
    assert plain.elements == 512 * 1000


def test_chunks_are_even_and_fill_a_gpu():
    assert chunk_size(16384, 32000, 2) == 4096
    assert chunk_size(16384, 128256, 2) == 1024
    assert chunk_size(16384, 262144, 4) == 1024
    assert chunk_size(5000, 32000, 2) == 2560
    assert chunk_size(0, 32000, 2) == 128
    assert chunk_size(3, 32000, 2) == 128
    for tokens in (1, 1023, 1025, 4097, 100001):
        size = chunk_size(tokens, 32000, 2)
        assert size % 128 == 0
        assert size * 32000 * 2 <= 2**28


@each_device
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, from Dynamo
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_whole_and_computes_the_same(dynamic, device):
    if dynamic and torch.__version__.startswith(("2.10.", "2.11.", "2.12.")):
        pytest.skip("this version's compiler asserts when an autograd function is given symbolic sizes")
    torch._dynamo.reset()
    compiled = torch.compile(head_loss, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for tokens in (75, 90) if dynamic else (75,):
        leaves, labels = make(tokens, device=device)
        want = head_loss(leaves[0], leaves[1], labels, bias=leaves[2], chunk_tokens=32)
        expected = gradients(want, leaves, 1.7)
        got = compiled(leaves[0], leaves[1], labels, bias=leaves[2], chunk_tokens=32)
        torch.testing.assert_close(got, want)
        for g, e in zip(gradients(got, leaves, 1.7), expected, strict=True):
            torch.testing.assert_close(g, e)


def test_labels_outside_raise_on_a_cpu():
    (x, w, _), labels = make()
    labels[3] = 101
    with pytest.raises(LabelError, match="label 101 is outside the vocabulary; allowed: 0 to 100"):
        head_loss(x, w, labels)


@pytest.mark.requires(sm=90)
def test_labels_outside_are_nan_on_a_gpu():
    (x, w, _), labels = make(device="cuda")
    labels[3] = 101
    assert math.isnan(head_loss(x, w, labels).item())


@pytest.mark.requires(sm=90)
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_nothing_waits_for_the_gpu():
    leaves, labels = make(device="cuda", dtype=torch.bfloat16)
    head_loss(leaves[0], leaves[1], labels, bias=leaves[2], chunk_tokens=32).backward()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        head_loss(leaves[0], leaves[1], labels, bias=leaves[2], chunk_tokens=32, num_items=9).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_errors_say_what_is_allowed():
    (x, w, b), labels = make()
    with pytest.raises(ShapeError, match=r"labels \(74,\); allowed: hidden \[..., D\], weight \[V, D\]"):
        head_loss(x, w, labels[1:])
    with pytest.raises(ShapeError, match=r"bias \(100,\)"):
        head_loss(x, w, labels, bias=b[1:])
    with pytest.raises(DtypeError, match=r"hidden torch.float32 and weight torch.bfloat16; allowed: the same, or auto"):
        head_loss(x, w.bfloat16(), labels)
    with pytest.raises(DtypeError, match=r"got hidden torch.float64; allowed: bf16, fp16, fp32"):
        head_loss(x.double(), w.double(), labels)
    with pytest.raises(DtypeError, match=r"labels torch.float32; allowed: an integer dtype"):
        head_loss(x, w, labels.float())
    with pytest.raises(ConfigError, match=r"reduction='none'.*allowed: reduction 'mean' or 'sum'"):
        head_loss(x, w, labels, reduction="none")
    with pytest.raises(ConfigError, match="with 'mean' only"):
        head_loss(x, w, labels, reduction="sum", num_items=3)
    for wrong in ({"label_smoothing": 1.5}, {"chunk_tokens": 0}, {"softcap": 0}):
        with pytest.raises(ConfigError, match="allowed: a label_smoothing from 0 to 1"):
            head_loss(x, w, labels, **wrong)


def test_it_is_a_public_name():
    assert acceler8.head_loss is head_loss
