"""The gated activation and its backward: against float64, against the cast of their own FP32 values, and each other.

The same tests run the reference on a CPU, the kernels on a GPU and, started by ``test_interpreter.py``, in Triton's
interpreter, which sees one shape of each combination.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from acceler8.errors import DtypeError, RecipeError, ShapeError
from acceler8.formats import E4M3, E5M2
from acceler8.kernels import (
    ACTIVATIONS,
    dequantize,
    gated,
    gated_backward,
    gated_backward_ref,
    gated_ref,
    quantize,
)
from acceler8.kernels._triton import INTERPRETED
from acceler8.scaling import GRANULARITIES, ROWWISE, TENSORWISE, BLOCK_1x128, Granularity, MX_1x32
from tests.kernels.activations import EXACT, SILENT_OVERFLOWS, U, bounds, near, of, some, value_and_slope
from tests.kernels.support import DTYPES, assert_same
from tests.kernels.test_library_ops import TRACED, opcheck

ALL = list(GRANULARITIES.values())
every = pytest.mark.parametrize("granularity", ALL, ids=str)
each = pytest.mark.parametrize("activation", ACTIVATIONS)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.requires(sm=90))]
on_each_device = pytest.mark.parametrize("device", DEVICES)
pytestmark = SILENT_OVERFLOWS
SHAPES = [(1, 16), (7, 48), (130, 128), (7, 256), (130, 48), (1, 256)]


def inputs(rows: int, features: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    """``(d_act, gate_up)``: gates over eight binades, so that every branch of f is met; zeros among them."""
    g = torch.Generator().manual_seed(seed)
    gate_up = torch.randn(rows, 2 * features, generator=g)
    gate_up[:, :features] *= 2.0 ** torch.randint(-4, 4, (rows, features), generator=g)
    gate_up[:, ::7] = 0.0
    return torch.randn(rows, features, generator=g).to(dtype), gate_up.to(dtype)


def fits(features: int, granularity: Granularity) -> bool:
    return features % granularity.contraction_multiple == 0


def exact(gate_up: Tensor, activation: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``(gate, up, f, f')`` in float64, by PyTorch's own activation and autograd."""
    gate, up = gate_up.double().chunk(2, 1)
    return gate, up, *value_and_slope(gate, activation)


def test_the_exact_gelu_tanh_is_pytorchs():
    x = torch.linspace(-10, 10, 1001, dtype=torch.float64)
    assert torch.allclose(EXACT["gelu_tanh"](x), F.gelu(x, approximate="tanh"), rtol=0, atol=1e-14)


@on_each_device
@each
def test_fp32_is_within_the_bound_of_float64(activation, device):
    for seed, (rows, features) in enumerate(SHAPES[1:2] if INTERPRETED else SHAPES):
        d, x = inputs(rows, features, torch.float32, seed)
        x[0, :12] = torch.tensor([-200.0, 200, -88, 88, -17, 17, -5.9, 5.9, -1.278, -0.7518, -3e4, 3e4])
        gate, up, value, slope = exact(x, activation)
        of_value, of_slope = bounds(gate, value, slope, activation)
        _, _, act = gated(x.to(device), activation, None, None, TENSORWISE, high_precision=True)
        assert ((act.cpu() - value * up).abs() <= of_value * up.abs() + U * (value * up).abs() + 2.0**-140).all()
        *_, got = gated_backward(
            d.to(device), x.to(device), activation, None, None, None, TENSORWISE, high_precision=True
        )
        d_gate, d_up = got.cpu().chunk(2, 1)
        d64 = d.double()
        assert ((d_up - d64 * value).abs() <= of_value * d64.abs() + U * (d64 * value).abs() + 2.0**-140).all()
        product = (d64 * up).abs()
        assert ((d_gate - d64 * up * slope).abs() <= product * (of_slope + 3 * U * slope.abs()) + 2.0**-140).all()
    assert act.dtype is torch.float32


