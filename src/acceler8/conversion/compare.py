"""One model under every backend: what each would make FP8, how long its linear layers take, what they keep.

Every number says where it is from. Time is predicted where a cost table has it; the shipped ones have the native
backend's, and what is not in a table reads "not measured here". What layers keep of their inputs until backward
follows from the dtypes: it is no peak, which attention, the head and the optimizer make.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from acceler8 import backends
from acceler8.backends import Backend
from acceler8.conversion.layers import module_name
from acceler8.conversion.plan import Plan
from acceler8.conversion.plan import plan as make_plan
from acceler8.conversion.speed import ms, times
from acceler8.errors import PlanError, RecipeError
from acceler8.recipes.layers import recipe_of_layer

_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("bytes", 1))
NOT_MEASURED, NOT_KNOWN = "not measured here", "not known"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One backend's row. A backend that cannot run has a ``problem`` and nothing else."""

    backend: str
    problem: str = ""
    recipe: str = ""
    fp8_layers: int = 0
    layers: int = 0
    parameters_share: float = 0.0
    """Of the model's parameters, in FP8 layers, 0 to 1."""
    flops_share: float = 0.0
    bf16_ms: float | None = None
    """Linear layers, forward and backward, in BF16, by a cost table; None: not predicted."""
    planned_ms: float | None = None
    kept_bytes: float | None = None
    """Of the inputs of linear layers, until backward, for one token; None: not known."""
    bf16_kept_bytes: float = 0.0
    """The same if all layers are in BF16."""

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)


def compare(
    model: nn.Module,
    recipe: Any = None,
    *,
    device: torch.device | None = None,
    tokens: int | None = None,
    gpu: str | None = None,
    **arguments: Any,
) -> list[Comparison]:
    """A row for every backend that there is, those that cannot run with the reason.

    ``device`` is where the model will train, for capabilities; None: where it is. ``arguments`` are those of ``plan``.
    Raises: PlanError if no backend can, with the native one's reason.
    """
    plans: dict[str, Plan] = {}
    problems: dict[str, str] = {}
    for name in backends.names():
        try:
            engine = backends.get(name)
            asked = engine.recipe_for(recipe, None)
            of_layers = [asked] if not hasattr(asked, "patterns") else [own for _, own in asked.patterns if own]
            if lacking := [why for own in of_layers if (why := device and engine.lacks(own, device)) is not None]:
                raise PlanError(lacking[0])
            plans[name] = make_plan(model, recipe, name, tokens=tokens, gpu=gpu, **arguments)
        except (PlanError, RecipeError) as error:
            problems[name] = str(error)
    if not plans:  # a typo, then, and no backend's fault
        raise PlanError(problems["native"])
    groups = _shared_inputs(plans)
    rows = []
    for name in backends.names():
        if name in problems:
            rows.append(Comparison(backend=name, problem=problems[name]))
        else:
            rows.append(_row(backends.find(name), plans[name], model, groups))
    return rows


def _shared_inputs(plans: Mapping[str, Plan]) -> dict[str, str]:
    """Layers that read one input, by the first of them: that input is kept once. The native plan finds them."""
    native = plans.get("native")
    first: dict[str, str] = {}
    for fusion in () if native is None else native.fusions:
        first |= {name: fusion.readers[0] for name in fusion.readers}
    return first


def _row(engine: Backend, plan: Plan, model: nn.Module, shared: Mapping[str, str]) -> Comparison:
    kept: dict[str, float | None] = {}
    plain: dict[str, float] = {}
    for row in plan.rows:
        layer = model.get_submodule(module_name(row.name))
        if not isinstance(layer, nn.Linear) or not layer.weight.requires_grad:
            continue
        name = of_codes = shared.get(module_name(row.name), row.name)
        in_bf16 = float(torch.bfloat16.itemsize * layer.in_features)
        plain[name] = in_bf16
        _, recipe = recipe_of_layer(plan.recipe, module_name(row.name))
        if not row.is_fp8 or recipe is None:
            kept.setdefault(name, in_bf16)
            continue
        each = engine.kept_input_bytes(recipe, torch.bfloat16)
        if not engine.fuses and each != torch.bfloat16.itemsize:  # each layer makes codes of its own
            of_codes = row.name
        kept[of_codes] = None if each is None else each * layer.in_features
    known = [value for value in kept.values() if value is not None]
    t, speed = plan.totals, plan.speed
    return Comparison(
        backend=plan.backend,
        recipe=plan.recipes_said,
        fp8_layers=t.fp8_layers,
        layers=t.layers,
        parameters_share=t.fp8_parameters / t.parameters if t.parameters else 0.0,
        flops_share=t.flops_share,
        bf16_ms=speed.bf16_ms if speed is not None and speed.bf16_ms else None,
        planned_ms=speed.planned_ms if speed is not None and speed.bf16_ms else None,
        kept_bytes=sum(known) if len(known) == len(kept) else None,
        bf16_kept_bytes=sum(plain.values()),
    )


def render(rows: list[Comparison], tokens: int | None, width: int = 120) -> str:
    """The rows as a text table."""
    import io

    from rich.console import Console
    from rich.table import Table

    table = Table(title="one model under every backend")
    for column in ("backend", "FP8 layers", "parameters", "matrix FLOPs", "linear layers, ms", "inputs kept"):
        table.add_column(column, overflow="fold")
    for row in (row for row in rows if not row.problem):
        table.add_row(
            f"{row.backend} ({row.recipe})",
            f"{row.fp8_layers} of {row.layers}",
            f"{row.parameters_share:.0%}",
            f"{row.flops_share:.0%}",
            _time(row),
            _memory(row, tokens),
        )
    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None, markup=False, emoji=False, highlight=False)
    console.print(table)
    console.print(
        "ms: forward and backward, by a cost table; inputs kept: of linear layers, until backward, in BF16 activations,"
        " computed from dtypes, no peak",
        soft_wrap=True,
    )
    for row in (row for row in rows if row.problem):
        console.print(f"{row.backend}: {row.problem}", soft_wrap=True)
    return out.getvalue().rstrip()


def _time(row: Comparison) -> str:
    if row.planned_ms is None or row.bf16_ms is None:
        return NOT_MEASURED
    return f"{ms(row.planned_ms)} of BF16's {ms(row.bf16_ms)} ({times(row.bf16_ms / row.planned_ms)})"


def _memory(row: Comparison, tokens: int | None) -> str:
    if row.kept_bytes is None:
        return NOT_KNOWN
    many = 1 if tokens is None else tokens
    unit, size = next(unit for unit in _UNITS if row.bf16_kept_bytes * many >= unit[1] or unit[1] == 1)
    kept, plain = (f"{value * many / size:.2f}" for value in (row.kept_bytes, row.bf16_kept_bytes))
    return f"{kept} of BF16's {plain} {unit}{' a token' if tokens is None else ''}"
