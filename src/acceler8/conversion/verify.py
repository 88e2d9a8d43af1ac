"""Prove that a converted model still is what its plan promised.

Static checks read state; the step check runs the user's own training step and watches the weights move and
the codes follow. Each check is a function that returns what is wrong, as sentences with the parameter's name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from acceler8.conversion.layers import module_name
from acceler8.errors import VerifyError, unknown_name
from acceler8.functional import WeightCodes, linear
from acceler8.kernels import Quantized, quantize
from acceler8.nn import Fp8Linear, ModelState, fp8_layers, state_of

StepFunction = Callable[[], Any]
CHECKS = ("layers", "ties", "requires_grad", "dtypes", "codes", "optimizer", "moved and fresh", "called")


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
    (``fresh``). ``ignore`` names checks to leave out, for example ``("requires_grad",)`` after freezing
    layers on purpose.
    Raises: VerifyError with every violation, by parameter name; PlanError if the model is not converted.
    """
    state = state_of(model)
    checks: dict[str, Callable[[], tuple[list[str], str]]] = {
        "layers": lambda: _layers(model, state),
        "ties": lambda: _ties(model, state),
        "requires_grad": lambda: _requires_grad(model, state),
        "dtypes": lambda: _dtypes(model, state),
        "codes": lambda: _codes(model),
    }
    if optimizer is not None:
        checks["optimizer"] = lambda: _optimizer(model, optimizer)
    if step is not None:
        checks["moved and fresh"] = lambda: _step(model, optimizer, step, check_calls="called" not in ignore)
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


def _layers(model: nn.Module, state: ModelState) -> tuple[list[str], str]:
    layers = {layer._acceler8_layer.name: layer for _, layer in fp8_layers(model)}
    live = set(layers)
    planned = {module_name(name) for name in state.plan.fp8_names}
    bad = [f"layer {n!r} is planned FP8 but is not; convert the model again" for n in sorted(planned - live)]
    bad += [
        f"layer {n!r} does not run in FP8: its forward was replaced on the instance after conversion"
        for n, layer in layers.items()
        if not _runs_own_forward(layer)
    ]
    return bad, f"{len(live)} FP8 layers as planned"


def _runs_own_forward(layer: Fp8Linear) -> bool:
    """True if calling the layer ends in ``Fp8Linear.forward``: its class's, or wrapped on the instance (as a prepared
    model's forward is, or one that the compiler leaves out).
    """
    forward = layer.__dict__.get("forward", layer.forward)
    for _ in range(8):
        if getattr(forward, "__func__", None) is Fp8Linear.forward:
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


