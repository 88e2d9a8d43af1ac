"""RMSNorm and LayerNorm with codes: against float64, the plain modules, and ``quantize`` of the same y, bit for bit.

The same tests run on the reference (CPU), on a GPU's kernels, and, started by ``test_interpreter.py`` under
``TRITON_INTERPRET=1``, on the kernels with CPU tensors.
"""

from __future__ import annotations

import itertools
import math
import re
import warnings

import pytest
import torch
from torch import Tensor

from acceler8.errors import DtypeError, ShapeError
from acceler8.formats import E4M3, E5M2
from acceler8.kernels import (
    amax_ref,
    compute_amax,
    norm_backward,
    norm_backward_ref,
    norm_forward,
    norm_ref,
    quantize,
    quantize_ref,
)
from acceler8.kernels._norm_kernel import norm_forward_kernel
from acceler8.kernels._triton import HAVE_TRITON, INTERPRETED, LAUNCH_OPTIONS
from acceler8.scaling import GRANULARITIES, ROWWISE, TENSORWISE, BLOCK_1x128, BLOCK_128x128, MX_1x32
from tests.kernels.support import DATA, DTYPES, assert_same, lay_out, make

# numpy, which the interpreter computes with, reports what the hardware does in silence
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{what} encountered:RuntimeWarning")
    for what in ("invalid value", "overflow", "divide by zero")
]
GPU = pytest.param("cuda", marks=pytest.mark.requires(sm=90))
on_each_device = pytest.mark.parametrize("device", ["cpu", GPU])
kinds = pytest.mark.parametrize("kind", ["rms", "layer"])
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
SHAPES = [(1, 16), (7, 100), (130, 16), (7, 4096)] + ([] if INTERPRETED else [(130, 100), (130, 4096), (1, 272)])
IN_ROW = [ROWWISE, BLOCK_1x128, MX_1x32]
U = 2.0**-24


def close(got: Tensor, want: Tensor, bound: Tensor | float, case: object) -> None:
    """Within ``bound`` of float64, plus the rounding to got's dtype; its subnormals have an absolute error."""
    info = torch.finfo(got.dtype)
    allowed = bound + want.abs() * info.eps / 2 * 1.01 + info.smallest_normal * info.eps
    error = (got.cpu().double() - want).abs()
    assert (error <= allowed).all(), (case, (error / allowed).max())


def tensors(m: int, d: int, dtype: torch.dtype, seed: int, scale: float = 1.0) -> list[Tensor]:
    """x, weight, bias, dy on the CPU; x has a mean."""
    g = torch.Generator().manual_seed(seed)
    x = (torch.randn(m, d, generator=g) + 0.3) * scale
    weight, bias = (torch.randn(d, generator=g) * 0.5 + 1.0 for _ in range(2))
    return [t.to(dtype) for t in (x, weight, bias, torch.randn(m, d, generator=g))]


def on(device: str, *many: Tensor | None) -> list[Tensor | None]:
    return [None if t is None else t.to(device) for t in many]


