"""What a linear layer costs on a GPU, forward and backward, in BF16 and in FP8: a measured table, read between points.

FP8 gains where the GEMMs are large and loses where casts weigh more; where that turns depends on the GPU.
``acceler8 bench gemm --save`` measures a grid of shapes and writes a table; ``CostTable.for_this_gpu()`` finds it, or
one that the package ships for the same GPU. Between points of the grid log(ms) is linear in log(M), log(K) and log(N),
which is exact for a power law. Outside of the grid, and where a corner was not measured, there is no answer: an
extrapolated one would look like a measured one.

A file is JSON: ``format`` ("acceler8-costs"), ``version``, ``gpu``, ``torch``, ``date``, ``commit``, ``source``
("measured", or "derived" from another table, as ``derivation`` then says), ``timing`` ("graph": what the GPU was busy
for, in replayed CUDA graphs; "eager": calls, with the waits for the host), and ``entries``, each with ``m`` (tokens),
``k`` (in_features), ``n`` (out_features), ``recipe`` ("bf16", a recipe's name, or with another backend than the native
one ``backend:recipe``) and ``ms``. All times of a table are
of one timing, else they could not be compared.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from acceler8.errors import RunError

if TYPE_CHECKING:
    import torch

FORMAT, VERSION = "acceler8-costs", 1
BF16 = "bf16"
SOURCES = ("measured", "derived")
TIMINGS = ("graph", "eager")
SHIPPED = Path(__file__).parent / "cost_tables"

Shape = tuple[int, int, int]
"""(M, K, N): tokens, in_features, out_features."""


def entry_name(backend: str, recipe: str) -> str:
    """What a recipe is called in a table: by its name, with another backend than the native one ``backend:recipe``."""
    return recipe if backend == "native" else f"{backend}:{recipe}"


def backend_and_recipe(entry: str) -> tuple[str, str]:
    """Inverse of ``entry_name``."""
    backend, _, recipe = entry.rpartition(":")
    return backend or "native", recipe


def user_folder() -> Path:
    """Where this user's tables lie: ``acceler8/cost_tables`` under XDG_DATA_HOME, by default ``~/.local/share``."""
    base = os.environ.get("XDG_DATA_HOME", "")
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".local" / "share") / "acceler8" / "cost_tables"


def file_name(gpu: str) -> str:
    """The file of a GPU's table: ``nvidia-h200.json``."""
    return f"{re.sub(r'[^a-z0-9]+', '-', gpu.lower()).strip('-')}.json"


def gpu_of(device: torch.device) -> str | None:
    """The GPU that computes what lies on ``device``, by its name; on ``meta`` this process's. None for a CPU."""
    import torch

    if device.type not in ("cuda", "meta") or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_name(device if device.type == "cuda" else None)


def known_gpus(folders: Iterable[Path] | None = None) -> tuple[str, ...]:
    """Names of the GPUs that have a table: this user's and the shipped ones. Raises RunError for a damaged one."""
    found = (user_folder(), SHIPPED) if folders is None else folders
    return tuple(sorted({CostTable.load(path).gpu for folder in found for path in folder.glob("[!.]*.json")}))


