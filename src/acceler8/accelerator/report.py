"""What FP8 did in this run, in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from acceler8.config.sources import Value
from acceler8.conversion import Plan


@dataclass(frozen=True, kw_only=True)
class Fp8Report:
    """Plans of the prepared models and how far their step clocks went."""

    mixed_precision: str
    plans: list[Plan] = field(default_factory=list)
    steps: int = 0
    values: Mapping[str, Value] = field(default_factory=dict)
    """Every effective setting of precision and FP8, by path, with the source that won."""

    @property
    def is_fp8(self) -> bool:
        """True if at least one layer of a prepared model is FP8."""
        return any(plan.totals.fp8_layers for plan in self.plans)

    def __str__(self) -> str:
        return "\n".join([*self._models(), *self._settings()])

    def _models(self) -> list[str]:
        if not self.plans:
            asked = "no model prepared yet" if self.mixed_precision == "fp8" else "FP8 was not asked for"
            return [f"mixed_precision={self.mixed_precision!r}: {asked}"]
        lines = [f"mixed_precision={self.mixed_precision!r}, {self.steps} steps"]
        for plan in self.plans:
            t = plan.totals
            lines.append(
                f"{plan.model}: {t.fp8_layers} of {t.layers} layers FP8 ({t.flops_share:.0%} of the matrix FLOPs),"
                f" recipe {plan.recipes_said}, backend {plan.backend}, {plan.device}"
            )
            if (window := plan.fp8_steps) is not None:
                now = "FP8" if window.holds(self.steps) else "high precision"
                lines.append(f"  FP8 only in {window.said}, counted from 0; step {self.steps}, the next, is in {now}")
            lines += self._depth(plan)
            lines += [f"  {plan.speed}"] if plan.speed is not None else []
            lines += [f"  note: {note}" for note in plan.notes] + [f"  WARNING: {w}" for w in plan.warnings]
        return lines

    def _depth(self, plan: Plan) -> list[str]:
        """How far a schedule by depth is."""
        if plan.fp8_last_layers is None or not plan.fp8_names:
            return []
        now = len(plan.in_fp8(self.steps))
        starts = [w.start or 0 for name in plan.fp8_names if (w := plan.window_of(name)) is not None]
        later = [start for start in starts if start > self.steps]
        more = f"; more from step {min(later)} on" if later else ""
        return [
            f"  FP8 by depth, {plan.fp8_last_layers} of {len(plan.blocks)} blocks: in step {self.steps}, the next,"
            f" {now} of {plan.totals.fp8_layers} FP8 layers are on{more}"
        ]

    def _settings(self) -> list[str]:
        """``margin = 2    yaml run.yaml:7``, a line for each setting."""
        said = {path: f"{path.rpartition('.')[2]} = {_text(v.value)}" for path, v in self.values.items()}
        width = max((len(text) for text in said.values()), default=0)
        lines = [f"  {text:<{width}}  {self.values[path].source}" for path, text in said.items()]
        return ["settings, and who decided:", *lines] if lines else []


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(_text, value)) or "none"
    return str(value).lower() if isinstance(value, bool) else str(value)