@on_each_device
@kinds
@dtypes
@pytest.mark.parametrize(("with_weight", "with_bias", "offset"), [(1, 1, 0.0), (1, 0, 1.0), (0, 0, 0.0), (0, 1, 0.0)])
def test_forward_and_backward_against_float64(kind, dtype, with_weight, with_bias, offset, device):
    """Bounds, with u = 2**-24. A row's sum takes at most 64 additions in a row (32 in a thread, 14 between them), so it
    is off by 64 u of the sum of magnitudes S. rms: n by half of 64 u and 5 roundings, 40 u. layer: the mean by 64 u
    mean|x|, which shifts each element by inv * that; its square's effect on the variance is of second order. Backward:
    a mean over the row of |g n| is off by (64 + 40) u of that, a sum over M rows by M u.
    """
    for i, (m, d) in enumerate(SHAPES):
        x, w, b, dy = tensors(m, d, dtype, i)
        w, b = w if with_weight else None, b if with_bias else None
        wide = [None if t is None else t.double() for t in (x, w, b)]
        want, inv, mean = norm_ref(*wide, 1e-5, kind=kind, weight_offset=offset)
        xd, wd, bd, dyd = on(device, x, w, b, dy)
        got = norm_forward(xd, wd, bd, 1e-5, kind=kind, weight_offset=offset)
        assert (got.y.dtype, got.rows, got.column_amax, got.amax) == (dtype, None, None, None)
        case = (m, d, kind, dtype)
        factor = (wide[1] + offset) if w is not None else torch.ones(d, dtype=torch.float64)
        centred = wide[0] - (0 if mean is None else mean[:, None])
        n = centred * inv[:, None]
        shift = torch.zeros(m, 1) if mean is None else inv[:, None] * 66 * U * wide[0].abs().mean(1, keepdim=True)
        own = 40 * U * n.abs() + shift + n.abs() * shift  # error of n
        close(got.y, want, factor.abs() * own + 3 * U * (want.abs() + (0 if b is None else b.abs())), case)
        assert torch.allclose(got.inverse_std.cpu().double(), inv, rtol=40 * U + 2 * shift.max().item(), atol=0)
        # the FP32 results of kernel and reference hardly differ: almost always they round to one 16-bit number
        ref = norm_ref(x, w, b, 1e-5, kind=kind, weight_offset=offset)[0]
        if dtype is not torch.float32:
            assert (got.y.cpu() != ref).double().mean() <= max(2e-3, 1.01 / ref.numel())

        dx, dw, db = norm_backward(
            dyd, xd, wd, got.inverse_std, got.mean, weight_offset=offset, weight_grad=w is not None,
            bias_grad=b is not None,
        )  # fmt: skip
        assert (dx.dtype, dw is None, db is None) == (dtype, w is None, b is None)
        exact = norm_backward_ref(dy.double(), wide[0], wide[1], inv, mean, weight_offset=offset)
        g = (dy.double() * factor).abs()
        along = (g * n.abs()).mean(1, keepdim=True)
        terms = g + n.abs() * along + (0 if mean is None else g.mean(1, keepdim=True))
        bound = (terms * 160 * U + own * along + n.abs() * (g * own).mean(1, keepdim=True)) * inv[:, None]
        close(dx, exact[0], bound, (case, "dx"))
        if dw is not None:
            assert dw.dtype == torch.float32
            close(dw, exact[1], (dy.double().abs() * (own + (m + 2) * U * n.abs())).sum(0), (case, "dw"))
        if db is not None:
            close(db, exact[2], dy.double().abs().sum(0) * m * U, (case, "db"))


def plain(kind: str, x: Tensor, w: Tensor, b: Tensor, cast: bool, offset: float) -> Tensor:
    """torch's own norms; Hugging Face's Llama and Gemma, written out."""
    if kind == "layer":
        return torch.nn.functional.layer_norm(x, x.shape[1:], w, b, 1e-5)
    if not cast and not offset:
        return torch.nn.functional.rms_norm(x, x.shape[1:], w, 1e-5)
    n = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)
    return w * n.to(x.dtype) if cast else (n * (1.0 + w.float())).type_as(x)


@on_each_device
@dtypes
@pytest.mark.parametrize(
    ("kind", "cast", "offset"), [("rms", False, 0.0), ("rms", True, 0.0), ("rms", False, 1.0), ("layer", False, 0.0)]
)
def test_y_is_the_plain_modules(kind, cast, offset, dtype, device):
    """16-bit y: at most 3 of 1000 differ (measured: 1.5 in 10**4 of fp16, 3 in 10**5 of bf16), each by one ulp; by two
    where n is rounded first, as a step of n is up to two steps of n * weight. Where bias cancels n * weight, the
    error of FP32 counts as well. FP32: the two errors together.
    """
    for i, (m, d) in enumerate(SHAPES):
        x, w, b, _ = on(device, *tensors(m, d, dtype, 10 + i))
        weights = [w, w.float()] if cast else [w]
        for weight in weights:
            want = plain(kind, x, weight, b, cast, offset)
            got = norm_forward(
                x,
                weight,
                b if kind == "layer" else None,
                1e-5,
                kind=kind,
                cast_before_weight=cast,
                weight_offset=offset,
            ).y
            assert got.dtype == want.dtype
            if dtype is torch.float32:
                torch.testing.assert_close(got, want, rtol=80 * U, atol=160 * U)
                continue
            differs = got != want
            assert differs.double().mean() <= max(3e-3, 1.01 / got.numel())
            info = torch.finfo(dtype)  # of FP32 y too: n was rounded to it
            ulp = torch.exp2(torch.floor(torch.log2(want.double().abs().clamp(min=info.smallest_normal)))) * info.eps
            allowed = ulp * (2.01 if cast else 1.01) + (
                160 * U * b.double().abs() if kind == "layer" else 0
            )  # b cancels
            assert ((got.double() - want.double()).abs() <= allowed).all()


RESIDUALS = [*zip(DTYPES, DTYPES, strict=True), (torch.bfloat16, torch.float32), (torch.float32, torch.float16)]


