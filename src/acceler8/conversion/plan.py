"""The plan: what would become FP8, what would not, and why. Making one changes nothing.

One row for each layer that multiplies: every ``nn.Linear`` (and subclass), and every other module with a
weight matrix of its own, so that a model whose work sits elsewhere (Conv1D, fused experts) shows it. FLOPs
are per token: 2 per weight and GEMM, for fprop, dgrad and (if the weight is trained) wgrad; attention and
convolution windows are not counted. With a cost table and a number of tokens rows have milliseconds too, and a layer
that FP8 would slow down stays in BF16 (``speed``).
"""

from __future__ import annotations

import dataclasses
import difflib
import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from acceler8 import backends
from acceler8.backends import KINDS, STRATEGIES, Backend, BackendOptions, Fusion
from acceler8.conversion.blocks import block_of, find_blocks
from acceler8.conversion.filters import Filter, first_match, output_heads, tied_names
from acceler8.conversion.fusions import Known, find_fusions, not_fused
from acceler8.conversion.layers import ROOT, check_is_plain, largest_shape, matrix_modules, module_name, row_name
from acceler8.conversion.speed import MEASURE, Forecast, Prediction, Speed, check_tokens, find_costs, ms, times
from acceler8.costs import CostTable
from acceler8.errors import PlanError, unknown_name
from acceler8.nn import NormKind
from acceler8.nn.class_change import plain_type
from acceler8.recipes import LayerRecipes, Recipe
from acceler8.recipes.layers import matches, recipe_from_dict, recipe_of_layer
from acceler8.scaling import LastLayers, StepWindow, check_schedule

LOW_COVERAGE = 0.1
_LATER_KEYS = (
    "fp8_steps",
    "fp8_last_layers",
    "blocks",
    "fusions",
    "speed",
    "also",
    "options",
)  # which a plan of an earlier version lacks
_SHOWN = 40  # names in an error message


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """One layer: FP8 or not, and why."""

    name: str
    type: str
    shape: tuple[int, ...]
    """Of the weight: (out_features, in_features) for nn.Linear."""
    dtype: str
    parameters: int
    flops_per_token: int
    is_fp8: bool
    reason: str
    recipe: str = ""
    """Name of the layer's recipe; empty in high precision."""
    bf16_ms: float | None = None
    """Predicted forward and backward in BF16, of layers that run as one its part; None: not predicted."""
    fp8_ms: float | None = None
    """The same by the recipe; None also for a layer that stays in high precision for another reason than speed."""

    @property
    def gain(self) -> float | None:
        """How many times as fast as BF16 the recipe is; None if not predicted."""
        return self.bf16_ms / self.fp8_ms if self.bf16_ms and self.fp8_ms else None


@dataclass(frozen=True, kw_only=True)
class AlsoRow:
    """A module beside the linear layers that the backend takes over, such as a norm, or why it does not."""

    name: str
    type: str
    reason: str = ""
    """Why it stays as it is; empty if the backend takes it."""


