"""Each operation of the kernels against its floor: the bytes that it must read and write over the copy bandwidth.

The floor reads every input once and writes every result once. Scales of a whole tensor, and of the rows of a transposed
cast, need an amax before the first code: such casts read twice, which the floor leaves out, so their share cannot reach
one. Before it is timed an operation runs on a small input, and its results are compared with the reference in plain
PyTorch: codes and scales bit for bit with the cast of the operation's own values, values within a bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from acceler8.bench import timing
from acceler8.bench.facts import facts
from acceler8.bench.gemm import Say
from acceler8.bench.layers import said
from acceler8.bench.results import Result, Row, one_line
from acceler8.errors import RunError, unknown_name
from acceler8.formats import E4M3
from acceler8.kernels import (
    Quantized,
    activation_backward,
    activation_backward_ref,
    activation_forward,
    activation_ref,
    amax_ref,
    compute_amax,
    gated,
    gated_backward,
    gated_backward_ref,
    gated_ref,
    norm_backward,
    norm_backward_ref,
    norm_forward,
    norm_ref,
    quantize,
    quantize_and_sum,
    quantize_concatenated,
    quantize_concatenated_and_sum,
    quantize_ref,
    transpose_codes,
    transpose_ref,
)
from acceler8.scaling import GRANULARITIES, ROWWISE, TENSORWISE, BLOCK_1x128, BLOCK_128x128, Granularity

SHAPES: tuple[tuple[int, int], ...] = ((16384, 4096), (16384, 14336), (4096, 4096))
TINY_SHAPES: tuple[tuple[int, int], ...] = ((64, 256),)
CHECKED_SHAPE = (272, 384)
BF16_SHARE = 2.0**-7
"""Of the largest magnitude: how far BF16 results of norms may lie from the reference: a rounding, the sums' order."""

Call = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Op:
    """One operation: how to call it on a shape, what that reads and writes, and how to check it."""

    name: str
    make: Callable[[tuple[int, int], torch.device], tuple[Call, int]]
    """Shape [rows, columns] of the activation -> the call, and its bytes."""
    check: Callable[[torch.device], str]
    """What is wrong with its results on a small input; empty if nothing."""


def _normal(rows: int, cols: int, device: torch.device, seed: int = 0) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(rows, cols, device=device, generator=generator).bfloat16()


def _differs(what: str, got: Quantized | None, source: Tensor, granularity: Granularity) -> str:
    """Compare codes with the reference's cast of ``source``, on the CPU; empty if they are equal."""
    if got is None:
        return f"{what}: no codes"
    codes, scale_inv, _ = quantize_ref(source.cpu(), E4M3, granularity)
    if not torch.equal(got.codes.cpu().view(torch.uint8), codes.view(torch.uint8)):
        return f"{what}: codes differ from the reference's"
    return "" if torch.equal(got.scale_inv.cpu(), scale_inv) else f"{what}: scales differ from the reference's"


def _far(what: str, got: Tensor | None, exact: Tensor, share: float = BF16_SHARE) -> str:
    """Compare values with the reference's: within ``share`` of the largest magnitude."""
    if got is None:
        return f"{what}: missing"
    error = (got.double().cpu() - exact.double().cpu()).abs().max().item()
    allowed = share * exact.double().abs().max().item()
    return "" if error <= allowed else f"{what}: off by {error:.3g}, allowed {allowed:.3g}"


def _first(*complaints: str) -> str:
    return next((complaint for complaint in complaints if complaint), "")


def _quantize_op(granularity: Granularity, rows: bool, cols: bool) -> Op:
    formats = E4M3 if rows else None, E4M3 if cols else None

    def make(shape: tuple[int, int], device: torch.device) -> tuple[Call, int]:
        x = _normal(*shape, device)
        return lambda: quantize(x, *formats, granularity), x.numel() * (2 + rows + cols)

    def check(device: torch.device) -> str:
        x = _normal(*CHECKED_SHAPE, device)
        as_rows, as_cols, _ = quantize(x, *formats, granularity)
        return _first(
            _differs("rows", as_rows, x, granularity) if rows else "",
            _differs("columns", as_cols, x.t(), granularity) if cols else "",
        )

    which = "both" if rows and cols else "rows" if rows else "columns"
    return Op(name=f"quantize {granularity} {which}", make=make, check=check)


