"""Where in an epoch all processes together stand, which another number of them, or other batches, can go on from.

Samples are divided in rounds: what has been used behind a whole round is a beginning of the epoch's order, however many
processes shared it. So a loader's state says how many samples that is, beside its own place in its own batches, and a
loader of the same samples in the same order leaves so many out. Where that is not known (a stream that each process
divides in its own way, or reads in worker processes) the epoch starts again, and a line says how many samples return.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import BatchSampler
from torch.utils.data.sampler import RandomSampler
from torchdata.stateful_dataloader.sampler import BatchSampler as StatefulBatchSampler

WHOLE, OWN, SHARDS = "whole", "own", "shards"
"""How a loader reads a stream: one process all of it, each process all of it for its part, each a shard of its own."""
_BATCHES_ARE_CUTS = (BatchSampler, StatefulBatchSampler)
"""Whose batches are the sampler's indices cut into pieces, so that they can be cut anew."""


def name_of(kind: type | None) -> str | None:
    """The whole name of a class."""
    return None if kind is None else f"{kind.__module__}.{kind.__qualname__}"


_CUTS = tuple(map(name_of, _BATCHES_ARE_CUTS))


def used(base: Mapping[str, Any], rounds: int, samples: int | None, batches: int) -> dict[str, Any]:
    """What of the epoch is used, as JSON: behind ``base``, ``rounds`` of so many samples and so many batches."""
    return {"base": dict(base), "rounds": rounds, "round_samples": samples, "round_batches": batches}


START: Mapping[str, Any] = {"samples": 0, "batches": 0}
"""The beginning of an epoch."""


def go_on(state: Mapping[str, Any], now: Mapping[str, Any], lost: int) -> tuple[dict[str, Any] | None, int | None]:
    """From where a loader of the facts ``now`` can go on, or None; and how many samples were used (None: not known).

    ``lost`` rounds are taken as not used: their gradients are gone.
    """
    saved, told = state["of"], state.get("used")
    if told is None or not now.keys() <= saved.keys():  # as the first versions saved it
        return None, None
    rounds, size = told["rounds"] - lost, told["round_samples"]
    before = told["base"]["samples"]
    samples = None if size is None or before is None else before + rounds * size
    if rounds < 0 or any(saved[name] != now[name] for name in ("sampler", "samples", "batching", "is_stream")):
        return None, samples
    position: dict[str, Any] = {"samples": samples, "batches": None, "loader": None}
    if not now["is_stream"]:
        if now["batching"] in _CUTS and samples is not None:
            return position, samples
        if now["batching"] is None or saved["batch_size"] != now["batch_size"] or told["base"]["batches"] is None:
            return None, samples
        return position | {"batches": batches_used(told, lost)}, samples
    return _in_stream(state, now, samples, batches_used(told, lost), lost), samples


def _in_stream(
    state: Mapping[str, Any], now: Mapping[str, Any], samples: int | None, batches: int | None, lost: int
) -> dict[str, Any] | None:
    saved, inner = state["of"], state["loader"]
    position: dict[str, Any] = {"samples": samples, "batches": None, "loader": None}
    same = all(saved[name] == now[name] for name in ("batch_size", "num_workers"))
    if saved["reads"] == now["reads"] == WHOLE and same and batches is not None:
        if holds_state(inner):
            return None if lost else position | {"loader": inner, "batches": batches}
        return position | {"batches": batches}
    if SHARDS in (saved["reads"], now["reads"]) or saved["num_workers"] or now["num_workers"] or samples is None:
        return None
    if now["reads"] == OWN:
        return position
    return (
        position | {"batches": samples // now["batch_size"]}
        if now["batch_size"] and not samples % now["batch_size"]
        else None
    )


def batches_used(told: Mapping[str, Any], lost: int = 0) -> int | None:
    """Batches of all processes that were used, if that is known."""
    base = told["base"]["batches"]
    return None if base is None else int(base + (told["rounds"] - lost) * told["round_batches"])


def holds_state(inner: Any) -> bool:
    """Whether a StatefulDataLoader's state is that of a dataset which can go on by itself.

    Of any other it says how many batches to read and drop, which acceler8 does: behind its second resume torchdata
    0.11 counts those of the first twice, and gives out others (``load_state_dict`` sets the count, and reading counts
    again). Remove when that is mended.
    """
    if not isinstance(inner, dict):
        return False
    own = any(inner.get(key) is not None for key in ("dataset_state", "dataset_iter_state"))
    return own or any(map(holds_state, inner.values()))


def is_point(point: Any) -> bool:
    """Whether a foreign value is a place as ``fit`` makes it, or None."""
    if point is None:
        return True
    if not isinstance(point, dict) or set(point) != {"samples", "batches", "loader", "used"}:
        return False
    return isinstance(point["loader"], dict | None) and is_used(used(point["used"] or {}, 0, point["samples"], 0))


def is_used(told: Any) -> bool:
    """Whether a foreign value is one as ``used`` makes it, or None."""
    if told is None:
        return True
    if not isinstance(told, dict) or set(told) != {"base", "rounds", "round_samples", "round_batches"}:
        return False
    base = told["base"]
    if not isinstance(base, dict) or set(base) != set(START):
        return False
    numbers = (
        told["rounds"],
        told["round_batches"],
        *(n for n in (told["round_samples"], *base.values()) if n is not None),
    )
    return all(type(n) is int and 0 <= n < 2**53 for n in numbers)


def own_order(order: torch.Tensor, sampler: Any) -> torch.Tensor:
    """The state of a generator of its own by which ``sampler`` orders as it does from the global one's ``order``."""
    if not isinstance(sampler, RandomSampler):
        return order
    drawn = torch.Generator()
    drawn.set_state(order)
    seed = int(torch.empty((), dtype=torch.int64).random_(generator=drawn).item())
    return torch.Generator().manual_seed(seed).get_state()