@on_each_device
@every
@each
def test_forward_codes_are_the_cast_of_its_own_fp32(activation, granularity, device):
    index = ALL.index(granularity) + ACTIVATIONS.index(activation)
    for i, (rows, features) in enumerate(some(SHAPES, index, device)):
        dtype = DTYPES[(i + index) % 3]
        _, x = inputs(rows, features, dtype, i)
        first, second = (E4M3, E5M2) if (i + index) % 2 else (E5M2, E4M3)
        options = {"pow2": (i + index) % 3 == 0, "margin": (i + index) % 4 - 1}
        case = (rows, features, dtype, options)
        _, _, own = gated(x.float().to(device), activation, None, None, granularity, high_precision=True)
        own, there = own.cpu(), x.to(device)
        as_rows, as_cols, act = gated(there, activation, first, second, granularity, high_precision=True, **options)
        of(as_rows, own, first, case, **options)
        of(as_cols, own.t(), second, (case, "cols"), **options)
        assert torch.equal(act.cpu(), own.to(dtype)), case
        near(as_rows, gated_ref(x, activation), first, activation, **options)
        for high in (False, True):
            alone, none, act = gated(there, activation, first, None, granularity, high_precision=high, **options)
            assert none is None
            of(alone, own, first, (case, "rows alone"), **options)
            assert act is None if not high else torch.equal(act.cpu(), own.to(dtype))
        none, alone, _ = gated(there, activation, None, second, granularity, **options)
        assert none is None
        of(alone, own.t(), second, (case, "cols alone"), **options)


@on_each_device
@every
@each
def test_backward_codes_are_the_cast_of_its_own_fp32(activation, granularity, device):
    index = ALL.index(granularity) + ACTIVATIONS.index(activation)
    shapes = [s for s in (*SHAPES, (130, 256)) if fits(s[1], granularity)]
    for i, (rows, features) in enumerate(some(shapes, index, device)):
        dtype = DTYPES[(i + index) % 3]
        d, x = inputs(rows, features, dtype, i)
        formats = (E4M3, E5M2, E4M3) if (i + index) % 2 else (E5M2, E4M3, E5M2)
        options = {"pow2": (i + index) % 3 == 0, "margin": (i + index) % 4 - 1}
        case = (rows, features, dtype, options)
        arguments = d.to(device), x.to(device), activation
        wide = d.float().to(device), x.float().to(device), activation
        *_, own = gated_backward(*wide, None, None, None, granularity, high_precision=True)
        _, _, act = gated(wide[1], activation, None, None, granularity, high_precision=True)
        own, act = own.cpu(), act.cpu()
        got = gated_backward(*arguments, *formats, granularity, high_precision=True, **options)
        for q, source, fmt in zip(got, (own, own.t(), act.t()), formats, strict=False):
            of(q, source, fmt, case, **options)
        assert torch.equal(got[3].cpu(), own.to(dtype)), case
        d_ref, act_ref = gated_backward_ref(d, x, activation)
        near(got[0], d_ref, formats[0], activation, **options)
        near(got[2], act_ref.t(), formats[2], activation, **options)
        for one in range(3):
            alone = gated_backward(
                *arguments, *(f if j == one else None for j, f in enumerate(formats)), granularity, **options
            )
            assert [q is not None for q in alone] == [j == one for j in range(4)]
            of(alone[one], (own, own.t(), act.t())[one], formats[one], (case, one), **options)


@on_each_device
@each
def test_act_of_the_backward_has_the_bits_of_the_forward(activation, device):
    """FP32 seen through a cast at many scales: were one bit of some act another, a code would be."""
    d, x = inputs(130, 128, torch.bfloat16, 3)
    d, x = d.to(device), x.to(device)
    for granularity in (ROWWISE, BLOCK_1x128)[: 1 if INTERPRETED else 2]:
        for margin in range(1 if INTERPRETED else 4):
            _, forward, _ = gated(x, activation, None, E4M3, granularity, margin=margin)
            _, _, backward, _ = gated_backward(d, x, activation, None, None, E4M3, granularity, margin=margin)
            assert_same(backward, forward.codes.cpu(), forward.scale_inv.cpu(), (granularity, margin))


