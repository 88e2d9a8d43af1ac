"""GEMMs, and linear layers forward and backward: BF16 against each way of FP8.

A GEMM alone says what the hardware can; its operands are cast already. A layer adds what training adds: casts of x, w
and dy in one or two orientations, three GEMMs, and launches. The second decides whether FP8 gains, so the cost table
is made of layers.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import acceler8
from acceler8 import recipes
from acceler8.bench import timing
from acceler8.bench.facts import device_name, facts
from acceler8.bench.results import Result, Row, one_line
from acceler8.costs import BF16, CostTable
from acceler8.errors import RunError
from acceler8.formats import E4M3
from acceler8.kernels import has_hardware_matmul, multiply, quantize
from acceler8.recipes import Gemm

Shape = tuple[int, int, int]
Say = Callable[[str], None]

SHAPES: tuple[Shape, ...] = (
    (8192, 8192, 8192), (16384, 4096, 14336), (16384, 14336, 4096), (16384, 4096, 4096), (16384, 4096, 6144),
    (16384, 4096, 28672), (16384, 2048, 8192), (16384, 2048, 16384), (16384, 8192, 2048), (16384, 2048, 11264),
    (16384, 5632, 2048), (4096, 2048, 8192),
)  # fmt: skip
"""(M, K, N): what the presets' layers multiply, merged ones included, and a square."""
TINY_SHAPES: tuple[Shape, ...] = ((64, 128, 256), (128, 256, 128))
GRID_TOKENS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
GRID_SIZES = (512, 1024, 2048, 4096, 8192, 16384)
GRID_BUDGET_S = 170.0

LEAST_SQNR_DB = {"bf16": 40.0, "fp8 product": 22.0, "fp8 layer": 18.0}
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


def said(shape: Sequence[int]) -> str:
    """``MxKxN``."""
    return "x".join(map(str, shape))


def sqnr_db(got: Tensor, exact: Tensor) -> float:
    """Power of ``exact`` over that of the difference, dB; infinite if equal."""
    wide = exact.double()
    noise = (got.double() - wide).square().sum()
    return float(10 * torch.log10(wide.square().sum() / noise))


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
            row.values["sqnr_db"] = _finite(sqnr_db(work()[:SAMPLE_ROWS, :SAMPLE_COLS], exact))
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


def _finite(db: float) -> float:
    """NaN, of a result that holds one, is no signal at all; equal tensors have more than any cast."""
    return -999.0 if math.isnan(db) else min(db, 999.0)


def _note_times(rows: list[Row], times: dict[str, timing.Spread], flops: float) -> None:
    for row in rows:
        if row.name in times:
            row.ms = times[row.name]
            row.values["tflops"] = flops / row.ms.median / 1e9
            if BF16 in times:
                row.values["speed_against_bf16"] = times[BF16].median / row.ms.median


class Layer:
    """A linear layer with input and gradient, in BF16 (None) or by a recipe; the same numbers for each."""

    def __init__(self, shape: Shape, recipe: str | None, device: torch.device) -> None:
        m, k, n = shape
        generator = torch.Generator(device).manual_seed(0)

        def normal(rows: int, cols: int, std: float = 1.0) -> Tensor:
            return (torch.randn(rows, cols, device=device, generator=generator) * std).bfloat16()

        linear = nn.Linear(k, n, bias=False, device="meta", dtype=torch.bfloat16)
        linear.weight = nn.Parameter(normal(n, k, k**-0.5))
        self.weight = linear.weight
        self.model: nn.Module = nn.Sequential(linear)
        if recipe is not None:
            acceler8.convert(self.model, recipe)
        self.x, self.dy = normal(m, k).requires_grad_(), normal(m, n)
        self.is_delayed = recipe is not None and recipes.get(recipe).is_delayed

    def step(self) -> Tensor:
        """Forward and backward; gradients are dropped by ``clear``."""
        y: Tensor = self.model(self.x)
        y.backward(self.dy)
        return y

    def clear(self) -> None:
        """Drop the gradients."""
        self.x.grad = self.weight.grad = None

    def work(self) -> None:
        """What is timed."""
        self.step()
        self.clear()

    def sample(self) -> tuple[Tensor, Tensor, Tensor]:
        """A part of the result and of both gradients. Delayed scaling has its amaxes behind it."""
        for _ in range(2 if self.is_delayed else 0):
            self.work()
            acceler8.step(self.model)
        y = self.step()
        assert self.x.grad is not None and self.weight.grad is not None
        parts = tuple(t[:SAMPLE_COLS, :SAMPLE_COLS].detach().clone() for t in (y, self.x.grad, self.weight.grad))
        self.clear()
        return parts[0], parts[1], parts[2]


def check_layer(layer: Layer, exact: tuple[Tensor, Tensor, Tensor]) -> float:
    """The worst SQNR of result and gradients against BF16's, dB."""
    return min(_finite(sqnr_db(got, of)) for got, of in zip(layer.sample(), exact, strict=True))


