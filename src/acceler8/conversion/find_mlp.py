"""MLPs of others, found by their structure, whatever they and their parts are called.

A module's own forward is traced with its children as black boxes (``torch.fx``), in training and in evaluation, and
must be ``down(f(gate(x)) * up(x))`` or ``second(f(first(x)))`` and nothing else; gate and up may be the halves of one
layer's result. The activation is recognised by its values. What a trace does not show (contexts such as
``torch.no_grad``, a branch on ``self.training``, random numbers, notes on ``self``) is looked for beside it.
"""

from __future__ import annotations

import copy
import operator
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.nn.modules.dropout import _DropoutNd

from acceler8.functional.mlp import ACTIVATIONS
from acceler8.nn.twin import ONE_AT_A_TIME, contents, twin_of

# of a tensor; element by element, unlike those that take parts of it or put them elsewhere
_METHODS = frozenset(("add", "div", "erf", "exp", "mul", "neg", "pow", "relu", "sigmoid", "square", "sub", "tanh"))


@dataclass(frozen=True)
class GatedMLP:
    """Children of a module whose forward is ``down(f(gate(x)) * up(x))``."""

    layers: tuple[str, ...]
    """Gate, up and down; or gate and up as one layer, and down."""
    activation: str


@dataclass(frozen=True)
class MLP:
    """Children of a module whose forward is ``second(f(first(x)))``."""

    layers: tuple[str, ...]
    """The first and the second."""
    activation: str


@dataclass(frozen=True)
class OnlyInEval:
    """A module whose forward is an MLP's in evaluation, but not in training."""

    found: GatedMLP | MLP
    what: str
    """What training has in addition."""


class _ChildrenAreLeaves(fx.Tracer):
    """Notes in which modes of autograd and autocast each operation would run: a trace does not show them."""

    def __init__(self) -> None:
        super().__init__()
        self.modes: set[tuple[bool, ...]] = set()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        self.modes.add(
            (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *map(torch.is_autocast_enabled, _DEVICES))
        )
        return super().create_node(*args, **kwargs)


_DEVICES = ("cpu", "cuda")


@contextmanager
def _modes(*, on: bool) -> Iterator[None]:
    """Autograd and autocast, all on or all off, so that a context inside a forward that sets either shows."""
    before = [torch.is_autocast_enabled(device) for device in _DEVICES]
    try:
        with torch.set_grad_enabled(on):
            for device in _DEVICES:
                torch.set_autocast_enabled(device, on)
            yield
    finally:
        for device, was in zip(_DEVICES, before, strict=True):
            torch.set_autocast_enabled(device, was)


def find_mlp(module: nn.Module) -> GatedMLP | MLP | OnlyInEval | None:
    """The parts of ``module`` if its forward is an MLP's and nothing else. Runs nothing of it but its Python."""
    in_training, in_eval = (_find_in_mode(module, training=training) for training in (True, False))
    if in_training == in_eval:
        return in_eval
    undropped = _find_in_mode(module, training=True, drops=False)
    return OnlyInEval(in_eval, _dropout_said(module)) if in_eval is not None and undropped == in_eval else None


def _dropout_said(module: nn.Module) -> str:
    dropouts = (part for _, part in module.named_modules() if isinstance(part, _DropoutNd))
    used = next((part.p for part in dropouts if part.p > 0), None)
    return "dropout" if used is None else f"dropout (p = {used:g})"


def _find_in_mode(module: nn.Module, *, training: bool, drops: bool = True) -> GatedMLP | MLP | None:
    """What ``module`` is in training or in evaluation; without ``drops`` if its dropouts did nothing."""
    ONE_AT_A_TIME.acquire()
    tracer, dice = _ChildrenAreLeaves(), random.getstate()
    try:
        twin = twin_of(module, training=training)
        before = contents(twin)
        with torch.random.fork_rng(devices=[]), _modes(on=training):
            seed = torch.get_rng_state()
            graph = tracer.trace(twin)
            threw_dice = random.getstate() != dice or not torch.equal(seed, torch.get_rng_state())
    except Exception:  # whatever a forward does that cannot be traced: it is no such MLP
        return None
    finally:
        random.setstate(dice)
        ONE_AT_A_TIME.release()
    if threw_dice or len(tracer.modes) > 1 or before != contents(twin):
        return None
    return _match_gated(graph, module) or _match(graph, module, training, drops)


