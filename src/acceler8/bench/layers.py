"""Linear layers forward and backward, alone or those that run together: BF16 against each recipe.

A layer adds to its GEMMs what training adds: casts of x, w and dy in one or two orientations, the weight's among them,
for its codes live for one forward and backward. What counts is how long the GPU is busy: in a training step the host
runs ahead. Eager calls of one small layer are as long as the host needs for its launches, whatever its shape, so a
layer is captured as a CUDA graph, forward and backward, and the graph is replayed.

A replay would find its input and weights in the L2 cache, which a step does not. So a graph goes through several copies
of them in turn, as many as are twice the cache, at most ``MOST_COPIES``: layers below an eighth of that keep some of
the advantage, in BF16 and in FP8 alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import acceler8
from acceler8 import backends, recipes
from acceler8.bench import timing
from acceler8.bench.results import Row, one_line
from acceler8.conversion.graphed_step import Capture, CudaGraphs
from acceler8.costs import BF16, backend_and_recipe, entry_name
from acceler8.errors import Acceler8Error, PlanError
from acceler8.kernels import has_hardware_matmul

Shape = tuple[int, int, int]
"""(M, K, N): tokens, in_features, out_features."""
Sample = tuple[Tensor, ...]

MOST_COPIES = 8
SAMPLE = 256
"""Rows and columns of each result that are compared."""


def said(shape: Sequence[int]) -> str:
    """``MxKxN``."""
    return "x".join(map(str, shape))


def sqnr_db(got: Tensor, exact: Tensor) -> float:
    """Power of ``exact`` over that of the difference, dB; infinite if equal."""
    wide = exact.double()
    noise = (got.double() - wide).square().sum()
    return float(10 * torch.log10(wide.square().sum() / noise))


def finite(db: float) -> float:
    """NaN, of a result that holds one, is no signal at all; equal tensors have more than any cast."""
    return -999.0 if math.isnan(db) else min(db, 999.0)


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Linear layers that read one input [tokens, k], or a module of such, and what they are called."""

    name: str
    tokens: int
    k: int
    widths: tuple[int, ...]
    """Of the results, in the order in which the module gives them."""
    label: str
    """The GEMMs' shape, in words."""
    make: Callable[[], nn.Module]
    weight_dtype: torch.dtype = torch.bfloat16
    """With float32 the layers run under autocast, as a prepared model does; inputs are BF16 all the same."""
    least_sqnr_db: float = 18.0
    """Below it a result is wrong: Gaussian data, the worst of results and gradients, and E5M2 gradients' is 24.6."""


def linear(shape: Shape) -> Unit:
    """One layer without bias."""
    m, k, n = shape
    return Unit(
        name="linear", tokens=m, k=k, widths=(n,), label=said(shape), make=lambda: nn.Linear(k, n, bias=False)
    )  # fmt: skip


