"""The operations as ``torch.library`` ops: schemas, fake implementations, torch.compile, autograd modes."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

from acceler8.formats import E4M3, E5M2
from acceler8.kernels import quantize, scaled_matmul
from acceler8.scaling import (
    GRANULARITIES,
    ROWWISE,
    TENSORWISE,
    BLOCK_1x128,
    BLOCK_128x128,
    Granularity,
    MX_1x32,
)
from tests.kernels.support import assert_same, make

ALL = list(GRANULARITIES.values())
every = pytest.mark.parametrize("granularity", ALL, ids=str)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.requires(sm=90))]
on_each_device = pytest.mark.parametrize("device", DEVICES)
TRACED = ("test_faketensor", "test_aot_dispatch_dynamic")  # there is no autograd formula to check


def opcheck(op: object, args: tuple[object, ...], checks: tuple[str, ...] = ("test_schema", *TRACED)) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # opcheck's own, from inside torch
        result = torch.library.opcheck(op, args, test_utils=checks)  # type: ignore[arg-type]
    assert set(result.values()) == {"SUCCESS"}


@on_each_device
@every
def test_opcheck_quantize(granularity, device):
    x = make("gaussian", 33, 48, torch.bfloat16).to(device)
    for rows, cols, statistics in (("E4M3", "E5M2", True), ("E4M3", "", False), ("", "E4M3", True)):
        opcheck(torch.ops.acceler8.quantize.default, (x, rows, cols, granularity.name, False, 0, statistics))


@on_each_device
def test_opcheck_quantize_delayed(device):
    x = make("gaussian", 33, 48, torch.bfloat16).to(device)
    amax, staging = torch.tensor([2.0], device=device), torch.tensor([1.0], device=device)
    for rows, cols, statistics in (("E4M3", "E5M2", True), ("E4M3", "", False), ("", "E4M3", True)):
        args = (x, amax, staging, rows, cols, False, 1, statistics)
        # not the schema check: that it maxes into staging is on purpose not declared, and its version stands still
        opcheck(torch.ops.acceler8.quantize_delayed.default, args, TRACED)
    staging = torch.tensor([1.0], device=device)
    torch.ops.acceler8.quantize_delayed.default(x, amax, staging, "E4M3", "", False, 1, False)
    assert staging.item() == x.abs().max().item()
    assert staging._version == 0


@on_each_device
@pytest.mark.parametrize(
    ("a_scales", "b_scales"),
    [(TENSORWISE, TENSORWISE), (ROWWISE, ROWWISE), (BLOCK_1x128, BLOCK_128x128), (MX_1x32, MX_1x32)],
)
def test_opcheck_scaled_matmul(a_scales, b_scales, device):
    a, _, _ = quantize(make("gaussian", 17, 128, torch.bfloat16).to(device), E4M3, None, a_scales)
    b, _, _ = quantize(make("gaussian", 32, 128, torch.bfloat16).to(device), E4M3, None, b_scales)
    for bias in (None, torch.ones(32, device=device)):
        args = (a.codes, a.scale_inv, b.codes, b.scale_inv, bias, a_scales.name, b_scales.name, torch.bfloat16, False)
        # the schema check compares inputs with allclose, which torch 2.13 lacks for FP8 on a CPU
        opcheck(torch.ops.acceler8.scaled_matmul.default, args, TRACED)


@on_each_device
@pytest.mark.parametrize("gradient", [False, True])
def test_opcheck_cross_entropy(gradient, device):
    x = make("gaussian", 9, 130, torch.bfloat16).to(device)
    labels = torch.arange(9, device=device)
    opcheck(torch.ops.acceler8.cross_entropy_.default, (x, labels, -100, 0.1, 2.0, 30.0, gradient))


def product(x: Tensor, w: Tensor, granularity: Granularity, w_granularity: Granularity) -> tuple[Tensor, ...]:
    a, a_cols, packed = quantize(x, E4M3, E5M2, granularity, statistics=True)
    b, _, _ = quantize(w, E4M3, None, w_granularity, pow2=True)
    assert a is not None
    assert a_cols is not None
    assert b is not None
    assert packed is not None
    y = scaled_matmul(a, b, out_dtype=x.dtype, bias=w.new_ones(w.shape[0]))
    return y + x.new_ones(()), a_cols.dequantize(x.shape[0]), packed


@on_each_device
@pytest.mark.parametrize("dynamic", [False, True])
@every
def test_compiles_whole_and_computes_the_same(granularity, dynamic, device):
    of_w = BLOCK_128x128 if granularity is BLOCK_1x128 else granularity
    if granularity is BLOCK_128x128:
        granularity, of_w = BLOCK_1x128, BLOCK_1x128
    torch._dynamo.reset()
    compiled = torch.compile(product, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for tokens in (17, 40) if dynamic else (17,):
        x = make("gaussian", tokens, 128, torch.bfloat16, seed=tokens).to(device)
        w = make("gaussian", 32, 128, torch.bfloat16, seed=1).to(device)
        for got, expected in zip(compiled(x, w, granularity, of_w), product(x, w, granularity, of_w), strict=True):
            assert got.shape == expected.shape
            assert got.dtype == expected.dtype
            assert torch.equal(got, expected)


@on_each_device
def test_delayed_scaling_compiles_whole_and_stages(device):
    """Staging is a view of a larger state, changed in place: what compile must not drop or copy."""

    def step(x: Tensor, state: Tensor) -> Tensor:
        q, _, _ = quantize(x, E4M3, E4M3, TENSORWISE, amax=state[1, 2:3], staging=state[0, 2:3])
        assert q is not None
        return q.dequantize()

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    x = make("gaussian", 32, 48, torch.float32).to(device)
    states = [torch.zeros(3, 4, device=device) for _ in range(2)]
    for state in states:
        state[1, 2] = 2.0
    for scale in (1.0, 4.0, 0.5):
        got, expected = compiled(x * scale, states[0]), step(x * scale, states[1])
        assert torch.equal(got, expected)
        assert torch.equal(states[0], states[1])
    assert states[0][0, 2].item() == (4 * x).abs().max().item()
    assert states[0].count_nonzero().item() == 2


@pytest.mark.slow  # needs a C++ compiler, and its time
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
def test_inductor_compiles_it_too():
    torch._dynamo.reset()
    compiled = torch.compile(product, fullgraph=True)
    x, w = make("gaussian", 17, 64, torch.float32), make("gaussian", 32, 64, torch.float32)
    for got, expected in zip(compiled(x, w, ROWWISE, ROWWISE), product(x, w, ROWWISE, ROWWISE), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_autograd_modes_change_nothing(mode):
    x = make("gaussian", 33, 48, torch.bfloat16)
    expected = quantize(x, E4M3, E5M2, ROWWISE)
    with mode():
        for q, e in zip(quantize(x, E4M3, E5M2, ROWWISE)[:2], expected[:2], strict=True):
            assert_same(q, e.codes, e.scale_inv, mode.__name__)


def test_the_meta_device_knows_shapes():
    x = torch.empty(100, 72, device="meta", dtype=torch.bfloat16)
    w = torch.empty(32, 72, device="meta", dtype=torch.bfloat16)
    for granularity in ALL[:2] + ALL[4:]:
        a, cols, packed = quantize(x, E4M3, E5M2, granularity, statistics=True)
        b, _, _ = quantize(w, E4M3, None, granularity)
        real = quantize(torch.ones(100, 72), E4M3, E5M2, granularity, statistics=True)
        for fake, q in ((a, real[0]), (cols, real[1])):
            assert (fake.codes.shape, fake.codes.dtype) == (q.codes.shape, q.codes.dtype)
            assert (fake.scale_inv.shape, fake.scale_inv.dtype) == (q.scale_inv.shape, q.scale_inv.dtype)
        assert packed.shape == real[2].shape
        assert scaled_matmul(a, b, out_dtype=torch.float32).shape == (100, 32)
