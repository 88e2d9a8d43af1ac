"""Adam's kernel against its reference, code for code, and the reference against FP64."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from acceler8.errors import GradientError
from acceler8.formats import E4M3_BLOCK, FP16_POW2, block_count, decode_blocks, encode_blocks, split_bf16
from acceler8.kernels._adam_launch import AdamLaunches
from acceler8.kernels._triton import INTERPRETED
from acceler8.kernels.adam import (
    FIRST_CODES,
    MOMENT_FORMATS,
    SECOND_CODES,
    AdamKind,
    AdamNumbers,
    AdamRow,
    AdamTensors,
    adam_ref,
    adam_step,
    load_moment,
    load_weight,
    power,
)

B, H, F = torch.bfloat16, torch.float16, torch.float32
DTYPES = {"fp32": F, "bf16": B, "fp16": H}
MASTERS = [("none", F), ("none", B), ("none", H), ("stochastic", B), ("fp32", B), ("fp32", H), ("bf16_remainder", B)]
MASTERS += [("fp16", B), ("fp16", H)]
SHAPES = [(3, 128), (5, 77), (2500,), (1,), (16, 16)]
GROUPS = (
    AdamNumbers(1e-2, 0.9, 0.999, 1e-8, 0.01, False, True),
    AdamNumbers(3e-3, 0.8, 0.95, 1e-6, 0.1, True, False),
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
runs_kernels = pytest.mark.skipif(
    not (INTERPRETED or torch.cuda.is_available()), reason="kernels need a CUDA GPU or TRITON_INTERPRET=1"
)


def make(kind: AdamKind, shape: tuple[int, ...], generator: torch.Generator) -> AdamTensors:
    """A parameter without gradient, and its state before the first step, on the CPU."""
    p = torch.randn(shape, generator=generator)
    scale = torch.zeros(block_count(p.numel()))
    master = master_scale = None
    if kind.master == "fp32":
        master = p.clone()
    elif kind.master == "bf16_remainder":
        p, master = split_bf16(p)
    elif kind.master == "fp16":
        master, master_scale = encode_blocks(p, FP16_POW2)
    return AdamTensors(
        p.to(kind.param),
        torch.empty(0),
        torch.zeros(shape, dtype=DTYPES.get(kind.exp_avg, torch.float8_e4m3fn)),
        scale.clone() if kind.exp_avg in FIRST_CODES else None,
        torch.zeros(shape, dtype=DTYPES.get(kind.exp_avg_sq, torch.uint8)),
        scale.clone() if kind.exp_avg_sq in SECOND_CODES else None,
        master,
        master_scale,
        torch.zeros(()),
    )


def on(device: str, row: AdamRow) -> AdamRow:
    return row._replace(tensors=AdamTensors(*(None if t is None else t.to(device, copy=True) for t in row.tensors)))


def with_grad(row: AdamRow, grad: torch.Tensor) -> AdamRow:
    return row._replace(tensors=row.tensors._replace(grad=grad))


def raw(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor if tensor is None or tensor.element_size() > 1 else tensor.view(torch.uint8)


def differences(got: list[AdamRow], expected: list[AdamRow]) -> list[tuple[AdamKind, str]]:
    found = []
    for g, e in zip(got, expected, strict=True):
        for name, a, b in zip(AdamTensors._fields, g.tensors, e.tensors, strict=True):
            if a is not None and not torch.equal(raw(a).cpu(), raw(b)):
                found.append((g.kind, name))
    return found


def all_kinds() -> list[AdamRow]:
    generator, rows = torch.Generator().manual_seed(0), []
    for number, (first, second, (master, dtype)) in enumerate(
        itertools.product(MOMENT_FORMATS, MOMENT_FORMATS, MASTERS)
    ):
        group = number % 2
        kind = AdamKind(dtype, (B, F, H)[number % 3], first, second, master, GROUPS[group].decoupled)
        tensors = make(kind, SHAPES[number % len(SHAPES)], generator)
        rows.append(AdamRow(kind, tensors, group, number))
    return rows


@runs_kernels
def test_kernel_gives_the_codes_of_the_reference_in_every_combination_of_formats(make_generator):
    """Three steps of all 144 at once (in the interpreter a quarter, in which each format is with several others), the
    second of which finds an infinity and must change nothing.
    """
    expected = all_kinds()[:: 4 if INTERPRETED else 1]
    got = [on(DEVICE, row) for row in expected]
    launches, generator = AdamLaunches(got[0].tensors.param.device), make_generator(1)
    for step in range(3):
        grads = [
            (torch.randn(row.tensors.param.shape, generator=generator) * 10.0**-step).to(row.kind.grad)
            for row in expected
        ]
        expected = [with_grad(row, g) for row, g in zip(expected, grads, strict=True)]
        got = [with_grad(row, g.to(DEVICE)) for row, g in zip(got, grads, strict=True)]
        found = torch.tensor(float(step == 1), device=DEVICE)
        adam_step(launches, got, GROUPS, grad_scale=torch.tensor(4.0, device=DEVICE), found_inf=found)
        if step != 1:
            for row in expected:
                adam_ref(row, GROUPS[row.group], 4.0)
        assert differences(got, expected) == []


def coded(grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return encode_blocks(grad, E4M3_BLOCK)


@runs_kernels
def test_kernel_gives_the_codes_of_the_reference_for_gradients_that_are_codes(make_generator):
    generator, expected = make_generator(6), []
    formats = list(itertools.product((("fp32", "fp32"), ("fp8", "fp16"), ("fp8", "fp8")), MASTERS))
    for number, ((first, second), (master, dtype)) in enumerate(formats[:: 4 if INTERPRETED else 1]):
        kind = AdamKind(dtype, torch.float8_e4m3fn, first, second, master, GROUPS[number % 2].decoupled)
        expected.append(AdamRow(kind, make(kind, SHAPES[number % len(SHAPES)], generator), number % 2, number))
    got = [on(DEVICE, row) for row in expected]
    launches = AdamLaunches(got[0].tensors.param.device)
    for step in range(2):
        for i, row in enumerate(expected):
            codes, scales = coded(torch.randn(row.tensors.param.shape, generator=generator) * 10.0**-step)
            expected[i] = row._replace(tensors=row.tensors._replace(grad=codes, grad_scale=scales))
            on_device = got[i].tensors._replace(grad=codes.to(DEVICE), grad_scale=scales.to(DEVICE))
            got[i] = got[i]._replace(tensors=on_device)
        adam_step(launches, got, GROUPS)
        for row in expected:
            adam_ref(row, GROUPS[row.group])
        assert differences(got, expected) == []


def test_a_gradient_of_codes_is_that_of_its_numbers(make_generator):
    """Bit for bit the step on the decoded gradient, in more than one of the reference's slices."""
    kind = AdamKind(F, F, "fp32", "fp32", "none", True)
    shape = (2**11 + 3, 129)
    plain = AdamRow(kind, make(kind, shape, make_generator(7)), 0, 0)
    codes, scales = coded(torch.randn(shape, generator=make_generator(8)))
    other = on("cpu", plain)
    tensors = other.tensors._replace(grad=codes, grad_scale=scales)
    other = AdamRow(kind._replace(grad=torch.float8_e4m3fn), tensors, 0, 0)
    adam_ref(with_grad(plain, decode_blocks(codes, scales, E4M3_BLOCK)), GROUPS[0])
    adam_ref(other, GROUPS[0])
    assert torch.equal(plain.tensors.param, other.tensors.param)
    assert torch.equal(plain.tensors.exp_avg_sq, other.tensors.exp_avg_sq)