@on_each_device
@pytest.mark.parametrize("known", [0.0, 3.0, 1e30, math.nan])
def test_delayed_scaling(known, device):
    d, x = inputs(33, 48, torch.float32)
    there = d.to(device), x.to(device)
    for act_known in (2.0,) if INTERPRETED else (0.0, 2.0):
        amaxes = [torch.tensor([v]) for v in (known, act_known)]
        pairs = [(a.to(device), torch.tensor([1e-3], device=device)) for a in amaxes]
        _, _, act = gated(there[1], "silu", None, None, TENSORWISE, high_precision=True)
        *_, own = gated_backward(*there, "silu", None, None, None, TENSORWISE, high_precision=True)
        own, act = own.cpu(), act.cpu()
        rows, cols, _ = gated(there[1], "silu", E4M3, E5M2, TENSORWISE, margin=1, amax=pairs[1][0], staging=pairs[1][1])
        of(rows, act, E4M3, known, amax=amaxes[1], margin=1)
        of(cols, act.t(), E5M2, known, amax=amaxes[1], margin=1)
        assert pairs[1][1].item() == act.abs().max()
        pairs[1][1].zero_()
        got = gated_backward(
            *there, "silu", E5M2, E4M3, E4M3, TENSORWISE, margin=1, amax=pairs[0][0], staging=pairs[0][1],
            act_amax=pairs[1][0], act_staging=pairs[1][1],
        )  # fmt: skip
        sources, formats, known_amaxes = (own, own.t(), act.t()), (E5M2, E4M3, E4M3), (*amaxes[:1] * 2, amaxes[1])
        for q, source, fmt, amax in zip(got, sources, formats, known_amaxes, strict=False):
            of(q, source, fmt, (known, act_known), amax=amax, margin=1)
        assert pairs[0][1].item() == own.abs().max()
        assert pairs[1][1].item() == act.abs().max()
        assert torch.equal(pairs[0][0].cpu().nan_to_num(-1.0), amaxes[0].nan_to_num(-1.0))
        pairs[0][1].zero_()
        alone = gated_backward(
            *there, "silu", None, None, E4M3, TENSORWISE, act_amax=pairs[1][0], act_staging=pairs[1][1]
        )
        of(alone[2], act.t(), E4M3, "act alone", amax=amaxes[1])
        alone = gated_backward(*there, "silu", E4M3, None, None, TENSORWISE, amax=pairs[0][0], staging=pairs[0][1])
        of(alone[0], own, E4M3, "d alone", amax=amaxes[0])


@on_each_device
@each
def test_huge_gates_are_finite(activation, device):
    """exp and g^2 overflow; f(-huge) is zero, f' is 0 or 1."""
    sizes = torch.tensor([60.0, 89.0, 200.0, 1e4, 2e19, 3e38])
    gate = torch.cat([-sizes, sizes, torch.zeros(4)])
    x = torch.cat([gate, torch.ones(16)])[None].to(device)
    d = torch.ones(1, 16, device=device)
    _, _, act = gated(x, activation, None, None, TENSORWISE, high_precision=True)
    *_, got = gated_backward(d, x, activation, None, None, None, TENSORWISE, high_precision=True)
    d_gate, d_up = got.cpu().chunk(2, 1)
    expected = torch.cat([torch.zeros(6), sizes, torch.zeros(4)])
    assert torch.allclose(act.cpu()[0], expected, rtol=1e-6, atol=1e-20)
    assert torch.equal(d_up, act.cpu())
    assert torch.allclose(d_gate[0, :12], torch.cat([torch.zeros(6), torch.ones(6)]), rtol=1e-6, atol=1e-20)