def layer_recipes(device: torch.device, wanted: Sequence[str] | None) -> list[str]:
    """The recipes that are asked for; by default those that the device multiplies itself (on a CPU all but MX)."""
    for name in wanted or ():
        recipes.get(name)
    known = [recipes.get(name) for name in recipes.names() if name != "mxfp8"]
    return list(wanted) if wanted else [
        r.name for r in known if device.type == "cpu" or not r.fp8_gemms or has_hardware_matmul(device, r.granularity)
    ]  # fmt: skip


def layer_rows(shape: Shape, names: Sequence[str], device: torch.device, rounds: int = 8, calls: int = 4) -> list[Row]:
    """BF16 and each recipe on one shape: checked against BF16, then timed in turns of several steps in a row."""
    layers: dict[str, Layer] = {BF16: Layer(shape, None, device)}
    exact = layers[BF16].sample()
    rows = [Row(name=BF16, labels={"group": "PyTorch", "shape": said(shape), "recipe": None})]
    for name in names:
        row = Row(name=name, labels={"group": "acceler8", "shape": said(shape), "recipe": name})
        rows.append(row)
        try:
            layer = Layer(shape, name, device)
            row.values["sqnr_db"] = db = check_layer(layer, exact)
        except Exception as error:
            row.status, row.detail = "error", one_line(error)
            continue
        if db < LEAST_SQNR_DB["fp8 layer"]:
            row.status, row.detail = "wrong", f"{db:.1f} dB, at least {LEAST_SQNR_DB['fp8 layer']:.0f} are right"
        else:
            layers[name] = layer
    works = {name: layer.work for name, layer in layers.items()}
    m, k, n = shape
    _note_times(rows, timing.rounds_ms(works, device, rounds=rounds, calls=calls), 6.0 * m * k * n)
    return rows


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
    layers = result.tables["Linear layers, forward and backward"] = []
    for shape in shapes:
        say(f"{said(shape)}: GEMMs")
        result.rows += gemm_rows(shape, device, rounds)
        timing.release(device)
        say(f"{said(shape)}: layers")
        layers += layer_rows(shape, names, device, rounds)
        timing.release(device)
    if device.type == "cpu":
        result.notes.append("on a CPU FP8 is emulated: times say nothing about a GPU")
    return result


def measure_costs(
    device: torch.device,
    names: Sequence[str],
    *,
    tokens: Sequence[int] = GRID_TOKENS,
    sizes: Sequence[int] = GRID_SIZES,
    budget_s: float = GRID_BUDGET_S,
    say: Say = lambda message: None,
) -> tuple[CostTable, list[str]]:
    """Layers over the grid of M in ``tokens``, K and N in ``sizes``, small ones first; and notes on what is missing.

    Recipes whose block does not divide a size are measured all the same, filled as they train. Points that do not fit
    into memory, or come behind ``budget_s`` seconds, are left out. Raises RunError if a result is wrong.
    """
    entries: dict[str, dict[Shape, float]] = {name: {} for name in (BF16, *names)}
    notes: list[str] = []
    start = time.perf_counter()
    grid = sorted(itertools.product(tokens, sizes, sizes), key=lambda shape: (math.prod(shape), shape))
    largest = timing.free_bytes(device) * 0.8 if device.type == "cuda" else math.inf
    for number, shape in enumerate(grid):
        m, k, n = shape
        if time.perf_counter() - start > budget_s:
            notes.append(f"{len(grid) - number} of {len(grid)} shapes left out: {budget_s:.0f} s were over")
            break
        if 14 * m * (k + n) + 16 * k * n > largest:
            notes.append(f"{said(shape)} left out: too large for the memory")
            continue
        if number % 16 == 0:
            say(f"shape {number + 1} of {len(grid)}: {said(shape)}, {time.perf_counter() - start:.0f} s")
        exact = None
        for name in (None, *names):
            layer = Layer(shape, name, device)
            if exact is None:
                exact = layer.sample()
            elif (db := check_layer(layer, exact)) < LEAST_SQNR_DB["fp8 layer"]:
                raise RunError(f"{name} on {said(shape)} has {db:.1f} dB, which is wrong; no cost table is made of it")
            spread = timing.call_ms(layer.work, device, repeats=5, warmup=1, flush=False, sample_ms=2.0)
            entries[name or BF16][shape] = spread.median
            del layer
    said_facts = facts(device)
    table = CostTable(
        gpu=device_name(device), torch=said_facts["torch"], date=said_facts["date"], commit=said_facts["commit"],
        source="measured", entries={name: found for name, found in entries.items() if found},
    )  # fmt: skip
    return table, notes


__all__ = ["SHAPES", "TINY_SHAPES", "Layer", "measure", "measure_costs", "parse_shapes"]
