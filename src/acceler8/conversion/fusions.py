"""Parts of a model that share work: layers that read one activation, and gated MLPs that run as one operation.

A gated MLP is found by its structure, whatever it and its parts are called: its own forward is traced with its children
as black boxes (``torch.fx``), and must be ``down(f(gate(x)) * up(x))`` and nothing else; gate and up may be the halves
of one layer's result. The activation is recognised by its values. What a trace does not show (contexts such as
``torch.no_grad``, a branch on ``self.training``, random numbers, notes on ``self``) is looked for beside it. Layers
that read one activation are found by the names that attentions give them; a wrong guess costs no more than a common
scale under delayed scaling, for codes are only shared on one and the same tensor object.
"""

from __future__ import annotations

import copy
import operator
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from acceler8.backends import Fusion
from acceler8.functional.gated_mlp import ACTIVATIONS, cannot_fuse
from acceler8.functional.linears import cannot_merge
from acceler8.nn import NormKind, neighbourhood
from acceler8.nn.class_change import OF_EVERY_MODULE
from acceler8.nn.find_norm import find_norm
from acceler8.nn.twin import ONE_AT_A_TIME, contents, twin_of
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
_MOST_CHILDREN = 6
_PLAIN = (int, float, str, bool, type(None))
Known = dict[Any, "GatedMLP | NormKind | None"]  # looking at one takes milliseconds, and most are alike


def find_fusions(model: nn.Module, recipes: dict[str, Recipe]) -> tuple[Fusion, ...]:
    """What can share work among the layers that become FP8, given with their recipes. Changes nothing."""
    found: list[Fusion] = []
    known: Known = {}
    widths = _widths(model, recipes)
    linears, in_fp8 = _holders(name for name, m in model.named_modules() if isinstance(m, nn.Linear)), _holders(recipes)
    for name, module in model.named_modules():
        if (norm := _norm_once(module, known, widths)) is not None and neighbourhood(name, linears) in in_fp8:
            found.append(Fusion(kind="norm", name=name, norm=norm))
        prefix = f"{name}." if name else ""
        own = {child: recipes[prefix + child] for child in module._modules if prefix + child in recipes}
        if len(own) < 2:
            continue
        taken: set[str] = set()
        mlp = _find_once(module, known)
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


def fits(fusion: Fusion, module: nn.Module, recipes: dict[str, Recipe], known: Known) -> bool:
    """True if ``module`` is what a plan says of it. ``recipes`` are those of the FP8 layers, by full name; ``known``,
    empty at first, is for the modules of one model.
    """
    if fusion.kind == "norm":
        return fusion.norm is not None and _norm_once(module, known) == fusion.norm
    prefix = f"{fusion.name}." if fusion.name else ""
    names = [name.removeprefix(prefix) for name in fusion.layers]
    if not all(name in module._modules and prefix + name in recipes for name in names):
        return False
    if fusion.kind != "gated MLP":
        parts = [child for child in map(module._modules.get, names) if isinstance(child, nn.Linear)]
        reads_one = len({part.in_features for part in parts}) == 1
        widths = [part.out_features for part in parts]
        can_run = fusion.kind == "shared input" or not cannot_merge(recipes[fusion.layers[0]], widths)
        return reads_one and can_run and _agree(recipes[name] for name in fusion.layers)
    mlp = _find_once(module, known)
    own = {name: recipes[prefix + name] for name in names}
    return mlp is not None and mlp == GatedMLP(tuple(names), fusion.activation) and _can_fuse(module, mlp, own)


def _find_once(module: nn.Module, known: Known) -> GatedMLP | None:
    children = module._modules
    linears = sum(isinstance(child, nn.Linear) for child in children.values())
    if linears not in (2, 3) or len(children) > _MOST_CHILDREN or "forward" in module.__dict__:
        return None
    if (alike := _signature(module)) not in known:
        known[alike] = find_gated_mlp(module)
    found = known[alike]
    assert not isinstance(found, NormKind)
    return found


def _holders(names: Iterable[str]) -> set[str]:
    """Names of the modules that hold these, at any depth."""
    parts = [name.split(".") for name in names if name]
    return {".".join(part[:i]) for part in parts for i in range(len(part))}


def _widths(model: nn.Module, recipes: dict[str, Recipe]) -> set[int]:
    """Widths of what FP8 layers read."""
    return {m.in_features for name, m in model.named_modules() if name in recipes and isinstance(m, nn.Linear)}


def _norm_once(module: nn.Module, known: Known, widths: set[int] | None = None) -> NormKind | None:
    """What ``module`` computes, if it is a norm of one of these widths."""
    weight = module._parameters.get("weight")
    if weight is None or weight.ndim != 1 or module._modules or (widths is not None and weight.shape[0] not in widths):
        return None
    alike = ("norm", weight.shape[0], *_signature(module))
    if alike not in known:
        known[alike] = find_norm(module)
    found = known[alike]
    assert found is None or isinstance(found, NormKind)
    return found


def _signature(module: nn.Module) -> tuple[Any, ...]:
    """Equal for modules whose forwards are the same: class, children, and what the constructor left on them."""
    children = [
        (n, type(c) if isinstance(c, nn.Linear) or c is None else _signature(c)) for n, c in module._modules.items()
    ]
    plain = [(n, v if isinstance(v, _PLAIN) else id(v)) for n, v in module.__dict__.items() if n not in OF_EVERY_MODULE]
    tensors = [(n, t is None) for n, t in (*module._parameters.items(), *module._buffers.items())]
    hooks = any(module.__dict__[name] for name in ("_forward_hooks", "_forward_pre_hooks"))
    return type(module), tuple(children), tuple(plain), tuple(tensors), hooks


def _can_fuse(module: nn.Module, mlp: GatedMLP, own: dict[str, Recipe]) -> bool:
    layers = [child for name in mlp.layers if isinstance(child := module._modules[name], nn.Linear)]
    *wide, down = layers
    if len(layers) != len(mlp.layers) or any(layer.bias is not None for layer in layers):
        return False
    features = down.in_features
    expected = (features * 2 // len(wide), wide[0].in_features)
    shapes_fit = all(tuple(layer.weight.shape) == expected for layer in wide)
    return shapes_fit and _agree(own[child] for child in mlp.layers) and not cannot_fuse(own[mlp.layers[0]], features)


def _agree(recipes: Iterable[Recipe]) -> bool:
    return len(set(recipes)) == 1


@dataclass(frozen=True)
class GatedMLP:
    """Children of a module whose forward is ``down(f(gate(x)) * up(x))``."""

    layers: tuple[str, ...]
    """Gate, up and down; or gate and up as one layer, and down."""
    activation: str


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


def find_gated_mlp(module: nn.Module) -> GatedMLP | None:
    """The parts of ``module`` if its forward is a gated MLP's and nothing else. Runs nothing of it but its Python."""
    found = {_find_in_mode(module, training=training) for training in (True, False)}
    return found.pop() if len(found) == 1 else None


def _find_in_mode(module: nn.Module, *, training: bool) -> GatedMLP | None:
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
    return _match(graph, module)


def _match(graph: fx.Graph, module: nn.Module) -> GatedMLP | None:
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
    }
    return functions[name]