@on_each_device
@each
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_element_is_visible_and_confined(activation, bad, device):
    """In ``up``, in ``gate`` and in ``d_act``; rows beside it keep their codes."""
    d, x = inputs(7, 48, torch.float32)
    x += 0.0625  # no zero gate: its product with infinity were NaN elsewhere than where it stands
    clean, _, _ = gated(x.to(device), activation, E4M3, None, ROWWISE)
    d_clean = gated_backward(d.to(device), x.to(device), activation, E4M3, None, None, ROWWISE)[0]
    others = torch.arange(7) != 3
    for column in (5, 48 + 5):
        y = x.clone()
        y[3, 5] = 1.0
        y[3, column] = bad
        q, _, _ = gated(y.to(device), activation, E4M3, None, ROWWISE)
        assert q.dequantize().isnan().nonzero().tolist() == [[3, 5]]
        assert torch.equal(q.codes.cpu().view(torch.uint8)[others], clean.codes.cpu().view(torch.uint8)[others])
        got = gated_backward(d.to(device), y.to(device), activation, E4M3, None, E4M3, ROWWISE)
        assert got[0].dequantize()[3].isnan().any()
        assert set(got[0].dequantize().isnan().nonzero()[:, 1].tolist()) <= {5, 53}
        assert torch.equal(got[0].codes.cpu().view(torch.uint8)[others], d_clean.codes.cpu().view(torch.uint8)[others])
        assert got[2].dequantize().isnan().nonzero().tolist() == [[5, 3]]
    e = d.clone()
    e[3, 5] = bad
    got = gated_backward(e.to(device), x.abs().to(device), activation, E4M3, None, None, ROWWISE)
    assert got[0].dequantize().isnan().nonzero().tolist() == [[3, 5], [3, 53]]


@on_each_device
@every
def test_empty(granularity, device):
    x, d = torch.empty(0, 512, device=device), torch.empty(0, 256, device=device)
    rows, cols, act = gated(x, "silu", E4M3, E5M2, granularity, high_precision=True)
    assert (act.shape, rows.codes.shape, cols.codes.shape) == ((0, 256), (0, 256), (256, 0))
    got = gated_backward(d, x, "silu", E4M3, E5M2, E4M3, granularity, high_precision=True)
    assert [q.codes.shape for q in got[:3]] == [(0, 512), (512, 0), (256, 0)]
    assert got[1].scale_inv.shape == granularity.scale_shape(512, 0)
    assert got[3].shape == (0, 512)


@on_each_device
def test_layouts(device):
    """Rows of gate_up at any distance, d_act in any layout, both at odd addresses; F that needs filler."""
    d, x = inputs(33, 48, torch.bfloat16)
    wide = torch.zeros(33, 131, dtype=torch.bfloat16, device=device)
    there = wide[:, 1:97].copy_(x)
    expected = gated_backward(d.to(device), x.to(device), "silu", E4M3, E4M3, E4M3, ROWWISE)
    strided = torch.zeros(33, 97, dtype=torch.bfloat16, device=device)[:, 1::2].copy_(d)
    for laid in (d.to(device), d.to(device).t().contiguous().t(), strided):
        for q, e in zip(gated_backward(laid, there, "silu", E4M3, E4M3, E4M3, ROWWISE)[:3], expected, strict=False):
            assert_same(q, e.codes.cpu(), e.scale_inv.cpu(), laid.stride())
    ones = torch.ones((), dtype=torch.bfloat16, device=device).expand(33, 48)
    of(gated_backward(ones, there, "relu", E4M3, None, None, ROWWISE)[0],
       gated_backward_ref(torch.ones(33, 48), x, "relu")[0], E4M3, "expanded")  # fmt: skip
    for features in (5, 21, 63):
        y = x[:, : 2 * features]
        rows, cols, _ = gated(y.to(device), "relu", E4M3, E5M2, ROWWISE)
        of(rows, gated_ref(y, "relu"), E4M3, features)
        of(cols, gated_ref(y, "relu").t(), E5M2, features)


