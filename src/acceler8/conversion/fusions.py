"""Parts of a model that share work: layers that read one activation, and gated MLPs that run as one operation.

A gated MLP is found by its structure, whatever it and its parts are called: its own forward is traced with its children
as black boxes (``torch.fx``), and must be ``down(f(gate(x)) * up(x))`` and nothing else. The activation is recognised
by its values. Layers that read one activation are found by the names that attentions give them; a wrong guess costs
nothing, for codes are only shared on one and the same tensor object.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from acceler8.backends import Fusion
from acceler8.functional.gated_mlp import ACTIVATIONS, cannot_fuse
from acceler8.functional.linears import cannot_merge
from acceler8.recipes import Recipe

_READERS = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("q_lin", "k_lin", "v_lin"),
    ("to_q", "to_k", "to_v"),
    ("wq", "wk", "wv"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("wi_0", "wi_1"),
)
_FEWEST_CHILDREN, _MOST_CHILDREN = 3, 6


def find_fusions(model: nn.Module, recipes: dict[str, Recipe]) -> tuple[Fusion, ...]:
    """What can share work among the layers that become FP8, given with their recipes. Changes nothing."""
    found: list[Fusion] = []
    known: dict[Any, GatedMLP | None] = {}  # tracing one takes milliseconds, and most are alike
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        own = {child: recipes[prefix + child] for child in module._modules if prefix + child in recipes}
        if len(own) < 2:
            continue
        taken: set[str] = set()
        mlp = None
        if len(own) >= 3:
            if (alike := _signature(module)) not in known:
                known[alike] = find_gated_mlp(module)
            mlp = known[alike]
        if mlp is not None and set(mlp.layers) <= set(own) and _can_fuse(module, mlp, own):
            taken = set(mlp.layers)
            layers = tuple(prefix + child for child in mlp.layers)
            found.append(Fusion(kind="gated MLP", name=name, layers=layers, activation=mlp.activation))
        for readers in _READERS:
            present = [child for child in readers if child in own and child not in taken]
            parts = [child for child in map(module._modules.get, present) if isinstance(child, nn.Linear)]
            reads_one = len({part.in_features for part in parts}) == 1
            if len(present) > 1 and reads_one and _agree(own[child] for child in present):
                can_merge = not cannot_merge(own[present[0]], [part.out_features for part in parts])
                layers = tuple(prefix + child for child in present)
                found.append(Fusion(kind="merged linears" if can_merge else "shared input", name=name, layers=layers))
    return tuple(found)


def _signature(module: nn.Module) -> tuple[Any, ...]:
    """Equal for modules whose forwards are the same: class, children, and what the constructor left on them."""
    children = [(n, type(c) if isinstance(c, nn.Linear) else (type(c), repr(c))) for n, c in module._modules.items()]
    plain = [
        (n, v if isinstance(v, (int, float, str, bool)) else id(v)) for n, v in module.__dict__.items() if n[0] != "_"
    ]
    return type(module), tuple(children), tuple(plain)


def _can_fuse(module: nn.Module, mlp: GatedMLP, own: dict[str, Recipe]) -> bool:
    gate, up, down = (module._modules[child] for child in mlp.layers)
    assert isinstance(gate, nn.Linear)
    assert isinstance(up, nn.Linear)
    assert isinstance(down, nn.Linear)
    shapes_fit = gate.weight.shape == up.weight.shape and down.in_features == gate.out_features
    has_bias = any(layer.bias is not None for layer in (gate, up, down))
    recipe = own[mlp.gate]
    return (
        shapes_fit
        and not has_bias
        and _agree(own[c] for c in mlp.layers)
        and not cannot_fuse(recipe, gate.out_features)
    )


def _agree(recipes: Iterable[Recipe]) -> bool:
    return len(set(recipes)) == 1


@dataclass(frozen=True)
class GatedMLP:
    """Children of a module whose forward is ``down(f(gate(x)) * up(x))``."""

    gate: str
    up: str
    down: str
    activation: str

    @property
    def layers(self) -> tuple[str, str, str]:
        """gate, up, down."""
        return self.gate, self.up, self.down


class _ChildrenAreLeaves(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def find_gated_mlp(module: nn.Module) -> GatedMLP | None:
    """The parts of ``module`` if its forward is a gated MLP's and nothing else. Runs nothing of it but its Python."""
    children = module._modules
    linears = [name for name, child in children.items() if isinstance(child, nn.Linear)]
    if len(linears) != 3 or not _FEWEST_CHILDREN <= len(children) <= _MOST_CHILDREN or "forward" in module.__dict__:
        return None
    try:
        graph = _ChildrenAreLeaves().trace(module)
    except Exception:  # whatever a forward does that cannot be traced: it is no such MLP
        return None
    return _match(graph, module)


def _match(graph: fx.Graph, module: nn.Module) -> GatedMLP | None:
    nodes: list[Any] = list(graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    (output,) = (node for node in nodes if node.op == "output")
    down: Any = _linear(output.args[0], module)
    if len(inputs) != 1 or down is None or len(down.args) != 1:
        return None
    product: Any = down.args[0]
    if not _is_call(product, operator.mul, torch.mul, "mul") or len(product.args) != 2:
        return None
    left, right = product.args
    for activated, up_result in ((left, right), (right, left)):
        function, gate_result = _activation_of(activated, module)
        gate, up = _linear(gate_result, module), _linear(up_result, module)
        if function is None or gate is None or up is None:
            continue
        parts: list[Any] = [gate, up, activated, product, down]
        reads_x = gate.args == up.args == (inputs[0],) and len(inputs[0].users) == 2
        is_all = all(len(node.users) == 1 for node in parts) and not any(
            node.kwargs for node in parts if node is not activated
        )
        kind = recognise(function)
        names = str(gate.target), str(up.target), str(down.target)
        if reads_x and is_all and kind is not None and len(set(names)) == 3:
            return GatedMLP(*names, kind)
    return None


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
        return child, node.args[0]
    if node.op == "call_function" and callable(node.target):
        target: Any = node.target
        more, options = node.args[1:], node.kwargs
        return lambda t: target(t, *more, **options), node.args[0]
    return None, None


def recognise(function: Callable[[Tensor], Tensor]) -> str | None:
    """Name of the activation that ``function`` computes, by its values; None if it is none that can be fused."""
    points = torch.linspace(-9, 9, 181, dtype=torch.float64)
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
    }
    return functions[name]
