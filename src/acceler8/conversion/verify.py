"""Prove that a converted model still is what its plan promised.

Static checks read state; the step check runs the user's own training step and watches the weights move and
the codes follow. Each check is a function that returns what is wrong, as sentences with the parameter's name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from acceler8 import backends
from acceler8.backends import Backend
from acceler8.conversion.layers import module_name
from acceler8.conversion.replicas import of_all, replicas, shard
from acceler8.conversion.weights import Weights
from acceler8.errors import VerifyError, unknown_name
from acceler8.formats import E4M3, E5M2
from acceler8.functional import WeightCodes
from acceler8.kernels import Quantized, quantize
from acceler8.nn import (
    Fp8Linear,
    FusedMLP,
    FusedNorm,
    LayerState,
    ModelState,
    fp8_layers,
    fused_mlps,
    fused_norms,
    keeps_history,
    run_as_one,
    run_one_by_one,
    state_of,
)
from acceler8.nn.gradients import gradient_of
from acceler8.recipes import Recipe

StepFunction = Callable[[], Any]
CHECKS = ("layers", "ties", "requires_grad", "dtypes", "codes", "optimizer", "moved and fresh", "called", "fused")


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """Checks that ran and held, and what each covered."""

    checks: dict[str, str]

    def __str__(self) -> str:
        return "\n".join(f"ok  {name}: {covered}" for name, covered in self.checks.items())


def verify(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    step: StepFunction | None = None,
    ignore: tuple[str, ...] = (),
) -> VerifyReport:
    """Check the invariants of a converted model.

    Static: ``layers`` are FP8 as planned, ``ties`` intact, ``requires_grad`` and ``dtypes`` unchanged,
    ``codes`` that an open window keeps equal a fresh cast; with ``optimizer``, every trainable parameter is
    in exactly one group.
    ``step`` is a function that does one whole training step (forward, backward, optimizer step); it is
    **called twice** and both are real steps. Then also: every parameter with a gradient and a learning rate
    changed (``moved``), and the second step's forward used codes of the weights as the first step left them
    (``fresh``); and each MLP that ran as one operation gave what its layers give one by one on the step's own
    input, as near as their formats are, and each norm what its own forward gives (``fused``; which did not run as one
    is said, with why). ``ignore`` names checks
    to leave out, for example ``("requires_grad",)`` after freezing layers on purpose.
    Of a model that ``torch.compile`` compiled the second step runs eagerly. Of a sharded model every process calls this
    with a ``step``, and what several of them hold must be the same in all.
    Raises: VerifyError with every violation, by parameter name; PlanError if the model is not converted.
    """
    state = state_of(model)
    engine = backends.get(state.backend)
    checks: dict[str, Callable[[], tuple[list[str], str]]] = {
        "layers": lambda: _layers(model, state, engine),
        "ties": lambda: _ties(model, state),
        "requires_grad": lambda: _requires_grad(model, state),
        "dtypes": lambda: _dtypes(model, state),
        "codes": lambda: _codes(model),
    }
    if optimizer is not None:
        checks["optimizer"] = lambda: _optimizer(model, optimizer)
    if step is not None:
        fused = _FusedRuns(model)
        checks["moved and fresh"] = lambda: _step(
            model, engine, optimizer, step, fused, check_calls="called" not in ignore
        )
        if (fused.mlps or fused.norms) and "moved and fresh" not in ignore:
            checks["fused"] = fused.result
    for name in ignore:
        if name not in CHECKS:
            raise VerifyError(unknown_name("check", name, CHECKS))
    held, broken = {}, []
    for name, check in checks.items():
        if name in ignore:
            continue
        violations, covered = check()
        broken += [f"{name}: {v}" for v in violations]
        held[name] = covered
    if broken:
        raise VerifyError("\n".join(broken))
    return VerifyReport(checks=held)


def _layers(model: nn.Module, state: ModelState, engine: Backend) -> tuple[list[str], str]:
    layers = {layer_state(layer).name: layer for _, layer in engine.layers(model)}
    live = set(layers)
    planned = {module_name(name) for name in state.plan.fp8_names}
    bad = [f"layer {n!r} is planned FP8 but is not; convert the model again" for n in sorted(planned - live)]
    bad += [
        f"layer {n!r} does not run in FP8: its forward was replaced on the instance after conversion"
        for n, layer in layers.items()
        if not _runs_own_forward(layer)
    ]
    for name, mlp in fused_mlps(model):
        wide = [layer_state(layers[n]).slots for n in _names(mlp)[:-1] if n in layers]
        if state.amax is not None and len(set(wide)) > 1:
            bad.append(
                f"gate and up of {name!r} have different amax slots and are cast as one; convert the model again"
            )
    return bad, f"{len(live)} FP8 layers as planned"


def _names(mlp: FusedMLP) -> list[str]:
    """Names of its layers at conversion."""
    state = mlp._acceler8_fusion
    return [f"{state.name}.{name}".lstrip(".") for name in state.layers]


def layer_state(layer: nn.Module) -> LayerState:
    """What every backend keeps on a layer that it made FP8."""
    state: LayerState = layer.__dict__["_acceler8_layer"]
    return state


def _runs_own_forward(layer: nn.Module) -> bool:
    """True if calling the layer ends in its FP8 class's forward: as it is, or wrapped on the instance (as a prepared
    model's forward is, or one that the compiler leaves out).
    """
    forward = layer.__dict__.get("forward", layer.forward)
    for _ in range(8):
        if getattr(forward, "__func__", None) is type(layer).forward:
            return True
        inner = [getattr(forward, name, None) for name in ("_torchdynamo_orig_callable", "__wrapped__", "forward")]
        forward = next((f for f in inner if f is not None), None)
    return False


def _named(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by the names that they had at conversion: wrappers put prefixes in front of those."""
    for module in model.modules():
        if "_acceler8_model" in module.__dict__:
            return dict(module.named_parameters(remove_duplicate=False))
    return dict(model.named_parameters(remove_duplicate=False))