@on_each_device
def test_compiles_whole_and_computes_the_same(device):
    def work(x: Tensor, d: Tensor, state: Tensor, granularity: Granularity, delayed: bool) -> tuple[Tensor, ...]:
        options = {"amax": state[0:1], "staging": state[1:2]} if delayed else {}
        more = {"act_amax": state[2:3], "act_staging": state[3:4]} if delayed else {}
        rows, cols, act = gated(x, "silu", E4M3, E5M2, granularity, high_precision=True, **options)
        a, b, c, e = gated_backward(d, x, "silu", E4M3, E5M2, E4M3, granularity, high_precision=True, **options, **more)
        return act, e, *(q.dequantize() for q in (rows, cols, a, b, c))

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
    d, x = (t.to(device) for t in inputs(7, 256, torch.bfloat16))
    end = (granularity.name, False, 1, True)
    opcheck(torch.ops.acceler8.gated.default, (x, "silu", "E4M3", "E5M2", *end))
    opcheck(torch.ops.acceler8.gated_backward.default, (d, x, "silu", "E4M3", "", "E5M2", *end))
    if granularity is TENSORWISE:
        state = [torch.tensor([float(i)], device=device) for i in range(4)]
        opcheck(
            torch.ops.acceler8.gated_backward_delayed.default,
            (d, x, *state, "silu", "E4M3", "E5M2", "E5M2", False, 1, True),
            TRACED,  # that it maxes into staging is on purpose not declared
        )


def test_rejected_with_what_is_allowed():
    x, d = torch.ones(4, 96), torch.ones(4, 48)
    with pytest.raises(RecipeError, match=r"got activation 'swish'; allowed: silu, gelu, gelu_tanh, relu, quick_gelu"):
        gated(x, "swish", E4M3, None, ROWWISE)
    with pytest.raises(ShapeError, match=r"got gate_up \(4, 95\); allowed: \[M, 2F\]"):
        gated(x[:, :95], "silu", E4M3, None, ROWWISE)
    with pytest.raises(ShapeError, match=r"allowed: contiguous rows.*call \.contiguous\(\) first"):
        gated(torch.ones(96, 4).t(), "silu", E4M3, None, ROWWISE)
    with pytest.raises(DtypeError, match=r"gate_up in torch.float64; allowed: bfloat16, float16, float32"):
        gated(x.double(), "silu", E4M3, None, ROWWISE)
    with pytest.raises(DtypeError, match="asked for nothing"):
        gated(x, "silu", None, None, ROWWISE)
    with pytest.raises(DtypeError, match="asked for nothing"):
        gated_backward(d, x, "silu", None, None, None, ROWWISE)
    with pytest.raises(ShapeError, match=r"F=48 with 1x128 scales; allowed: multiples of 128"):
        gated_backward(d, x, "silu", E4M3, None, None, BLOCK_1x128)
    with pytest.raises(ShapeError, match=r"F=48 with mx1x32 scales; allowed: multiples of 32"):
        gated_backward(d, x, "silu", E4M3, None, None, MX_1x32)
    with pytest.raises(ShapeError, match=r"d_act \(4, 32\) and gate_up \(4, 96\)"):
        gated_backward(d[:, :32], x, "silu", E4M3, None, None, ROWWISE)
    one = torch.ones(1)
    with pytest.raises(ShapeError, match="for both or neither"):
        gated_backward(d, x, "silu", E4M3, None, E4M3, TENSORWISE, amax=one, staging=one)
    with pytest.raises(ShapeError, match="with rowwise scales; allowed: tensorwise"):
        gated(x, "silu", E4M3, None, ROWWISE, amax=one, staging=one)
    with pytest.raises(ShapeError, match="got amax but no staging"):
        gated(x, "silu", E4M3, None, TENSORWISE, amax=one)


