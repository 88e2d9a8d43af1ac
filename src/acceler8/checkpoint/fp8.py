"""The FP8 state of a converted model in a checkpoint: what it was converted to, and its amax histories.

A resumed model may be converted otherwise, or not at all: a history is taken over where the layer has one of the same
length now, any other starts afresh, and both are said.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from acceler8 import backends
from acceler8.errors import CheckpointError
from acceler8.nn.model_state import ATTRIBUTE, ModelState, find_states
from acceler8.scaling.delayed import IN_USE, STAGING

_STEPS, _AMAX = "steps", "amax"
_STAGED_FIRST = "amax_history_"  # histories whose row 0 is the staging row, such as TransformerEngine's
_SAID, _DEEPEST = 3, 8  # differences in one line, levels that are compared


def describe(model: nn.Module) -> list[dict[str, Any]]:
    """Each converted part of ``model``: its ``path``, ``recipe``, ``backend``, FP8 ``layers`` by name, and schedule."""
    return [
        {
            "path": path,
            "recipe": state.plan.recipe.to_dict(),
            "backend": state.backend,
            "layers": [_join(path, layer) for layer in state.plan.fp8_names],
            "fp8_steps": str(state.plan.fp8_steps or ":"),
            "fp8_last_layers": str(state.plan.fp8_last_layers or "0:all"),
        }
        for path, _, state in _parts(model)
    ]


def fp8_tensors(model: nn.Module) -> dict[str, Tensor]:
    """What the backends keep, such as amax histories by layer name; empty unless the recipe is delayed."""
    return {_join(path, name): t for path, part, state in _parts(model) for name, t in _own(part, state).items()}


def _own(part: nn.Module, state: ModelState) -> dict[str, Tensor]:
    return backends.find(state.backend).state(part)


def fit_fp8(
    model: nn.Module, saved_parts: list[dict[str, Any]], saved: Mapping[str, Tensor], where: str
) -> tuple[list[Callable[[], None]], list[str]]:
    """Actions that bring ``model`` to the saved state, and what they reset, a line each. Changes nothing.

    Raises: CheckpointError for histories that no training writes, or that lack what the same recipe needs.
    """
    for name, tensor in saved.items():
        _check(name, tensor, where)
    actions: list[Callable[[], None]] = []
    reset = _changes(saved_parts, describe(model), where)
    unused = {name for name in saved if name.rpartition(".")[2] != _STEPS}
    for path, part, state in _parts(model):
        own = _own(part, state)
        initial = backends.find(state.backend).initial_state(own)
        merged = {name: _merge(saved.get(_join(path, name)), fresh) for name, fresh in initial.items()}
        missing = [name for name, (_, is_saved) in merged.items() if not is_saved]
        unused -= {_join(path, name) for name, (_, is_saved) in merged.items() if is_saved}
        if missing and any(_describes(p, state, path) for p in saved_parts):
            raise CheckpointError(
                f"{where} lacks a fitting {_join(path, missing[0])!r}, which its recipe keeps; the checkpoint is"
                " damaged: use another one"
            )
        histories = [name for name in missing if name != _STEPS]
        if histories:
            reset.append(f"{where}: amax histories of {len(histories)} layers, such as {histories[0]}, start afresh")
        actions.append(_loading(part, state, {name: tensor for name, (tensor, _) in merged.items()}))
    if unused:
        reset.append(f"{where}: {len(unused)} saved amax histories, such as {min(unused)}, have no use now")
    return actions, reset


def drop_codes(model: nn.Module) -> None:
    """Forget codes of the weights before."""
    for state in find_states(model):
        for codes in state.codes:
            codes.close()


def _parts(model: nn.Module) -> Iterator[tuple[str, nn.Module, ModelState]]:
    for path, module in model.named_modules():
        if (state := module.__dict__.get(ATTRIBUTE)) is not None:
            yield path, module, state


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _merge(saved: Tensor | None, fresh: Tensor) -> tuple[Tensor, bool]:
    """The saved tensor if it fits, else the one of a start, and whether it was the saved one."""
    if saved is not None and saved.shape == fresh.shape and saved.dtype == fresh.dtype:
        return saved, True
    return fresh, False


def _loading(part: nn.Module, state: ModelState, saved: dict[str, Tensor]) -> Callable[[], None]:
    return lambda: backends.find(state.backend).load_state(part, saved)


def _describes(saved: dict[str, Any], state: ModelState, path: str) -> bool:
    """True if a saved part is what stands at ``path`` now."""
    layers = [_join(path, layer) for layer in state.plan.fp8_names]
    is_same = saved["path"] == path and backends.full_name(saved["backend"]) == state.backend
    return bool(is_same and saved["recipe"] == state.plan.recipe.to_dict() and saved["layers"] == layers)


def _check(name: str, tensor: Tensor, where: str) -> None:
    """Histories are finite and not negative; only the staging row may hold what the boundary of its step drops.

    What other backends keep is finite, and for them to judge.
    """
    what = name.rpartition(".")[2]
    if what.startswith(_STAGED_FIRST) and tensor.ndim == 2 and tensor.is_floating_point():
        is_right, must = bool(tensor[1:].isfinite().all()) and not bool((tensor < 0).any()), "finite and from 0"
    elif what not in (_STEPS, _AMAX):
        is_right, must = not tensor.is_floating_point() or bool(tensor.isfinite().all()), "finite"
    elif what == _STEPS:
        is_right = tensor.dtype == torch.int64 and tensor.ndim == 0 and tensor.item() >= 0
        must = "one int64 number from 0"
    else:
        is_right = tensor.dtype == torch.float32 and tensor.ndim == 2 and tensor.shape[1] == 3
        is_right = is_right and len(tensor) > IN_USE and not bool((tensor[STAGING] < 0).any())
        is_right = is_right and bool((tensor[IN_USE:].isfinite() & (tensor[IN_USE:] >= 0)).all())
        must = "float32 [2 + history, 3], finite and from 0"
    if not is_right:
        raise CheckpointError(
            f"{where}: FP8 state {name!r} ({tensor.dtype} {list(tensor.shape)}) is none that a training writes; it must"
            f" be {must}: use another checkpoint"
        )


def _changes(saved: list[dict[str, Any]], now: list[dict[str, Any]], where: str) -> list[str]:
    """In words, how precision, recipe, backend and layers differ from the saved ones."""
    if not saved and not now:
        return []
    if not saved or not now:
        was, has = (_words(parts) for parts in (saved, now))
        return [f"{where}: was {was}, now {has}"]
    lines = []
    for key in ("recipe", "backend", "fp8_steps", "fp8_last_layers"):
        before, after = ([part.get(key) for part in parts] for parts in (saved, now))
        if before == after:
            continue
        was, has = _names(before), _names(after)
        own = f" with other settings{_settings_said(before, after)}" if was == has else ""
        lines.append(f"{where}: {key} was {was}, now {has}{own}")
    layers = [{layer for part in parts for layer in part["layers"]} for parts in (saved, now)]
    if gone := layers[0] - layers[1]:
        lines.append(f"{where}: {len(gone)} layers were FP8 and are not now, such as {min(gone)}")
    if new := layers[1] - layers[0]:
        lines.append(f"{where}: {len(new)} layers are FP8 and were not, such as {min(new)}")
    return lines


def _words(parts: list[dict[str, Any]]) -> str:
    if not parts:
        return "in high precision"
    return f"FP8 (recipe {_names([p['recipe'] for p in parts])}, backend {_names([p['backend'] for p in parts])})"


def _names(values: list[Any]) -> str:
    said = dict.fromkeys(str(v.get("name", v) if isinstance(v, dict) else v) for v in values)
    return ", ".join(f"{text:.200}" for text in said)


def _settings_said(before: list[Any], after: list[Any]) -> str:
    """``: scaling.margin was 0, now 2``, in what recipes of the same name differ."""
    was, has = (_leaves(values[0] if len(values) == 1 else values) for values in (before, after))
    differ = [key for key in {**was, **has} if was.get(key) != has.get(key)]
    said = [f"{key:.60} was {was.get(key)!r:.40}, now {has.get(key)!r:.40}" for key in differ[:_SAID]]
    return ": " + "; ".join(said) + ("; ..." if len(differ) > _SAID else "")


def _leaves(value: Any, path: str = "", depth: int = 0) -> dict[str, Any]:
    """What is in nested lists and dicts, under dotted keys; a recipe is not as deep as a file may be."""
    if not isinstance(value, dict | list) or depth == _DEEPEST:
        return {path: value}
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    parts = [_leaves(part, _join(path, str(key)), depth + 1) for key, part in inner]
    return {key: leaf for part in parts for key, leaf in part.items()}
