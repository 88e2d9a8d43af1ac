"""Norms that TransformerEngine can compute: found by what they compute, whoever wrote them.

Left, each with its reason: norms without a weight, and LayerNorms without a bias, which TransformerEngine's always own;
norms over several dimensions; ``eps=None``; what rounds to 16 bit before the weight multiplies, if the weight is in
another dtype, is a norm all the same: TransformerEngine rounds once, behind the weight.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from acceler8.nn import NormKind
from acceler8.nn.find_norm import find_norm
from acceler8.nn.twin import ONE_AT_A_TIME

_TORCH = (nn.LayerNorm, nn.RMSNorm)


@dataclass(frozen=True, kw_only=True)
class Norm:
    """A norm of a model: what it computes, or why TransformerEngine does not take it."""

    name: str
    module: nn.Module
    kind: NormKind | None = None
    refusal: str | None = None


def find_norms(model: nn.Module) -> list[Norm]:
    """Every norm inside ``model``, each module once, by its first name."""
    found, known = [], {}
    for name, module in model.named_modules():
        if not _may_be_one(module):
            continue
        key = _key(module)
        if key not in known:
            with ONE_AT_A_TIME:
                known[key] = find_norm(module)
        kind = known[key]
        refusal = refuse(module, kind)
        if kind is not None or refusal is not None:
            found.append(Norm(name=name, module=module, kind=kind, refusal=refusal))
    return found


def _may_be_one(module: nn.Module) -> bool:
    if isinstance(module, _TORCH):
        return True
    weight = module._parameters.get("weight")
    return weight is not None and weight.ndim == 1 and not module._modules


def _key(module: nn.Module) -> tuple[object, ...]:
    """Norms of one class with the same numbers compute the same; their weights do not matter."""
    numbers = {name: v for name, v in module.__dict__.items() if type(v) in (int, float, str, bool, type(None))}
    numbers.pop("training", None)
    shapes = tuple((name, None if p is None else tuple(p.shape)) for name, p in module._parameters.items())
    own = "forward" in module.__dict__ or bool(module._buffers)
    return type(module), tuple(sorted(numbers.items(), key=str)), shapes, id(module) if own else None


def refuse(module: nn.Module, kind: NormKind | None) -> str | None:
    """Why a norm stays as it is; None if TransformerEngine takes it, or if it is no norm at all."""
    if isinstance(module, _TORCH):
        what = "LayerNorm" if isinstance(module, nn.LayerNorm) else "RMSNorm"
        if len(module.normalized_shape) > 1:
            return f"norm over {len(module.normalized_shape)} dimensions; TransformerEngine's is over the last one"
        if module._parameters.get("weight") is None:
            return f"no weight (elementwise_affine=False), and TransformerEngine's {what} always has one"
        if module.eps is None:
            return "eps is None, a number by dtype, and TransformerEngine needs one number; give it one"
    if kind is None:
        return f"{type(module).__name__} computes more than its formula" if isinstance(module, _TORCH) else None
    if kind.kind == "layer" and module._parameters.get("bias") is None:
        return "no bias, and TransformerEngine's LayerNorm always has one"
    if getattr(module, kind.eps) is None:
        return "eps is None, a number by dtype, and TransformerEngine needs one number; give it one"
    if "forward" in module.__dict__:
        return "its forward was replaced on the instance (a library's hook, say)"
    return None
