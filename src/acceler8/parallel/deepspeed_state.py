"""The weights of a model in a DeepSpeed engine, whole, and back: one Parameter at a time, whatever the stage.

What is saved of a trained weight is its FP32 master. Its 16-bit Parameter is that rounded, so a resume at the same
stage continues bit for bit, and a plain FP32 model that loads the file starts from the exact weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from acceler8.errors import CheckpointError
from acceler8.nn import find_states
from acceler8.parallel.deepspeed_parts import Parts, shape_of
from acceler8.parallel.first_process import from_process_0


def gather_model(model: nn.Module, parts: Parts, *, on_all: bool) -> dict[str, Any]:
    """The whole ``state_dict`` on process 0, or ``on_all``, and on the CPU; elsewhere empty. Ties are one tensor."""
    is_reader = on_all or dist.get_rank() == 0
    state: dict[str, Any] = {}
    known: dict[int, Tensor] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, nn.Parameter):
            if id(value) not in known:
                whole = parts.weight(value)
                known[id(value)] = whole.to("cpu", copy=True) if is_reader else value
            value = known[id(value)]
        elif isinstance(value, Tensor):
            value = value.detach().to("cpu", copy=True)
        state[name] = value
    return state if is_reader else {}


@torch.no_grad()
def scatter_model(model: nn.Module, parts: Parts, state: Mapping[str, Any]) -> None:
    """Put process 0's ``state`` into the model on all. Names that it lacks, and that the model lacks, are left.

    Raises: CheckpointError, on all and before anything changes, for other shapes.
    """
    own = model.state_dict(keep_vars=True)
    names, others = from_process_0(lambda: _split(own, state), f"the state of {type(model).__name__}")
    done: set[int] = set()
    for name in names:
        parameter = own[name]
        if id(parameter) in done:
            continue
        done.add(id(parameter))
        weight = torch.empty(shape_of(parameter), dtype=torch.float32, device=parts.engine.device)
        if dist.get_rank() == 0:
            weight.copy_(state[name])
        dist.broadcast(weight, 0)
        parts.set_weight(parameter, weight)
    model.load_state_dict(others, strict=False)
    for converted in find_states(model):
        converted.drop_codes()


def _split(own: Mapping[str, Any], state: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Names of Parameters in ``state``, and what else of it the model has. Raises: CheckpointError for other shapes."""
    names = [name for name in state if isinstance(own.get(name), nn.Parameter)]
    for name in names:
        if state[name].shape != shape_of(own[name]):
            raise CheckpointError(
                f"{name} is {list(state[name].shape)}; allowed: {list(shape_of(own[name]))}; load a state of this model"
            )
    return names, {name: value for name, value in state.items() if name in own and name not in names}
