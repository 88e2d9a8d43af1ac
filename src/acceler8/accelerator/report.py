"""What FP8 did in this run, in words."""

from __future__ import annotations

from dataclasses import dataclass, field

from acceler8.conversion import Plan


@dataclass(frozen=True, kw_only=True)
class Fp8Report:
    """Plans of the prepared models and how far their step clocks went."""

    mixed_precision: str
    plans: list[Plan] = field(default_factory=list)
    steps: int = 0

    @property
    def is_fp8(self) -> bool:
        """True if at least one layer of a prepared model is FP8."""
        return any(plan.totals.fp8_layers for plan in self.plans)

    def __str__(self) -> str:
        if not self.plans:
            asked = "no model prepared yet" if self.mixed_precision == "fp8" else "FP8 was not asked for"
            return f"mixed_precision={self.mixed_precision!r}: {asked}"
        lines = [f"mixed_precision={self.mixed_precision!r}, {self.steps} steps"]
        for plan in self.plans:
            t = plan.totals
            lines.append(
                f"{plan.model}: {t.fp8_layers} of {t.layers} layers FP8 ({t.flops_share:.0%} of the matrix FLOPs),"
                f" recipe {plan.recipe.name}, backend {plan.backend}, {plan.device}"
            )
            lines += [f"  note: {note}" for note in plan.notes] + [f"  WARNING: {w}" for w in plan.warnings]
        return "\n".join(lines)