def _ties(model: nn.Module, state: ModelState) -> tuple[list[str], str]:
    named = _named(model)
    bad = []
    for names in state.ties:
        present = [n for n in names if n in named]
        if len({id(named[n]) for n in present}) > 1:
            bad.append(f"{' and '.join(present)} shared one Parameter and no longer do; tie them again before training")
    return bad, f"{len(state.ties)} ties"


def _requires_grad(model: nn.Module, state: ModelState) -> tuple[list[str], str]:
    named = _named(model)
    bad = [
        f"{name} was {'trainable' if was else 'frozen'} and now is not; if you meant it, pass ignore=('requires_grad',)"
        for name, was in state.requires_grad.items()
        if name in named and named[name].requires_grad != was
    ]
    return bad, _covered(state.requires_grad, named)


def _dtypes(model: nn.Module, state: ModelState) -> tuple[list[str], str]:
    named = _named(model)
    bad = [
        f"{name} is {named[name].dtype}, at conversion it was {was}; cast the model before converting it"
        for name, was in state.dtypes.items()
        if name in named and named[name].dtype != was
    ]
    return bad, _covered(state.dtypes, named)


def _covered(known: dict[str, Any], named: dict[str, nn.Parameter]) -> str:
    """How many parameters a check compared: a wrapper inside the model (PEFT's, say) gives some another name."""
    gone = sum(name not in named for name in known)
    return f"{len(known) - gone} parameters" + (f"; {gone} have another name since conversion" if gone else "")


def fresh_weight_codes(layer: Fp8Linear, orientation: str, *more: Fp8Linear) -> Quantized:
    """A cast of the layer's weight as it is now; of several layers that are cast as one, of all their weights."""
    weights = [part._acceler8_layer.codes.source(part.weight) for part in (layer, *more)]
    return _cast_of(layer, orientation, torch.cat(weights) if more else weights[0])