@dataclass(frozen=True, kw_only=True)
class Totals:
    """FP8 and all, by layers, parameters (of the whole model) and FLOPs (of the rows)."""

    fp8_layers: int
    layers: int
    fp8_parameters: int
    parameters: int
    fp8_flops_per_token: int
    flops_per_token: int

    @property
    def flops_share(self) -> float:
        """Share of the rows' FLOPs in FP8 layers, 0 to 1."""
        return self.fp8_flops_per_token / self.flops_per_token if self.flops_per_token else 0.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Printable, JSON-able description of a conversion; ``convert`` carries it out."""

    model: str
    recipe: Recipe | LayerRecipes
    backend: str
    device: str
    rows: tuple[PlanRow, ...]
    totals: Totals
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    fp8_steps: StepWindow | None = None
    """The steps in which the layers are in FP8; None: all."""
    fusions: tuple[Fusion, ...] = ()
    """FP8 layers that share work: codes of their input, or a whole MLP."""
    fp8_last_layers: LastLayers | None = None
    """How many of the last ``blocks`` are in FP8 from which step on; None: all from the first."""
    blocks: tuple[str, ...] = ()
    """Names of the model's blocks, first to last; looked for only if ``fp8_last_layers`` counts them."""
    speed: Speed | None = None
    """What a cost table predicts of all rows; None: nothing was predicted."""
    also: tuple[AlsoRow, ...] = ()
    """Modules beside the rows' layers that the backend takes over, or would but for a reason."""
    options: BackendOptions | None = None
    """The backend's own settings."""

    @property
    def fp8_names(self) -> tuple[str, ...]:
        """Names of the layers that become FP8."""
        return tuple(row.name for row in self.rows if row.is_fp8)

    @property
    def recipes_said(self) -> str:
        """The recipe's name; with several, how many layers each has: ``tensorwise (4 layers), rowwise (8 layers)``."""
        if isinstance(self.recipe, Recipe):
            return self.recipe.name
        counts: dict[str, int] = {}
        for row in self.rows:
            if row.is_fp8:
                counts[row.recipe] = counts.get(row.recipe, 0) + 1
        return ", ".join(f"{name} ({n} layer{'s' * (n > 1)})" for name, n in counts.items()) or self.recipe.name

    @property
    def schedule_said(self) -> str:
        """``fp8_steps 100: and fp8_last_layers 0:4,1000:all``; empty if every layer is in FP8 in every step."""
        given = {"fp8_steps": self.fp8_steps, "fp8_last_layers": self.fp8_last_layers}
        return " and ".join(f"{name} {value}" for name, value in given.items() if value is not None)

    def window_of(self, row: str) -> StepWindow | None:
        """The steps in which the FP8 layer of this row is in FP8, which both settings allow; None: none."""
        window = self.fp8_steps or StepWindow()
        if self.fp8_last_layers is None:
            return window
        place = block_of(module_name(row), self.blocks)
        first = self.fp8_last_layers.first_step(None if place is None else len(self.blocks) - 1 - place)
        return None if first is None else window.since(first)

    def in_fp8(self, step: int) -> tuple[str, ...]:
        """Names of the layers that are in FP8 in this step."""
        windows = {name: self.window_of(name) for name in self.fp8_names}
        return tuple(name for name, window in windows.items() if window is not None and window.holds(step))

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; ``from_dict`` restores an equal plan."""
        rows = [dataclasses.asdict(row) | {"shape": list(row.shape)} for row in self.rows]
        return {
            "model": self.model,
            "recipe": self.recipe.to_dict(),
            "backend": self.backend,
            "device": self.device,
            "totals": dataclasses.asdict(self.totals),
            "notes": list(self.notes),
            "warnings": list(self.warnings),
            "fp8_steps": None if self.fp8_steps is None else str(self.fp8_steps),
            "fusions": [dataclasses.asdict(fusion) | {"layers": list(fusion.layers)} for fusion in self.fusions],
            "fp8_last_layers": None if self.fp8_last_layers is None else str(self.fp8_last_layers),
            "blocks": list(self.blocks),
            "speed": None if self.speed is None else dataclasses.asdict(self.speed),
            "also": [dataclasses.asdict(row) for row in self.also],
            "options": None if self.options is None else self.options.to_dict(),
            "rows": rows,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Plan:
        """Inverse of ``to_dict``. Raises PlanError for an unknown or missing key."""
        valid = [f.name for f in dataclasses.fields(cls)]
        for key in data:
            if key not in valid:
                raise PlanError(unknown_name("plan key", key, valid))
        if missing := [key for key in valid if key not in data and key not in _LATER_KEYS]:
            raise PlanError(f"plan lacks {', '.join(missing)}; write it with Plan.to_dict()")
        try:
            rows = tuple(PlanRow(**(row | {"shape": tuple(row["shape"])})) for row in data["rows"])
            totals = Totals(**data["totals"])
            fusions = tuple(_fusion(f) for f in data.get("fusions", ()))
            speed = Speed(**data["speed"]) if data.get("speed") is not None else None
            also = tuple(AlsoRow(**row) for row in data.get("also", ()))
        except (KeyError, TypeError) as error:
            raise PlanError(
                f"a row or the totals of the plan, its speed or a fusion, are not as Plan.to_dict() writes them:"
                f" {error}"
            ) from None
        for fusion in fusions:
            if fusion.kind not in KINDS:
                raise PlanError(unknown_name("kind of fusion", fusion.kind, KINDS))
        return cls(
            **{
                **data,
                "recipe": recipe_from_dict(data["recipe"]),
                "totals": totals,
                "notes": tuple(data["notes"]),
                "warnings": tuple(data["warnings"]),
                "fp8_steps": _window(data.get("fp8_steps")),
                "fusions": fusions,
                "fp8_last_layers": _last_layers(data.get("fp8_last_layers")),
                "blocks": tuple(data.get("blocks", ())),
                "speed": speed,
                "also": also,
                "options": _options(data["backend"], data.get("options")),
                "rows": rows,
            }
        )

    def __str__(self) -> str:
        return render(self)


def plan(
    model: nn.Module,
    recipe: str | Recipe | LayerRecipes | Mapping[str, str | Recipe | None] | None = None,
    backend: str = "native",
    *,
    skip: Iterable[str] | None = None,
    filter_fn: Filter | None = None,
    fp8_steps: str | StepWindow | None = None,
    fp8_last_layers: str | Mapping[Any, Any] | LastLayers | None = None,
    save_for_backward: str | None = None,
    fuse: bool = True,
    tokens: int | None = None,
    costs: CostTable | Path | str | None = None,
    gpu: str | None = None,
    never_slower: bool = True,
    options: BackendOptions | None = None,
    strategy: str = "single",
) -> Plan:
    """Decide layer by layer what converting ``model`` would make FP8. Changes nothing.

    ``recipe`` is a name or a Recipe (default the backend's, natively ``rowwise``), or a mapping of patterns of layer
    names to such, of which the first that fits a layer decides; None, and a layer that none fits, is high precision.
    ``skip`` names layers to leave: a name, a dotted prefix or suffix, or a glob, which patterns may be too; added to
    the recipe's own.
    ``filter_fn(name, module)`` False leaves a layer too. Left by default: output heads, tied weights, dimensions that
    are not multiples of 16, subclasses of nn.Linear. The model may be on the meta device. ``fp8_steps`` is the window
    of steps, ``"START:STOP"``, outside of which the converted layers compute in high precision. ``fp8_last_layers``,
    ``"0:4,1000:8,2000:all"`` or ``{0: 4, 1000: 8, 2000: "all"}``, is the number of the last blocks whose layers are in
    FP8 from each of these steps on (``blocks`` says what a block is); ``all`` is also what lies outside of the blocks.
    Both must allow a step. ``save_for_backward``, ``fp8``, ``fp8_compressed`` or ``bf16``, is what stays of activations
    until backward, in place of what the recipe says, or each recipe. ``fuse=False`` runs each layer by itself, where
    otherwise those that read one activation share its codes, an MLP is one operation, and norms hand codes on to
    all that read their result.
    ``tokens`` is how many tokens (batch x sequence) one forward on one GPU has. With it and a cost table each row has
    predicted milliseconds, and a layer that would be slower in FP8 than in BF16 stays in BF16, unless a pattern of the
    recipe other than ``*`` or ``filter_fn`` asks for it, its recipe multiplies nothing in FP8 (and only saves memory),
    or ``never_slower`` is False. The table is that of the model's GPU, ``costs`` (or its file), or that of another
    ``gpu`` by name, such as ``"NVIDIA H200"``. What it does not know stays in FP8. ``options`` are the backend's own
    settings; ``strategy``, one of ``acceler8.backends.STRATEGIES``, is how the model is spread over processes.
    Raises: RecipeError for an unknown recipe, or a schedule that is none; PlanError for an unknown backend, a recipe
        that it does not run on the model's device (those that it does are listed), a skip name or pattern that fits no
        layer (the nearest layer is named), a model that is already converted, or a lazy one that never ran; with
        ``fp8_last_layers`` also for a model without blocks, and if no layer is ever in FP8; for ``tokens`` that are
        none, and a GPU without a table. RunError for a cost table that cannot be read.
    """
    check_tokens(tokens, never_slower)
    if filter_fn is not None and not callable(filter_fn):
        raise PlanError(
            f"filter_fn got a {type(filter_fn).__name__}; allowed: a function (name, module) -> bool, True for layers"
            " that may be FP8; names and patterns go to skip, or to recipe as a mapping"
        )
    engine = backends.get(backend)
    engine.check_options(options)
    recipe, window = engine.recipe_for(recipe, options), _window(fp8_steps)
    last_layers = _last_layers(fp8_last_layers)
    check_schedule(window, last_layers)
    if save_for_backward is not None:
        recipe = recipe.replace(save_for_backward=save_for_backward)
    check_is_plain(model)
    _check_backend_has(engine, recipe, _device_of(model), strategy)
    skip = _skip_patterns(skip)
    modules = [name for name, _ in model.named_modules()]
    _check_patterns((*_skip_of(recipe), *skip), modules, "skip names")
    if isinstance(recipe, LayerRecipes):
        linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        _check_patterns([pattern for pattern, _ in recipe.patterns], linears, "recipe has the pattern")
    # in the library itself a filter takes the place of what is left by default
    left = {} if filter_fn is not None and engine.filter_decides else engine.left_by_default(model, options)
    heads = {} if filter_fn is not None and engine.filter_decides else output_heads(model)
    owners = {name: id(module) for name, module in model.named_modules(remove_duplicate=False)}

    def owner(parameter: str) -> int:
        return owners[parameter.rpartition(".")[0]]

    # one module under two names is one layer, not two that are tied
    ties = {name: [n for n in names if owner(n) != owner(name)] for names in tied_names(model) for name in names}
    rows = []
    for name, module, weights in matrix_modules(model):
        reason = None
        decides, own = recipe_of_layer(recipe, name)
        if not isinstance(module, nn.Linear):
            reason = f"{plain_type(module).__name__} is not nn.Linear"
        elif pattern := first_match(name, (*(own.skip if own else ()), *skip)):
            reason = f"skipped by name ({pattern})"
        elif own is None:
            reason = f"high precision by recipe ({decides})" if decides else "no pattern of the recipe fits it"
        elif id(module) in heads:
            reason = heads[id(module)]
        elif tied := ties.get(f"{name}.weight".lstrip(".")):
            reason = f"weight tied with {tied[0]}"
        elif not name and engine.replaces_modules:
            reason = f"the model itself: {engine.name} puts another module in its place; put it into an nn.Sequential"
        elif refusal := engine.refuses(module, own):
            reason = refusal
        elif id(module) in left and not _is_asked_for(recipe, name):
            reason = left[id(module)]
        elif filter_fn is not None and not filter_fn(name, module):
            reason = "left by filter_fn"
        elif not _what_is_fp8(own, weights[0].requires_grad):
            reason = "nothing of it is in FP8 by this recipe" + ("" if weights[0].requires_grad else ": frozen")
        rows.append(_row(name, module, weights, reason, own))
    table, notes = find_costs(costs, gpu, tokens, _device_of(model))
    forecast = Forecast(table, tokens, engine.name) if table is not None and tokens is not None else None
    if engine.name != "native":
        if forecast is not None and not forecast.knows_backend:
            notes = [
                f"speed not measured: the {forecast.table.said} has no recipe of {engine.name}; {MEASURE} adds them"
            ]
            forecast = None
        elif tokens is None:
            notes = []
    asked = {row.name for row in rows if filter_fn is not None or _is_asked_for(recipe, row.name)}
    kept = {row.name for row in rows if row.is_fp8} if not never_slower else asked
    known: Known | None = {} if fuse and engine.fuses else None
    rows, fusions, speed = _predict(model, recipe, rows, forecast, kept, known)
    made = _finish(model, recipe, engine, rows, window, fusions, options)
    made = dataclasses.replace(made, notes=(*made.notes, *engine.strategy_notes(options, strategy)))
    made = dataclasses.replace(made, also=_also(model, recipe, engine, skip, options), options=options)
    made = dataclasses.replace(made, speed=speed, notes=(*made.notes, *notes, *_speed_notes(rows, speed)))
    if known is not None:
        made = dataclasses.replace(made, notes=(*made.notes, *not_fused(model, _recipes_of(recipe, rows), known)))
    return _by_depth(model, made, last_layers)


def _check_backend_has(engine: Backend, recipe: Recipe | LayerRecipes, device: torch.device, strategy: str) -> None:
    """Raise PlanError for a recipe that the backend does not run there."""
    if strategy not in STRATEGIES:
        raise PlanError(unknown_name("strategy", strategy, STRATEGIES))
    for own in [recipe] if isinstance(recipe, Recipe) else [own for _, own in recipe.patterns if own is not None]:
        if (why := engine.lacks(own, device, strategy)) is not None:
            raise PlanError(why)


def _also(
    model: nn.Module,
    recipe: Recipe | LayerRecipes,
    engine: Backend,
    skip: tuple[str, ...],
    options: BackendOptions | None,
) -> tuple[AlsoRow, ...]:
    """What the backend takes over beside the layers, without what the user skips by name."""
    rows = []
    for found in engine.also_converts(model, recipe, options):
        reason = found.refusal or ""
        if pattern := first_match(found.name, (*_skip_of(recipe), *skip)):
            reason = f"skipped by name ({pattern})"
        rows.append(AlsoRow(name=row_name(found.name), type=plain_type(found.module).__name__, reason=reason))
    return tuple(rows)


def _options(backend: str, data: dict[str, Any] | None) -> BackendOptions | None:
    """Inverse of ``BackendOptions.to_dict``. Raises PlanError."""
    if data is None:
        return None
    kind = backends.find(backend).options_type
    if kind is None:
        raise PlanError(f"the plan has options for backend {backend!r}, which has none; write it with Plan.to_dict()")
    return kind.from_dict(data)


def _predict(
    model: nn.Module,
    recipe: Recipe | LayerRecipes,
    rows: list[PlanRow],
    forecast: Forecast | None,
    kept: set[str],
    known: Known | None,
) -> tuple[list[PlanRow], tuple[Fusion, ...], Speed | None]:
    """The rows with what is predicted, the fusions of those that become FP8, and the sum.

    Rows that FP8 would slow down are left, but for those in ``kept``. A layer that goes may part those that ran with it
    as one, so they are asked again until none goes. Without ``known`` nothing is fused.
    """
    modules = dict(model.named_modules())
    linears = {row.name: m for row in rows if isinstance(m := modules[module_name(row.name)], nn.Linear)}
    fp8 = {row.name: recipe_of_layer(recipe, module_name(row.name))[1] for row in rows if row.is_fp8}
    recipes = {name: own for name, own in fp8.items() if own is not None}
    left: dict[str, Prediction] = {}
    while True:
        named = {module_name(name): own for name, own in recipes.items()}
        fusions = find_fusions(model, named, known) if known is not None else ()
        if forecast is None:
            return rows, fusions, None
        found = forecast.of_layers({module_name(n): m for n, m in linears.items()}, named, fusions)
        found = {row_name(name): prediction for name, prediction in found.items()}
        saves_memory = {name for name, own in recipes.items() if not own.fp8_gemms}
        slower = {n: p for n, p in found.items() if p.is_slower and n not in kept and n not in saves_memory}
        if not slower:
            break
        left |= slower
        recipes = {name: own for name, own in recipes.items() if name not in slower}
    rows = [_timed(row, linears.get(row.name), forecast, found.get(row.name), left.get(row.name)) for row in rows]
    return rows, fusions, _speed(rows, forecast)


def _recipes_of(recipe: Recipe | LayerRecipes, rows: Iterable[PlanRow]) -> dict[str, Recipe]:
    """By full name of the module, of those that become FP8."""
    found = {name: recipe_of_layer(recipe, name)[1] for row in rows if row.is_fp8 for name in [module_name(row.name)]}
    return {name: own for name, own in found.items() if own is not None}


def _timed(
    row: PlanRow, layer: nn.Linear | None, forecast: Forecast, stays: Prediction | None, goes: Prediction | None
) -> PlanRow:
    """The row with its milliseconds; in BF16 if it ``goes``."""
    if (found := stays or goes) is None:
        is_plain = layer is not None and not row.is_fp8
        return dataclasses.replace(row, bf16_ms=forecast.bf16_ms(layer) if is_plain and layer is not None else None)
    row = dataclasses.replace(row, bf16_ms=found.own_bf16_ms, fp8_ms=found.own_fp8_ms)
    if goes is None:
        return row
    return dataclasses.replace(row, is_fp8=False, recipe="", reason=goes.reason(forecast.table))


def _speed(rows: list[PlanRow], forecast: Forecast) -> Speed:
    known = [(row, row.bf16_ms) for row in rows if row.bf16_ms is not None]
    return Speed(
        table=forecast.table.said,
        gpu=forecast.table.gpu,
        source=forecast.table.source,
        tokens=forecast.tokens,
        bf16_ms=sum(bf16 for _, bf16 in known),
        planned_ms=sum((row.fp8_ms if row.is_fp8 else None) or bf16 for row, bf16 in known),
        fp8_bf16_ms=sum(bf16 for row, bf16 in known if row.is_fp8),
        unknown=len(rows) - len(known),
    )


def _speed_notes(rows: list[PlanRow], speed: Speed | None) -> list[str]:
    """What was left because of its speed, and what was kept in spite of it."""
    if speed is None:
        return []
    if not speed.bf16_ms:
        return [f"speed not predicted: no layer is in the {speed.table}, so none was left in BF16 for its speed"]
    left = [row for row in rows if not row.is_fp8 and row.fp8_ms is not None]
    slow = [row for row in rows if row.is_fp8 and row.gain is not None and row.gain < 1]
    notes = []
    if left:
        notes.append(f"left in BF16, where FP8 would be slower: {_counted(left)}; never_slower=False makes them FP8")
    if slow:
        notes.append(
            f"slower in FP8, and FP8 all the same (asked for by pattern, filter_fn or never_slower=False, or to save"
            f" memory): {_counted(slow)}"
        )
    return notes


def _counted(rows: list[PlanRow]) -> str:
    first = rows[0]
    return f"{len(rows)} layer{'s' * (len(rows) > 1)}, such as {first.name} ({times(first.gain or 1.0)})"


def _is_asked_for(recipe: Recipe | LayerRecipes, row: str) -> bool:
    """True if a pattern names the layer, and not all of them."""
    pattern, own = recipe_of_layer(recipe, module_name(row))
    return own is not None and pattern != "*"


def _device_of(model: nn.Module) -> torch.device:
    first = next(model.parameters(), None)
    return first.device if first is not None else torch.device("cpu")


def _by_depth(model: nn.Module, made: Plan, last_layers: LastLayers | None) -> Plan:
    """The plan with a schedule by depth and the blocks that it counts."""
    if last_layers is None:
        return made
    setting = f"fp8_last_layers {last_layers}"
    rows = [module_name(row.name) for row in made.rows]
    blocks = find_blocks(model, rows, [module_name(name) for name in made.fp8_names])
    if made.fp8_names and not blocks:
        raise PlanError(
            f"{setting} counts blocks, and {made.model} has none: no nn.ModuleList or nn.Sequential holds two or more"
            " like modules with FP8 layers; leave fp8_last_layers out, or give fp8_steps, which is for all layers"
        )
    warnings = [
        f"{setting} asks for the last {count} of {len(blocks)} blocks: all of them; write all, which is also for layers"
        " outside of the blocks"
        for _, count in last_layers.stages
        if blocks and count is not None and count > len(blocks)
    ]
    made = dataclasses.replace(
        made, fp8_last_layers=last_layers, blocks=blocks, warnings=(*made.warnings, *warnings[:1])
    )
    if made.fp8_names and all(made.window_of(name) is None for name in made.fp8_names):
        raise PlanError(
            f"{made.schedule_said} never puts a layer of this {made.model} in FP8: of {blocks[0]} to {blocks[-1]} it"
            f" reaches those without any of the {len(made.fp8_names)} FP8 layers; give a larger K, or all"
        )
    return made


def _last_layers(stages: str | Mapping[Any, Any] | LastLayers | None) -> LastLayers | None:
    """The stages, None if every layer is in FP8 from the first step on."""
    found = None if stages is None else LastLayers.of(stages)
    return None if found is None or found.is_all else found


def _window(steps: str | StepWindow | None) -> StepWindow | None:
    """The window, None if it holds every step."""
    window = None if steps is None else StepWindow.of(steps)
    return None if window is None or window.is_all else window


def _skip_patterns(skip: Iterable[str] | None) -> tuple[str, ...]:
    if isinstance(skip, str):
        raise PlanError(f"skip={skip!r} is one string; allowed: a list of layer names; write skip=[{skip!r}]")
    return tuple(skip or ())


def _skip_of(recipe: Recipe | LayerRecipes) -> tuple[str, ...]:
    if isinstance(recipe, Recipe):
        return recipe.skip
    return tuple(dict.fromkeys(name for _, own in recipe.patterns if own for name in own.skip))


def _check_patterns(patterns: Iterable[str], names: list[str], says: str) -> None:
    """Raise PlanError for a pattern that fits no name; the nearest is said: a path if it is one, else a last part."""
    for pattern in patterns:
        if any(first_match(name, (pattern,)) for name in names):
            continue
        last = {name.rpartition(".")[2] for name in names}
        parts = sorted(part for part in last if part and not part.isdigit())
        pool = parts if parts and "." not in pattern else [name for name in names if name]
        near = _nearest(pattern, pool if "." not in pattern else _paths(names), names)
        hint = f"; did you mean {near!r}?" if near else ";"
        shown = ", ".join(pool[:_SHOWN]) + (", ..." if len(pool) > _SHOWN else "")
        raise PlanError(f"{says} {pattern!r}, which fits no layer{hint} there are: {shown}")


def _paths(names: list[str]) -> list[str]:
    """The names and every path above them."""
    split = [name.split(".") for name in names if name]
    return list(dict.fromkeys(".".join(parts[:end]) for parts in split for end in range(1, len(parts) + 1)))


def _nearest(pattern: str, pool: list[str], names: list[str]) -> str | None:
    """The nearest name of the pool; else the pattern with its mistyped parts replaced, if that fits a name."""
    if near := difflib.get_close_matches(pattern, pool, n=1, cutoff=0.5):
        return near[0]
    known = sorted({part for name in names for part in name.split(".")})
    parts = []
    for part in pattern.split("."):
        is_right = part in known or any(c in part for c in "*?[")
        parts += [part] if is_right else (difflib.get_close_matches(part, known, n=1, cutoff=0.5) or [part])
    mended = ".".join(parts)
    return mended if any(matches(name, mended) for name in names) else None


def _row(
    name: str, module: nn.Module, weights: list[torch.Tensor], reason: str | None, recipe: Recipe | None
) -> PlanRow:
    count = sum(w.numel() for w in weights)
    own = module.parameters(recurse=hasattr(module, "parametrizations"))
    trained = any(w.requires_grad for w in weights)
    return PlanRow(
        name=row_name(name),
        type=plain_type(module).__name__,
        shape=largest_shape(weights),
        dtype=str(weights[0].dtype).removeprefix("torch."),
        parameters=sum(p.numel() for p in own),
        flops_per_token=(6 if trained else 4) * count,
        is_fp8=reason is None and recipe is not None,
        reason=reason or (_what_is_fp8(recipe, trained) if recipe else ""),
        recipe=recipe.name if recipe and reason is None else "",
    )


def _what_is_fp8(recipe: Recipe, trained: bool) -> str:
    """What the recipe quantises of a layer, in words; empty if nothing."""
    gemms = {name: getattr(recipe, name) for name in ("fprop", "dgrad", "wgrad") if trained or name != "wgrad"}
    parts = [" ".join(name for name, gemm in gemms.items() if gemm.is_fp8)]
    for name, gemm in gemms.items():
        if name == "wgrad" and gemm.b.is_fp8 and not gemm.is_fp8:
            parts.append(f"x kept for backward in {gemm.b}")
        elif gemm.a.is_fp8 != gemm.b.is_fp8:
            parts.append(f"{name} in high precision on {gemm.a if gemm.a.is_fp8 else gemm.b} values")
    said = ", ".join(part for part in parts if part)
    return said if trained or not said else f"{said} (frozen: no wgrad)"


def _used(recipe: Recipe | LayerRecipes, rows: list[PlanRow]) -> list[Recipe]:
    """The recipes of the rows that become FP8, each once; a single one even if none does."""
    if isinstance(recipe, Recipe):
        return [recipe]
    found = [recipe.find(module_name(row.name))[1] for row in rows if row.is_fp8]
    return list(dict.fromkeys(own for own in found if own is not None))


def _idle_patterns(recipe: Recipe | LayerRecipes, rows: list[PlanRow]) -> list[str]:
    """A warning for each pattern with a recipe that makes no layer FP8, with why. The last ``*`` may be for nothing."""
    warnings = []
    for pattern, own in recipe.patterns if isinstance(recipe, LayerRecipes) else ():
        fits = [row for row in rows if matches(module_name(row.name), pattern)]
        decided = [row for row in fits if recipe_of_layer(recipe, module_name(row.name))[0] == pattern]
        if not decided and pattern != "*":
            warnings.append(
                f"pattern {pattern!r} decides no layer: patterns before it fit all that it fits; move it up"
            )
        elif decided and own is not None and not any(row.is_fp8 for row in decided):
            why = "; ".join(dict.fromkeys(row.reason for row in decided))
            warnings.append(f"pattern {pattern!r} (recipe {own.name}) makes no layer FP8: {why}")
    return warnings


def _idle_policy(used: list[Recipe], fp8: list[PlanRow], fusions: tuple[Fusion, ...]) -> list[str]:
    """A warning if FP8 inputs are to be kept of what this plan does not run itself."""
    if not fp8 or not any(recipe.save_for_backward == "fp8_compressed" for recipe in used):
        return []
    if any(fusion.norm is not None or fusion.is_mlp for fusion in fusions):
        return []
    return [
        "save_for_backward fp8_compressed keeps no less than fp8 here: none of this model's norms and MLPs runs fused"
    ]


def _notes(
    recipe: Recipe | LayerRecipes,
    engine: Backend,
    device: torch.device,
    used: list[Recipe],
    options: BackendOptions | None,
) -> list[str]:
    """What the recipes and the backend say; of several recipes, which one says it."""
    notes = []
    for own in used:
        notes += [note if isinstance(recipe, Recipe) else f"{own.name}: {note}" for note in own.notes]
        notes += engine.notes(own, device, options) if device.type != "meta" else []
    return list(dict.fromkeys(notes))


def _finish(
    model: nn.Module,
    recipe: Recipe | LayerRecipes,
    engine: Backend,
    rows: list[PlanRow],
    window: StepWindow | None,
    fusions: tuple[Fusion, ...],
    options: BackendOptions | None,
) -> Plan:
    device = _device_of(model)
    fp8 = [row for row in rows if row.is_fp8]
    totals = Totals(
        fp8_layers=len(fp8),
        layers=len(rows),
        fp8_parameters=sum(row.parameters for row in fp8),
        parameters=sum(p.numel() for p in model.parameters()),
        fp8_flops_per_token=sum(row.flops_per_token for row in fp8),
        flops_per_token=sum(row.flops_per_token for row in rows),
    )
    warnings = [*_idle_patterns(recipe, rows), *_idle_policy(_used(recipe, rows), fp8, fusions)]
    if totals.flops_share < LOW_COVERAGE:
        why: dict[str, int] = {}
        for row in rows:
            if not row.is_fp8:
                why[row.reason] = why.get(row.reason, 0) + 1
        worst = "; ".join(f"{n} x {reason}" for reason, n in sorted(why.items(), key=lambda i: -i[1])[:3])
        warnings.append(
            f"FP8 would cover {totals.flops_share:.0%} of the matrix FLOPs ({len(fp8)} of {len(rows)} layers), so"
            f" training would run almost as before. Why: {worst or 'the model has no weight matrices'}"
        )
    notes = _notes(recipe, engine, device, _used(recipe, rows), options)
    return Plan(
        model=type(model).__name__,
        recipe=recipe,
        backend=engine.name,
        device=str(device),
        rows=tuple(rows),
        totals=totals,
        notes=tuple(notes),
        warnings=tuple(warnings),
        fp8_steps=window,
        fusions=fusions,
    )


def _fusion(data: dict[str, Any]) -> Fusion:
    norm = data.get("norm")
    return Fusion(**(data | {"layers": tuple(data["layers"]), "norm": None if norm is None else NormKind(**norm)}))


def _fusions_said(fusions: Iterable[Fusion]) -> list[str]:
    """A line for each kind, with the first of that kind: ``fused: 32 x gated MLP, such as layers.0.mlp (...)``."""
    kinds: dict[str, list[Fusion]] = {}
    for fusion in fusions:
        kinds.setdefault(f"{fusion.kind} ({', '.join(fusion.parts)})", []).append(fusion)
    return [f"fused: {len(alike)} x {said}, such as {alike[0].name or ROOT}" for said, alike in kinds.items()]


def _also_said(plan: Plan) -> list[str]:
    """A line for each class that is taken over, and for each reason why one is not, with the first of them."""
    kinds: dict[tuple[str, str], list[AlsoRow]] = {}
    for row in plan.also:
        kinds.setdefault((row.type, row.reason), []).append(row)
    return [
        f"{'left' if reason else f'also by {plan.backend}'}: {len(alike)} x {kind}, such as {alike[0].name}"
        + (f": {reason}" if reason else "")
        for (kind, reason), alike in kinds.items()
    ]


def render(plan: Plan, width: int = 120) -> str:
    """The plan as a text table."""
    from rich.console import Console
    from rich.table import Table

    t = plan.totals
    table = Table(title=f"FP8 plan: {plan.model}, recipe {plan.recipe.name}, backend {plan.backend}, {plan.device}")
    has_several = not isinstance(plan.recipe, Recipe)  # else the title says it
    by_depth = plan.fp8_last_layers is not None
    columns = ("layer", "type", "shape", "FP8", *(("from step",) if by_depth else ()))
    timed = ("BF16 ms", "FP8 ms", "gain") if plan.speed is not None else ()
    for column in (*columns, *(("recipe",) if has_several else ()), *timed, "why"):
        justify: Literal["left", "right"] = "right" if column in ("shape", "BF16 ms", "FP8 ms") else "left"
        table.add_column(column, justify=justify, overflow="fold")
    for row in plan.rows:
        cells = [row.name, row.type, "x".join(map(str, row.shape)), "yes" if row.is_fp8 else "no"]
        cells += [_from_step(plan, row)] if by_depth else []
        cells += [row.recipe] if has_several else []
        cells += _times_of(row) if timed else []
        table.add_row(*cells, row.reason)
    out = io.StringIO()
    # names and reasons hold brackets and colons, which are not markup
    console = Console(file=out, width=width, color_system=None, markup=False, emoji=False, highlight=False)
    console.print(table)
    share = t.fp8_parameters / t.parameters if t.parameters else 0.0
    console.print(
        f"FP8: {t.fp8_layers} of {t.layers} layers, {t.fp8_parameters / 1e6:.2f} of {t.parameters / 1e6:.2f} M"
        f" parameters ({share:.0%}), {t.fp8_flops_per_token / 1e6:.2f} of {t.flops_per_token / 1e6:.2f} MFLOP a token"
        f" ({t.flops_share:.0%})",
        soft_wrap=True,
    )
    if plan.speed is not None:
        console.print(str(plan.speed), soft_wrap=True)
    if plan.fp8_steps is not None:
        console.print(f"only in {plan.fp8_steps.said}, counted from 0; high precision outside", soft_wrap=True)
    for line in (*_stages(plan), *_fusions_said(plan.fusions), *_also_said(plan)):
        console.print(line, soft_wrap=True)
    for note in plan.notes:
        console.print(f"note: {note}", soft_wrap=True)
    for warning in plan.warnings:
        console.print(f"WARNING: {warning}", soft_wrap=True)
    return out.getvalue().rstrip()


def _times_of(row: PlanRow) -> list[str]:
    """``BF16 ms``, ``FP8 ms`` and ``gain`` in a table."""
    if row.is_fp8 and row.gain is None:
        return ["", "", "not in the table"]
    cells = ["" if value is None else ms(value) for value in (row.bf16_ms, row.fp8_ms)]
    return [*cells, "" if row.gain is None else times(row.gain)]


def _from_step(plan: Plan, row: PlanRow) -> str:
    """The first step in which a row's layer is in FP8, in a table."""
    if not row.is_fp8:
        return ""
    window = plan.window_of(row.name)
    return "never" if window is None else str(window.start or 0)


def _stages(plan: Plan) -> list[str]:
    """``from step 0: layers.8 to layers.11 (24 in all)``, a line for each step at which layers turn to FP8."""
    if plan.fp8_last_layers is None or not plan.blocks:
        return []
    places: dict[int | None, list[int | None]] = {}
    for name in plan.fp8_names:
        window = plan.window_of(name)
        first = None if window is None else window.start or 0
        places.setdefault(first, []).append(block_of(module_name(name), plan.blocks))
    lines = [
        f"FP8 by depth: {len(plan.blocks)} blocks, {_span(plan.blocks)}; layers turn to FP8, steps counted from 0,"
    ]
    for first in sorted(places, key=lambda step: (step is None, step)):
        found = sorted({place for place in places[first] if place is not None})
        parts = [_span(plan.blocks[found[0] : found[-1] + 1])] if found else []
        outside = places[first].count(None)
        parts += [f"{outside} layer{'s' * (outside > 1)} outside of the blocks"] if outside else []
        when = "never in FP8" if first is None else f"from step {first}"
        lines.append(f"  {when}: {' and '.join(parts)} ({len(places[first])} in all)")
    return lines


def _span(blocks: tuple[str, ...]) -> str:
    return blocks[0] if len(blocks) == 1 else f"{blocks[0]} to {blocks[-1]}"