def _match_gated(graph: fx.Graph, module: nn.Module) -> GatedMLP | None:
    nodes: list[Any] = list(graph.nodes)
    x, output = nodes[0], nodes[-1]
    down: Any = _linear(output.args[0], module)
    if x.op != "placeholder" or down is None:
        return None
    product: Any = down.args[0] if len(down.args) == 1 else None
    if not _is_call(product, operator.mul, torch.mul, "mul") or len(product.args) != 2:
        return None
    left, right = product.args
    for activated, up in ((left, right), (right, left)):
        function, gate = _activation_of(activated, module)
        if function is None:
            continue
        wide = _one_layer(gate, up, module)
        used: list[Any] = [x, *(wide or (gate, up)), activated, product, down, output]
        layers: list[Any] = wide[:1] if wide else [gate, up]
        is_all = len(nodes) == len(used) and set(nodes) == set(used)
        if not is_all or any(_linear(layer, module) is None or layer.args != (x,) for layer in layers):
            continue
        kind = recognise(function)
        names = tuple(str(layer.target) for layer in (*layers, down))
        if kind is not None and len(set(names)) == len(names) and not any(n.kwargs for n in (*layers, product, down)):
            return GatedMLP(names, kind)
    return None


def _match(graph: fx.Graph, module: nn.Module, training: bool, drops: bool) -> MLP | None:
    """Without a gate. What lies between the layers is run on numbers as it is, so the activation may also be written
    out, with a dropout of nothing behind it; what lies behind the second layer must do nothing.
    """
    nodes: list[Any] = list(graph.nodes)
    x, output = nodes[0], nodes[-1]
    linears = [node for node in nodes if _linear(node, module) is not None]
    if x.op != "placeholder" or len(linears) != 2 or linears[0].target == linears[1].target:
        return None
    first, second = linears
    at, behind = nodes.index(first), nodes.index(second)
    if at != 1 or first.args != (x,) or first.kwargs or second.kwargs or len(second.args) != 1:
        return None
    between = _function_of(nodes[at + 1 : behind], first, second.args[0], module, training, drops)
    after = _function_of(nodes[behind + 1 : -1], second, output.args[0], module, training, drops)
    if between is None or after is None or not _does_nothing(after):
        return None
    kind = recognise(between)
    return None if kind is None else MLP((str(first.target), str(second.target)), kind)


def _function_of(
    nodes: list[Any], argument: Any, result: Any, module: nn.Module, training: bool, drops: bool
) -> Callable[[Tensor], Tensor] | None:
    """What ``nodes`` make of the result of ``argument``, if each of them is a function of numbers and they read nothing
    else, nor is one of them idle.
    """
    readable = {argument, *nodes}
    steps = {node: step for node in nodes if (step := _step(node, module, training, drops)) is not None}
    is_closed = all(node.users and readable.issuperset(node.all_input_nodes) for node in nodes)
    if len(steps) < len(nodes) or not is_closed or result not in readable:
        return None

    def function(t: Tensor) -> Tensor:
        values: dict[Any, Any] = {argument: t}
        for node in nodes:
            values[node] = steps[node](*fx.map_arg(node.args, values.get), **fx.map_arg(node.kwargs, values.get))
        out: Tensor = values[result]
        return out

    return function


def _step(node: Any, module: nn.Module, training: bool, drops: bool) -> Callable[..., Any] | None:
    """What a node of a trace does, on numbers; None if it is no function of them, element by element."""
    if node.op == "call_module":
        child = module._modules.get(str(node.target))
        if child is None or next(child.parameters(), None) is not None or next(child.buffers(), None) is not None:
            return None
        twin = copy.deepcopy(child).train(training)
        for part in twin.modules():
            if isinstance(part, _DropoutNd) and not drops:
                part.p = 0.0
        forward: Callable[..., Any] = twin.forward
        return forward
    if node.op == "call_function" and node.target is F.dropout and not drops:
        return lambda t, *_, **__: t
    if node.op == "call_method" and node.target in _METHODS:
        return lambda t, *more, **options: getattr(t, node.target)(*more, **options)
    is_function = node.op == "call_function" and callable(node.target) and node.target is not operator.getitem
    return node.target if is_function else None