@pytest.mark.requires(sm=90)
@each
def test_wide_rows_and_many_tiles_on_a_gpu(activation):
    """What one program holds whole, and beyond; tiles enough to fill the GPU."""
    for rows, features in ((300, 5632), (130, 14336), (5, 16384), (5, 16400), (1000, 1504)):
        d, x = inputs(rows, features, torch.bfloat16)
        arguments = d.cuda(), x.cuda(), activation
        *_, act = gated(x.float().cuda(), activation, None, None, ROWWISE, high_precision=True)
        *_, own = gated_backward(
            d.float().cuda(), x.float().cuda(), activation, None, None, None, ROWWISE, high_precision=True
        )
        of(gated(x.cuda(), activation, E4M3, None, ROWWISE)[0], act.cpu(), E4M3, (rows, features))
        for granularity in (g for g in ALL if fits(features, g)):
            got = gated_backward(*arguments, E4M3, E5M2, E4M3, granularity)
            sources = (own, own.t(), act.t())
            for q, source, fmt in zip(got, sources, (E4M3, E5M2, E4M3), strict=False):
                of(q, source.cpu(), fmt, (rows, features, str(granularity)))


@on_each_device
@pytest.mark.parametrize("granularity", [ROWWISE, TENSORWISE, BLOCK_1x128], ids=str)
def test_backward_reads_what_was_kept_in_fp8(granularity, device):
    """The codes of the dequantised tensor, bit for bit, whether they are read in the kernel (F a multiple of 128) or
    dequantised before it.
    """
    for i, (rows, features) in enumerate([(40, 128), (33, 256)] + ([] if granularity is BLOCK_1x128 else [(70, 96)])):
        for dtype in (torch.bfloat16, torch.float32):
            g = torch.Generator().manual_seed(i)
            x, d = (torch.randn(rows, n, generator=g).to(dtype).to(device) for n in (2 * features, features))
            x[1, ::3] *= 1e3  # blocks of a row have scales of their own
            kept, _, _ = quantize(x, E4M3, None, BLOCK_1x128)
            there = dequantize(kept, 2 * features, dtype)
            options = {"kept_dtype": dtype, "high_precision": True}
            got = gated_backward(d, kept, "silu", E4M3, E4M3, E4M3, granularity, **options)
            want = gated_backward(d, there, "silu", E4M3, E4M3, E4M3, granularity, **options)
            for a, b in zip(got[:3], want[:3], strict=True):
                assert_same(a, b.codes.cpu(), b.scale_inv.cpu(), (rows, features, dtype))
            assert got[3].dtype is dtype
            assert torch.equal(got[3], want[3])


@pytest.mark.requires(sm=90)
def test_offsets_beyond_2_to_the_31():
    rows, features = 40_000, 32_768
    x = torch.empty(rows, 2 * features, dtype=torch.bfloat16, device="cuda")
    for part in x.split(4096):
        part.normal_()
    d = torch.ones((), dtype=torch.bfloat16, device="cuda").expand(rows, features)
    some = torch.tensor([0, 1, 2**31 // (2 * features), rows - 1], device="cuda")
    whole = gated_backward(d, x, "relu", E4M3, E4M3, E4M3, BLOCK_1x128)
    part = gated_backward(d[:4], x[some], "relu", E4M3, None, None, BLOCK_1x128)[0]
    last = gated_backward(d[-64:], x[-64:], "relu", None, E4M3, E4M3, BLOCK_1x128)
    assert torch.equal(whole[0].codes.view(torch.uint8)[some], part.codes.view(torch.uint8))
    for q, p in ((whole[1], last[1]), (whole[2], last[2])):  # 40000 = 312 * 128 + 64
        assert torch.equal(q.codes.view(torch.uint8)[:, -128:], p.codes.view(torch.uint8))
        assert torch.equal(q.scale_inv[:, -1:], p.scale_inv)