BITING = ["zeros", "nan", "inf", "tiny", "huge", "denormal"]


@runs_kernels
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("kind", BITING)
def test_kernel_gives_the_codes_of_the_reference_for_gradients_that_bite(make_generator, kind):
    generator = make_generator(2)
    expected = []
    moments_and_masters = list(itertools.product(("fp32", "fp16", "fp8"), MASTERS))
    for number, (moments, (master, dtype)) in enumerate(moments_and_masters[:: 2 if INTERPRETED else 1]):
        of = AdamKind(dtype, F, moments, moments, master, True)
        row = AdamRow(of, make(of, (3, 130), generator), 0, number)
        grad = torch.randn(3, 130, generator=generator)
        factor = {"zeros": 0.0, "tiny": 1e-18, "huge": 1e15, "denormal": 1e-39}.get(kind, 1.0)
        grad *= factor
        if kind in ("nan", "inf"):
            grad[1, 5] = float(kind)
        expected.append(with_grad(row, grad))
    got = [on(DEVICE, row) for row in expected]
    launches = AdamLaunches(got[0].tensors.param.device)
    for _ in range(2):
        adam_step(launches, got, GROUPS)
        for row in expected:
            adam_ref(row, GROUPS[0])
    for g, e in zip(got, expected, strict=True):
        for name, a, b in zip(AdamTensors._fields, g.tensors, e.tensors, strict=True):
            if a is None or name == "grad":
                continue
            a, b = a.cpu(), b
            if a.is_floating_point():  # NaN has many codes; numbers have one
                assert torch.equal(a.float().isnan(), b.float().isnan()), (g.kind, name)
                a, b = a.float().nan_to_num(-7.0, math.inf, -math.inf), b.float().nan_to_num(-7.0, math.inf, -math.inf)
            assert torch.equal(a, b), (g.kind, name)