def _cast_of(layer: Fp8Linear, orientation: str, weight: Tensor) -> Quantized:
    state = layer._acceler8_layer
    operand = state.recipe.fprop.b if orientation == "rows" else state.recipe.dgrad.b
    slots = state.slots
    rows, cols, _ = quantize(
        weight,
        operand.format if orientation == "rows" else None,
        operand.format if orientation == "cols" else None,
        operand.granularity,
        pow2=state.recipe.pow2_scales,
        margin=state.recipe.margin,
        amax=slots.w.in_use if slots else None,
        staging=slots.w.staging.clone() if slots else None,
    )
    made = rows if orientation == "rows" else cols
    assert made is not None
    return made


def _same(a: Quantized, b: Quantized) -> bool:
    codes = torch.equal(a.codes.view(torch.uint8), b.codes.view(torch.uint8))
    return codes and torch.equal(a.scale_inv.nan_to_num(), b.scale_inv.nan_to_num())


def _codes(model: nn.Module) -> tuple[list[str], str]:
    owners = [(f"{name}.weight", layer._acceler8_layer.codes, [layer]) for name, layer in fp8_layers(model)]
    for name, mlp in fused_mlps(model):
        state = mlp._acceler8_fusion
        wide = [mlp._modules[part] for part in state.layers[:-1]]
        if layers := [layer for layer in wide if isinstance(layer, Fp8Linear)][: len(wide)]:
            owners.append((f"{name} ({' and '.join(state.layers[:-1])}).weight", state.codes, layers))
    bad, seen = [], 0
    for name, codes, layers in owners:
        codes.follow(*(layer.weight for layer in layers))
        for orientation, kept in codes.live().items():
            seen += 1
            if not _same(kept, fresh_weight_codes(layers[0], orientation, *layers[1:])):
                bad.append(
                    f"{name} changed inside an open window and its kept codes ({orientation}) are stale; close"
                    " the window, or mark the change with acceler8.step(model)"
                )
    for name, layer in fp8_layers(model):
        persistent = layer._acceler8_layer.kept
        rows = None if persistent is None else persistent.get(layer.weight)
        if rows is None:
            continue
        seen += 1
        if not _same(rows, fresh_weight_codes(layer, "rows")):
            bad.append(
                f"{name}.weight changed since the step that made its kept codes (level O3), which are older now; change"
                " weights by counted operations under torch.no_grad(), not through .data, or call acceler8.step(model)"
            )
    return bad, f"{seen} live codes equal a fresh cast"


def _optimizer(model: nn.Module, optimizer: Optimizer) -> tuple[list[str], str]:
    owners: dict[int, int] = {}
    for group in optimizer.param_groups:
        for p in group["params"]:
            owners[id(p)] = owners.get(id(p), 0) + 1
    bad, count = [], 0
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        count += 1
        n = owners.get(id(p), 0)
        if n != 1:
            where = f"held {n} times by the optimizer" if n else "in no group of the optimizer: it will never move"
            bad.append(f"{name} is {where}; build the optimizer from the converted model's parameters, each once")
    return bad, f"{count} trainable parameters, each in one group"


