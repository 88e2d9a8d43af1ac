"""GEMMs alone, and beside them linear layers forward and backward (``layers``): BF16 against each way of FP8.

A GEMM alone says what the hardware can; its operands are cast already. The layers decide whether FP8 gains, so the cost
table (``cost_grid``) is made of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from acceler8 import recipes
from acceler8.bench import timing
from acceler8.bench.facts import facts
from acceler8.bench.layers import Shape, capture_for, finite, layer_rows, linear, said, sqnr_db
from acceler8.bench.results import Result, Row, one_line
from acceler8.costs import BF16
from acceler8.errors import RunError
from acceler8.formats import E4M3
from acceler8.kernels import has_hardware_matmul, multiply, quantize
from acceler8.recipes import Gemm

Say = Callable[[str], None]

SHAPES: tuple[Shape, ...] = (
    (8192, 8192, 8192), (16384, 4096, 14336), (16384, 14336, 4096), (16384, 4096, 4096), (16384, 4096, 6144),
    (16384, 4096, 28672), (16384, 2048, 8192), (16384, 2048, 16384), (16384, 8192, 2048), (16384, 2048, 11264),
    (16384, 5632, 2048), (4096, 2048, 8192),
)  # fmt: skip
"""(M, K, N): what the presets' layers multiply, merged ones included, and a square."""
TINY_SHAPES: tuple[Shape, ...] = ((64, 128, 256), (128, 256, 128))

LEAST_SQNR_DB = {"bf16": 40.0, "fp8 product": 22.0}
"""Below it a result is wrong. Gaussian data: a product of E4M3 operands has 28.5 dB, of E5M2 and E4M3 24.6."""
SAMPLE_ROWS, SAMPLE_COLS = 64, 256


def parse_shapes(text: str) -> tuple[Shape, ...]:
    """``16384x4096x14336,...`` as (M, K, N). Raises RunError for another form, and for K, N not multiples of 16."""
    shapes = []
    for part in text.split(","):
        numbers = part.strip().lower().split("x")
        if len(numbers) != 3 or not all(number.isdecimal() and int(number) > 0 for number in numbers):
            raise RunError(f"shape {part.strip()!r} is not allowed; write MxKxN, such as 16384x4096x14336, with commas")
        m, k, n = map(int, numbers)
        if k % 16 or n % 16:
            raise RunError(f"shape {part.strip()!r} is not allowed: FP8 GEMMs take K and N in multiples of 16")
        shapes.append((m, k, n))
    return tuple(shapes)


@dataclass(frozen=True, kw_only=True)
class _Mode:
    """One way to multiply."""

    name: str
    gemm: Gemm | None
    """None: BF16."""


def _modes(device: torch.device) -> list[_Mode]:
    modes = [_Mode(name=BF16, gemm=None)]
    for name in ("tensorwise", "rowwise"):
        plain = recipes.get(name, formats="E4M3").fprop
        modes += [
            _Mode(name=f"{name} {said}", gemm=Gemm(a=plain.a, b=plain.b, fast_accum=fast))
            for said, fast in (("fast", True), ("exact", False))
        ]
    modes.append(_Mode(name="blockwise", gemm=recipes.get("blockwise").fprop))
    return [
        m for m in modes if device.type == "cpu" or m.gemm is None or has_hardware_matmul(device, m.gemm.a.granularity)
    ]


def _product(mode: _Mode, a: Tensor, b: Tensor) -> Callable[[], Tensor]:
    """``a @ b.T`` in the mode, operands cast beforehand."""
    gemm = mode.gemm
    if gemm is None:
        return lambda: a @ b.t()
    qa, _, _ = quantize(a, gemm.a.format or E4M3, None, gemm.a.granularity)
    qb, _, _ = quantize(b, gemm.b.format or E4M3, None, gemm.b.granularity)
    assert qa is not None and qb is not None
    left, right = qa, qb
    return lambda: multiply(left, right, out_dtype=torch.bfloat16, fast_accum=gemm.fast_accum)


def gemm_rows(shape: Shape, device: torch.device, rounds: int = 10) -> list[Row]:
    """Each mode on one shape: checked against a float64 sample of the originals, then timed in turns."""
    m, k, n = shape
    generator = torch.Generator(device).manual_seed(0)
    a = torch.randn(m, k, device=device, generator=generator).bfloat16()
    b = torch.randn(n, k, device=device, generator=generator).bfloat16()
    exact = a[:SAMPLE_ROWS].double() @ b[:SAMPLE_COLS].double().t()
    rows, works = [], {}
    for mode in _modes(device):
        row = Row(name=mode.name, labels={"group": "acceler8" if mode.gemm else "PyTorch", "shape": said(shape)})
        rows.append(row)
        try:
            work = _product(mode, a, b)
            row.values["sqnr_db"] = finite(sqnr_db(work()[:SAMPLE_ROWS, :SAMPLE_COLS], exact))
        except Exception as error:
            row.status, row.detail = "error", one_line(error)
            continue
        least = LEAST_SQNR_DB["fp8 product" if mode.gemm else BF16]
        if row.values["sqnr_db"] < least:
            row.status, row.detail = "wrong", f"{row.values['sqnr_db']:.1f} dB, at least {least:.0f} are right"
        else:
            works[mode.name] = work
    _note_times(rows, timing.rounds_ms(works, device, rounds=rounds), 2.0 * m * k * n)
    return rows


def _note_times(rows: list[Row], times: dict[str, timing.Spread], flops: float) -> None:
    for row in rows:
        if row.name in times:
            row.ms = times[row.name]
            row.values["tflops"] = flops / row.ms.median / 1e9
            if BF16 in times:
                row.values["speed_against_bf16"] = times[BF16].median / row.ms.median


LAYERS = "Linear layers, forward and backward"


def measure(
    shapes: Iterable[Shape],
    names: Sequence[str],
    device: torch.device,
    *,
    say: Say = lambda message: None,
    rounds: int = 10,
) -> Result:
    """Both tables over the shapes."""
    shapes = tuple(shapes)
    result = Result(
        command="gemm", facts=facts(device), rows=[],
        settings={"shapes": [said(shape) for shape in shapes], "recipes": list(names)},
    )  # fmt: skip
    layers = result.tables[LAYERS] = []
    capture = capture_for(device)
    for shape in shapes:
        say(f"{said(shape)}: GEMMs")
        result.rows += gemm_rows(shape, device, rounds)
        timing.release(device)
        say(f"{said(shape)}: layers")
        layers += layer_rows(linear(shape), names, device, capture, rounds=rounds)
        timing.release(device)
    if device.type == "cpu":
        result.notes.append("on a CPU FP8 is emulated: times say nothing about a GPU")
    return result


__all__ = ["SHAPES", "TINY_SHAPES", "measure", "parse_shapes"]