@on_each_device
@kinds
@pytest.mark.parametrize(("dtype", "other"), [*RESIDUALS, (torch.float16, torch.bfloat16)], ids=str)
@pytest.mark.parametrize("granularity", [TENSORWISE, ROWWISE, MX_1x32, BLOCK_128x128], ids=str)
def test_a_residual_is_added_as_pytorch_adds(kind, dtype, other, granularity, device):
    """h has the bits of ``x + residual``; all else is what the norm makes of h."""
    for i, (m, d) in enumerate(SHAPES[:3] if INTERPRETED else SHAPES):
        x, w, b, _ = on(device, *tensors(m, d, dtype, i))
        residual = tensors(m, d, other, 100 + i)[3].to(device)
        weight = w.float() if i % 2 else w
        cast_first = i % 3 == 0 and kind == "rms"
        options = {
            "kind": kind, "cast_before_weight": cast_first, "rows": E4M3, "granularity": granularity,
            "pow2": i % 2 == 0, "column_amax": i % 2 == 1,
        }  # fmt: skip
        got = norm_forward(x, weight, b, 1e-5, residual=residual, **options)
        h = x + residual
        assert got.h.dtype == h.dtype == torch.promote_types(dtype, other)
        assert torch.equal(got.h, h)
        assert got.h.is_contiguous()
        want = norm_forward(h, weight, b, 1e-5, **options)
        assert want.h is None
        for mine, its in zip((got.y, *got[2:6]), (want.y, *want[2:6]), strict=True):
            assert (mine is None) == (its is None)
            assert its is None or torch.equal(mine, its), (m, d)
        assert_same(got.rows, want.rows.codes.cpu(), want.rows.scale_inv.cpu(), (m, d))


@on_each_device
@kinds
@pytest.mark.parametrize(("dtype", "other"), RESIDUALS, ids=str)
def test_the_gradient_of_h_is_added_before_dx_is_rounded(kind, dtype, other, device):
    """Against float64: what the norm's own dx is off by (``test_forward_and_backward_against_float64``, twice its
    bound), an addition, and one rounding. dweight and dbias do not see it.
    """
    for i, (m, d) in enumerate(SHAPES[:3] if INTERPRETED else SHAPES):
        x, w, _, dy = tensors(m, d, dtype, i)
        dh = tensors(m, d, other, 50 + i)[3]
        xd, wd, dyd, dhd = on(device, x, w, dy, dh)
        made = norm_forward(xd, wd, None, 1e-5, kind=kind)
        dx, dw, db = norm_backward(dyd, xd, wd, made.inverse_std, made.mean, dh=dhd)
        _, dw_alone, db_alone = norm_backward(dyd, xd, wd, made.inverse_std, made.mean)
        for got, alone, size in ((dw, dw_alone, dy.abs().float() * 8), (db, db_alone, dy.abs().float())):
            assert ((got - alone).abs().cpu() <= 2 * (m + 2) * U * size.sum(0) * 2).all()
        wide = x.double(), w.double()
        _, inv, mean = norm_ref(*wide, None, 1e-5, kind=kind)
        exact, _, _ = norm_backward_ref(dy.double(), *wide, inv, mean, dh=dh.double())
        n = (wide[0] - (0 if mean is None else mean[:, None])) * inv[:, None]
        g = (dy.double() * wide[1]).abs()
        terms = g + g.mean(1, keepdim=True) + n.abs() * (g * n.abs()).mean(1, keepdim=True)
        shift = 66 * U * inv[:, None] * wide[0].abs().mean(1, keepdim=True)
        bound = terms * inv[:, None] * (320 * U + 4 * shift * (1 + n.abs())) + U * exact.abs() + U * dh.double().abs()
        assert dx.dtype == dtype
        close(dx, exact, bound, (m, d))
        plain_dx, _, _ = norm_backward_ref(dy.double(), *wide, inv, mean)
        assert (exact - plain_dx - dh.double()).abs().max() < 1e-6 * dh.abs().max()  # and the reference adds it


@on_each_device
def test_residuals_and_their_gradients_in_any_layout(device):
    x, w, _, dy = tensors(7, 48, torch.bfloat16, 1)
    r = tensors(7, 48, torch.bfloat16, 2)[0]
    xd, wd, dyd, rd = on(device, x, w, dy, r)
    want = norm_forward(xd, wd, None, 1e-5, residual=rd, rows=E4M3)
    want_dx = norm_backward(dyd, want.h, wd, want.inverse_std, None, bias_grad=False, dh=rd)[0]
    apart = torch.stack([rd, rd], 1)[:, 0]
    for odd in (rd.t().contiguous().t(), apart, torch.stack([rd, rd], 2)[:, :, 0]):
        got = norm_forward(xd, wd, None, 1e-5, residual=odd, rows=E4M3)
        assert torch.equal(got.h, want.h)
        assert torch.equal(got.y, want.y)
        assert torch.equal(
            norm_backward(dyd, got.h, wd, got.inverse_std, None, bias_grad=False, dh=odd)[0], want_dx
        )  # fmt: skip
    one = rd[:1].expand(7, 48)
    assert torch.equal(norm_forward(xd, wd, None, 1e-5, residual=one).h, xd + one)
    dx = norm_backward(dyd, want.h, wd, want.inverse_std, None, dh=one)[0]
    assert torch.equal(dx, norm_backward(dyd, want.h, wd, want.inverse_std, None, dh=one.contiguous())[0])


