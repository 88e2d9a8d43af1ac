"""Batches and outputs as scripts nest them: tensors in lists, tuples, named tuples and mappings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def map_tensors(change: Callable[[Tensor], Tensor], data: Any, *, needed_by: str = "") -> Any:
    """``data`` with each tensor changed; containers keep their type.

    What is no tensor stays. With ``needed_by``, the name of an operation, it raises TypeError instead.
    """
    if isinstance(data, Tensor):
        return change(data)
    if isinstance(data, list | tuple):
        return _like(data, [map_tensors(change, item, needed_by=needed_by) for item in data])
    if isinstance(data, Mapping):
        return _like_mapping(data, {k: map_tensors(change, item, needed_by=needed_by) for k, item in data.items()})
    if needed_by:
        raise TypeError(
            f"{needed_by} got a {type(data).__name__}; allowed: tensors, nested in lists, tuples and dicts; gather"
            " other objects with gather_for_metrics(..., use_gather_object=True)"
        )
    return data


def _like(data: Sequence[Any], items: list[Any]) -> Any:
    kind: Any = type(data)
    return kind(*items) if hasattr(data, "_fields") else kind(items)


def _like_mapping(data: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    kind: Any = type(data)
    return kind(data.default_factory, items) if hasattr(data, "default_factory") else kind(items)


def tensors(data: Any) -> Iterator[Tensor]:
    """Every tensor in ``data``, in order."""
    if isinstance(data, Tensor):
        yield data
    elif isinstance(data, list | tuple):
        for item in data:
            yield from tensors(item)
    elif isinstance(data, Mapping):
        for item in data.values():
            yield from tensors(item)


def is_all_tensors(data: Any) -> bool:
    """True if nothing in ``data`` but its containers is something else than a tensor."""
    try:
        map_tensors(lambda t: t, data, needed_by="this")
    except TypeError:
        return False
    return True


def send_to_device(data: Any, device: torch.device, non_blocking: bool = False) -> Any:
    """``data`` with its tensors on ``device``. An object that moves itself (transformers' BatchEncoding) does."""
    if isinstance(data, Tensor):
        return data.to(device, non_blocking=non_blocking)
    if hasattr(data, "to"):
        try:
            return data.to(device, non_blocking=non_blocking)
        except TypeError:  # it takes the device alone
            return data.to(device)
    if isinstance(data, list | tuple):
        return _like(data, [send_to_device(item, device, non_blocking) for item in data])
    if isinstance(data, Mapping):
        return _like_mapping(data, {k: send_to_device(item, device, non_blocking) for k, item in data.items()})
    return data


def concatenate(parts: Sequence[Any]) -> Any:
    """Batches of one structure, one behind the other along dim 0."""
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(list(parts))
    if isinstance(first, list | tuple):
        return _like(first, [concatenate(items) for items in zip(*parts, strict=True)])
    if isinstance(first, Mapping):
        return _like_mapping(first, {key: concatenate([part[key] for part in parts]) for key in first})
    raise TypeError(
        f"a batch that rank 0 sends holds a {type(first).__name__}; allowed: tensors, nested in lists, tuples and"
        " dicts; let each process read its own batches with DataLoaderConfiguration(dispatch_batches=False)"
    )


def batch_size_of(data: Any) -> int:
    """Length along dim 0 of the first tensor in ``data``. Raises: TypeError if there is none."""
    first = next(tensors(data), None)
    if first is None or first.ndim == 0:
        raise TypeError(
            "a batch that rank 0 sends holds no tensor with a batch dimension; allowed: tensors; let each process read"
            " its own batches with DataLoaderConfiguration(dispatch_batches=False)"
        )
    return first.shape[0]