class Operands:
    """Inputs, weights and results' gradients of a unit, the same for BF16 and every recipe."""

    def __init__(self, unit: Unit, device: torch.device) -> None:
        self.unit, self.device = unit, device
        with torch.device("meta"):
            shapes = {name: p.shape for name, p in unit.make().named_parameters()}
        generator = torch.Generator(device).manual_seed(0)

        def normal(*size: int, std: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return (torch.randn(size, device=device, generator=generator) * std).to(dtype)

        self.weight_count = sum(shape.numel() for shape in shapes.values())
        elements = self.weight_count + unit.tokens * (unit.k + sum(unit.widths))
        self.copies = range(_copies(2 * elements, device))
        self.xs = [normal(unit.tokens, unit.k) for _ in self.copies]
        self.dys = [tuple(normal(unit.tokens, width) for width in unit.widths) for _ in self.copies]
        self._weights = [
            {
                name: nn.Parameter(normal(*shape, std=shape[-1] ** -0.5, dtype=unit.weight_dtype))
                for name, shape in shapes.items()
            }
            for _ in self.copies
        ]

    @property
    def flops(self) -> float:
        """Of a forward and backward of one copy."""
        return 6.0 * self.unit.tokens * self.weight_count

    def modules(self) -> nn.ModuleList:
        """A module for each copy, all with the same Parameter objects at each call."""
        made = []
        for weights in self._weights:
            with torch.device("meta"):
                module = self.unit.make()
            module.load_state_dict(weights, assign=True)
            made.append(module)
        return nn.ModuleList(made)


def _copies(size: int, device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return max(1, min(MOST_COPIES, math.ceil(2 * cache / size)))


class Layer:
    """A unit with its operands, in BF16 (None) or by a recipe, ``backend:recipe`` with another backend."""

    def __init__(self, operands: Operands, recipe: str | None) -> None:
        self.operands = operands
        self.modules = operands.modules()
        self.is_delayed = False
        if recipe is not None:
            backend, word = backend_and_recipe(recipe)
            if backend == "native":
                acceler8.convert(self.modules, word)
            else:  # all of them: what a library leaves by default is not what is measured
                plan = acceler8.plan(self.modules, word, backend, filter_fn=lambda name, module: True)
                acceler8.convert(self.modules, plan)
            self.is_delayed = recipes.get(word).is_delayed

    def _context(self) -> AbstractContextManager[Any]:
        if self.operands.unit.weight_dtype is torch.bfloat16:
            return nullcontext()
        return torch.autocast(self.operands.device.type, torch.bfloat16)

    def _run_copy(self, number: int) -> Sample:
        module = self.modules[number]
        leaf = self.operands.xs[number].detach().requires_grad_()
        with self._context():
            # a result of an operation, as in a model: codes may lie on it, and go with it
            got = module(leaf.view_as(leaf))
        ys = got if isinstance(got, tuple) else (got,)
        gradients = torch.autograd.grad(ys, (leaf, *module.parameters()), self.operands.dys[number])
        return (*(y.detach() for y in ys), *gradients)

    def run(self) -> Sample:
        """Forward and backward of each copy; the results and gradients of the first."""
        first = self._run_copy(0)
        for number in self.operands.copies[1:]:
            self._run_copy(number)
        return first

    def settle(self) -> None:
        """Load the kernels, which are the same for all copies; delayed scaling has the amaxes of each behind it."""
        if not self.is_delayed:
            self._run_copy(0)
            return
        for _ in range(2):
            self.run()
            acceler8.step(self.modules)


class NoGraphError(Acceler8Error, RuntimeError):
    """A layer could not be captured."""


class Ready(NamedTuple):
    """A layer to be timed: all its copies once, a part of what that gave, and about how long it took, ms."""

    work: Callable[[], object]
    sample: Sample
    once_ms: float


def ready(layer: Layer, capture: Capture | None) -> Ready:
    """Run the layer as it will be timed. Raises NoGraphError if ``capture`` fails."""
    device = layer.operands.device
    if capture is None:
        layer.settle()
        kept: list[Sample] = []
        (once,) = timing.turn_ms(lambda: kept.append(layer.run()), 1, device)
        return Ready(layer.run, _sample(kept[0]), once)
    capture.warm_up(layer.settle)
    try:
        replay, results = capture.record(layer.run)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if isinstance(error.__context__, torch.OutOfMemoryError):
            raise error.__context__ from None
        raise NoGraphError(one_line(error)) from None
    (once,) = timing.turn_ms(replay, 1, device)
    return Ready(replay, _sample(results), once)


def _sample(results: Sample) -> Sample:
    return tuple(t[:SAMPLE, :SAMPLE].clone() for t in results)


def worst_db(sample: Sample, exact: Sample) -> float:
    """The worst SQNR of results and gradients against BF16's, dB."""
    return min(finite(sqnr_db(got, of)) for got, of in zip(sample, exact, strict=True))


def capture_for(device: torch.device) -> Capture | None:
    """CUDA graphs on a GPU, None elsewhere."""
    return CudaGraphs(device) if device.type == "cuda" else None


def layer_recipes(device: torch.device, wanted: Sequence[str] | None) -> list[str]:
    """The recipes that are asked for, those of other backends as ``backend:recipe``.

    By default those that the device multiplies itself (on a CPU all but MX), and on a GPU those of each backend that is
    installed. Raises PlanError for a backend that is not, and for a recipe that it lacks on this device.
    """
    for name in wanted or ():
        backend, word = backend_and_recipe(name)
        engine = backends.get(backend)
        if (problem := engine.lacks(recipes.get(word), device)) is not None:
            raise PlanError(problem)
    if wanted:
        return list(wanted)
    known = [recipes.get(name) for name in recipes.names() if name != "mxfp8"]
    own = [
        r.name for r in known if device.type == "cpu" or not r.fp8_gemms or has_hardware_matmul(device, r.granularity)
    ]  # fmt: skip
    return own if device.type == "cpu" else [*own, *_of_other_backends(device)]


def _of_other_backends(device: torch.device) -> list[str]:
    engines = [backends.find(name) for name in backends.names() if name != "native"]
    return [
        entry_name(engine.name, name)
        for engine in engines
        if engine.unavailable() is None
        for name in recipes.names()
        if engine.lacks(recipes.get(name), device) is None
    ]


def layer_rows(
    unit: Unit, names: Sequence[str], device: torch.device, capture: Capture | None, *, rounds: int = 10
) -> list[Row]:
    """BF16 and each recipe on one unit: checked against BF16, then timed in turns.

    ``ms`` is the GPU's (``labels["timing"]`` is ``graph``), and ``values["eager_ms"]`` that of calls. Where one cannot
    be captured ``ms`` is that of calls for all (``eager``), so that they can be compared, and BF16's row says why.
    """
    why = ""
    if capture is not None:
        try:
            return timed_rows(unit, names, device, capture, rounds=rounds, with_eager=True)
        except NoGraphError as error:
            why = f"not captured as a CUDA graph: {error}"
    rows = timed_rows(unit, names, device, None, rounds=rounds)
    rows[0].detail = why
    return rows


def timed_rows(
    unit: Unit,
    names: Sequence[str],
    device: torch.device,
    capture: Capture | None,
    *,
    rounds: int,
    with_eager: bool = False,
    is_strict: bool = False,
) -> list[Row]:
    """The rows, with one timing for all. ``is_strict``: what a recipe raises is raised.

    Raises: NoGraphError if one cannot be captured.
    """
    operands = Operands(unit, device)
    kind = "eager" if capture is None else "graph"
    rows: list[Row] = []
    layers: dict[str, Layer] = {}
    found: dict[str, Ready] = {}
    for name in (BF16, *names):
        is_plain = name == BF16
        group = "PyTorch" if is_plain else backend_and_recipe(name)[0].replace("native", "acceler8")
        labels = {"group": group, "shape": unit.label, "layer": unit.name}
        row = Row(name=name, labels=labels | {"recipe": None if is_plain else name, "timing": kind})
        rows.append(row)
        try:
            layer = Layer(operands, None if is_plain else name)
            one = ready(layer, capture)
        except NoGraphError as error:
            if ":" not in name:
                raise
            row.status, row.detail = "error", f"not captured as a CUDA graph: {error}"
            continue
        except Exception as error:
            if is_strict or is_plain:
                raise
            row.status, row.detail = "error", one_line(error)
            continue
        if not is_plain:
            row.values["sqnr_db"] = db = worst_db(one.sample, found[BF16].sample)
            if db < unit.least_sqnr_db:
                row.status, row.detail = "wrong", f"{db:.1f} dB, at least {unit.least_sqnr_db:.0f} are right"
                continue
        layers[name], found[name] = layer, one
    _note_times(rows, _times(found, device, kind, rounds), operands)
    if with_eager:
        times = timing.rounds_ms({name: layer.run for name, layer in layers.items()}, device, rounds=rounds, calls=4)
        for row in rows:
            if row.name in times:
                row.values["eager_ms"] = times[row.name].median / len(operands.copies)
                row.values["eager_speed_against_bf16"] = times[BF16].median / times[row.name].median
    return rows


def _times(found: dict[str, Ready], device: torch.device, kind: str, rounds: int) -> dict[str, timing.Spread]:
    works = {name: one.work for name, one in found.items()}
    if kind == "graph":
        return timing.queued_ms(works, {name: one.once_ms for name, one in found.items()}, device, rounds=rounds)
    longest = max(one.once_ms for one in found.values())
    return timing.rounds_ms(works, device, rounds=rounds, calls=max(2, min(20, round(2 / max(longest, 1e-6)))))


def _note_times(rows: list[Row], times: dict[str, timing.Spread], operands: Operands) -> None:
    for row in rows:
        if row.name in times:
            row.ms = times[row.name].divided(len(operands.copies))
            row.values["tflops"] = operands.flops / row.ms.median / 1e9
            row.values["speed_against_bf16"] = times[BF16].median / times[row.name].median


__all__ = [
    "Layer", "NoGraphError", "Operands", "Unit", "capture_for", "layer_recipes", "layer_rows", "linear", "timed_rows",
]  # fmt: skip