@on_each_device
def test_a_residual_that_is_bad_stays_in_its_row(device):
    x, w, _, _ = on(device, *tensors(7, 100, torch.bfloat16, 3))
    residual = torch.ones_like(x)
    clean = norm_forward(x, w, None, 1e-5, residual=residual, rows=E4M3)
    residual[2, 5] = math.nan
    made = norm_forward(x, w, None, 1e-5, residual=residual, rows=E4M3)
    good = [0, 1, 3, 4, 5, 6]
    assert torch.equal(made.h[good], clean.h[good])
    assert torch.equal(made.y[good], clean.y[good])
    assert made.h[2].isnan().nonzero().tolist() == [[5]]
    assert made.y[2].isnan().all()


@on_each_device
def test_a_residual_with_delayed_scaling_and_with_nothing_to_norm(device):
    x, w, _, r = on(device, *tensors(7, 96, torch.bfloat16, 3))
    for known in (0.0, 3.0):
        outs = []
        for residual in (None, r):
            amax, staging = torch.tensor([known], device=device), torch.zeros(1, device=device)
            outs.append(
                norm_forward(
                    x + r if residual is None else x, w, None, 1e-5, residual=residual, rows=E4M3,
                    granularity=TENSORWISE, amax=amax, staging=staging,
                )
            )  # fmt: skip
            assert staging.item() == outs[-1].y.abs().max().item()
        assert_same(outs[1].rows, outs[0].rows.codes.cpu(), outs[0].rows.scale_inv.cpu(), known)
    made = norm_forward(x[:0], w, None, 1e-5, residual=r[:0].float(), rows=E4M3)
    assert (made.h.shape, made.h.dtype, made.y.dtype) == ((0, 96), torch.float32, torch.float32)
    assert norm_backward(x[:0], x[:0], w, made.inverse_std, None, dh=r[:0])[0].shape == (0, 96)


@pytest.mark.skipif(INTERPRETED, reason="wide rows take a minute there")
@on_each_device
def test_a_residual_of_wide_rows_runs_by_parts(device):
    x, w, _, r = on(device, *tensors(3, 16400, torch.bfloat16, 1))
    made = norm_forward(x, w, None, 1e-5, residual=r, rows=E4M3, granularity=TENSORWISE, column_amax=True)
    assert torch.equal(made.h, x + r)
    assert torch.equal(made.y, norm_forward(x + r, w, None, 1e-5).y)
    assert_same(made.rows, *quantize_ref(made.y.cpu(), E4M3, TENSORWISE)[:2], "wide")


@on_each_device
@kinds
@pytest.mark.parametrize("granularity", [TENSORWISE, *IN_ROW, BLOCK_128x128], ids=str)
@pytest.mark.parametrize("column_amax", [False, True])
def test_codes_are_those_of_y(kind, granularity, column_amax, device):
    """Every dtype, data that bites, both formats; also compared with the reference of y's copy on the CPU."""
    for i, data in enumerate(DATA[column_amax::3] if INTERPRETED else DATA):
        m, d = SHAPES[i % 3] if INTERPRETED else (130, (16, 100, 272, 1025, 4096)[i % 5])
        dtype, fmt, options = DTYPES[i % 3], (E4M3, E5M2)[i % 2], {"pow2": i % 3 == 0, "margin": i % 3 - 1}
        x, w = make(data, m, d, dtype, i), make("gaussian", 1, d, dtype, 1)[0]
        xd, wd = on(device, x, w)
        made = norm_forward(
            xd, wd, None, 1e-6, kind=kind, rows=fmt, granularity=granularity, column_amax=column_amax, **options
        )
        case = (data, m, d, dtype, str(fmt), options)
        codes, scale_inv, _ = quantize_ref(made.y.cpu(), fmt, granularity, **options)
        assert_same(made.rows, codes, scale_inv, case)
        same, _, _ = quantize(made.y, fmt, None, granularity, **options)
        assert_same(made.rows, same.codes.cpu(), same.scale_inv.cpu(), case)
        if column_amax:
            assert (
                torch.equal(made.column_amax.cpu(), amax_ref(made.y.cpu(), 0).view(torch.int32))
                or (made.column_amax.view(torch.float32).cpu().isnan() == amax_ref(made.y.cpu(), 0).isnan()).all()
            )
            assert made.column_amax.dtype == torch.int32
        if granularity is TENSORWISE:
            whole = amax_ref(made.y.cpu())
            assert torch.equal(made.amax.cpu().nan_to_num(-1), whole.reshape(1).nan_to_num(-1)), case
            cols, _, _ = quantize(
                made.y.t(), E4M3, None, TENSORWISE, amax=made.amax, staging=torch.zeros_like(made.amax)
            )
            want, inv, _ = quantize_ref(made.y.cpu().t(), E4M3, TENSORWISE)
            assert_same(cols, want, inv, case)  # amax serves quantize as it is


