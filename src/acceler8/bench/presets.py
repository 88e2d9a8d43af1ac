"""What a benchmark of a training step does: sizes and defaults, as data. Nothing here needs torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from acceler8.errors import RunError, unknown_name

Loop = Literal["plain", "prepared"]
"""``plain``: 16-bit parameters, a loop of its own, layers converted or exchanged in place. ``prepared``: what
``Accelerator(mixed_precision=...).prepare(model, optimizer)`` gives, ours or Hugging Face's."""


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A model's shape, the work of a step, and how long to measure."""

    name: str
    about: str
    """One line for help and tables."""
    loop: Loop
    model: Literal["llama", "hf-llama"] = "llama"
    """``llama``: pre-norm layers of this package without rotary positions; ``hf-llama``: transformers' class."""
    layers: int
    width: int
    ffn: int
    heads: int
    kv_heads: int
    vocabulary: int
    batch: int
    """Sequences a step."""
    length: int
    """Tokens of a sequence."""
    parameters: Literal["bfloat16", "float32"] = "bfloat16"
    lr: float = 1e-4
    check_steps: int = 8
    """Steps from the same weights after which losses are compared; they warm up too."""
    steps: int = 10
    """Timed steps of each variant."""
    turn: int = 5
    """Timed steps of a variant before the next one's turn; one step more, not timed, opens each turn."""
    needs_gib: float = 0.0
    """Free GPU memory that the largest variant needs; 0: runs on the CPU too."""
    fuse: bool = True
    """Let layers that share work run together."""
    head_loss: bool = False
    """Let acceler8's head compute the loss, in every variant of ours."""
    save_for_backward: str | None = None
    """What ours keep for backward; None: the default."""
    compress_every: int = 0
    """Of the layers, one in so many keeps compressed activations, from the first on; 0: see ``save_for_backward``."""

    def __post_init__(self) -> None:
        for name in ("layers", "width", "ffn", "heads", "kv_heads", "vocabulary", "batch", "length", "check_steps",
                     "steps", "turn"):  # fmt: skip
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise RunError(f"{name}={value!r} is not allowed; it must be an integer of 1 or more")
        if self.check_steps < 2:
            raise RunError(f"check_steps={self.check_steps} is not allowed; it takes 2 or more to see a loss fall")

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * self.length

    @property
    def kv_width(self) -> int:
        """Outputs of the projections of keys and of values."""
        return self.width // self.heads * self.kv_heads

    def matrices(self) -> tuple[tuple[str, int, int], ...]:
        """``(name, K, N)`` of a layer's GEMMs, with those merged that read the same input."""
        return (
            ("qkv", self.width, self.width + 2 * self.kv_width),
            ("o", self.width, self.width),
            ("gate_up", self.width, 2 * self.ffn),
            ("down", self.ffn, self.width),
        )

    def parameter_count(self) -> int:
        """Parameters of all matrices, embedding and head included."""
        return self.layers * sum(k * n for _, k, n in self.matrices()) + 2 * self.vocabulary * self.width

    def flops(self) -> float:
        """Of a step: 6 per weight and token (head included), and causal attention's two products, three times."""
        weights = self.layers * sum(k * n for _, k, n in self.matrices()) + self.vocabulary * self.width
        return 6.0 * self.tokens * weights + self.layers * 6.0 * self.batch * self.length**2 * self.width

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return dataclasses.asdict(self)


PRESETS: Mapping[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset(
            name="tiny", about="seconds on a CPU: shows that every variant works, says nothing about speed",
            loop="plain", layers=2, width=64, ffn=128, heads=4, kv_heads=2, vocabulary=256, batch=2, length=32,
            lr=1e-3, check_steps=3, steps=4, turn=2,
        ),
        Preset(
            name="llama3-8b-4l", about="four layers of Llama-3-8B, BF16 parameters, 4 x 4096 tokens",
            loop="plain", layers=4, width=4096, ffn=14336, heads=32, kv_heads=8, vocabulary=32000, batch=4,
            length=4096, needs_gib=32.0,
        ),
        Preset(
            name="hf-llama-1b", about="Hugging Face's Llama of 1.1 B FP32 parameters through Accelerator.prepare",
            loop="prepared", model="hf-llama", layers=16, width=2048, ffn=8192, heads=32, kv_heads=8,
            vocabulary=32000, batch=8, length=2048, parameters="float32", steps=8, turn=4, needs_gib=64.0,
        ),
        Preset(
            name="practitioner", about="a Llama of 0.57 B FP32 parameters that takes about 24.5 GB in FP16 at batch 8",
            loop="prepared", layers=12, width=2048, ffn=5632, heads=16, kv_heads=8, vocabulary=256, batch=8,
            length=1760, parameters="float32", needs_gib=40.0,
        ),
    )
}  # fmt: skip


def preset_named(name: str, **changes: Any) -> Preset:
    """The preset with what is not None in ``changes`` put in place of its own. Raises RunError."""
    if name not in PRESETS:
        raise RunError(unknown_name("preset", name, PRESETS))
    wanted = {key: value for key, value in changes.items() if value is not None}
    return dataclasses.replace(PRESETS[name], **wanted)
