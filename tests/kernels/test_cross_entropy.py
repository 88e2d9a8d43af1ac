"""Cross-entropy and its gradient in place: against float64 and PyTorch's own.

The same tests run on the reference (CPU), on a GPU's kernel, and, started by ``test_interpreter.py`` under
``TRITON_INTERPRET=1``, on the kernel with CPU tensors.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from acceler8.errors import DtypeError, LabelError, ShapeError
from acceler8.kernels import check_labels, cross_entropy_, cross_entropy_ref
from acceler8.kernels._cross_entropy_kernel import cross_entropy_kernel
from acceler8.kernels._triton import HAVE_TRITON, INTERPRETED, LAUNCH_OPTIONS
from tests.kernels.support import DTYPES

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{what} encountered:RuntimeWarning")
    for what in ("invalid value", "overflow", "divide by zero")
]
GPU = pytest.param("cuda", marks=pytest.mark.requires(sm=90))
on_each_device = pytest.mark.parametrize("device", ["cpu", GPU])
# one word, primes, a power of two, more than one block of 8192, and a block and one
SHAPES = [(1, 1), (3, 7), (5, 128), (4, 1009), (3, 8192), (2, 8193), (2, 20011)]
OPTIONS = [
    {},
    {"label_smoothing": 0.1},
    {"label_smoothing": 1.0},
    {"logit_scale": 0.25},
    {"softcap": 5.0},
    {"softcap": 30.0, "logit_scale": 2.0, "label_smoothing": 0.2},
]
U = 2.0**-24
# half a unit in the last place, relatively, and of what is subnormal
ROUNDING = {torch.bfloat16: (2.0**-8, 0.0), torch.float16: (2.0**-11, 2.0**-25), torch.float32: (U, 0.0)}


def data(rows: int, vocabulary: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    logits = (torch.randn(rows, vocabulary, generator=g) * 3).to(dtype)
    labels = torch.randint(0, vocabulary, (rows,), generator=g)
    if rows > 2:
        labels[1] = -100
    return logits, labels


def in_float64(logits: Tensor, labels: Tensor, options: dict[str, float]) -> tuple[Tensor, Tensor, Tensor]:
    """Losses, gradient and z by autograd, from PyTorch's cross_entropy."""
    x = logits.double().requires_grad_()
    z = x * options.get("logit_scale", 1.0)
    if cap := options.get("softcap"):
        z = cap * torch.tanh(z / cap)
    losses = F.cross_entropy(z, labels, reduction="none", label_smoothing=options.get("label_smoothing", 0.0))
    losses.sum().backward()
    return losses.detach(), x.grad, z.detach()


@on_each_device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_against_float64(options, dtype, device):
    """Bounds, with u = 2**-24. z is off by 12 u of its row's largest |z| or cap (tanh 8 u, two products). exp and log
    of FP32 are within 4 u and the rounding of their argument; a row's sum takes at most 64 additions in a row (16 in a
    thread, 14 between them, 3 blocks): the loss is off by e = u (24 |z|max + 96). A probability is off by p times that,
    the slope 1 - t**2 by 20 u; then the gradient is rounded.
    """
    relative, absolute = ROUNDING[dtype]
    for i, (rows, vocabulary) in enumerate(SHAPES):
        logits, labels = data(rows, vocabulary, dtype, i)
        want, gradient, z = in_float64(logits, labels, options)
        x = logits.to(device).clone()
        got = cross_entropy_(x, labels.to(device), **options)
        assert (got.dtype, got.shape) == (torch.float32, (rows,))
        scale = options.get("logit_scale", 1.0)
        top = torch.maximum(z.abs().amax(1), torch.tensor(options.get("softcap", 0.0), dtype=torch.float64))
        error = U * (24 * top + 96)
        assert ((got.cpu().double() - want).abs() <= error).all(), (rows, vocabulary)
        p = torch.softmax(z, 1)
        bound = scale * (p * error[:, None] + 4 * U) + (p + 1) * 20 * U * scale
        bound = bound + gradient.abs() * relative * 1.01 + absolute
        assert x.dtype is dtype
        assert ((x.cpu().double() - gradient).abs() <= bound).all(), (rows, vocabulary)


@on_each_device
def test_without_gradient_logits_stay(device):
    logits, labels = data(4, 1009, torch.bfloat16)
    x = logits.to(device)
    losses = cross_entropy_(x, labels.to(device), gradient=False)
    assert torch.equal(x.cpu(), logits)
    want = cross_entropy_ref(logits, labels, gradient=False)[0]
    torch.testing.assert_close(losses.cpu(), want, rtol=1e-6, atol=1e-6)


@on_each_device
def test_ignored_rows_are_zero_and_another_index_may_be_ignored(device):
    logits, labels = data(5, 300, torch.float32)
    labels[:] = torch.tensor([7, 7, 3, 7, 1])
    logits[0, 5] = math.nan
    x = logits.to(device)
    losses = cross_entropy_(x, labels.to(device), ignore_index=7)
    assert losses[[0, 1, 3]].tolist() == [0, 0, 0]
    assert x[[0, 1, 3]].count_nonzero() == 0
    assert (losses[[2, 4]] > 0).all()
    assert x[[2, 4]].isfinite().all()


@on_each_device
@pytest.mark.parametrize("label", [-1, 300, 2**40])
def test_a_label_outside_makes_its_row_nan_and_no_other(label, device):
    logits, labels = data(3, 300, torch.float32)
    labels[:] = torch.tensor([4, label, 299])
    x = logits.to(device)
    losses = cross_entropy_(x, labels.to(device))
    assert losses.isnan().tolist() == [False, True, False]
    assert x.isnan().all(1).tolist() == [False, True, False]
    assert not x[[0, 2]].isnan().any()