def _step(
    model: nn.Module,
    engine: Backend,
    optimizer: Optimizer | None,
    step: StepFunction,
    fused: _FusedRuns,
    *,
    check_calls: bool,
) -> tuple[list[str], str]:
    weights = Weights(model, optimizer)
    had_gradient: set[str] = set()
    handles = [
        handle
        for name, p in model.named_parameters()
        if p.requires_grad
        for handle in _note_gradients(name, p, had_gradient)
    ]
    rates = _Rates(optimizer)
    clock = state_of(model).clock
    ticks = clock.ticks
    if optimizer is not None:
        handles.append(optimizer.register_step_pre_hook(rates))
    # before the user's own hooks, which may change the output
    handles += [mlp.register_forward_hook(fused, prepend=True) for mlp in fused.mlps.values()]
    handles += [norm.register_forward_hook(fused.compare_norm, prepend=True) for norm in fused.norms.values()]
    try:
        step()
    finally:
        for handle in handles:
            handle.remove()
    held = rates.of
    changed = weights.changed()
    bad, moved, rounded = weights.stale(), 0, 0
    is_sharded = any(isinstance(p, DTensor) for p in model.parameters())
    if is_sharded:
        # a process may hold none of a small parameter's elements, or only those without a gradient
        had_gradient, changed = of_all(had_gradient, changed)
    for name, p in model.named_parameters():
        if name not in had_gradient or held.get(id(p), 1.0) == 0.0:
            continue
        if name in changed:
            moved += 1
        elif weights.rounds and (id(p) in held or (optimizer is None and p.dtype is not torch.float32)):
            rounded += 1  # the optimizer holds this very tensor: its step was below half an ulp of every element
        else:
            bad.append(
                f"{name} had a gradient and a learning rate but did not move: the optimizer holds another tensor"
            )
    del weights
    state = state_of(model)
    if clock.ticks == ticks and (keeps_history(model) or state.schedules):
        what = f"{state.plan.schedule_said} stands still" if state.schedules else "delayed scaling keeps no history"
        bad.append(
            f"step() marked no step boundary, so {what}: use Accelerator, or acceler8.attach(model, optimizer), or call"
            " acceler8.step(model) behind each optimizer step"
        )
    off, compared = [name for name, schedule in state.schedules.items() if not schedule.is_on], clock.ticks
    stale, used, idle = _codes_used(model, engine, step, fused)
    bad += stale
    if idle and check_calls:
        bad.append(
            f"{len(idle)} FP8 layers were not called in training mode by step(), such as {idle[0]!r}: the model"
            " multiplies their weights without them, or does not use them; skip them in the plan, or pass"
            " ignore=('called',)"
        )
    if is_sharded:
        bad += replicas(model)
    if not moved:
        bad.append("no parameter moved: step() must run backward and an optimizer step")
    covered = f"{moved} parameters moved, {used} layers used codes of their new weight"
    if off:
        covered += (
            f" ({len(off)} of {len(state.schedules)} FP8 layers were in high precision in step {compared}, by"
            f" {state.plan.schedule_said})"
        )
    return bad, covered + (f", {rounded} had steps below their resolution" if rounded else "")


class _NoteGradient:
    """Gradient hook: remember that this parameter got a gradient that is not all zero."""

    def __init__(self, name: str, seen: set[str]) -> None:
        self.name, self.seen = name, seen

    def __call__(self, p: Tensor) -> None:
        gradient = gradient_of(p)
        if gradient is not None:
            self.of_backward(shard(gradient))

    def of_backward(self, grad: Tensor) -> None:
        """The same, of the gradient as backward gives it."""
        if bool(grad.any()):
            self.seen.add(self.name)


def _note_gradients(name: str, p: nn.Parameter, seen: set[str]) -> list[RemovableHandle]:
    """Hooks for engines of either kind: those that set ``grad`` of a shard, and those that take it away at once."""
    note = _NoteGradient(name, seen)
    return [p.register_hook(note.of_backward), p.register_post_accumulate_grad_hook(note)]


class _Rates:
    """Step hook: the learning rate of each parameter as the step uses it (a scheduler may change it right after)."""

    def __init__(self, optimizer: Optimizer | None) -> None:
        self.of: dict[int, float] = {}
        self(optimizer)

    def __call__(self, optimizer: Optimizer | None, *args: Any) -> None:
        groups = [] if optimizer is None else optimizer.param_groups
        self.of = {id(p): float(group["lr"]) for group in groups for p in group["params"]}