@runs_kernels
def test_launches_follow_rows_that_change(make_generator):
    """Other gradients in other memory, a learning rate that changes, rows that come, go and move."""
    kinds = [AdamKind(B, B, "fp8", "fp8", "bf16_remainder", True), AdamKind(F, F, "fp32", "fp32", "none", True)]
    generator = make_generator(3)
    expected = [
        AdamRow(kind, make(kind, shape, generator), 0, i)
        for i, (kind, shape) in enumerate(itertools.product(kinds, SHAPES))
    ]
    got = [on(DEVICE, row) for row in expected]
    launches = AdamLaunches(got[0].tensors.param.device)
    for step in range(6):
        groups = (AdamNumbers(1e-2 / (step + 1), 0.9, 0.999, 1e-8, 0.01, False, True),)
        chosen = range(len(expected)) if step % 3 else range(step % 2, len(expected), 2)
        for i in chosen:
            grad = torch.randn(expected[i].tensors.param.shape, generator=generator).to(expected[i].kind.grad)
            expected[i], got[i] = with_grad(expected[i], grad), with_grad(got[i], grad.to(DEVICE))
        if step == 4:
            got = [on(DEVICE, row) for row in got]  # everything lies elsewhere
        adam_step(launches, [got[i] for i in chosen], groups)
        for i in chosen:
            adam_ref(expected[i], groups[0])
        assert differences(got, expected) == []


@pytest.mark.requires(sm=80)
def test_a_captured_step_is_the_eager_one(make_generator):
    kind = AdamKind(B, B, "fp8", "fp8", "bf16_remainder", True)
    eager = AdamRow(kind, make(kind, (64, 256), make_generator(4)), 0, 0)
    eager = on("cuda", with_grad(eager, torch.randn(64, 256, generator=make_generator(5)).to(B)))
    graphed = on("cuda", eager)
    lr = torch.tensor(1e-2, device="cuda")
    groups = (AdamNumbers(lr, 0.9, 0.999, 1e-8, 0.01, False, True),)
    launches, stream = AdamLaunches(lr.device), torch.cuda.Stream()
    refused = pytest.raises(GradientError, match="captured in a CUDA graph before it ran")
    with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
        adam_step(AdamLaunches(lr.device), [on("cuda", eager)], groups)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        adam_step(launches, [graphed], groups)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        adam_step(launches, [graphed], groups)
    others = AdamLaunches(lr.device)
    adam_step(others, [eager], groups)
    for step in range(3):
        lr.fill_(1e-2 / (step + 1))
        graph.replay()
        adam_step(others, [eager], groups)
        assert differences([graphed], [on("cpu", eager)]) == []
    adam_step(launches, [graphed], groups)  # an eager step between replays has a table of its own
    adam_step(others, [eager], groups)
    assert differences([graphed], [on("cpu", eager)]) == []


