"""Whole tensors of a sharded model: gathered on process 0, and spread from there.

Tensors travel as bytes, which every process group takes (Gloo refuses FP8), one at a time, so that beside the shards no
more than one whole tensor is on a device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from acceler8.errors import CheckpointError, ConfigError
from acceler8.parallel.first_process import from_process_0


class _TensorForm(NamedTuple):
    """Stands for a tensor in a structure that is sent to the other processes."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def plain_local(t: Tensor) -> Tensor:
    """This process's shard of a DTensor, without torchao's subclass around it; any other tensor itself, detached."""
    own = t._local_tensor if isinstance(t, DTensor) else t
    return getattr(own, "_tensor", own).detach()


def whole(t: Tensor) -> Tensor:
    """All of ``t``, in plain form. Every process of its mesh calls this."""
    own = plain_local(t)
    if not isinstance(t, DTensor):
        return own
    as_bytes = own.dtype if own.dtype.itemsize == 1 else None
    sharded = DTensor.from_local(
        own if as_bytes is None else own.view(torch.uint8),
        t.device_mesh,
        t.placements,
        run_check=False,
        shape=t.shape,
        stride=t.stride(),
    )
    full: Tensor = _on_mesh(sharded).full_tensor()
    return full if as_bytes is None else full.view(as_bytes)


def _on_mesh(t: DTensor) -> DTensor:
    """An offloaded shard cannot be gathered where it lies."""
    kind = t.device_mesh.device_type
    if t.device.type == kind:
        return t
    moved: Any = t._local_tensor.to(torch.device(kind, torch.accelerator.current_device_index()))
    return DTensor.from_local(moved, t.device_mesh, t.placements, run_check=False, shape=t.shape, stride=t.stride())


def broadcast(t: Tensor) -> None:
    """Process 0's ``t`` into that of all, in place."""
    if not t.numel():
        return
    packed = t.detach().contiguous()
    dist.broadcast(packed.reshape(-1).view(torch.uint8), 0)
    if packed.data_ptr() != t.data_ptr():
        t.detach().copy_(packed)


def from_first(t: Tensor | None, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Process 0's ``t``, whole and on ``device``, on all; what the others give is not read."""
    if dist.get_rank() == 0:
        assert t is not None
        sent = t.detach().to(device, dtype).contiguous()
    else:
        sent = torch.empty(shape, dtype=dtype, device=device)
    broadcast(sent)
    return sent


def shard_of(full: Tensor, like: DTensor) -> DTensor:
    """The part of ``full``, which all processes hold, that ``like`` has here, as a DTensor of the same placements."""
    made = distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)
    device = like._local_tensor.device
    if device.type not in ("meta", made.device.type):  # offloaded
        return DTensor.from_local(
            made._local_tensor.to(device), like.device_mesh, like.placements, run_check=False,
            shape=like.shape, stride=like.stride(),
        )  # fmt: skip
    return made


def check_same_on_all(model: nn.Module) -> None:
    """Raise ConfigError, on every process, unless all have a model of the same parameters and buffers."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    lines = [f"{name} {tuple(t.shape)} {t.dtype} {getattr(t, 'requires_grad', False)}" for name, t in named]
    own = (hashlib.sha256("\n".join(lines).encode()).hexdigest(), lines)
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, own[0])
    if len(set(digests)) == 1:
        return
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, lines)
    other = next(i for i, digest in enumerate(digests) if digest != digests[0])
    differ = sorted(set(every[0]) ^ set(every[other]))
    raise ConfigError(
        f"{type(model).__name__}: processes 0 and {other} have different models, such as in {differ[0]!r}; allowed:"
        " the same parameters and buffers, shapes, dtypes and requires_grad in every process; build it alike in all"
    )


# -- models


def model_state(model: nn.Module) -> dict[str, Any]:
    """The plain state_dict, whole and on the CPU, in process 0; elsewhere empty. Ties stay ties."""
    is_first = dist.get_rank() == 0
    made: dict[int, Tensor] = {}
    state: dict[str, Any] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            found: Any = value
        elif id(value) in made:
            found = made[id(value)]
        else:
            full = whole(value)
            found = full.to("cpu", copy=True) if is_first else full.new_empty(0)
            made[id(value)] = found
            del full
        if is_first:
            state[name] = found
    return state


def load_model_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Put process 0's whole ``state`` into the sharded model, on all.

    Raises: CheckpointError, on all and before anything changes, for names or shapes that are not the model's.
    """
    own = model.state_dict(keep_vars=True)
    from_process_0(lambda: _check(own, state), f"the state of {type(model).__name__}")
    seen: set[int] = set()
    others = {name: value for name, value in state.items() if not isinstance(value, Tensor)}
    for name, target in own.items():
        if not isinstance(target, Tensor) or id(target) in seen:
            continue
        seen.add(id(target))
        into = plain_local(target)
        full = from_first(state.get(name), target.shape, target.dtype, _device_of(target))
        with torch.no_grad():
            into.copy_(plain_local(shard_of(full, target)) if isinstance(target, DTensor) else full)
    sent = [others]
    if any(not isinstance(target, Tensor) for target in own.values()):
        dist.broadcast_object_list(sent, 0)
        model.load_state_dict(sent[0], strict=False)