@on_each_device
@pytest.mark.parametrize("known", [0.0, 3.0, 1e-20, math.inf, math.nan])
def test_delayed_scaling(known, device):
    for data, (m, d) in (("outliers", (7, 100)), ("one_nan", (130, 16))):
        x = make(data, m, d, torch.bfloat16).to(device)
        for staged in (0.0, 7.0, math.nan):
            amax, staging = torch.tensor([known], device=device), torch.tensor([staged], device=device)
            made = norm_forward(
                x, None, None, 1e-6, rows=E4M3, granularity=TENSORWISE, margin=1, amax=amax, staging=staging,
                column_amax=True,
            )  # fmt: skip
            y = made.y.cpu()
            assert_same(made.rows, *quantize_ref(y, E4M3, TENSORWISE, margin=1, amax=amax.cpu())[:2], (known, staged))
            want = torch.maximum(torch.tensor([staged]), amax_ref(y))
            assert torch.equal(staging.cpu().nan_to_num(-1), want.nan_to_num(-1))
            assert torch.equal(amax.cpu().nan_to_num(-1), torch.tensor([known]).nan_to_num(-1))


@on_each_device
@kinds
@dtypes
def test_a_bad_row_stays_alone(kind, dtype, device):
    """NaN and inf reach no other row of y, codes or dx, and all of dweight that they must."""
    x, w, b, dy = tensors(7, 100, dtype, 3)
    clean = norm_forward(*on(device, x, w, b), 1e-5, kind=kind, rows=E4M3, granularity=ROWWISE)
    bad = x.clone()
    bad[2, 5], bad[5, 99] = math.nan, math.inf
    made = norm_forward(*on(device, bad, w, b), 1e-5, kind=kind, rows=E4M3, granularity=ROWWISE)
    good = [0, 1, 3, 4, 6]
    assert torch.equal(made.y[good], clean.y[good])
    assert torch.equal(made.rows.codes.view(torch.uint8)[good], clean.rows.codes.view(torch.uint8)[good])
    assert made.y[2].isnan().all()
    assert not made.y[5].isfinite().all()
    assert not made.rows.codes.view(torch.uint8)[:, 100:].any()  # filler
    args = on(device, dy, w)
    dx, dw, _ = norm_backward(args[0], bad.to(device), args[1], made.inverse_std, made.mean)
    want, _, _ = norm_backward(args[0], x.to(device), args[1], clean.inverse_std, clean.mean)
    assert torch.equal(dx[good], want[good])
    assert dx[2].isnan().all()
    assert dw.isnan().all()


@on_each_device
@kinds
@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_zeros_tiny_and_huge_values(kind, eps, device):
    """As the plain modules: rows of zeros, squares that underflow or overflow FP32."""
    for scale in (0.0, 1e-5, 1e-30, 1e15) + ((1e25,) if kind == "rms" else ()):
        x, w, b, _ = on(device, *tensors(7, 100, torch.float32, 5, scale))
        want = plain(kind, x, w, b, False, 0.0) if eps else None
        got = norm_forward(x, w, b if kind == "layer" else None, eps, kind=kind, rows=E4M3, granularity=ROWWISE)
        if not eps:
            f = torch.nn.functional
            want = f.rms_norm(x, (100,), w, eps) if kind == "rms" else f.layer_norm(x, (100,), w, b, eps)
        elif kind == "rms":
            want = torch.nn.functional.rms_norm(x, (100,), w, eps)
        else:
            want = torch.nn.functional.layer_norm(x, (100,), w, b, eps)
        torch.testing.assert_close(got.y, want, rtol=80 * U, atol=160 * U, equal_nan=True, msg=str((scale, eps)))
        assert_same(got.rows, *quantize_ref(got.y.cpu(), E4M3, ROWWISE)[:2], scale)


