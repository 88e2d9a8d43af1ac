"""What of a model goes to disk: plain tensors under their state_dict names, each tied tensor once.

The file is one that ``transformers`` and any other safetensors reader opens: the first name of a tied group
keeps the bytes, as Hugging Face writes it, and the checkpoint's JSON lists the other names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from acceler8.checkpoint.sharded import local
from acceler8.errors import CheckpointError

_SHOWN = 5
_OTHER_MODEL = re.compile(r"model_[1-9]\d*:", re.ASCII)
"""What stands before the names of the second model and on, where several share a file."""


def split_state(
    state: Mapping[str, Any], aliases: Iterable[str] | None = None
) -> tuple[dict[str, Tensor], dict[str, str], dict[str, Any]]:
    """A state_dict as ``(tensors, tied, rest)``.

    ``tied`` maps each further name of a tensor to the name that is kept: the first that is not in ``aliases``, where
    a ``transformers`` model lists the names that it ties to another. ``rest`` is what modules answered as extra state
    that is no tensor. Two names are tied when they are the same elements of the same memory.
    """
    tensors: dict[str, Tensor] = {}
    rest: dict[str, Any] = {}
    for name, value in state.items():
        (tensors if isinstance(value, Tensor) else rest)[name] = value
    last = frozenset(aliases or ())
    tied = tied_names({name: tensors[name] for name in sorted(tensors, key=last.__contains__)})
    return {name: tensor for name, tensor in tensors.items() if name not in tied}, tied, rest


def tied_names(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Each name whose tensor already stands under an earlier name, mapped to that name."""
    first: dict[object, str] = {}
    tied: dict[str, str] = {}
    for name, tensor in tensors.items():
        plain = local(tensor.detach())
        if tensor.is_meta or tensor.numel() == 0 or type(plain) is not Tensor:
            continue
        # Of a DTensor a process may hold no element, at an address that says nothing; its memory is there all the same.
        at = plain.data_ptr() or plain.untyped_storage().data_ptr()
        if not at:
            continue
        place = (tensor.device, at, tensor.shape, tensor.stride(), tensor.dtype)
        kept = first.setdefault(place, name)
        if kept != name:
            tied[name] = kept
    return tied


def share_ties(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """``state`` with one tensor under all names of a Parameter or buffer: gathered name by name it has a copy each."""
    first: dict[int, str] = {}
    owners = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    kept = {name: first.setdefault(id(tensor), name) for name, tensor in owners if name in state}
    return {name: state[kept.get(name, name)] for name in state}


def check_fit(
    saved: Mapping[str, Any], saved_tied: Mapping[str, str], current: Mapping[str, Any], *, strict: bool
) -> list[str]:
    """Compare a saved state (ties filled in) with a model's own, before loading; returns what was let pass.

    Names, dtypes and ties must agree when ``strict``; shapes always must, and the model must hold real
    memory.
    Raises: CheckpointError listing all that does not fit.
    """
    shared = [name for name in saved if name in current]
    pairs = [(name, saved[name], current[name]) for name in shared if isinstance(current[name], Tensor)]
    fatal = _list("on the meta device; materialise the model first", [n for n, _, c in pairs if c.is_meta])
    fatal += _list(
        "of another kind",
        [f"{n}: saved {type(s).__name__}" for n, s, _ in pairs if not isinstance(s, Tensor)],
    )
    pairs = [pair for pair in pairs if isinstance(pair[1], Tensor)]
    fatal += _list(
        "of another shape",
        [f"{n}: saved {list(s.shape)}, model {list(c.shape)}" for n, s, c in pairs if s.shape != c.shape],
    )
    loose = name_differences(saved, current)
    loose += _list(
        "of another dtype",
        [f"{n}: saved {s.dtype}, model {c.dtype}" for n, s, c in pairs if s.dtype != c.dtype],
    )
    loose += _tie_differences(saved_tied, current, set(shared))
    problems = fatal + (loose if strict else [])
    if problems:
        raise CheckpointError(
            "the checkpoint does not fit the model, which is unchanged: "
            + "; ".join(problems)
            + "; build the model as it was saved"
            + ("" if fatal else ", or pass strict=False to load what fits")
        )
    return loose


def name_differences(saved: Iterable[str], current: Iterable[str], owner: str = "model") -> list[str]:
    """In words, the names that only one side has, or the wrapper's prefix that explains them all."""
    before, now = dict.fromkeys(saved), dict.fromkeys(current)
    missing = [name for name in now if name not in before]
    unexpected = [name for name in before if name not in now]
    for one, other, whose in ((missing, unexpected, f"{owner}'s"), (unexpected, missing, "saved")):
        longer, shorter = sorted(one), sorted(other)  # a common prefix keeps the order
        prefix = longer[0].removesuffix(shorter[0]) if longer and shorter else ""
        if _OTHER_MODEL.fullmatch(prefix) and [name.removeprefix(prefix) for name in longer] == shorter:
            return [
                f"the {whose} names are those of another model, {prefix!r}; prepare in the same order as when saved"
            ]
        if prefix and [name.removeprefix(prefix) for name in longer] == shorter:
            return [f"the {whose} names begin with {prefix!r}, which a wrapper adds: use the model inside it"]
    return _list("not in the checkpoint", missing) + _list(f"not in the {owner}", unexpected)


def load_state(model: nn.Module, state: Mapping[str, Any]) -> Callable[[], None]:
    """The action that copies a checked ``state`` into ``model``; its Parameters stay the same objects."""

    def apply() -> None:
        with torch.no_grad():
            model.load_state_dict(state, strict=False)

    return apply


def _tie_differences(saved_tied: Mapping[str, str], current: Mapping[str, Any], shared: set[str]) -> list[str]:
    now = tied_names({name: value for name, value in current.items() if isinstance(value, Tensor) and name in shared})
    was = _groups({alias: kept for alias, kept in saved_tied.items() if alias in shared and kept in shared})
    have = _groups(now)
    return _list("tied when saved but not in the model", [" = ".join(group) for group in was if group not in have]) + (
        _list("tied in the model but not when saved", [" = ".join(group) for group in have if group not in was])
    )


def _groups(tied: Mapping[str, str]) -> list[tuple[str, ...]]:
    groups: dict[str, set[str]] = {}
    for alias, kept in tied.items():
        groups.setdefault(kept, {kept}).add(alias)
    return sorted(tuple(sorted(group)) for group in groups.values())


def _list(what: str, names: list[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return [f"{what}: {', '.join(names[:_SHOWN])}{more}"]
