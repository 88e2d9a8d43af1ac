"""The blocks of a model: what "the last K layers" counts.

A chain is one ``nn.ModuleList``, whose entries are alike by intention, or those children of an ``nn.Sequential`` that
have the class which most of them have; without what multiplies by no matrix, and with two or more left. Of the chains
that hold an FP8 layer and do not lie in a block of another one (as the experts of a layer do), the longest holds the
blocks; of equally long ones the last (a decoder behind its encoder). Blocks without an FP8 layer count too, so that
``skip`` does not move the others. The order is that of the container.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from torch import nn

from acceler8.nn.class_change import plain_type


def find_blocks(model: nn.Module, rows: Iterable[str], fp8: Iterable[str]) -> tuple[str, ...]:
    """Names of the blocks, first to last; empty if there is no chain.

    rows: names of the modules that multiply by matrices. fp8: those that become FP8.
    """
    best: tuple[str, ...] = ()
    for chain in find_chains(model, rows, fp8):
        if len(chain) >= len(best):
            best = chain
    return best


def find_chains(model: nn.Module, rows: Iterable[str], fp8: Iterable[str] | None = None) -> list[tuple[str, ...]]:
    """Names of the blocks of each chain that does not lie in a block of another, in the order of the model.

    fp8: only chains that hold one of these; None: all.
    """
    rows = tuple(rows)
    fp8 = rows if fp8 is None else tuple(fp8)
    found: list[tuple[str, ...]] = []
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():  # parents first
        if not isinstance(module, nn.ModuleList | nn.Sequential) or _is_in(name, inside):
            continue
        chain = _chain(name, module, rows)
        if len(chain) < 2 or not any(_is_in(layer, chain) for layer in fp8):
            continue
        inside += chain
        found.append(chain)
    return found


def block_of(layer: str, blocks: tuple[str, ...]) -> int | None:
    """The place of the block that ``layer`` lies in, or is; None if it lies in none."""
    return next((i for i, block in enumerate(blocks) if _is_in(layer, (block,))), None)


def _chain(name: str, container: nn.Module, rows: tuple[str, ...]) -> tuple[str, ...]:
    """Names of the children that are alike and multiply by matrices."""
    children = {f"{name}.{key}".lstrip("."): child for key, child in container.named_children()}
    children = {path: child for path, child in children.items() if any(_is_in(row, (path,)) for row in rows)}
    if isinstance(container, nn.Sequential) and children:
        kind, _ = Counter(plain_type(child) for child in children.values()).most_common(1)[0]
        children = {path: child for path, child in children.items() if plain_type(child) is kind}
    return tuple(children)


def _is_in(name: str, modules: tuple[str, ...]) -> bool:
    return any(name == module or name.startswith(module + ".") for module in modules)