@on_each_device
@kinds
def test_any_layout(kind, device):
    x, w, b, dy = tensors(7, 48, torch.bfloat16, 1)
    first = norm_forward(*on(device, x, w, b), 1e-5, kind=kind, rows=E4M3, granularity=ROWWISE)
    grads = norm_backward(dy.to(device), x.to(device), w.to(device), first.inverse_std, first.mean)
    for layout in ("transposed", "strided", "offset"):
        there = x.to(device)
        odd = lay_out(there.cpu(), layout) if device == "cpu" else there.t().contiguous().t()
        odd_w = w.to(device).repeat_interleave(2)[::2]
        got = norm_forward(odd, odd_w, b.to(device), 1e-5, kind=kind, rows=E4M3, granularity=ROWWISE)
        assert torch.equal(got.y, first.y), layout
        assert_same(got.rows, first.rows.codes.cpu(), first.rows.scale_inv.cpu(), layout)
        dy_odd = dy.to(device).t().contiguous().t()
        for a, c in zip(norm_backward(dy_odd, odd, odd_w, got.inverse_std, got.mean), grads, strict=True):
            assert torch.equal(a, c), layout
    rows_apart = torch.stack([x, x], 1).to(device)[:, 0]
    assert torch.equal(norm_forward(rows_apart, w.to(device), b.to(device), 1e-5, kind=kind).y, first.y)
    expanded = dy.to(device)[:1].expand(7, 48)
    for a, c in zip(
        norm_backward(expanded, x.to(device), w.to(device), first.inverse_std, first.mean),
        norm_backward(expanded.contiguous(), x.to(device), w.to(device), first.inverse_std, first.mean),
        strict=True,
    ):
        assert torch.equal(a, c)


@on_each_device
def test_repeated_calls_give_the_same_bits(device):
    x, w, b, dy = on(device, *tensors(130, 100, torch.bfloat16, 1))
    runs = []
    for _ in range(2 if INTERPRETED else 5):
        made = norm_forward(x, w, b, 1e-5, kind="layer", column_amax=True)
        runs.append([made.y, made.column_amax, *norm_backward(dy, x, w, made.inverse_std, made.mean)])
    for run in runs[1:]:
        assert all(torch.equal(a, c) for a, c in zip(run, runs[0], strict=True))


@pytest.mark.skipif(INTERPRETED, reason="wide rows take a minute there")
@on_each_device
@pytest.mark.parametrize("d", [8192, 16384, 16400])
def test_wide_rows(d, device):
    """More than 16384 columns run by parts."""
    x, w, _, dy = on(device, *tensors(3, d, torch.bfloat16, 1))
    for granularity in (TENSORWISE, *IN_ROW):
        made = norm_forward(x, w, None, 1e-5, rows=E4M3, granularity=granularity, column_amax=True)
        assert_same(made.rows, *quantize_ref(made.y.cpu(), E4M3, granularity)[:2], (d, str(granularity)))
        assert torch.equal(made.column_amax.view(torch.float32), compute_amax(made.y, 0))
    ref = norm_ref(x, w, None, 1e-5, kind="rms")[0]
    assert (made.y != ref).double().mean() <= 2e-3
    got = norm_backward(dy, x, w, made.inverse_std, None, bias_grad=False)
    want = norm_backward_ref(dy, x, w, made.inverse_std, None, bias_grad=False)
    torch.testing.assert_close(got[0], want[0], rtol=0.008, atol=1e-5)
    torch.testing.assert_close(got[1], want[1], rtol=1e-5, atol=1e-5)


@on_each_device
@kinds
def test_empty(kind, device):
    x, w = torch.empty(0, 32, device=device), torch.ones(32, device=device)
    for granularity in GRANULARITIES.values():
        made = norm_forward(x, w, w, 1e-5, kind=kind, rows=E4M3, granularity=granularity, column_amax=True)
        assert made.y.shape == (0, 32)
        assert made.rows.codes.shape[0] == 0
        assert not made.column_amax.any()
    dx, dw, db = norm_backward(x, x, w, made.inverse_std, made.mean)
    assert dx.shape == x.shape
    assert not dw.any()
    assert not db.any()


