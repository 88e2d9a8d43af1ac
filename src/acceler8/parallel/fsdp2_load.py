"""How the shards of a model get process 0's weights.

Either each process holds the model on its device, takes process 0's values and cuts its shards (``take_from_first``).
Or only process 0 holds weights, in main memory, and the others anything of the same shapes, also on the meta device.
The model is then sharded on the meta device, and each weight travels once (``make_empty`` and ``fill_from_first``); a
device never holds more than its shards and one whole tensor.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from acceler8.backends.torchao.all_gather import wrapped_as
from acceler8.nn import find_states
from acceler8.parallel.fsdp2_whole import broadcast, from_first, shard_of


class Place(NamedTuple):
    """Where a Parameter stands."""

    module: nn.Module
    key: str
    name: str


def places_of(model: nn.Module) -> list[tuple[nn.Parameter, list[Place]]]:
    """Each Parameter of ``model`` once, with all the places that it stands in."""
    found: dict[int, tuple[nn.Parameter, list[Place]]] = {}
    for path, module in model.named_modules():
        for key, p in module._parameters.items():
            if p is not None:
                found.setdefault(id(p), (p, []))[1].append(Place(module, key, f"{path}.{key}".lstrip(".")))
    return list(found.values())


def put(places: list[Place], p: nn.Parameter) -> None:
    """Let ``p`` stand in all these places."""
    for place in places:
        place.module._parameters[place.key] = p


@torch.no_grad()
def take_from_first(model: nn.Module) -> None:
    """Process 0's parameters and buffers into those of all."""
    for p, _ in places_of(model):
        broadcast(p)
    for buffer in model.buffers():
        broadcast(buffer)


@torch.no_grad()
def make_empty(model: nn.Module, is_first: bool) -> list[Tensor | None]:
    """Put Parameters on the meta device in the place of all; returns process 0's values, in order, None elsewhere.

    They and buffers have process 0's dtypes: it may have loaded a checkpoint in BF16 where the others only built the
    model. Every process calls this.
    """
    dtypes = _dtypes_of_first(model)
    held = []
    for p, places in places_of(model):
        held.append(p.detach() if is_first else None)
        empty = torch.empty_like(p, device="meta", dtype=dtypes.get(places[0].name, p.dtype))
        put(places, nn.Parameter(empty, requires_grad=p.requires_grad))
    for path, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = buffer.to(dtypes.get(f"{path}.{key}".lstrip("."), buffer.dtype))
    return held


def _dtypes_of_first(model: nn.Module) -> dict[str, torch.dtype]:
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    sent = [{name: t.dtype for name, t in named}]
    dist.broadcast_object_list(sent, 0)
    return sent[0]


@torch.no_grad()
def fill_from_first(model: nn.Module, held: list[Tensor | None], device: torch.device) -> None:
    """Put Parameters with process 0's values in the place of empty ones, and its buffers; shards where sharded."""
    for values, (p, places) in zip(held, places_of(model), strict=True):
        full = from_first(values, p.shape, p.dtype, device)
        made = _with_subclass(shard_of(full, p), p) if isinstance(p, DTensor) else full
        put(places, nn.Parameter(made, requires_grad=p.requires_grad))
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = from_first(buffer, buffer.shape, buffer.dtype, device)
    for state in find_states(model):
        if state.amax is not None:
            state.amax.to(device)
        state.drop_codes()
    model._apply(lambda t: t)  # FSDP2 takes over the Parameters that it finds


def _with_subclass(made: DTensor, like: DTensor) -> DTensor:
    """What torchao puts around a weight is around its shards too."""
    if type(like._local_tensor) is Tensor:
        return made
    local = wrapped_as(made._local_tensor, like._local_tensor)
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


__all__ = ["fill_from_first", "make_empty", "places_of", "put", "take_from_first"]
