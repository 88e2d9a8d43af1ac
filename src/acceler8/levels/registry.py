"""The levels O1, O2, O3 in one table: what each weight of an FP8 layer is stored as beside its GEMMs.

They are MS-AMP's, with its bits and other codes: gradients and first moments are E4M3 in blocks of 128 with an FP32
scale, not a power of two for a whole tensor, which freezes moments (``acceler8.formats.blocks``). The 16-bit weight is
BF16, updated with stochastic rounding, where MS-AMP's is FP16 under a scale: rounded to nearest it would lose what is
below 2**-9 of a weight, and on average it loses nothing now. Every choice can be made alone: ``level("O2",
exp_avg_sq="fp8")``.

Source: Peng et al. 2023, "FP8-LM: Training FP8 Large Language Models", arXiv:2310.18313; Azure/MS-AMP 0.4.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from acceler8.errors import ConfigError, unknown_name
from acceler8.formats import BLOCK
from acceler8.kernels.adam import MASTER_FORMATS, MOMENT_FORMATS

GRADIENTS = ("fp8", "weight")
WEIGHTS = ("bf16", "fp16", "fp32")
_BITS = {"fp8": 8, "fp16": 16, "bf16": 16, "fp32": 32}
_MASTER_BYTES = {"none": 0.0, "stochastic": 0.0, "fp32": 4.0, "bf16_remainder": 2.0, "fp16": 2 + 4 / BLOCK}


@dataclass(frozen=True, kw_only=True)
class Level:
    """What the 2-D weights of FP8 layers are stored as. Other parameters stay as they are, with FP32 states.

    Raises: ConfigError for a word that is unknown, and for a master that the weight cannot have.
    """

    name: str
    weight: str = "bf16"
    """Dtype of the Parameter: "bf16", "fp16", or "fp32", which is left as it is."""
    master: str = "stochastic"
    """How the optimizer updates it: ``acceler8.optim``'s ``master``; "stochastic" and "none" take no memory."""
    gradient: str = "fp8"
    """"fp8": E4M3 codes in blocks of 128; "weight": PyTorch's own, in the weight's dtype."""
    exp_avg: str = "fp32"
    exp_avg_sq: str = "fp32"
    keeps_weight_codes: bool = False
    """FP8 codes of the weight stay beside it, made anew by each optimizer step."""

    def __post_init__(self) -> None:
        for field, allowed in (
            ("weight", WEIGHTS),
            ("master", MASTER_FORMATS),
            ("gradient", GRADIENTS),
            ("exp_avg", MOMENT_FORMATS),
            ("exp_avg_sq", MOMENT_FORMATS),
        ):
            if getattr(self, field) not in allowed:
                raise ConfigError(unknown_name(field, getattr(self, field), allowed))
        if self.weight == "fp16" and self.master in ("stochastic", "bf16_remainder"):
            raise ConfigError(
                f"level {self.name} got weight='fp16' with master={self.master!r}, which a BF16 weight has; allowed:"
                " none (FP16 rounded to nearest, as MS-AMP's), fp32, fp16; give master too"
            )

    def replace(self, **choices: Any) -> Level:
        """This level with other choices. Raises: ConfigError for a choice that there is not."""
        names = [field.name for field in dataclasses.fields(self) if field.name != "name"]
        for name in choices:
            if name not in names:
                raise ConfigError(unknown_name("choice of a level", name, names))
        return dataclasses.replace(self, **choices)

    def parts(self, in_features: int = 4096) -> dict[str, float]:
        """Bytes a weight element, by what holds them, scales included; row scales of codes for ``in_features``."""
        codes = 1 + 4 / BLOCK
        moments = {"fp8": codes, "fp16": 2 + 4 / BLOCK, "bf16": 2.0, "fp32": 4.0}
        width = _BITS[self.weight] / 8
        return {
            "weight": width,
            "weight codes": 1 + 4 / in_features if self.keeps_weight_codes else 0.0,
            "master": _MASTER_BYTES[self.master] if self.weight != "fp32" else 0.0,
            "gradient": codes if self.gradient == "fp8" else width,
            "moments": moments[self.exp_avg] + moments[self.exp_avg_sq],
        }

    def bytes_per_parameter(self, in_features: int = 4096) -> float:
        """Bytes that are stored for an element of a weight between a backward and the next step."""
        return sum(self.parts(in_features).values())


O1 = Level(name="O1")
O2 = O1.replace(exp_avg="fp8", exp_avg_sq="fp16")
O2 = dataclasses.replace(O2, name="O2")
O3 = dataclasses.replace(O2, name="O3", keeps_weight_codes=True)
LEVELS: dict[str, Level] = {made.name: made for made in (O1, O2, O3)}


def level(opt_level: str | Level, **choices: Any) -> Level:
    """The level of that name, with choices of its own: ``level("O2", exp_avg_sq="fp8", master="bf16_remainder")``.

    Raises: ConfigError for an unknown name or choice, naming those that there are.
    """
    if isinstance(opt_level, Level):
        return opt_level.replace(**choices)
    name = str(opt_level).upper()
    if name not in LEVELS:
        raise ConfigError(unknown_name("opt_level", opt_level, tuple(LEVELS)))
    return LEVELS[name].replace(**choices)


def table() -> str:
    """The levels as a Markdown table, of bits and bytes."""
    head = ("level", "GEMM", "weight", "FP8 codes kept", "master", "weight gradient", "optimizer states")
    rows = [(*head, "bytes a weight element")]
    for made in LEVELS.values():
        rows.append(
            (
                made.name,
                "FP8",
                made.weight.upper(),
                "FP8" if made.keeps_weight_codes else "-",
                "the weight, stochastic rounding" if made.master == "stochastic" else made.master,
                "FP8 / 128" if made.gradient == "fp8" else made.weight.upper(),
                " + ".join(_moment(fmt) for fmt in (made.exp_avg, made.exp_avg_sq)),
                f"{made.bytes_per_parameter():.2f}",
            )
        )
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + " --- |" * len(rows[0]), *lines[1:]])


def _moment(fmt: str) -> str:
    return fmt.upper() + (f" / {BLOCK}" if fmt in ("fp8", "fp16") else "")