def _does_nothing(function: Callable[[Tensor], Tensor]) -> bool:
    points = torch.linspace(-9, 9, 181, dtype=torch.float64, device="cpu")
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            return torch.equal(function(points.clone()), points)
    except Exception:  # what takes no float64 on a CPU does something
        return False


def _one_layer(gate: Any, up: Any, module: nn.Module) -> list[Any]:
    """The nodes between x and the halves, if gate and up are the left and the right half of one layer's result."""
    halves = gate, up
    if not all(_is_call(half, operator.getitem) for half in halves):
        return []
    (chunk, first), (other, second) = gate.args, up.args
    if chunk is not other or (first, second) != (0, 1) or not _is_call(chunk, torch.chunk, "chunk"):
        return []
    options = dict(zip(("input", "chunks", "dim"), chunk.args, strict=False)) | chunk.kwargs
    layer = options.pop("input", None)
    return [layer, chunk, *halves] if options == {"chunks": 2, "dim": -1} and _linear(layer, module) else []


def _is_call(node: Any, *functions: Callable[..., Any] | str) -> bool:
    return isinstance(node, fx.Node) and node.op in ("call_function", "call_method") and node.target in functions


def _linear(node: Any, module: nn.Module) -> Any:
    if isinstance(node, fx.Node) and node.op == "call_module":
        child = module._modules.get(str(node.target))
        if isinstance(child, nn.Linear):
            return node
    return None


def _activation_of(node: Any, module: nn.Module) -> tuple[Callable[[Tensor], Tensor] | None, Any]:
    """``(f, argument)`` if ``node`` is ``f(argument)``, f a function of one tensor."""
    if (
        not isinstance(node, fx.Node)
        or not node.args
        or any(isinstance(a, fx.Node) for a in (*node.args[1:], *node.kwargs.values()))
    ):
        return None, None
    if node.op == "call_module":
        child = module._modules.get(str(node.target))
        if child is None or next(child.parameters(), None) is not None or next(child.buffers(), None) is not None:
            return None, None
        return _in_both_modes(child), node.args[0]
    if node.op == "call_function" and callable(node.target):
        target: Any = node.target
        more, options = node.args[1:], node.kwargs
        return lambda t: target(t, *more, **options), node.args[0]
    return None, None


def _in_both_modes(child: nn.Module) -> Callable[[Tensor], Tensor]:
    """What ``child`` computes, NaN where training and evaluation differ. Its own hooks do not run."""

    def function(t: Tensor) -> Tensor:
        trained, evaluated = (copy.deepcopy(child).train(mode).forward(t.clone()) for mode in (True, False))
        return torch.where(trained == evaluated, trained, torch.nan)

    return function


def recognise(function: Callable[[Tensor], Tensor]) -> str | None:
    """Name of the activation that ``function`` computes, by its values; None if it is none that can be fused."""
    near = torch.linspace(-9, 9, 181, dtype=torch.float64, device="cpu")
    far = torch.tensor([16.0, 25.0, 60.0, 250.0, 1e3, 1e4], dtype=torch.float64, device="cpu")  # none clips there
    points = torch.cat([near, far, -far])
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            values = function(points.clone())
            if not isinstance(values, Tensor) or values.shape != points.shape:
                return None
            return next((name for name in ACTIVATIONS if torch.allclose(values, _plain(name)(points), 0, 1e-9)), None)
    except Exception:  # a module that takes no float64 on a CPU is no known activation
        return None


def _plain(name: str) -> Callable[[Tensor], Tensor]:
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": lambda t: F.gelu(t, approximate="tanh"),
        "relu": F.relu,
        "quick_gelu": lambda t: t * torch.sigmoid(1.702 * t),
    }
    return functions[name]
