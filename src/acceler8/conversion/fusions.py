"""Parts of a model that share work: layers that read one activation, and MLPs that run as one operation.

MLPs are found by their structure (``find_mlp.py``). Layers that read one activation are found by the names that
attentions give them; a wrong guess costs no more than a common scale under delayed scaling, for codes are only shared
on one and the same tensor object.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from torch import nn

from acceler8.backends import Fusion
from acceler8.conversion.find_mlp import MLP, GatedMLP, OnlyInEval, find_mlp
from acceler8.functional import gated_mlp, mlp
from acceler8.functional.linears import cannot_merge
from acceler8.nn import NormKind, neighbourhood
from acceler8.nn.class_change import OF_EVERY_MODULE
from acceler8.nn.find_norm import find_norm
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
Known = dict[
    Any, "GatedMLP | MLP | OnlyInEval | NormKind | None"
]  # looking at one takes milliseconds, and most are alike


def find_fusions(model: nn.Module, recipes: dict[str, Recipe], known: Known | None = None) -> tuple[Fusion, ...]:
    """What can share work among the layers that become FP8, given with their recipes. Changes nothing. ``known``, empty
    at first, is for the modules of one model.
    """
    found: list[Fusion] = []
    known = {} if known is None else known
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
        found_mlp = _find_once(module, known)
        if isinstance(found_mlp, (GatedMLP, MLP)) and _can_fuse(module, found_mlp, own):
            taken = set(found_mlp.layers)
            layers = tuple(prefix + child for child in found_mlp.layers)
            found.append(_fusion(found_mlp, name, layers))
        for readers in _READERS:
            present = [child for child in readers if child in own and child not in taken]
            parts = [child for child in map(module._modules.get, present) if isinstance(child, nn.Linear)]
            reads_one = len({part.in_features for part in parts}) == 1
            if len(present) > 1 and reads_one and _agree(own[child] for child in present):
                can_merge = not cannot_merge(own[present[0]], [part.out_features for part in parts])
                layers = tuple(prefix + child for child in present)
                found.append(Fusion(kind="merged linears" if can_merge else "shared input", name=name, layers=layers))
    return tuple(found)


def not_fused(model: nn.Module, recipes: dict[str, Recipe], known: Known) -> list[str]:
    """Notes on MLPs whose layers become FP8, given with their recipes, but run one by one for what users can change."""
    why: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        found = _find_once(module, known)
        prefix = f"{name}." if name else ""
        own = {child: recipes[prefix + child] for child in module._modules if prefix + child in recipes}
        if isinstance(found, OnlyInEval) and _can_fuse(module, found.found, own):
            why.setdefault(found.what, []).append(name or "the model itself")
    return [
        f"{len(names)} MLP{'s' * (len(names) > 1)}, such as {names[0]}, could run as one operation but for {what} in"
        " training; layer by layer instead. Set it to 0 if the training allows that"
        for what, names in why.items()
    ]


def _fusion(found: GatedMLP | MLP, name: str, layers: tuple[str, ...]) -> Fusion:
    kind: Literal["gated MLP", "MLP"] = "gated MLP" if isinstance(found, GatedMLP) else "MLP"
    return Fusion(kind=kind, name=name, layers=layers, activation=found.activation)


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
    if not fusion.is_mlp:
        parts = [child for child in map(module._modules.get, names) if isinstance(child, nn.Linear)]
        reads_one = len({part.in_features for part in parts}) == 1
        widths = [part.out_features for part in parts]
        can_run = fusion.kind == "shared input" or not cannot_merge(recipes[fusion.layers[0]], widths)
        return reads_one and can_run and _agree(recipes[name] for name in fusion.layers)
    found = _find_once(module, known)
    if not isinstance(found, (GatedMLP, MLP)) or _fusion(found, fusion.name, fusion.layers) != fusion:
        return False
    own = {name: recipes[prefix + name] for name in names}
    return found.layers == tuple(names) and _can_fuse(module, found, own)


def _find_once(module: nn.Module, known: Known) -> GatedMLP | MLP | OnlyInEval | None:
    children = module._modules
    linears = sum(isinstance(child, nn.Linear) for child in children.values())
    if linears not in (2, 3) or len(children) > _MOST_CHILDREN or "forward" in module.__dict__:
        return None
    if (alike := _signature(module)) not in known:
        known[alike] = find_mlp(module)
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


def _can_fuse(module: nn.Module, found: GatedMLP | MLP, own: dict[str, Recipe]) -> bool:
    """True if the layers, whose recipes by their names in ``module`` are ``own``, can run as one."""
    layers = [child for name in found.layers if isinstance(child := module._modules[name], nn.Linear)]
    if len(layers) != len(found.layers) or not own.keys() >= set(found.layers):
        return False
    if not _agree(own[child] for child in found.layers):
        return False
    *wide, narrow = layers
    features, recipe = narrow.in_features, own[found.layers[0]]
    if isinstance(found, MLP):
        return wide[0].out_features == features and mlp.cannot_fuse(recipe) is None
    expected = (features * 2 // len(wide), wide[0].in_features)
    shapes_fit = all(tuple(layer.weight.shape) == expected and layer.bias is None for layer in wide)
    return shapes_fit and narrow.bias is None and gated_mlp.cannot_fuse(recipe, features) is None


def _agree(recipes: Iterable[Recipe]) -> bool:
    return len(set(recipes)) == 1
