"""The activation without a gate, and its backward: against float64, the cast of their own FP32 values, and each other.

The same tests run the reference on a CPU, the kernels on a GPU and, started by ``test_interpreter.py``, in Triton's
interpreter, which sees one shape of each combination.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from acceler8.errors import DtypeError, RecipeError, ShapeError
from acceler8.formats import E4M3, E5M2
from acceler8.kernels import (
    ACTIVATIONS,
    activation_backward,
    activation_backward_ref,
    activation_forward,
    activation_ref,
    dequantize,
    gated,
    quantize,
)
from acceler8.kernels._triton import INTERPRETED
from acceler8.scaling import GRANULARITIES, ROWWISE, TENSORWISE, BLOCK_1x128, Granularity
from tests.kernels.activations import SILENT_OVERFLOWS, U, bounds, near, of, some, value_and_slope
from tests.kernels.support import DTYPES, assert_same
from tests.kernels.test_library_ops import TRACED, opcheck

ALL = list(GRANULARITIES.values())
every = pytest.mark.parametrize("granularity", ALL, ids=str)
each = pytest.mark.parametrize("activation", ACTIVATIONS)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.requires(sm=90))]
on_each_device = pytest.mark.parametrize("device", DEVICES)
pytestmark = SILENT_OVERFLOWS
SHAPES = [(1, 16), (7, 48), (130, 128), (7, 250), (130, 48), (33, 21), (1, 256)]


def inputs(rows: int, features: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    """``(d_act, x)``: x over eight binades, so that every branch of f is met; zeros among them."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, features, generator=g) * 2.0 ** torch.randint(-4, 4, (rows, features), generator=g)
    x[:, ::7] = 0.0
    return torch.randn(rows, features, generator=g).to(dtype), x.to(dtype)


