"""Which modules of a model FSDP2 gathers at once: its units.

A unit's weights are whole only while it runs, so a unit for each repeated block bounds what is whole at a time. Beside
the blocks stand the input embedding, and the final norm with the output head, which is used last in forward and first
in backward and so stays whole in between; what is left is the root's. A Parameter that several modules share must lie
in one unit, so units that share one become one.

Source: Hugging Face Accelerate's ``fsdp2_prepare_model``, whose policies these are; PyTorch's ``fully_shard``, which
takes a list of modules as one unit (pytorch#127786) and refuses a Parameter in two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from acceler8.conversion.blocks import find_chains
from acceler8.conversion.layers import matrix_modules
from acceler8.errors import ConfigError
from acceler8.nn.class_change import plain_type
from acceler8.nn.head_loss import fused_heads

BLOCKS, TRANSFORMER, SIZE, NOTHING = "blocks", "TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"
DEFAULT_SIZE = 100_000_000
"""PyTorch's ``size_based_auto_wrap_policy``: parameters of a unit."""
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)  # never called


@dataclass(frozen=True, kw_only=True)
class WrapPolicy:
    """What becomes a unit.

    kind: ``blocks``, found by structure; ``TRANSFORMER_BASED_WRAP``, by class name; ``SIZE_BASED_WRAP``; ``NO_WRAP``;
        the last without blocks.
    """

    kind: str = BLOCKS
    class_names: tuple[str, ...] = ()
    """Of ``TRANSFORMER_BASED_WRAP``; empty: those that the model names (``_no_split_modules``)."""
    min_num_params: int = DEFAULT_SIZE
    """Of ``SIZE_BASED_WRAP``: a module with more parameters is a unit."""
    wants: Callable[[nn.Module], bool] | None = None
    """A policy of the script's own, in the place of the kind."""


@dataclass
class Unit:
    """Modules that are gathered together."""

    names: list[str]
    is_tail: bool = False
    """Used last in forward and first in backward: not freed in between."""


def find_blocks_of(model: nn.Module, policy: WrapPolicy) -> list[str]:
    """Names of the modules that are units by the policy, inner ones first. Raises: ConfigError for class names that
    the model does not have.
    """
    modules = {name: m for name, m in model.named_modules() if name and not isinstance(m, _CONTAINERS)}
    if policy.wants is not None:
        found = [name for name, module in modules.items() if policy.wants(module)]
    elif policy.kind == NOTHING:
        found = []
    elif policy.kind == SIZE:
        sizes = {name: sum(p.numel() for p in module.parameters()) for name, module in modules.items()}
        found = [name for name in modules if sizes[name] > policy.min_num_params]
    elif policy.kind == TRANSFORMER and (names := policy.class_names or _names_of_model(model)):
        found = _of_classes(model, modules, names, is_asked=bool(policy.class_names))
    else:
        found = [name for chain in find_chains(model, [row for row, _, _ in matrix_modules(model)]) for name in chain]
    return sorted(found, key=lambda name: -name.count("."))


def _names_of_model(model: nn.Module) -> tuple[str, ...]:
    return tuple(getattr(model, "_no_split_modules", None) or ())


def _of_classes(
    model: nn.Module, modules: dict[str, nn.Module], names: tuple[str, ...], *, is_asked: bool
) -> list[str]:
    kinds = {name: {kind.__name__ for kind in type(module).__mro__} for name, module in modules.items()}
    there = {kind for found in kinds.values() for kind in found}
    if is_asked and (missing := [name for name in names if name not in there]):
        own = (next(kind.__name__ for kind in type(m).__mro__ if not _is_made(kind)) for m in modules.values())
        has = sorted(set(own))
        raise ConfigError(
            f"fsdp_transformer_layer_cls_to_wrap: got {missing[0]!r}, which this {type(model).__name__} does not have;"
            f" allowed: {', '.join(has)}; or leave it out, and blocks are found by structure"
        )
    return [name for name in modules if kinds[name] & set(names)]