@pytest.mark.parametrize("decoupled", [True, False])
def test_reference_is_the_formula(make_generator, decoupled):
    """FP32 state against the formula in FP64: a few ulps after 50 steps."""
    kind = AdamKind(F, F, "fp32", "fp32", "none", decoupled)
    numbers = AdamNumbers(1e-2, 0.9, 0.99, 1e-8, 0.1, False, decoupled)
    row = AdamRow(kind, make(kind, (300,), make_generator(6)), 0, 0)
    w, m, v = row.tensors.param.double(), torch.zeros(300, dtype=torch.float64), torch.zeros(300, dtype=torch.float64)
    generator = make_generator(7)
    for t in range(1, 51):
        grad = torch.randn(300, generator=generator)
        adam_ref(with_grad(row, grad), numbers)
        g = grad.double() + (0 if decoupled else 0.1 * w)
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        w = w * (1 - 1e-2 * 0.1 if decoupled else 1)
        w = w - 1e-2 / (1 - 0.9**t) * m / ((v / (1 - 0.99**t)).sqrt() + 1e-8)
    # each step rounds a handful of times, each by half an ulp of a number of the weight's size at most
    assert (row.tensors.param.double() - w).abs().max() < 50 * 4 * 2.0**-24 * w.abs().max()
    assert ((row.tensors.exp_avg_sq.double() - v) / v).abs().max() < 100 * 3 * 2.0**-24


def test_reference_rounds_every_operation_to_nearest(make_generator):
    """One step in NumPy's FP32, whose divisions and roots are IEEE's: what a GPU's div.rn and sqrt.rn give."""
    kind, numbers = AdamKind(F, F, "fp32", "fp32", "none", True), AdamNumbers(1e-2, 0.9, 0.999, 1e-8, 0.1, False, True)
    row = AdamRow(kind, make(kind, (100_000,), make_generator(15)), 0, 0)
    grad = torch.randn(100_000, generator=make_generator(16)) * 1e-4
    w, g, f = row.tensors.param.numpy().copy(), grad.numpy(), np.float32
    adam_ref(with_grad(row, grad), numbers)
    m, v = g * f(1 - 0.9), g * g * f(1 - 0.999)
    root = np.sqrt(v) * f(1 / math.sqrt(1 - 0.999)) + f(1e-8)
    expected = w * f(1 - 1e-2 * 0.1) - m / root * f(1e-2 / (1 - 0.9))
    assert np.array_equal(row.tensors.param.numpy(), expected)


@pytest.mark.parametrize(("master", "dtype"), MASTERS)
@pytest.mark.parametrize("second", MOMENT_FORMATS)
def test_slices_of_the_reference_are_one_update(make_generator, monkeypatch, master, dtype, second):
    kind = AdamKind(dtype, B, "fp8", second, master, True)
    whole = AdamRow(kind, make(kind, (7, 130), make_generator(8)), 0, 3)
    whole = with_grad(whole, torch.randn(7, 130, generator=make_generator(9)).to(B))
    sliced = on("cpu", whole)
    adam_ref(whole, GROUPS[0])
    monkeypatch.setattr("acceler8.kernels.adam._SLICE", 256)
    adam_ref(sliced, GROUPS[0])
    assert differences([sliced], [whole]) == []