def _codes_used(
    model: nn.Module, engine: Backend, step: StepFunction, fused: _FusedRuns
) -> tuple[list[str], int, list[str]]:
    """Run ``step`` and compare each layer's first forward in it with one that casts the weight afresh.

    ``(violations, layers compared, layers not called)``.
    """
    bad: list[str] = []
    seen: set[str] = set()
    watched, handles, in_mlps = [], [], set()
    for name, mlp in fused.mlps.items():  # a hook on their layers would run those one by one, not as they run else
        if fused.ran.get(name, "") is None:
            names = [f"{name}.{part}".lstrip(".") for part in mlp._acceler8_fusion.layers]
            in_mlps.update(names)
            handles.append(mlp.register_forward_hook(_CompareFused(names, seen, bad), prepend=True))
    for name, layer in engine.layers(model):
        state = layer_state(layer)
        if not state.recipe.fprop.is_fp8:
            continue  # no codes
        watched.append(name)
        if name in in_mlps:
            continue
        if type(state.codes) is not WeightCodes and isinstance(layer, Fp8Linear):  # a sharding engine brings codes
            handles.append(layer.register_forward_hook(_CompareGathered(name, seen, bad), prepend=True))
            continue
        # before the user's own hooks, which may change the output
        handles.append(layer.register_forward_hook(_CompareOutput(engine, name, seen, bad), prepend=True))
    try:
        with torch.compiler.set_stance("force_eager"):  # compiled code does not call hooks that come behind it
            step()
    finally:
        for handle in handles:
            handle.remove()
    return bad, len(seen), [name for name in watched if name not in seen]