def test_what_is_refused():
    x, w = torch.ones(4, 16), torch.ones(16)
    with pytest.raises(ShapeError, match="2; flatten"):
        norm_forward(x[None], w, None, 1e-5)
    with pytest.raises(ShapeError, match=r"weight \(8,\); allowed: \(16,\)"):
        norm_forward(x, w[:8], None, 1e-5)
    with pytest.raises(DtypeError, match=r"x in torch\.float64"):
        norm_forward(x.double(), w, None, 1e-5)
    with pytest.raises(ShapeError, match="both amax and staging"):
        norm_forward(x, w, None, 1e-5, rows=E4M3, amax=w[:1], staging=w[:1])
    with pytest.raises(ShapeError, match="of one shape"):
        norm_backward(x[:2], x, w, x[:, 0], None)
    with pytest.raises(ShapeError, match=r"residual \(2, 16\) torch.float32, x \(4, 16\); allowed: .* of one shape"):
        norm_forward(x, w, None, 1e-5, residual=x[:2])
    with pytest.raises(ShapeError, match=r"got dh \(4, 16\) torch.float64"):
        norm_backward(x, x, w, x[:, 0], None, dh=x.double())


@on_each_device
def test_opcheck(device):
    x, w, b, dy = on(device, *tensors(5, 48, torch.bfloat16, 1))
    utils = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    options = (1e-5, True, 0.0, False, torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # opcheck's own, from inside torch
        for rows, granularity, column in (
            ("E4M3", "rowwise", True),
            ("", "rowwise", False),
            ("E5M2", "tensorwise", False),
        ):
            for residual in (None, dy, dy.float()):
                args = (x, residual, w, b, *options, rows, granularity, False, 0, column)
                torch.library.opcheck(torch.ops.acceler8.norm.default, args, test_utils=utils)
        one = torch.ones(1, device=device)
        args = (x, dy, w, None, one, one.clone(), *options, "E4M3", "tensorwise", False, 0, True)
        torch.library.opcheck(
            torch.ops.acceler8.norm_delayed.default, args, test_utils=utils[1:]
        )  # staging is not declared
        made = norm_forward(x, w, b, 1e-5, kind="layer")
        for asked in ((True, True), (True, False), (False, False)):
            args = (dy, x if asked[1] else None, x, w, made.inverse_std, made.mean, 0.0, False, *asked)
            torch.library.opcheck(torch.ops.acceler8.norm_backward.default, args, test_utils=utils)


@pytest.mark.requires(sm=90)
def test_gpu_and_reference_give_the_same_codes_almost_everywhere():
    """The kernel's y and the reference's differ where a sum's order moves a rounding; elsewhere the codes are equal."""
    for kind in ("rms", "layer"):
        x, w, b, _ = tensors(1000, 4096, torch.bfloat16, 1)
        made = norm_forward(*on("cuda", x, w, b), 1e-5, kind=kind, rows=E4M3, granularity=MX_1x32, column_amax=True)
        y = norm_ref(x, w, b, 1e-5, kind=kind)[0]
        codes = quantize_ref(y, E4M3, MX_1x32)[0]
        assert (made.rows.codes.cpu().view(torch.uint8) != codes.view(torch.uint8)).double().mean() <= 2e-4
        assert_same(made.rows, *quantize_ref(made.y.cpu(), E4M3, MX_1x32)[:2], kind)
        assert torch.equal(made.column_amax.view(torch.float32).cpu(), amax_ref(made.y.cpu(), 0))


@pytest.mark.requires(sm=90)
def test_a_captured_graph_finds_its_own_amax_at_each_replay():
    x = torch.randn(130, 272, device="cuda")
    weight = torch.ones(272, device="cuda")
    options = {"rows": E4M3, "granularity": TENSORWISE, "column_amax": True}
    norm_forward(x, weight, None, 1e-5, **options)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = norm_forward(x, weight, None, 1e-5, **options)
    for factor in (8.0, 1.0, 0.25):
        weight.fill_(factor)
        graph.replay()
        assert_same(made.rows, *quantize_ref(made.y.cpu(), E4M3, TENSORWISE)[:2], factor)
        assert torch.equal(made.column_amax.view(torch.float32), compute_amax(made.y, 0))


@pytest.mark.requires(sm=90)
def test_offsets_beyond_2_to_the_31():
    rows, cols = 140_000, 16_384
    x = torch.empty(rows, cols, dtype=torch.bfloat16, device="cuda")
    for part in x.split(8192):
        part.normal_()
    made = norm_forward(x, None, None, 1e-5, rows=E4M3, granularity=ROWWISE, column_amax=True)
    at = torch.tensor([0, 1, 2**31 // cols - 1, 2**31 // cols, rows - 1], device="cuda")
    y = made.y[at].cpu()
    assert (y != norm_ref(x[at].cpu(), None, None, 1e-5, kind="rms")[0]).double().mean() <= 2e-3
    assert torch.equal(made.rows.codes[at].cpu().view(torch.uint8), quantize_ref(y, E4M3, ROWWISE)[0].view(torch.uint8))


@pytest.mark.requires(sm=90, gpus=2)
def test_a_tensor_on_the_second_gpu_is_worked_on_there():
    x, w, b, dy = on("cuda:1", *tensors(130, 272, torch.bfloat16, 1))
    made = norm_forward(x, w, b, 1e-5, rows=E4M3, granularity=ROWWISE, column_amax=True)
    dx, dw, _ = norm_backward(dy, x, w, made.inverse_std, None)
    assert {t.device.index for t in (made.y, made.rows.codes, made.column_amax, dx, dw)} == {1}
    assert_same(made.rows, *quantize_ref(made.y.cpu(), E4M3, ROWWISE)[:2], "second")
    assert torch.cuda.current_device() == 0


ASKED = [  # codes, granularity, amax of columns, delayed
    (None, ROWWISE, False, False),
    (None, ROWWISE, True, False),
    (E4M3, ROWWISE, True, False),
    (E4M3, TENSORWISE, False, False),
    (E4M3, TENSORWISE, False, True),
    (E4M3, BLOCK_1x128, False, False),
]


@on_each_device
@dtypes
@kinds
def test_y_does_not_depend_on_what_else_is_asked(kind, dtype, device):
    """A norm learns from its readers which codes they want; a run that resumes has not learned yet."""
    for m, d in ((9, 48), (33, 384)) + (((64, 2048), (64, 4096), (5, 8192)) if device == "cuda" else ()):
        x, w, b, _ = on(device, *tensors(m, d, dtype, d))
        ys = []
        for rows, granularity, column_amax, delayed in ASKED:
            amax = torch.ones(2, device=device) if delayed else [None, None]
            made = norm_forward(
                x, w, b if kind == "layer" else None, 1e-5, kind=kind, rows=rows, granularity=granularity,
                column_amax=column_amax, amax=amax[0] if amax[0] is None else amax[:1],
                staging=amax[1] if amax[1] is None else amax[1:],
            )  # fmt: skip
            ys.append(made.y)
        for y in ys[1:]:
            assert torch.equal(y, ys[0]), (m, d)


@pytest.mark.skipif(not HAVE_TRITON or INTERPRETED, reason="needs the triton package, and not its interpreter")
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_sums_have_one_order_whatever_is_asked(kind, dtype):
    """The layout of the sums, from which their order follows, as the compiler chooses it for a GPU."""
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    pointers = {
        "x": dtype, "residual": dtype, "weight": dtype, "bias": dtype, "known": "i32", "staging": "i32", "found": "i32",
        "column": "i32", "h": dtype, "y": dtype, "inverse_std": "fp32", "mean": "fp32", "codes": "u8",
        "scale_inv": "fp32",
    }  # fmt: skip
    signature = {f"{name}_ptr": f"*{kind}" for name, kind in pointers.items()}
    signature |= dict.fromkeys(("row_count", "col_count", "row_stride", "residual_stride", "width", "steps"), "i32")
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(signature) - 1)}
    layouts = set()
    for (rows, granularity, column_amax, delayed), residual in itertools.product(ASKED, (False, True)):
        is_tensor = rows is not None and granularity is TENSORWISE
        options = {
            "RESIDUAL": residual, "EPS": 1e-5, "LAYER": kind == "layer", "WEIGHT": True, "BIAS": True, "OFFSET": 0.0,
            "CAST_FIRST": False,
            "CODES": rows is not None and (delayed or not is_tensor), "TENSOR": is_tensor, "DELAYED": delayed,
            "COLUMN": column_amax, "E5M2": False, "FMT_MAX": 448.0, "POW2": False, "MARGIN": 1.0,
            "GROUP": granularity.cols, "HARDWARE": True, "ROWS": 2, "COLS": 2048,
        }  # fmt: skip
        source = ASTSource(
            norm_forward_kernel,
            {**signature, **dict.fromkeys(options, "constexpr")},
            {(len(signature) + i,): value for i, value in enumerate(options.values())},
            aligned,
        )
        code = compile(source, target=GPUTarget("cuda", 90, 32), options={**LAUNCH_OPTIONS, "num_warps": 8}).asm[
            "ttgir"
        ]
        named = dict(re.findall(r"^(#\w+) = (.*)$", code, flags=re.MULTILINE))
        sums = re.findall(r'"tt.reduce".*?arith\.addf.*?\(tensor<[^#]*(#\w+)>', code, flags=re.DOTALL)
        assert len(sums) == 1 + (kind == "layer")
        layouts.add(tuple(named[name] for name in sums))
    assert len(layouts) == 1