def test_exact_masters_give_the_weights_of_fp32(make_generator):
    """A BF16 parameter with its remainder, and one with an FP32 master, walk with an FP32 parameter, bit for bit."""
    kinds = {
        "fp32": AdamKind(F, F, "fp32", "fp32", "none", True),
        "master": AdamKind(B, F, "fp32", "fp32", "fp32", True),
        "remainder": AdamKind(B, F, "fp32", "fp32", "bf16_remainder", True),
    }
    rows = {name: AdamRow(kind, make(kind, (500,), make_generator(10)), 0, 0) for name, kind in kinds.items()}
    generator = make_generator(11)
    for _ in range(20):
        grad = torch.randn(500, generator=generator)
        for row in rows.values():
            adam_ref(with_grad(row, grad), GROUPS[0])
    exact = rows["fp32"].tensors.param
    for name, kind in (("master", "fp32"), ("remainder", "bf16_remainder")):
        tensors = rows[name].tensors
        assert torch.equal(load_weight(tensors.param, tensors.master, None, kind), exact)
        assert torch.equal(tensors.param, exact.to(B))


def test_small_updates_are_lost_to_nearest_and_kept_by_chance_and_by_remainder(make_generator):
    """100 steps of 2**-12 of the weight: BF16 to nearest never moves, the others arrive."""
    numbers = AdamNumbers(2.0**-12, 0.0, 0.0, 0.0, 0.0, False, True)  # an update is lr, whatever the gradient
    moved = {}
    for master in ("none", "stochastic", "bf16_remainder"):
        kind = AdamKind(B, F, "fp32", "fp32", master, True)
        row = AdamRow(kind, make(kind, (4096,), make_generator(12)), 0, 0)
        row.tensors.param.fill_(1.0)
        if row.tensors.master is not None:
            row.tensors.master.zero_()
        for _ in range(100):
            adam_ref(with_grad(row, torch.full((4096,), -1.0)), numbers)
        moved[master] = (row.tensors.param.float() - 1.0).mean().item()
    assert moved["none"] == 0.0
    # a draw a step: standard error of the mean 2**-7 * sqrt(100 * (1/32) * (31/32) / 4096)
    assert moved["stochastic"] == pytest.approx(100 * 2.0**-12, rel=0.02)
    assert moved["bf16_remainder"] == pytest.approx(100 * 2.0**-12, abs=2.0**-8)


def test_powers_are_those_of_the_definition():
    for beta in (0.9, 0.95, 0.999, 0.0, 0.5):
        for exponent in (1, 2, 3, 10, 1000, 123_457):
            assert power(beta, exponent) == pytest.approx(beta**exponent, rel=1e-15 * exponent, abs=0.0)
    assert power(0.7, 0) == 1.0


@pytest.mark.parametrize("moments", ["fp16", "fp8"])
def test_moments_are_what_the_codes_say(make_generator, moments):
    kind = AdamKind(F, F, moments, moments, "none", True)
    row = AdamRow(kind, make(kind, (4, 128), make_generator(13)), 0, 0)
    grad = torch.randn(4, 128, generator=make_generator(14))
    adam_ref(with_grad(row, grad), GROUPS[0])
    t = row.tensors
    first = load_moment(t.exp_avg, t.exp_avg_scale, FIRST_CODES[moments])
    second = load_moment(t.exp_avg_sq, t.exp_avg_sq_scale, SECOND_CODES[moments])
    half_ulp = 2.0**-4 if moments == "fp8" else 2.0**-11
    large = grad.abs() > 0.05
    assert ((first - 0.1 * grad) / (0.1 * grad)).abs()[large].max() < half_ulp * 1.01
    assert ((second - 0.001 * grad**2) / (0.001 * grad**2)).abs()[large].max() < half_ulp * 1.01