def fp32_of(d: Tensor, x: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """``(dx, act)`` that the operations compute, before any rounding."""
    d, x = d.float(), x.float()
    act = activation_forward(x, activation, None, None, TENSORWISE, high_precision=True)[2]
    dx = activation_backward(d, x, activation, None, None, None, TENSORWISE, high_precision=True)[3]
    assert act is not None
    assert dx is not None
    return dx.cpu(), act.cpu()


@on_each_device
@each
def test_fp32_is_within_the_bound_of_float64(activation, device):
    for seed, (rows, features) in enumerate(SHAPES[1:2] if INTERPRETED else SHAPES):
        d, x = inputs(rows, features, torch.float32, seed)
        x[0, :12] = torch.tensor([-200.0, 200, -88, 88, -17, 17, -5.9, 5.9, -1.278, -0.7518, -3e4, 3e4])
        value, slope = value_and_slope(x, activation)
        of_value, of_slope = bounds(x.double(), value, slope, activation)
        dx, act = fp32_of(d.to(device), x.to(device), activation)
        assert ((act - value).abs() <= of_value + 2.0**-140).all()
        size = d.double().abs()
        assert ((dx - d.double() * slope).abs() <= size * (of_slope + U * slope.abs()) + 2.0**-140).all()


@on_each_device
@every
@each
def test_forward_codes_are_the_cast_of_its_own_fp32(activation, granularity, device):
    index = ALL.index(granularity) + ACTIVATIONS.index(activation)
    for i, (rows, features) in enumerate(some(SHAPES, index, device)):
        dtype = DTYPES[(i + index) % 3]
        d, x = inputs(rows, features, dtype, i)
        first, second = (E4M3, E5M2) if (i + index) % 2 else (E5M2, E4M3)
        options = {"pow2": (i + index) % 3 == 0, "margin": (i + index) % 4 - 1}
        case = (rows, features, dtype, options)
        there = x.to(device)
        _, own = fp32_of(d.to(device), there, activation)
        both = activation_forward(there, activation, first, second, granularity, high_precision=True, **options)
        of(both[0], own, first, case, **options)
        of(both[1], own.t(), second, (case, "cols"), **options)
        assert torch.equal(both[2].cpu(), own.to(dtype)), case
        near(both[0], activation_ref(x, activation), first, activation, **options)
        rows_only = activation_forward(there, activation, first, None, granularity, **options)
        of(rows_only[0], own, first, (case, "rows alone"), **options)
        assert rows_only[1] is rows_only[2] is None
        cols_only = activation_forward(there, activation, None, second, granularity, **options)
        of(cols_only[1], own.t(), second, (case, "cols alone"), **options)
        assert cols_only[0] is cols_only[2] is None
        beside = torch.cat([there, torch.ones_like(there)], 1)  # a gate whose up is one
        as_gated, _, _ = gated(beside, activation, first, None, granularity, **options)
        assert_same(rows_only[0], as_gated.codes.cpu(), as_gated.scale_inv.cpu(), (case, "gated"))


@on_each_device
@every
@each
def test_backward_codes_are_the_cast_of_its_own_fp32(activation, granularity, device):
    """And the sums are those of what is cast: within what FP32 additions round, of the sum of magnitudes."""
    index = ALL.index(granularity) + ACTIVATIONS.index(activation)
    for i, (rows, features) in enumerate(some(SHAPES, index, device)):
        dtype = DTYPES[(i + index) % 3]
        d, x = inputs(rows, features, dtype, i)
        formats = (E4M3, E5M2, E4M3) if (i + index) % 2 else (E5M2, E4M3, E5M2)
        options = {"pow2": (i + index) % 3 == 0, "margin": (i + index) % 4 - 1}
        case = (rows, features, dtype, options)
        arguments = d.to(device), x.to(device), activation
        own, act = fp32_of(*arguments)
        got = activation_backward(*arguments, *formats, granularity, high_precision=True, sums=True, **options)
        for q, source, fmt in zip(got, (own, own.t(), act.t()), formats, strict=False):
            of(q, source, fmt, case, **options)
        assert torch.equal(got[3].cpu(), own.to(dtype)), case
        assert_sums(got[4], own)
        d_ref, act_ref = activation_backward_ref(d, x, activation)
        near(got[0], d_ref, formats[0], activation, **options)
        near(got[2], act_ref.t(), formats[2], activation, **options)
        for one in range(3):
            alone = activation_backward(
                *arguments, *(f if j == one else None for j, f in enumerate(formats)), granularity, **options
            )
            assert [part is not None for part in alone] == [j == one for j in range(5)]
            of(alone[one], (own, own.t(), act.t())[one], formats[one], (case, one), **options)


def assert_sums(got: Tensor | None, own: Tensor) -> None:
    """Sums over tokens of FP32 ``own``, of which each addition rounds one partial sum by U of it."""
    assert got is not None
    assert (got.dtype, got.shape) == (torch.float32, own.shape[1:])
    wide = own.double()
    allowed = max(1, own.shape[0] - 1) * U * wide.abs().sum(0)
    assert ((got.cpu() - wide.sum(0)).abs() <= allowed).all()


@on_each_device
@every
def test_sums_alone_and_of_many_tokens(granularity, device):
    """Of several tiles, the last not full; nothing else is made; again they are the same bits."""
    d, x = inputs(300, 21, torch.bfloat16)
    arguments = d.to(device), x.to(device), "gelu", None, None, None, granularity
    own, _ = fp32_of(*arguments[:3])
    alone = activation_backward(*arguments, sums=True)
    assert alone[:4] == (None,) * 4
    assert_sums(alone[4], own)
    again = activation_backward(d.to(device), x.to(device), "gelu", E4M3, E4M3, E4M3, granularity, sums=True)
    assert torch.equal(again[4], alone[4])


@on_each_device
@each
def test_act_of_the_backward_has_the_bits_of_the_forward(activation, device):
    """FP32 seen through a cast at many scales: were one bit of some act another, a code would be."""
    d, x = (t.to(device) for t in inputs(130, 128, torch.bfloat16, 3))
    for granularity in (ROWWISE, BLOCK_1x128)[: 1 if INTERPRETED else 2]:
        for margin in range(1 if INTERPRETED else 4):
            _, forward, _ = activation_forward(x, activation, None, E4M3, granularity, margin=margin)
            got = activation_backward(d, x, activation, None, None, E4M3, granularity, margin=margin)
            assert_same(got[2], forward.codes.cpu(), forward.scale_inv.cpu(), (granularity, margin))


@on_each_device
@pytest.mark.parametrize("known", [0.0, 3.0, 1e30, math.nan])
def test_delayed_scaling(known, device):
    d, x = inputs(33, 48, torch.float32)
    there = d.to(device), x.to(device)
    own, act = fp32_of(*there, "silu")
    amaxes = torch.tensor([known]), torch.tensor([2.0])
    (amax, staging), (act_amax, act_staging) = (
        (a.to(device), torch.tensor([1e-3], device=device)) for a in amaxes
    )  # fmt: skip
    of_act = {"amax": act_amax, "staging": act_staging}
    rows, cols, _ = activation_forward(there[1], "silu", E4M3, E5M2, TENSORWISE, margin=1, **of_act)
    of(rows, act, E4M3, known, amax=amaxes[1], margin=1)
    of(cols, act.t(), E5M2, known, amax=amaxes[1], margin=1)
    assert act_staging.item() == act.abs().max()
    act_staging.zero_()
    of_d = {"amax": amax, "staging": staging}
    of_act = {"act_amax": act_amax, "act_staging": act_staging}
    got = activation_backward(*there, "silu", E5M2, E4M3, E4M3, TENSORWISE, margin=1, sums=True, **of_d, **of_act)
    for q, source, fmt, a in zip(got, (own, own.t(), act.t()), (E5M2, E4M3, E4M3), amaxes[:1] * 2 + amaxes[1:],
                                 strict=False):  # fmt: skip
        of(q, source, fmt, known, amax=a, margin=1)
    assert_sums(got[4], own)
    assert staging.item() == own.abs().max()
    assert act_staging.item() == act.abs().max()
    assert torch.equal(amax.cpu().nan_to_num(-1.0), amaxes[0].nan_to_num(-1.0))
    staging.zero_()
    alone = activation_backward(*there, "silu", None, None, E4M3, TENSORWISE, **of_act)
    of(alone[2], act.t(), E4M3, "act alone", amax=amaxes[1])
    assert staging.item() == 0
    alone = activation_backward(*there, "silu", E4M3, None, None, TENSORWISE, **of_d)
    of(alone[0], own, E4M3, "d alone", amax=amaxes[0])


@on_each_device
@each
def test_huge_values_are_finite(activation, device):
    """exp, g^2 and 1.702 g overflow; f(-huge) is zero, f' is 0 or 1."""
    sizes = torch.tensor([60.0, 89.0, 200.0, 1e4, 2e19, 3e38])
    x = torch.cat([-sizes, sizes, torch.zeros(4)])[None].to(device)
    dx, act = fp32_of(torch.ones(1, 16, device=device), x, activation)
    assert torch.allclose(act[0], torch.cat([torch.zeros(6), sizes, torch.zeros(4)]), rtol=1e-6, atol=1e-20)
    assert torch.allclose(dx[0, :12], torch.cat([torch.zeros(6), torch.ones(6)]), rtol=1e-6, atol=1e-20)


@on_each_device
@each
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_element_is_visible_and_confined(activation, bad, device):
    """In ``x`` and in ``d_act``; rows beside it keep their codes, sums beside it their values."""
    d, x = inputs(7, 48, torch.float32)
    x += 0.0625
    d, x = d.to(device), x.to(device)
    clean, _, _ = activation_forward(x, activation, E4M3, None, ROWWISE)
    clean_d, *_, clean_sums = activation_backward(d, x, activation, E4M3, None, None, ROWWISE, sums=True)
    others = torch.arange(7) != 3
    y, e = x.clone(), d.clone()
    y[3, 5] = e[3, 5] = bad
    q, _, _ = activation_forward(y, activation, E4M3, None, ROWWISE)
    assert q.dequantize().isnan().nonzero().tolist() == [[3, 5]]
    assert torch.equal(q.codes.cpu().view(torch.uint8)[others], clean.codes.cpu().view(torch.uint8)[others])
    q, _, act, _, sums = activation_backward(e, x.abs(), activation, E4M3, None, E4M3, ROWWISE, sums=True)
    assert q.dequantize().isnan().nonzero().tolist() == [[3, 5]]
    assert not act.dequantize().isnan().any()
    assert (~sums.isfinite()).nonzero().tolist() == [[5]]
    q, _, act, _, sums = activation_backward(d, y, activation, E4M3, None, E4M3, ROWWISE, sums=True)
    assert torch.equal(q.codes.cpu().view(torch.uint8)[others], clean_d.codes.cpu().view(torch.uint8)[others])
    assert act.dequantize().isnan().nonzero().tolist() == [[5, 3]]
    columns = torch.arange(48) != 5
    assert torch.equal(sums.cpu()[columns], clean_sums.cpu()[columns])


@on_each_device
@every
def test_empty(granularity, device):
    x = torch.empty(0, 256, device=device)
    rows, cols, act = activation_forward(x, "silu", E4M3, E5M2, granularity, high_precision=True)
    assert (act.shape, rows.codes.shape, cols.codes.shape) == ((0, 256), (0, 256), (256, 0))
    got = activation_backward(x, x, "silu", E4M3, E5M2, E4M3, granularity, high_precision=True, sums=True)
    assert [q.codes.shape for q in got[:3]] == [(0, 256), (256, 0), (256, 0)]
    assert got[1].scale_inv.shape == granularity.scale_shape(256, 0)
    assert got[3].shape == (0, 256)
    assert torch.equal(got[4].cpu(), torch.zeros(256))


@on_each_device
def test_layouts(device):
    """Rows of x at any distance, d_act in any layout, both at odd addresses."""
    d, x = inputs(33, 48, torch.bfloat16)
    there = torch.zeros(33, 131, dtype=torch.bfloat16, device=device)[:, 1:49].copy_(x)
    expected = activation_backward(d.to(device), x.to(device), "silu", E4M3, E4M3, E4M3, ROWWISE, sums=True)
    strided = torch.zeros(33, 97, dtype=torch.bfloat16, device=device)[:, 1::2].copy_(d)
    for laid in (d.to(device), d.to(device).t().contiguous().t(), strided):
        got = activation_backward(laid, there, "silu", E4M3, E4M3, E4M3, ROWWISE, sums=True)
        for q, e in zip(got[:3], expected, strict=False):
            assert_same(q, e.codes.cpu(), e.scale_inv.cpu(), laid.stride())
        assert torch.equal(got[4], expected[4]) or device == "cpu"  # PyTorch sums another layout in another order
        assert_sums(got[4], fp32_of(d.to(device), there, "silu")[0])
    ones = torch.ones((), dtype=torch.bfloat16, device=device).expand(33, 48)
    of(activation_backward(ones, there, "relu", E4M3, None, None, ROWWISE)[0],
       activation_backward_ref(torch.ones(33, 48), x, "relu")[0], E4M3, "expanded")  # fmt: skip


@on_each_device
def test_compiles_whole_and_computes_the_same(device):
    def work(x: Tensor, d: Tensor, state: Tensor, granularity: Granularity, delayed: bool) -> tuple[Tensor, ...]:
        options = {"amax": state[0:1], "staging": state[1:2]} if delayed else {}
        more = {"act_amax": state[2:3], "act_staging": state[3:4]} if delayed else {}
        rows, cols, act = activation_forward(x, "gelu", E4M3, E5M2, granularity, high_precision=True, **options)
        a, b, c, e, sums = activation_backward(
            d, x, "gelu", E4M3, E5M2, E4M3, granularity, high_precision=True, sums=True, **options, **more
        )
        return act, e, sums, *(q.dequantize() for q in (rows, cols, a, b, c))

    d, x = (t.to(device) for t in inputs(7, 48, torch.bfloat16))
    for granularity, delayed in ((ROWWISE, False), (TENSORWISE, False), (TENSORWISE, True)):
        states = [torch.tensor([2.0, 0.0, 0.0, 0.0], device=device) for _ in range(2)]
        torch._dynamo.reset()
        compiled = torch.compile(work, fullgraph=True, backend="aot_eager")
        got, expected = compiled(x, d, states[0], granularity, delayed), work(x, d, states[1], granularity, delayed)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        assert torch.equal(*states)
        assert bool(states[0][1] > 0) == delayed


@on_each_device
@every
def test_opcheck(granularity, device):
    d, x = (t.to(device) for t in inputs(7, 250, torch.bfloat16))
    end = (granularity.name, False, 1, True)
    opcheck(torch.ops.acceler8.activation.default, (x, "silu", "E4M3", "E5M2", *end))
    for sums in (False, True):
        arguments = d, x, "silu", "E4M3", "", "E5M2", *end, sums
        opcheck(torch.ops.acceler8.activation_backward.default, arguments)
    if granularity is TENSORWISE:
        state = [torch.tensor([float(i)], device=device) for i in range(4)]
        end = (False, 1, True)
        # not the schema check: that they max into staging is on purpose not declared
        ops = torch.ops.acceler8
        opcheck(ops.activation_delayed.default, (x, *state[:2], "silu", "E4M3", "E5M2", *end), TRACED)
        arguments = d, x, *state, "silu", "E4M3", "E5M2", "E5M2", *end, True
        opcheck(ops.activation_backward_delayed.default, arguments, TRACED)


def test_rejected_with_what_is_allowed():
    x = torch.ones(4, 48)
    with pytest.raises(RecipeError, match=r"got activation 'swish'; allowed: silu, gelu, gelu_tanh, relu, quick_gelu"):
        activation_forward(x, "swish", E4M3, None, ROWWISE)
    with pytest.raises(ShapeError, match=r"got x \(2, 2, 48\); allowed: \[M, F\]; flatten"):
        activation_forward(torch.ones(2, 2, 48), "silu", E4M3, None, ROWWISE)
    with pytest.raises(ShapeError, match=r"allowed: contiguous rows.*call \.contiguous\(\) first"):
        activation_forward(torch.ones(48, 4).t(), "silu", E4M3, None, ROWWISE)
    with pytest.raises(DtypeError, match=r"x in torch.float64; allowed: bfloat16, float16, float32"):
        activation_forward(x.double(), "silu", E4M3, None, ROWWISE)
    with pytest.raises(DtypeError, match=r"d_act in torch.float64; allowed: bfloat16, float16, float32"):
        activation_backward(x.double(), x, "silu", E4M3, None, None, ROWWISE)
    with pytest.raises(DtypeError, match="asked for nothing"):
        activation_forward(x, "silu", None, None, ROWWISE)
    with pytest.raises(DtypeError, match=r"asked for nothing.*sums=True"):
        activation_backward(x, x, "silu", None, None, None, ROWWISE)
    with pytest.raises(ShapeError, match=r"d_act \(4, 32\) and x \(4, 48\); allowed: the same shape"):
        activation_backward(x[:, :32], x, "silu", E4M3, None, None, ROWWISE)
    one = torch.ones(1)
    with pytest.raises(ShapeError, match="one of dx and act; allowed: for both or neither"):
        activation_backward(x, x, "silu", E4M3, None, E4M3, TENSORWISE, amax=one, staging=one)
    with pytest.raises(ShapeError, match="with rowwise scales; allowed: tensorwise"):
        activation_forward(x, "silu", E4M3, None, ROWWISE, amax=one, staging=one)


@on_each_device
@pytest.mark.parametrize("granularity", [ROWWISE, TENSORWISE, BLOCK_1x128], ids=str)
def test_backward_reads_what_was_kept_in_fp8(granularity, device):
    """The codes of the dequantised tensor, bit for bit, whether they are read in the kernel (F a multiple of 128) or
    dequantised before it.
    """
    for i, (rows, features) in enumerate([(40, 128), (33, 256), (70, 96)]):
        for dtype in (torch.bfloat16, torch.float32):
            g = torch.Generator().manual_seed(i)
            x, d = (torch.randn(rows, features, generator=g).to(dtype).to(device) for _ in range(2))
            x[1, ::3] *= 1e3  # blocks of a row have scales of their own
            kept, _, _ = quantize(x, E4M3, None, BLOCK_1x128)
            there = dequantize(kept, features, dtype)
            options = {"kept_dtype": dtype, "high_precision": True, "sums": True}
            got = activation_backward(d, kept, "silu", E4M3, E4M3, E4M3, granularity, **options)
            want = activation_backward(d, there, "silu", E4M3, E4M3, E4M3, granularity, **options)
            for a, b in zip(got[:3], want[:3], strict=True):
                assert_same(a, b.codes.cpu(), b.scale_inv.cpu(), (rows, features, dtype))
            assert got[3].dtype is dtype
            assert torch.equal(got[3], want[3])
            assert torch.equal(got[4], want[4])


@pytest.mark.requires(sm=90)
@each
def test_wide_rows_and_many_tiles_on_a_gpu(activation):
    """What one program holds whole, and beyond; tiles enough to fill the GPU."""
    for rows, features in ((300, 5632), (130, 14336), (5, 16384), (5, 16400), (1000, 1504)):
        d, x = inputs(rows, features, torch.bfloat16)
        arguments = d.cuda(), x.cuda(), activation
        own, act = fp32_of(*arguments)
        of(activation_forward(x.cuda(), activation, E4M3, None, ROWWISE)[0], act, E4M3, (rows, features))
        for granularity in ALL:
            got = activation_backward(*arguments, E4M3, E5M2, E4M3, granularity, sums=True)
            for q, source, fmt in zip(got, (own, own.t(), act.t()), (E4M3, E5M2, E4M3), strict=False):
                of(q, source, fmt, (rows, features, str(granularity)))
            assert_sums(got[4], own)


@pytest.mark.requires(sm=90)
def test_offsets_beyond_2_to_the_31():
    rows, features = 70_000, 32_768
    x = torch.empty(rows, features, dtype=torch.bfloat16, device="cuda")
    for part in x.split(4096):
        part.normal_()
    d = torch.ones((), dtype=torch.bfloat16, device="cuda").expand(rows, features)
    some = torch.tensor([0, 1, 2**31 // features, rows - 1], device="cuda")
    whole = activation_backward(d, x, "relu", E4M3, E4M3, E4M3, BLOCK_1x128, sums=True)
    part = activation_backward(d[:4], x[some], "relu", E4M3, None, None, BLOCK_1x128)[0]
    assert torch.equal(whole[0].codes.view(torch.uint8)[some], part.codes.view(torch.uint8))
    last = activation_backward(d[-112:], x[-112:], "relu", None, E4M3, E4M3, BLOCK_1x128)
    for q, p in ((whole[1], last[1]), (whole[2], last[2])):  # 70000 = 546 * 128 + 112
        assert torch.equal(q.codes.view(torch.uint8)[:, -128:], p.codes.view(torch.uint8))
    positive = sum((part > 0).sum(0) for part in x.split(4096))
    assert torch.equal(whole[4], positive.float())
