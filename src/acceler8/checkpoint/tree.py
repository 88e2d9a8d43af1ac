"""Nested Python state as JSON beside named tensors, and back, exactly and without pickle.

Plain values stand in the JSON as themselves; whatever JSON has no word for is an object with one ``$`` key:
``{"$tensor": name}``, ``{"$tuple": [...]}``, ``{"$float": "nan"}``, ``{"$dict": [[key, value], ...]}`` for
keys that are not strings. A format that can hold any object would have to run code on load; this one holds
what optimizers, schedulers and loaders keep, and refuses the rest by name.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from acceler8.errors import CheckpointError

_DICTS: dict[str, type[dict[Any, Any]]] = {"$dict": dict, "$ordered": OrderedDict, "$counter": Counter}
_DEEPEST = 100
_LONGEST = 13_000  # bits of an integer: Python reads and writes 4300 digits
_TAG_OF = {kind: tag for tag, kind in _DICTS.items()}


def encode(value: object, where: str) -> tuple[Any, dict[str, Tensor]]:
    """JSON value and named tensors that ``decode`` turns back into ``value``.

    ``where`` names ``value`` in errors and is the stem of no tensor's name. Tensors are taken as they are,
    not copied. Subclasses of str, int and float (an enum, a NumPy double) come back as the plain type.
    Raises: CheckpointError naming the key of the first value that is neither JSON-able nor a tensor, is nested too
        deep (what holds itself is) or is too long a number.
    """
    tensors: dict[str, Tensor] = {}
    return _encode(value, (), where, tensors), tensors


def _encode(value: object, path: tuple[str, ...], where: str, tensors: dict[str, Tensor]) -> Any:
    if len(path) > _DEEPEST:
        raise CheckpointError(
            f"{'.'.join((where, *path[:3]))}... is nested more than {_DEEPEST} deep, or holds itself; allowed: up to"
            f" {_DEEPEST}; give its owner a state_dict() that is flatter"
        )
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        if value.bit_length() > _LONGEST:
            raise CheckpointError(
                f"{'.'.join((where, *path))} is an integer of {value.bit_length()} bits; allowed: up to {_LONGEST};"
                " keep it as text"
            )
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, Tensor):
        return {"$tensor": _store(value, ".".join(path) or "value", tensors)}
    if type(value) in (list, tuple, torch.Size):
        items = [_encode(item, (*path, str(i)), where, tensors) for i, item in enumerate(value)]  # type: ignore[var-annotated, arg-type]
        return items if type(value) is list else {"$tuple": items}
    if type(value) in _TAG_OF:
        return _encode_dict(value, path, where, tensors)  # type: ignore[arg-type]
    key = ".".join((where, *path))
    raise CheckpointError(
        f"{key} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot hold; "
        "allowed are None, bool, int, float, str, tensors, and lists, tuples and dicts of them; give its "
        "owner a state_dict() that returns only those, or leave it out"
    )


def _encode_dict(value: dict[Any, Any], path: tuple[str, ...], where: str, tensors: dict[str, Tensor]) -> Any:
    tag = _TAG_OF[type(value)]
    if tag == "$dict" and all(type(key) is str and not key.startswith("$") for key in value):
        return {key: _encode(item, (*path, key), where, tensors) for key, item in value.items()}
    pairs = []
    for key, item in value.items():
        inner = (*path, str(key))
        pairs.append([_encode(key, (*inner, "key"), where, tensors), _encode(item, inner, where, tensors)])
    return {tag: pairs}


def _store(tensor: Tensor, name: str, tensors: dict[str, Tensor]) -> str:
    # Keys may hold dots, so two paths can spell the same name.
    unique, n = name, 1
    while unique in tensors:
        unique, n = f"{name}#{n}", n + 1
    tensors[unique] = tensor
    return unique


def decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The Python value that ``encode`` was given; tensors are the ones in ``tensors``, not copies.

    Raises: KeyError for a tensor that is not there, ValueError for an unknown ``$`` word.
    """
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if not tag.startswith("$"):
        return {key: decode(item, tensors) for key, item in value.items()}
    content = value[tag]
    if tag == "$tensor":
        return tensors[content]
    if tag == "$float":
        return float(content)
    if tag == "$tuple":
        return tuple(decode(item, tensors) for item in content)
    if tag in _DICTS:
        pairs = ((decode(key, tensors), decode(item, tensors)) for key, item in content)
        return _DICTS[tag](dict(pairs))
    raise ValueError(f"unknown word {tag!r}")
