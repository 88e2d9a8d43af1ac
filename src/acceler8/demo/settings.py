"""What one demo run does: model sizes, defaults, and the checks on what was asked.

``asked`` holds only the options that a person gave; ``resolve_settings`` fills the rest from the size and the
device. So a run folder records complete settings, and ``--resume`` can tell another wish from no wish at all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from acceler8.errors import RunError, unknown_name

STANDARD_LIBRARY = "standard library"
"""The value of ``text`` that means the source of Python's own standard library."""


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """The shape of a model and the training defaults that suit it."""

    dim: int
    """Width of the residual stream."""
    layers: int
    """Number of transformer layers."""
    heads: int
    """Query heads; ``dim`` is a multiple."""
    kv_heads: int
    """Key and value heads; ``heads`` is a multiple."""
    ffn: int
    """Hidden width of the gated MLP; like every width here a multiple of 16, as the FP8 GEMM needs."""
    steps: int
    """Optimizer steps of each of the two trainings."""
    batch: int
    """Windows of text a step."""
    seq: int
    """Bytes predicted in each window."""
    lr: float
    """Peak learning rate of AdamW."""
    cpu_threads: int | None = None
    """Most threads that a step on a CPU gains from (``processors``); None: all that there are."""

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.heads


# "small" is what a CPU trains twice, once in emulated FP8, within about two minutes. Only "large" has GEMMs big
# enough for FP8 to be quicker than BF16 on a data-centre GPU; the others show the numerics.
SIZES: Mapping[str, ModelSize] = {
    "tiny": ModelSize(
        dim=64, layers=2, heads=4, kv_heads=2, ffn=176, steps=300, batch=8, seq=64, lr=3e-3, cpu_threads=1
    ),
    "small": ModelSize(
        dim=128, layers=2, heads=4, kv_heads=2, ffn=352, steps=250, batch=8, seq=128, lr=1e-3, cpu_threads=1
    ),
    "base": ModelSize(dim=512, layers=8, heads=8, kv_heads=4, ffn=1408, steps=400, batch=32, seq=512, lr=8e-4),
    "large": ModelSize(dim=2048, layers=8, heads=16, kv_heads=8, ffn=5632, steps=300, batch=8, seq=1024, lr=3e-4),
}


_KINDS: Mapping[Any, Any] = {"str": str, "int": int, "float": int | float}  # annotations are strings here


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """Everything that decides what a run computes; two runs with equal settings and text have equal curves.

    Raises: RunError for a value that no run can have. ``recipe`` and ``device`` are checked by
    ``resolve_settings``.
    """

    size: str
    """A name in ``SIZES``."""
    device: str
    """``cpu`` or ``cuda:N``."""
    recipe: str
    """Name of the FP8 recipe."""
    steps: int
    """Optimizer steps of each of the two trainings."""
    batch: int
    """Windows of text a step."""
    seq: int
    """Bytes predicted in each window."""
    lr: float
    """Peak learning rate."""
    seed: int
    """Decides the initial weights and the order of the batches."""
    text: str
    """``STANDARD_LIBRARY`` or the absolute path of a file or folder."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value, kind = getattr(self, field.name), _KINDS[field.type]
            if not isinstance(value, kind) or isinstance(value, bool):
                raise RunError(f"{field.name}={value!r} is not allowed; it must be of type {field.type}")
        if self.size not in SIZES:
            raise RunError(unknown_name("size", self.size, SIZES))
        for name in ("steps", "batch", "seq"):
            if getattr(self, name) < 1:
                raise RunError(
                    f"{name}={getattr(self, name)} is not allowed; it must be at least 1; "
                    f"leave --{name} out for the default of {getattr(SIZES[self.size], name)}"
                )
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise RunError(
                f"lr={self.lr!r} is not allowed; the learning rate must be a finite number above 0; "
                f"leave --lr out for the default of {SIZES[self.size].lr}"
            )
        if not 0 <= self.seed < 2**63:
            raise RunError(f"seed={self.seed!r} is not allowed; it must be from 0 to 2**63 - 1; leave --seed out for 0")

    @property
    def model_size(self) -> ModelSize:
        """The model's shape."""
        return SIZES[self.size]

    @property
    def tokens_per_step(self) -> int:
        """Bytes predicted in one optimizer step."""
        return self.batch * self.seq

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> DemoSettings:
        """Rebuild settings from ``to_dict``; RunError when a key is missing or unknown."""
        known = {field.name for field in fields(cls)}
        if set(saved) != known:
            odd = sorted(set(saved) ^ known)
            raise RunError(
                f"saved settings have other keys than this version knows: {', '.join(odd)}; "
                "resume with the acceler8 version that started the run"
            )
        return cls(**saved)


def resolve_device(asked: str | None) -> str:
    """Turn ``auto``, ``cpu``, ``cuda`` or ``cuda:N`` into the device of a run: ``cpu`` or ``cuda:N``.

    Raises: RunError for another name; HardwareError when that GPU is not there.
    """
    import torch

    from acceler8.errors import HardwareError

    name = "auto" if asked is None else asked
    kind, _, index = name.partition(":")
    if kind not in ("auto", "cpu", "cuda") or (index and not (kind == "cuda" and index.isdecimal())):
        raise RunError(unknown_name("device", name, ("auto", "cpu", "cuda", "cuda:N")))
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return "cpu"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    number = int(index) if index else 0
    if number >= count:
        raise HardwareError(
            f"device {name!r} is not here: PyTorch {torch.__version__} sees {count} CUDA GPUs; "
            "use --device cpu, which emulates FP8, or install a CUDA build of PyTorch and its driver"
        )
    return f"cuda:{number}"


def resolve_settings(asked: Mapping[str, Any]) -> DemoSettings:
    """Complete what was asked with the defaults of the size, and check all of it.

    ``asked`` maps names of ``DemoSettings`` to values; absent or None means the default: size ``small`` on a
    CPU and ``large`` on a GPU, recipe ``rowwise``, seed 0, the standard library's text.
    Raises: RunError, RecipeError or HardwareError; each names what was got, what is allowed and what to do.
    """
    from acceler8 import recipes

    wishes = {name: value for name, value in asked.items() if value is not None}
    device = resolve_device(wishes.get("device"))
    size = wishes.get("size", "small" if device == "cpu" else "large")
    if size not in SIZES:
        raise RunError(unknown_name("size", size, SIZES))
    recipe = wishes.get("recipe", "rowwise")
    recipes.get(recipe)
    text = wishes.get("text", STANDARD_LIBRARY)
    if text == "":
        raise RunError("text='' is not allowed; it must be a file or folder; leave --text out for the standard library")
    defaults = SIZES[size]
    return DemoSettings(
        size=size,
        device=device,
        recipe=recipe,
        steps=wishes.get("steps", defaults.steps),
        batch=wishes.get("batch", defaults.batch),
        seq=wishes.get("seq", defaults.seq),
        lr=wishes.get("lr", defaults.lr),
        seed=wishes.get("seed", 0),
        text=text if text == STANDARD_LIBRARY else str(Path(text).expanduser().resolve()),
    )