@on_each_device
def test_values_that_bite(device):
    """-inf is a probability of 0; NaN, inf and nothing but -inf make a row NaN, as in PyTorch."""
    logits, labels = data(6, 9000, torch.float32)
    labels[:] = torch.tensor([1, 2, 3, 4, 5, 6])
    logits[0, 100:] = -math.inf
    logits[1, 8500] = math.nan
    logits[2, 17] = math.inf
    logits[3] = -math.inf
    logits[4] *= 1e4
    logits[5, :8999] = -math.inf  # whole blocks of it first, also the label
    want = F.cross_entropy(logits, labels, reduction="none")
    x = logits.to(device)
    got = cross_entropy_(x, labels.to(device)).cpu()
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6, equal_nan=True)
    assert x[0, 100:].count_nonzero() == 0
    assert x[[1, 2, 3]].isnan().any(1).all()
    assert x[[0, 4]].isfinite().all()


@on_each_device
def test_a_maximum_that_rises_or_falls_from_block_to_block(device):
    up = torch.linspace(-3, 3, 20011)
    logits, labels = torch.stack([up, -up, up * 20, -up * 20]), torch.tensor([10000, 10000, 20010, 0])
    want = F.cross_entropy(logits.double(), labels, reduction="none")
    got = cross_entropy_(logits.to(device), labels.to(device)).cpu()
    torch.testing.assert_close(got.double(), want, rtol=0, atol=U * (24 * 60 + 96))


@on_each_device
def test_rows_apart_and_integer_labels_of_any_width(device):
    logits, labels = data(4, 130, torch.bfloat16)
    wide = torch.zeros(4, 200, dtype=torch.bfloat16, device=device)
    x = wide[:, 3:133].copy_(logits)
    labels[1] = 5
    losses = cross_entropy_(x, labels.to(device, torch.int32))
    want = logits.to(device).clone()
    assert torch.equal(losses, cross_entropy_(want, labels.to(device)))
    assert torch.equal(x, want)
    assert wide[:, :3].count_nonzero() + wide[:, 133:].count_nonzero() == 0
    columns = logits.to(device).t().contiguous().t()  # no kernel for those
    torch.testing.assert_close(cross_entropy_(columns, labels.to(device)), losses, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(columns, want, rtol=2**-8, atol=1e-6)


@on_each_device
def test_no_rows(device):
    x = torch.empty(0, 10, device=device)
    assert cross_entropy_(x, torch.empty(0, dtype=torch.int64, device=device)).shape == (0,)


@pytest.mark.requires(sm=90)
def test_offsets_beyond_2_to_the_31():
    rows, vocabulary = 2**31 // 128256 + 3, 128256
    x = torch.zeros(rows, vocabulary, dtype=torch.bfloat16, device="cuda")
    labels = torch.arange(rows, device="cuda")
    losses = cross_entropy_(x, labels)
    torch.testing.assert_close(losses, torch.full_like(losses, math.log(vocabulary)), rtol=1e-6, atol=0)
    assert (x[-1].argmin().item(), x[-1, rows - 1].item()) == (rows - 1, -1.0)
    assert x.sum(dtype=torch.float64).abs().item() < rows * 2**-8


@pytest.mark.skipif(not HAVE_TRITON or INTERPRETED, reason="needs the triton package, and not its interpreter")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the other tests run it here")
@pytest.mark.parametrize(("dtype", "block"), [("bf16", 8192), ("fp16", 8), ("fp32", 1)])
def test_the_kernel_compiles_for_a_gpu(dtype, block):
    """The interpreter lets types pass that the compiler does not, such as a variable whose shape changes in a loop."""
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    pointers = {"logits_ptr": f"*{dtype}", "labels_ptr": "*i64", "loss_ptr": "*fp32"}
    numbers = dict.fromkeys(("row_stride", "vocabulary", "ignored"), "i32")
    options = {"SMOOTHING": 0.1, "EVEN": 0.1, "SCALE": 2.0, "CAP": 30.0, "GRADIENT": True, "BLOCK": block}
    for chosen in (options, {**options, "SMOOTHING": 0.0, "EVEN": 0.0, "CAP": 0.0}):
        signature = {**pointers, **numbers, **dict.fromkeys(options, "constexpr")}
        source = ASTSource(cross_entropy_kernel, signature, {(6 + i,): v for i, v in enumerate(chosen.values())})
        settings = {**LAUNCH_OPTIONS, "num_warps": max(1, block // 512)}
        compiled = compile(source, target=GPUTarget("cuda", 90, 32), options=settings)
        assert "cubin" in compiled.asm


def test_errors_say_what_is_allowed():
    with pytest.raises(ShapeError, match=r"logits \(2, 3, 4\).*allowed: logits \[M, V\]"):
        cross_entropy_(torch.zeros(2, 3, 4), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ShapeError, match=r"labels \(3,\)"):
        cross_entropy_(torch.zeros(2, 3), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(DtypeError, match="labels of an integer dtype"):
        cross_entropy_(torch.zeros(2, 3), torch.zeros(2))
    with pytest.raises(LabelError, match="label 9 is outside the vocabulary; allowed: 0 to 6, and ignore_index=-100"):
        check_labels(torch.tensor([0, -100, 9]), 7, -100)
    check_labels(torch.tensor([0, -100, 6]), 7, -100)
    assert issubclass(LabelError, IndexError)  # what PyTorch raises