def _fresh(layer: Fp8Linear, orientation: str) -> Quantized:
    """A cast of the layer's weight as it is now."""
    state = layer._acceler8_layer
    operand = state.recipe.fprop.b if orientation == "rows" else state.recipe.dgrad.b
    slots = state.slots
    rows, cols, _ = quantize(
        layer.weight.detach(),
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
    bad, seen = [], 0
    for name, layer in fp8_layers(model):
        codes = layer._acceler8_layer.codes
        codes.follow(layer.weight)
        for orientation, kept in codes.live().items():
            seen += 1
            if not _same(kept, _fresh(layer, orientation)):
                bad.append(
                    f"{name}.weight changed inside an open window and its kept codes ({orientation}) are stale; close"
                    " the window, or mark the change with acceler8.step(model)"
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
    model: nn.Module, optimizer: Optimizer | None, step: StepFunction, *, check_calls: bool
) -> tuple[list[str], str]:
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    had_gradient: set[str] = set()
    handles = [
        p.register_post_accumulate_grad_hook(_NoteGradient(name, had_gradient))
        for name, p in model.named_parameters()
        if p.requires_grad
    ]
    rates = _Rates(optimizer)
    clock = state_of(model).clock
    ticks = clock.ticks
    if optimizer is not None:
        handles.append(optimizer.register_step_pre_hook(rates))
    try:
        step()
    finally:
        for handle in handles:
            handle.remove()
    held = rates.of
    bad, moved, rounded = [], 0, 0
    for name, p in model.named_parameters():
        if name not in had_gradient or held.get(id(p), 1.0) == 0.0:
            continue
        if not torch.equal(p.detach(), before[name]):
            moved += 1
        elif id(p) in held or (optimizer is None and p.dtype is not torch.float32):
            rounded += 1  # the optimizer holds this very tensor: its step was below half an ulp of every element
        else:
            bad.append(
                f"{name} had a gradient and a learning rate but did not move: the optimizer holds another tensor"
            )
    del before
    state = state_of(model)
    if clock.ticks == ticks and (state.amax is not None or state.schedules):
        what = f"{state.plan.schedule_said} stands still" if state.schedules else "delayed scaling keeps no history"
        bad.append(
            f"step() marked no step boundary, so {what}: use Accelerator, or acceler8.attach(model, optimizer), or call"
            " acceler8.step(model) behind each optimizer step"
        )
    off, compared = [name for name, schedule in state.schedules.items() if not schedule.is_on], clock.ticks
    stale, used, idle = _codes_used(model, step)
    bad += stale
    if idle and check_calls:
        bad.append(
            f"{len(idle)} FP8 layers were not called in training mode by step(), such as {idle[0]!r}: the model"
            " multiplies their weights without them, or does not use them; skip them in the plan, or pass"
            " ignore=('called',)"
        )
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
        if p.grad is not None and bool(p.grad.any()):
            self.seen.add(self.name)


class _Rates:
    """Step hook: the learning rate of each parameter as the step uses it (a scheduler may change it right after)."""

    def __init__(self, optimizer: Optimizer | None) -> None:
        self.of: dict[int, float] = {}
        self(optimizer)

    def __call__(self, optimizer: Optimizer | None, *args: Any) -> None:
        groups = [] if optimizer is None else optimizer.param_groups
        self.of = {id(p): float(group["lr"]) for group in groups for p in group["params"]}


def _codes_used(model: nn.Module, step: StepFunction) -> tuple[list[str], int, list[str]]:
    """Run ``step`` and compare each layer's first forward in it with one that casts the weight afresh.

    ``(violations, layers compared, layers not called)``.
    """
    bad: list[str] = []
    seen: set[str] = set()
    watched, handles = [], []
    for name, layer in fp8_layers(model):
        state = layer._acceler8_layer
        if not state.recipe.fprop.is_fp8 or type(state.codes) is not WeightCodes:
            continue  # no codes, or a sharding engine's, whose weight is not there to cast
        watched.append(name)
        # before the user's own hooks, which may change the output
        handles.append(layer.register_forward_hook(_CompareOutput(name, seen, bad), prepend=True))
    try:
        step()
    finally:
        for handle in handles:
            handle.remove()
    return bad, len(seen), [name for name in watched if name not in seen]


class _CompareOutput:
    """Forward hook: the layer's output must be, bit for bit, the one that fresh weight codes give."""

    def __init__(self, name: str, seen: set[str], bad: list[str]) -> None:
        self.name, self.seen, self.bad = name, seen, bad

    def __call__(self, layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        assert isinstance(layer, Fp8Linear)
        state = layer._acceler8_layer
        if self.name in self.seen or not layer.training or not args:
            return
        self.seen.add(self.name)
        slots = state.slots
        with torch.no_grad():
            if not state.is_fp8(training=True):  # outside the window of FP8 steps
                expected = F.linear(args[0], layer.weight, layer.bias)
            else:
                expected = linear(
                    args[0],
                    layer.weight,
                    layer.bias,
                    recipe=state.recipe,
                    slots=slots if slots is None else slots._replace(records=False),
                )
        if not torch.equal(expected.nan_to_num(), output.detach().nan_to_num()):
            self.bad.append(f"{self.name}: its forward after the step used codes of an older weight")