def _delayed_op() -> Op:
    def known(x: Tensor) -> tuple[Tensor, Tensor]:
        return amax_ref(x).reshape(1).contiguous(), torch.zeros(1, device=x.device)

    def make(shape: tuple[int, int], device: torch.device) -> tuple[Call, int]:
        x = _normal(*shape, device)
        amax, staging = known(x)
        return lambda: quantize(x, E4M3, E4M3, TENSORWISE, amax=amax, staging=staging), x.numel() * 4

    def check(device: torch.device) -> str:
        x = _normal(*CHECKED_SHAPE, device)
        amax, staging = known(x)
        rows, cols, _ = quantize(x, E4M3, E4M3, TENSORWISE, amax=amax, staging=staging)
        return _first(
            _differs("rows", rows, x, TENSORWISE),
            _differs("columns", cols, x.t(), TENSORWISE),
            "" if torch.equal(staging, amax) else "the amax for the next step differs",
        )

    return Op(name="quantize delayed both", make=make, check=check)


def _amax_op(dim: int | None) -> Op:
    def make(shape: tuple[int, int], device: torch.device) -> tuple[Call, int]:
        x = _normal(*shape, device)
        return lambda: compute_amax(x, dim), x.numel() * 2

    def check(device: torch.device) -> str:
        x = _normal(*CHECKED_SHAPE, device)
        same = torch.equal(compute_amax(x, dim).cpu(), amax_ref(x.cpu(), dim))
        return "" if same else "amax differs from the reference's"

    return Op(name={None: "amax tensor", 0: "amax columns", 1: "amax rows"}[dim], make=make, check=check)