def _is_made(kind: type) -> bool:
    """True for a class that conversion or FSDP2 put in front of the author's."""
    return kind.__module__.startswith("acceler8.") or kind.__name__.startswith(("Fp8", "FSDP"))


def find_units(model: nn.Module, policy: WrapPolicy, ignored: Iterable[nn.Parameter] = ()) -> list[Unit]:
    """The units of ``model`` but for the root, in the order in which to shard them: inner ones first."""
    skipped = {id(p) for p in ignored}
    units = [Unit([name]) for name in find_blocks_of(model, policy)]
    taken = {name for unit in units for name in unit.names}
    names = {id(module): name for name, module in model.named_modules()}
    for modules, is_tail in _ends(model):
        free = [names[id(m)] for m in modules if id(m) in names and not _is_taken(names[id(m)], taken)]
        if free:
            units.append(Unit(free, is_tail))
            taken.update(free)
    units = _with_ties_together(model, units, skipped)
    return [unit for unit in units if _has_parameters(model, unit, skipped)]


def _is_taken(name: str, taken: set[str]) -> bool:
    return any(name == other or name.startswith(other + ".") for other in taken)


def _has_parameters(model: nn.Module, unit: Unit, ignored: set[int]) -> bool:
    return any(id(p) not in ignored for name in unit.names for p in model.get_submodule(name).parameters())


def _ends(model: nn.Module) -> Iterator[tuple[list[nn.Module], bool]]:
    """The embedding, and the final norm with the head. A head whose loss is computed without its logits is not called,
    so it stays in the root's unit, which is whole throughout.
    """
    embedding, head = (_ask(model, f"get_{side}_embeddings") for side in ("input", "output"))
    if embedding is not None:
        yield [embedding], False
    if head is None or any(True for _ in fused_heads(model)):
        return
    norm = _final_norm(model)
    yield [module for module in (norm, head) if module is not None], True


def _ask(model: nn.Module, method: str) -> nn.Module | None:
    getter = getattr(model, method, None)
    try:
        found = getter() if callable(getter) else None
    except NotImplementedError:
        return None
    return found if isinstance(found, nn.Module) else None


def _final_norm(model: nn.Module) -> nn.Module | None:
    """The last norm among the children of the base model, as ``model.norm`` of Llama is."""
    prefix = getattr(model, "base_model_prefix", "")
    base = getattr(model, prefix, None) if prefix else model
    children = base.children() if isinstance(base, nn.Module) else ()
    return next((m for m in reversed(list(children)) if "Norm" in plain_type(m).__name__), None)


def _with_ties_together(model: nn.Module, units: list[Unit], ignored: set[int]) -> list[Unit]:
    """Units that share a Parameter become one; one that shares it with the root becomes part of that."""
    place_of = {name: i for i, unit in enumerate(units) for name in unit.names}
    owners: dict[int, set[int | None]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        if id(p) not in ignored:
            owners.setdefault(id(p), set()).add(_owner(name, place_of))
    into: dict[int, int | None] = {i: i for i in range(len(units))}

    def root_of(i: int | None) -> int | None:
        while i is not None and into[i] != i:
            i = into[i]
        return i

    for sharing in owners.values():
        roots: set[Any] = {root_of(i) for i in sharing}
        if len(roots) > 1:
            first = None if None in roots else min(roots)
            for other in roots - {None, first}:
                into[other] = first
    merged: dict[int, Unit] = {}
    for i, unit in enumerate(units):
        if (target := root_of(i)) is not None:
            whole = merged.setdefault(target, Unit([], units[target].is_tail))
            whole.names += unit.names
            whole.is_tail |= unit.is_tail
    return list(merged.values())


def _owner(parameter: str, place_of: dict[str, int]) -> int | None:
    """The innermost unit that holds the module of ``parameter``; None: the root."""
    name = parameter
    while name:
        name = name.rpartition(".")[0]
        if name in place_of:
            return place_of[name]
    return None


__all__ = ["BLOCKS", "NOTHING", "SIZE", "TRANSFORMER", "Unit", "WrapPolicy", "find_blocks_of", "find_units"]