@dataclass(frozen=True, kw_only=True)
class CostTable:
    """Milliseconds of a linear layer's forward and backward by recipe and shape, on one kind of GPU."""

    gpu: str
    torch: str
    date: str
    commit: str
    source: str
    entries: Mapping[str, Mapping[Shape, float]]
    """Recipe, or ``bf16`` -> shape -> ms."""
    timing: str = "graph"
    """``graph``: what the GPU was busy for; ``eager``: calls, with the waits for the host."""
    derivation: str = ""
    """How a derived table was made; empty for a measured one."""
    path: Path | None = field(default=None, compare=False)
    """Where it was read from."""

    @property
    def recipes(self) -> tuple[str, ...]:
        """The recipes that were measured beside BF16."""
        return tuple(name for name in self.entries if name != BF16)

    @property
    def said(self) -> str:
        """``NVIDIA H200 table of 2026-11-30``, with ``derived`` in front if it is."""
        return f"{'derived ' if self.source == 'derived' else ''}{self.gpu} table of {self.date}"

    @classmethod
    def load(cls, path: Path | str) -> CostTable:
        """Read a file. Raises RunError for one that cannot be read or is not what it claims to be."""
        path = Path(path)
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise RunError(f"cannot read the cost table {str(path)!r}: {error.strerror}; name another") from error
        except ValueError as error:
            raise RunError(f"cost table {str(path)!r} is not JSON: {error}; {_REMEDY}") from None
        try:
            return cls._from_dict(data, path)
        except (KeyError, TypeError, ValueError) as error:
            raise RunError(f"cost table {str(path)!r} is damaged: {type(error).__name__} {error}; {_REMEDY}") from None

    @classmethod
    def _from_dict(cls, data: Any, path: Path) -> CostTable:
        if data["format"] != FORMAT or data["version"] != VERSION:
            raise ValueError(
                f"got {data['format']!r} version {data['version']!r}; allowed: {FORMAT!r} version {VERSION}"
            )
        if data["source"] not in SOURCES:
            raise ValueError(f"got source {data['source']!r}; allowed: {', '.join(SOURCES)}")
        if data["timing"] not in TIMINGS:
            raise ValueError(f"got timing {data['timing']!r}; allowed: {', '.join(TIMINGS)}")
        entries: dict[str, dict[Shape, float]] = {}
        for entry in data["entries"]:
            shape, ms = (int(entry["m"]), int(entry["k"]), int(entry["n"])), float(entry["ms"])
            if min(shape) < 1 or not (math.isfinite(ms) and ms > 0):
                raise ValueError(f"got shape {shape} with {ms} ms; allowed: positive numbers")
            entries.setdefault(str(entry["recipe"]), {})[shape] = ms
        said = {key: str(data[key]) for key in _HEAD}
        return cls(**said, derivation=str(data.get("derivation", "")), entries=entries, path=path)

    def save(self, path: Path | str) -> None:
        """Write the file, with one entry a line. Raises RunError if that fails."""
        path = Path(path)
        head = {"format": FORMAT, "version": VERSION} | {key: getattr(self, key) for key in _HEAD}
        if self.derivation:
            head["derivation"] = self.derivation
        lines = [
            json.dumps({"m": m, "k": k, "n": n, "recipe": recipe, "ms": round(ms, 5)}, allow_nan=False)
            for recipe, by_shape in self.entries.items()
            for (m, k, n), ms in sorted(by_shape.items())
        ]
        text = json.dumps(head, indent=1)[:-2] + ',\n "entries": [\n  ' + ",\n  ".join(lines) + "\n ]\n}\n"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            whole = path.with_name(f".{path.name}.{os.getpid()}")
            whole.write_text(text, encoding="utf-8")
            whole.replace(path)
        except OSError as error:
            raise RunError(f"cannot write the cost table {str(path)!r}: {error.strerror}; name another file") from error

    @classmethod
    def for_this_gpu(cls, gpu: str | None = None, folders: Iterable[Path] | None = None) -> CostTable | None:
        """The table of the GPU of this process (or the one named): the user's own, else a shipped one, else None.

        None too where there is no GPU. Raises RunError for a table with that GPU's file name that is damaged.
        """
        if gpu is None:
            import torch

            if not torch.cuda.is_available():
                return None
            gpu = torch.cuda.get_device_name()
        for folder in (user_folder(), SHIPPED) if folders is None else folders:
            path = folder / file_name(gpu)
            if path.is_file():
                stat = path.stat()
                table = _load_once(path, (stat.st_mtime_ns, stat.st_size, stat.st_ino))
                if table.gpu == gpu:
                    return table
        return None

    def ms(self, m: int, k: int, n: int, recipe: str = BF16) -> float | None:
        """Milliseconds of one layer; None outside of the grid, and where one of the points around was not measured."""
        by_shape = self.entries.get(recipe)
        if not by_shape:
            return None
        if (m, k, n) in by_shape:
            return by_shape[m, k, n]
        sides = [_around(value, axis) for value, axis in zip((m, k, n), _axes(by_shape), strict=True)]
        logarithm = 0.0
        for corner in itertools.product(*sides):
            at = (corner[0][0], corner[1][0], corner[2][0])
            share = math.prod(part for _, part in corner)
            if share == 0.0:
                continue
            if at not in by_shape:
                return None
            logarithm += share * math.log(by_shape[at])
        return math.exp(logarithm) if all(sides) else None

    def predict(self, m: int, k: int, n: int, recipe: str) -> tuple[float, float] | None:
        """``(bf16_ms, fp8_ms)`` of a linear layer [m, k] -> [m, n], forward and backward; None if either is unknown."""
        bf16, fp8 = self.ms(m, k, n), self.ms(m, k, n, recipe)
        return None if bf16 is None or fp8 is None else (bf16, fp8)


@functools.lru_cache(maxsize=4)
def _load_once(path: Path, version: tuple[int, ...]) -> CostTable:
    """The table in a file that is as it was then: each plan asks, and reading takes longer than a small plan."""
    return CostTable.load(path)


_HEAD = ("gpu", "torch", "date", "commit", "source", "timing")
_REMEDY = "delete it, or measure it anew with `acceler8 bench gemm --save`"


def _axes(by_shape: Mapping[Shape, float]) -> tuple[list[int], list[int], list[int]]:
    m, k, n = (sorted({shape[i] for shape in by_shape}) for i in range(3))
    return m, k, n


def _around(value: int, axis: list[int]) -> list[tuple[int, float]]:
    """The neighbours of ``value`` on the axis and the share of each, which add to 1; empty outside of the axis."""
    if value in axis:
        return [(value, 1.0)]
    above = next((i for i, point in enumerate(axis) if point > value), 0)
    if above == 0:
        return []
    low, high = axis[above - 1], axis[above]
    share = math.log(value / low) / math.log(high / low)
    return [(low, 1.0 - share), (high, share)]


__all__ = [
    "BF16", "SHIPPED", "CostTable", "backend_and_recipe", "entry_name", "file_name", "gpu_of", "known_gpus",
    "user_folder",
]  # fmt: skip