class _FusedRuns:
    """Forward hooks on MLPs that can run as one, and on norms: whether they did, and if that gave what their
    layers give, or their author's forward.
    """

    def __init__(self, model: nn.Module) -> None:
        self.mlps, self.norms = dict(fused_mlps(model)), dict(fused_norms(model))
        self.ran: dict[str, str | None] = {}
        """Why not, by name, None if it ran as one; in the first training forward of each."""
        self.bad: list[str] = []
        self._names = {id(part): name for name, part in (*self.mlps.items(), *self.norms.items())}

    def __call__(self, mlp: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        assert isinstance(mlp, FusedMLP)
        name = self._names[id(mlp)]
        if name in self.ran or not mlp.training:
            return
        why_not = mlp._acceler8_fusion.why_not
        self.ran[name] = why_not = "it is compiled" if torch.compiler.is_compiling() else why_not
        if why_not is not None or not args:
            return
        want, got = (t.detach().double().nan_to_num() for t in (run_one_by_one(mlp, args[0]), output))
        first = mlp._modules[mlp._acceler8_fusion.layers[0]]
        assert isinstance(first, Fp8Linear)
        noise = _noise(first._acceler8_layer.recipe, mlp._acceler8_fusion.is_gated)
        error, allowed = (got - want).norm(), noise * want.norm()
        if not error <= allowed:
            self.bad.append(
                f"{name} as one operation differs from its layers one by one by {error / want.norm():.1%} of its"
                f" output, its formats allow {allowed / want.norm():.1%}; plan the model with fuse=False"
            )

    def compare_norm(self, norm: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        """Forward hook on a norm."""
        assert isinstance(norm, FusedNorm)
        name = self._names[id(norm)]
        if name in self.ran or not norm.training:
            return
        state = norm._acceler8_norm
        self.ran[name] = why_not = "it is compiled" if torch.compiler.is_compiling() else state.why_not
        if why_not is not None:
            return
        with torch.no_grad():
            want, got = (t.double().nan_to_num() for t in (state.author.forward(norm, args[0]), output.detach()))
        error, allowed = (got - want).norm(), torch.finfo(output.dtype).eps * want.norm()
        if not error <= allowed:
            self.bad.append(
                f"{name} in one kernel differs from its own forward by {error / want.norm():.1e} of its output, its"
                f" dtype allows {allowed / want.norm():.1e}; plan the model with fuse=False"
            )

    def result(self) -> tuple[list[str], str]:
        """``(violations, what was covered)``."""
        gated = [name for name, mlp in self.mlps.items() if mlp._acceler8_fusion.is_gated]
        covered = (
            (gated, "gated MLPs ran as one operation"),
            ([name for name in self.mlps if name not in gated], "MLPs ran as one operation"),
            (self.norms, "norms ran in one kernel"),
        )
        said = [self._said(parts, what) for parts, what in covered if parts]
        return self.bad, ", ".join(said)

    def _said(self, parts: Collection[str], what: str) -> str:
        why = {name: self.ran.get(name, "it was not called in training mode") for name in parts}
        ran = sum(why_not is None for why_not in why.values())
        others: dict[str, list[str]] = {}
        for name, why_not in why.items():
            if why_not is not None:
                others.setdefault(why_not, []).append(name)
        said = [f"; {len(names)} did not, such as {names[0]}: {why_not}" for why_not, names in others.items()]
        return f"{ran} of {len(parts)} {what}{''.join(said)}"


def _noise(recipe: Recipe, is_gated: bool) -> float:
    """What two runs of an MLP may differ by, relative, if they share no rounding: noise adds up in squares.

    A cast leaves noise of 2.7 % in E4M3 and 5.3 % in E5M2 (Gaussian data). The output of a gated one holds five casts
    of activations (that of x twice, as one, through gate and through up, and the product) and three of weights; without
    a gate they are two and two.
    """
    activations, weights = (5, 3) if is_gated else (2, 2)
    noise = {E4M3: 0.027, E5M2: 0.053}
    a, b = (noise[operand.format] for operand in (recipe.fprop.a, recipe.fprop.b) if operand.format is not None)
    return float((2 * (activations * a**2 + weights * b**2)) ** 0.5)


class _CompareFused:
    """Forward hook: a fused MLP's output must be, bit for bit, the one that fresh weight codes give."""

    def __init__(self, names: list[str], seen: set[str], bad: list[str]) -> None:
        self.names, self.seen, self.bad = names, seen, bad

    def __call__(self, mlp: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        assert isinstance(mlp, FusedMLP)
        if self.seen.issuperset(self.names) or not mlp.training or not args:
            return
        self.seen.update(self.names)
        if mlp._acceler8_fusion.why_not is not None:
            return  # one by one after all
        with torch.no_grad():
            expected = run_as_one(mlp, args[0].detach(), records=False)
        if not torch.equal(expected.nan_to_num(), output.detach().nan_to_num()):
            self.bad.append(f"{mlp._acceler8_fusion.name}: its forward after the step used codes of an older weight")


class _CompareGathered:
    """Forward hook: the codes that arrived must be, bit for bit, those of the whole weight as it now is."""

    def __init__(self, name: str, seen: set[str], bad: list[str]) -> None:
        self.name, self.seen, self.bad = name, seen, bad

    def __call__(self, layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        if self.name in self.seen or not layer.training:
            return
        self.seen.add(self.name)
        assert isinstance(layer, Fp8Linear)
        with torch.no_grad():
            fresh = fresh_weight_codes(layer, "rows")
            arrived = layer._acceler8_layer.codes.get("rows")
        assert arrived is not None
        width = arrived.codes.shape[1]  # what is filled up to a multiple of 16 does not travel
        if not _same(arrived, fresh._replace(codes=fresh.codes[:, :width])):
            self.bad.append(f"{self.name}: its forward after the step used codes of an older weight")


class _CompareOutput:
    """Forward hook: the layer's output must be, bit for bit, the one that fresh weight codes give."""

    def __init__(self, engine: Backend, name: str, seen: set[str], bad: list[str]) -> None:
        self.engine, self.name, self.seen, self.bad = engine, name, seen, bad

    def __call__(self, layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        if self.name in self.seen or not layer.training or not args:
            return
        self.seen.add(self.name)
        with torch.no_grad():
            if not layer_state(layer).is_fp8(training=True):  # outside the window of FP8 steps
                expected: Tensor | None = F.linear(args[0], layer.weight, layer.bias)  # type: ignore[arg-type]
            else:
                expected = self.engine.expected_output(layer, args[0])
        if expected is None:
            return
        if not torch.equal(expected.nan_to_num(), output.detach().nan_to_num()):
            self.bad.append(f"{self.name}: its forward after the step used codes of an older weight")