def _concatenated_op(granularity: Granularity) -> Op:
    def parts(rows: int, cols: int, device: torch.device) -> list[Tensor]:
        return list(_normal(rows, cols, device).split(-(-rows // 2 // 128) * 128))

    def make(shape: tuple[int, int], device: torch.device) -> tuple[Call, int]:
        weights = parts(*shape, device)
        return lambda: quantize_concatenated(weights, E4M3, E4M3, granularity), shape[0] * shape[1] * 4

    def check(device: torch.device) -> str:
        weights = parts(*CHECKED_SHAPE, device)
        rows, cols = quantize_concatenated(weights, E4M3, E4M3, granularity)
        whole = torch.cat(weights)
        return _first(
            _differs("rows", rows, whole, granularity), _differs("columns", cols, whole.t(), granularity)
        )  # fmt: skip

    return Op(name=f"quantize two weights as one {granularity}", make=make, check=check)


def _sums_op(granularity: Granularity) -> Op:
    """A cast of dy that adds up its columns, beside "quantize ... both", which does not."""

    def make(shape: tuple[int, int], device: torch.device) -> tuple[Call, int]:
        x = _normal(*shape, device)
        return lambda: quantize_and_sum(x, E4M3, E4M3, granularity), x.numel() * 4 + shape[1] * 4

    def check(device: torch.device) -> str:
        x = _normal(*CHECKED_SHAPE, device)
        rows, cols, _, sums = quantize_and_sum(x, E4M3, E4M3, granularity)
        return _first(
            _differs("rows", rows, x, granularity),
            _differs("columns", cols, x.t(), granularity),
            _far("sums", sums, x.double().sum(0), 1e-5),
        )

    return Op(name=f"quantize {granularity} both with sums of columns", make=make, check=check)


def _sums_of_several_op(granularity: Granularity) -> Op:
    """Gradients of two layers as one, transposed, as q, k and v cast theirs."""

    def parts(rows: int, cols: int, device: torch.device) -> list[Tensor]:
        return list(_normal(rows, cols, device).t().split(-(-cols // 2 // 128) * 128))

    def make(shape: tuple[int, int], device: torch.device) -> tuple[Call, int]:
        several = parts(*shape, device)
        return (
            lambda: quantize_concatenated_and_sum(several, E4M3, E4M3, granularity),
            shape[0] * shape[1] * 4 + shape[1] * 4,
        )

    def check(device: torch.device) -> str:
        several = parts(*CHECKED_SHAPE, device)
        rows, cols, sums = quantize_concatenated_and_sum(several, E4M3, E4M3, granularity)
        whole = torch.cat(several)
        return _first(
            _differs("rows", rows, whole, granularity),
            _differs("columns", cols, whole.t(), granularity),
            _far("sums", sums, whole.double().sum(1), 1e-5),
        )

    return Op(name=f"quantize two gradients as one with sums {granularity}", make=make, check=check)


def _transpose_op() -> Op:
    def by_rows(rows: int, cols: int, device: torch.device) -> Quantized:
        q, _, _ = quantize(_normal(rows, cols, device), E4M3, None, ROWWISE, pow2=True)
        assert q is not None
        return q

    def make(shape: tuple[int, int], device: torch.device) -> tuple[Call, int]:
        q = by_rows(*shape, device)
        return lambda: transpose_codes(q, shape[1]), q.codes.numel() * 2

    def check(device: torch.device) -> str:
        q, cols = by_rows(*CHECKED_SHAPE, device), CHECKED_SHAPE[1]
        got = transpose_codes(q, cols)
        want = transpose_ref(q.codes.cpu(), q.scale_inv.cpu(), got.scale_inv.cpu(), cols)
        return "" if torch.equal(got.codes.cpu().view(torch.uint8), want.view(torch.uint8)) else "codes differ"

    return Op(name="transpose codes", make=make, check=check)


def _gated_op(granularity: Granularity, cols: bool) -> Op:
    wanted = E4M3 if cols else None

    def make(shape: tuple[int, int], device: torch.device) -> tuple[Call, int]:
        gate_up = _normal(shape[0], 2 * shape[1], device)
        return lambda: gated(gate_up, "silu", E4M3, wanted, granularity), shape[0] * shape[1] * (5 + cols)

    def check(device: torch.device) -> str:
        gate_up = _normal(CHECKED_SHAPE[0], 2 * CHECKED_SHAPE[1], device).float()
        rows, columns, act = gated(gate_up, "silu", E4M3, wanted, granularity, high_precision=True)
        assert act is not None
        return _first(
            _far("act", act, gated_ref(gate_up.double(), "silu"), 1e-5),
            _differs("rows", rows, act, granularity),
            _differs("columns", columns, act.t(), granularity) if cols else "",
        )

    return Op(name=f"gated {granularity} {'both' if cols else 'rows'}", make=make, check=check)


def _gated_backward_op(granularity: Granularity) -> Op:
    def make(shape: tuple[int, int], device: torch.device) -> tuple[Call, int]:
        gate_up, d = _normal(shape[0], 2 * shape[1], device), _normal(*shape, device, 1)
        return (
            lambda: gated_backward(d, gate_up, "silu", E4M3, E4M3, E4M3, granularity),
            shape[0] * shape[1] * 11,
        )  # fmt: skip

    def check(device: torch.device) -> str:
        gate_up = _normal(CHECKED_SHAPE[0], 2 * CHECKED_SHAPE[1], device).float()
        d = _normal(*CHECKED_SHAPE, device, 1).float()
        rows, cols, act_cols, own = gated_backward(
            d, gate_up, "silu", E4M3, E4M3, E4M3, granularity, high_precision=True
        )
        act = gated(gate_up, "silu", None, None, granularity, high_precision=True)[2]
        assert own is not None and act is not None
        exact, _ = gated_backward_ref(d.double(), gate_up.double(), "silu")
        return _first(
            _far("gradient", own, exact, 1e-5),
            _differs("rows", rows, own, granularity),
            _differs("columns", cols, own.t(), granularity),
            _differs("act", act_cols, act.t(), granularity),
        )

    return Op(name=f"gated backward {granularity}", make=make, check=check)


def _activation_op(granularity: Granularity) -> Op:
    def make(shape: tuple[int, int], device: torch.device) -> tuple[Call, int]:
        x = _normal(*shape, device)
        return lambda: activation_forward(x, "gelu", E4M3, None, granularity), x.numel() * 3

    def check(device: torch.device) -> str:
        x = _normal(*CHECKED_SHAPE, device).float()
        rows, _, act = activation_forward(x, "gelu", E4M3, None, granularity, high_precision=True)
        assert act is not None
        exact = activation_ref(x.double(), "gelu")
        return _first(_far("act", act, exact, 1e-5), _differs("rows", rows, act, granularity))

    return Op(name=f"activation {granularity} rows", make=make, check=check)


def _activation_backward_op(granularity: Granularity) -> Op:
    """With the sums over tokens, which are a bias's gradient."""

    def make(shape: tuple[int, int], device: torch.device) -> tuple[Call, int]:
        x, d = _normal(*shape, device), _normal(*shape, device, 1)
        operands = d, x, "gelu", E4M3, E4M3, E4M3, granularity
        return lambda: activation_backward(*operands, sums=True), x.numel() * 7

    def check(device: torch.device) -> str:
        x, d = _normal(*CHECKED_SHAPE, device).float(), _normal(*CHECKED_SHAPE, device, 1).float()
        operands = d, x, "gelu", E4M3, E4M3, E4M3, granularity
        rows, cols, act_cols, own, sums = activation_backward(*operands, high_precision=True, sums=True)
        act = activation_forward(x, "gelu", None, None, granularity, high_precision=True)[2]
        assert own is not None and act is not None and sums is not None
        exact, _ = activation_backward_ref(d.double(), x.double(), "gelu")
        return _first(
            _far("gradient", own, exact, 1e-5),
            _far("sums", sums, exact.sum(0), 1e-5),
            _differs("rows", rows, own, granularity),
            _differs("columns", cols, own.t(), granularity),
            _differs("act", act_cols, act.t(), granularity),
        )

    return Op(name=f"activation backward {granularity}", make=make, check=check)


def _norm_op(codes: bool) -> Op:
    rows = E4M3 if codes else None

    def make(shape: tuple[int, int], device: torch.device) -> tuple[Call, int]:
        x, w = _normal(*shape, device), _normal(1, shape[1], device, 1)[0]
        return lambda: norm_forward(x, w, None, 1e-5, rows=rows, granularity=ROWWISE), x.numel() * (4 + codes)

    def check(device: torch.device) -> str:
        x, w = _normal(*CHECKED_SHAPE, device), _normal(1, CHECKED_SHAPE[1], device, 1)[0]
        made = norm_forward(x, w, None, 1e-5, rows=rows, granularity=ROWWISE)
        exact, _, _ = norm_ref(x.double(), w.double(), None, 1e-5, kind="rms")
        return _first(_far("y", made.y, exact), _differs("rows", made.rows, made.y, ROWWISE) if codes else "")

    return Op(name="norm forward rowwise codes" if codes else "norm forward", make=make, check=check)


def _add_norm_op() -> Op:
    """A residual, a norm and its codes: reads two tensors, writes the sum, y and codes."""

    def inputs(rows: int, cols: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        return _normal(rows, cols, device), _normal(rows, cols, device, 2), _normal(1, cols, device, 1)[0]

    def make(shape: tuple[int, int], device: torch.device) -> tuple[Call, int]:
        x, residual, w = inputs(*shape, device)
        return (
            lambda: norm_forward(x, w, None, 1e-5, residual=residual, rows=E4M3, granularity=ROWWISE),
            x.numel() * 9,
        )

    def check(device: torch.device) -> str:
        x, residual, w = inputs(*CHECKED_SHAPE, device)
        made = norm_forward(x, w, None, 1e-5, residual=residual, rows=E4M3, granularity=ROWWISE)
        assert made.h is not None
        exact, _, _ = norm_ref(made.h.double(), w.double(), None, 1e-5, kind="rms")
        return _first(
            "" if torch.equal(made.h, x + residual) else "the sum differs from PyTorch's",
            _far("y", made.y, exact),
            _differs("rows", made.rows, made.y, ROWWISE),
        )

    return Op(name="norm forward with residual rowwise codes", make=make, check=check)


def _norm_backward_op(residual: bool) -> Op:
    """With a residual the gradient of the sum is read too, and added."""

    def inputs(rows: int, cols: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        x, dy, w = _normal(rows, cols, device), _normal(rows, cols, device, 2), _normal(1, cols, device, 1)[0]
        dh = _normal(rows, cols, device, 3) if residual else None
        return dy, x, w, norm_forward(x, w, None, 1e-5).inverse_std, dh

    def make(shape: tuple[int, int], device: torch.device) -> tuple[Call, int]:
        dy, x, w, inverse_std, dh = inputs(*shape, device)
        return (
            lambda: norm_backward(dy, x, w, inverse_std, None, bias_grad=False, dh=dh),
            x.numel() * (8 if residual else 6),
        )

    def check(device: torch.device) -> str:
        dy, x, w, inverse_std, dh = inputs(*CHECKED_SHAPE, device)
        dx, dw, _ = norm_backward(dy, x, w, inverse_std, None, bias_grad=False, dh=dh)
        exact, exact_dw, _ = norm_backward_ref(
            dy.double(), x.double(), w.double(), inverse_std.double(), None, bias_grad=False,
            dh=None if dh is None else dh.double(),
        )  # fmt: skip
        assert exact_dw is not None
        return _first(_far("dx", dx, exact), _far("dw", dw, exact_dw, 1e-3))

    return Op(name=f"norm backward{' with residual' if residual else ''}", make=make, check=check)


def all_ops() -> list[Op]:
    """Every operation that is measured."""
    orientations = ((True, False), (False, True), (True, True))
    return [
        *(_quantize_op(g, rows, cols) for g in GRANULARITIES.values() for rows, cols in orientations),
        _delayed_op(),
        *(_sums_op(g) for g in (TENSORWISE, ROWWISE, BLOCK_1x128)),
        *(_sums_of_several_op(g) for g in (TENSORWISE, ROWWISE)),
        *(_amax_op(dim) for dim in (None, 1, 0)),
        _transpose_op(),
        *(_concatenated_op(g) for g in (TENSORWISE, ROWWISE, BLOCK_128x128)),
        *(_gated_op(g, cols) for g in (TENSORWISE, ROWWISE, BLOCK_1x128) for cols in (False, True)),
        *(_gated_backward_op(g) for g in (TENSORWISE, ROWWISE, BLOCK_1x128)),
        *(_activation_op(g) for g in (TENSORWISE, ROWWISE, BLOCK_1x128)),
        *(_activation_backward_op(g) for g in (TENSORWISE, ROWWISE, BLOCK_1x128)),
        _norm_op(codes=False),
        _norm_op(codes=True),
        _add_norm_op(),
        _norm_backward_op(residual=False),
        _norm_backward_op(residual=True),
    ]


def select(patterns: Sequence[str] | None, ops: Sequence[Op]) -> list[Op]:
    """The operations that a name or glob fits; all for None. Raises RunError for a pattern that fits none."""
    for pattern in patterns or ():
        if not any(fnmatchcase(op.name, pattern) for op in ops):
            raise RunError(unknown_name("operation", pattern, [op.name for op in ops]))
    return [op for op in ops if patterns is None or any(fnmatchcase(op.name, pattern) for pattern in patterns)]


def parse_shapes(text: str) -> tuple[tuple[int, int], ...]:
    """``16384x4096,...`` as (rows, columns). Raises RunError for another form."""
    shapes = []
    for part in text.split(","):
        numbers = part.strip().lower().split("x")
        if len(numbers) != 2 or not all(number.isdecimal() and int(number) > 0 for number in numbers):
            raise RunError(
                f"shape {part.strip()!r} is not allowed; write ROWSxCOLUMNS, such as 16384x4096, with commas"
            )
        if int(numbers[0]) % 16 or int(numbers[1]) % 128:
            raise RunError(f"shape {part.strip()!r} is not allowed: rows are multiples of 16, columns of 128")
        shapes.append((int(numbers[0]), int(numbers[1])))
    return tuple(shapes)


def _rows_of(op: Op, shapes: Sequence[tuple[int, int]], device: torch.device, bandwidth: float) -> Iterator[Row]:
    labels = {"group": "acceler8"}
    try:
        wrong = op.check(device)
    except Exception as error:
        yield Row(name=op.name, status="error", detail=one_line(error), labels=labels)
        return
    if wrong:
        yield Row(name=op.name, status="wrong", detail=wrong, labels=labels)
        return
    for shape in shapes:
        row = Row(name=op.name, labels=labels | {"shape": said(shape)})
        try:
            work, size = op.make(shape, device)
            row.ms = timing.call_ms(work, device)
            row.values["gb_per_s"] = size / row.ms.median / 1e6
            row.values["floor_ms"] = size / bandwidth * 1e3
            row.values["share_of_floor"] = row.values["floor_ms"] / row.ms.median
        except Exception as error:
            row.status, row.detail = "error", one_line(error)
        yield row
        timing.release(device)


def measure(
    ops: Sequence[Op],
    shapes: Sequence[tuple[int, int]],
    device: torch.device,
    *,
    say: Say = lambda message: None,
) -> Result:
    """Check and time each operation on each shape."""
    bandwidth = timing.copy_bandwidth(device)
    timing.release(device)
    result = Result(
        command="op", facts=facts(device), rows=[],
        settings={
            "shapes": [said(shape) for shape in shapes], "ops": [op.name for op in ops],
            "copy_tb_per_s": bandwidth / 1e12,
        },
    )  # fmt: skip
    for op in ops:
        say(op.name)
        result.rows += _rows_of(op, shapes, device, bandwidth)
    if device.type == "cpu":
        result.notes.append("on a CPU the reference in plain PyTorch runs: times say nothing about the kernels")
    return result