def _device_of(t: Tensor) -> torch.device:
    if not isinstance(t, DTensor) or t.device.type == t.device_mesh.device_type:
        return t.device
    return torch.device(t.device_mesh.device_type, torch.accelerator.current_device_index())


def _check(own: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    if differ := sorted(set(own) ^ set(state)):
        where = "is not in the model" if differ[0] in state else "is missing"
        raise CheckpointError(
            f"{len(differ)} names differ, such as {differ[0]!r}, which {where}; load a state of this model"
        )
    for name, target in own.items():
        value = state[name]
        if isinstance(target, Tensor) and tuple(value.shape) != tuple(target.shape):
            raise CheckpointError(
                f"{name} is {tuple(value.shape)}; allowed: {tuple(target.shape)}; load a state of this model"
            )


# -- optimizers


def optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's state_dict with whole tensors on the CPU in process 0; elsewhere empty."""
    packed = optimizer.state_dict()
    is_first = dist.get_rank() == 0
    state: dict[Any, dict[str, Any]] = {}
    for number, values in packed["state"].items():
        kept = state[number] = {}
        for key, value in values.items():
            found = whole(value).to("cpu", copy=True) if isinstance(value, Tensor) else value
            if is_first:
                kept[key] = found
    return {**packed, "state": state} if is_first else {}


def load_optimizer_state(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Put process 0's whole ``state`` into an optimizer of sharded Parameters, on all."""
    is_first = dist.get_rank() == 0
    packed: Any = from_process_0(
        lambda: _map_tensors(dict(state), lambda t: _TensorForm(tuple(t.shape), t.dtype)), "the state of the optimizer"
    )
    numbers = [number for group in packed["param_groups"] for number in group["params"]]
    own = [p for group in optimizer.param_groups for p in group["params"]]
    order = dict(zip(numbers, own, strict=False))
    for number, values in packed["state"].items():
        for key, form in values.items():
            if isinstance(form, _TensorForm):
                given = state["state"][number][key] if is_first else None
                values[key] = _spread(given, form, order.get(number), key)
    optimizer.load_state_dict(packed)


def _spread(given: Tensor | None, form: _TensorForm, p: Any, key: str) -> Tensor:
    """Process 0's tensor of one parameter's state, sharded as the parameter if it has a number for each element, or a
    row for each of its rows (scales).
    """
    device = _device_of(p) if isinstance(p, Tensor) else torch.device("cpu")
    alone = not form.shape
    value = from_first(given, torch.Size(form.shape), form.dtype, device)
    if alone or not isinstance(p, DTensor):
        return value.cpu() if alone else value
    rows = p.shape[0]
    if key.endswith("_scale") and value.ndim == 1 and value.numel() % rows == 0:
        value = value.reshape(rows, -1)  # of a model that was whole: a scale for each block, row after row
    if value.shape[0] != rows:
        raise CheckpointError(
            f"optimizer state {key!r} has shape {tuple(value.shape)}; allowed: {rows} rows, as the parameter; load the"
            " state of this optimizer"
        )
    if value.dtype.itemsize > 1:
        return shard_of(value, p)
    made = shard_of(value.view(torch.uint8), p)
    return DTensor.from_local(
        made._local_tensor.view(value.dtype), p.device_mesh, p.placements, run_check=False,
        shape=value.shape, stride=value.stride(),
    )  # fmt: skip


def _map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _map_tensors(inner, change) for key, inner in value.items()}
    if isinstance(value, (list, tuple)) and not isinstance(value, _TensorForm):
        return type(value)(_map_tensors(inner, change) for inner in value)
    return value


__all__ = [
    "broadcast",
    "check_same_on_all",
    "from_first",
    "load_model_state",
    "load_optimizer_state",
    "model_state",
    "optimizer_state",
    "plain_local",
    "shard_of",
    "whole",
]
