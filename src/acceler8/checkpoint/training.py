"""Writing a whole training: several models, optimizers, schedulers and loaders, and what each process has of its own.

    model.safetensors, model_1.safetensors, ...     plain weights; in several files with an index above the size limit
    model.shards.json, model.shard-00001-of-...     weights that no process holds whole, and likewise optimizers
    acceler8_state.json, .safetensors               recipe, backend, versions, settings, steps; amax histories
    optimizer.json, .safetensors, optimizer_1...    under parameter names
    extra.json, .safetensors                        schedulers, loss scaler, registered objects
    process_0.json, .safetensors, process_1...      each process's random generators, loaders, unfinished gradients

The model of number 1 and on has ``model_1:`` before its names wherever several models share a file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from acceler8.checkpoint.fp8 import describe, fp8_tensors
from acceler8.checkpoint.manifest import write_json
from acceler8.checkpoint.model import split_state
from acceler8.checkpoint.optimizer import named_state
from acceler8.checkpoint.rng import capture_rng
from acceler8.checkpoint.save import FP8, write_part
from acceler8.checkpoint.sharded import is_sharded, local, write_index, write_shard
from acceler8.checkpoint.shards import write_model
from acceler8.checkpoint.tensorfile import write_tensors
from acceler8.checkpoint.tree import encode
from acceler8.errors import CheckpointError
from acceler8.scaling import StepClock

STATE_VERSION = 1
"""Of ``acceler8_state.json``; raised when an older reader could misread it."""
STATE = "acceler8_state.json"


class AccumulationWindow(Protocol):
    """Where a loop stands among the micro-batches of a step."""

    num_steps: int
    micro_batch: int
    sync_gradients: bool


@dataclass(kw_only=True)
class Training:
    """The live objects of a training, in the order in which they were prepared."""

    models: Sequence[nn.Module]
    """Plain: behind whatever a strategy put around them."""
    optimizers: Sequence[Optimizer]
    window: AccumulationWindow
    clock: StepClock
    schedulers: Sequence[Any] = ()
    loaders: Sequence[Any] = ()
    scaler: Any = None
    custom: Sequence[Any] = ()
    mixed_precision: str = "no"
    configuration: Mapping[str, str] = field(default_factory=dict)
    """Every effective setting as text, for people."""
    process_index: int = 0
    num_processes: int = 1
    optimizer_states: Sequence[Mapping[str, Any]] | None = None
    """Whole ``state_dict``s, where an engine gathers them on process 0; elsewhere empty."""
    keeps_gradients: bool = False
    """True if gradients of an unfinished step are an engine's, and cannot be saved."""

    def parameters(self) -> dict[str, nn.Parameter]:
        """Every model's Parameters, by the names that a checkpoint gives them."""
        return {prefix(i) + name: p for i, model in enumerate(self.models) for name, p in model.named_parameters()}

    def extras(self) -> dict[str, Any]:
        """Schedulers, scaler and registered objects, by name."""
        found = {f"scheduler_{i}": one for i, one in enumerate(self.schedulers)}
        if self.scaler is not None:
            found["scaler"] = self.scaler
        return found | {f"custom_{i}": one for i, one in enumerate(self.custom)}

    def is_inside_window(self) -> bool:
        """True between two micro-batches of one step, when gradients are part of the state."""
        return not self.window.sync_gradients and self.window.micro_batch > 0


def stem(kind: str, index: int) -> str:
    """``model``, ``model_1``, ..."""
    return f"{kind}_{index}" if index else kind


def prefix(index: int) -> str:
    """What stands before the names of model ``index`` where models share a file."""
    return f"model_{index}:" if index else ""


def check_finite(model: nn.Module, state: Mapping[str, Any], what: str, advice: str) -> None:
    """Raise CheckpointError naming the first parameter with NaN or inf, or buffer with NaN (a mask may hold inf)."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, value in state.items():
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.is_meta:
            continue
        value = local(value)
        plain = value.float() if value.element_size() == 1 else value
        bad = ~plain.isfinite() if name in parameters else plain.isnan()
        if count := int(bad.sum()):
            raise CheckpointError(f"{what}: {name} holds {count} of {value.numel()} values NaN or inf; {advice}")


def write_common(
    folder: Path, training: Training, weights: Mapping[int, Mapping[str, Any]], max_shard_size: int | str
) -> dict[str, str]:
    """Write what all processes share, weights of the models in ``weights``; returns the ties of the first model.

    Of DTensors that is what they make up together; ``write_shards`` writes what each process holds.
    """
    described: list[dict[str, Any]] = []
    histories: dict[str, Tensor] = {}
    rest: dict[str, Any] = {}
    for i, model in enumerate(training.models):
        tensors, tied, extra_state = split_state(weights.get(i, {}), getattr(model, "_tied_weights_keys", None))
        if i in weights:
            if is_sharded(tensors):
                write_index(folder, stem("model", i), tensors, training.num_processes)
            else:
                write_model(folder, stem("model", i), tensors, max_shard_size)
            rest |= {prefix(i) + name: value for name, value in extra_state.items()}
        of_model = {prefix(i) + name: tensor for name, tensor in fp8_tensors(model).items()}
        histories |= of_model
        described.append(
            {
                "type": type(model).__qualname__,
                "tied": tied,
                "fp8": describe(model),
                "histories": {name: list(tensor.shape) for name, tensor in of_model.items()},
            }
        )
    if histories:
        write_tensors(folder / FP8, histories, "fp8_state")
    if rest:
        write_part(folder, "module_extra", rest)
    for i in range(len(training.optimizers)):
        write_part(folder, stem("optimizer", i), _state_of_optimizer(training, i), training.num_processes)
    extras = {name: state_of(name, owner) for name, owner in training.extras().items()}
    if extras:
        write_part(folder, "extra", extras)
    _write_state(folder, training, described)
    return dict(described[0]["tied"]) if described else {}


def write_shards(folder: Path, training: Training, weights: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """Write what this process holds of DTensors; returns the names of the files."""
    parts: dict[str, Mapping[str, Tensor]] = {}
    for i, state in weights.items():
        aliases = getattr(training.models[i], "_tied_weights_keys", None)
        parts[stem("model", i)] = split_state(state, aliases)[0]
    for i in range(len(training.optimizers)):
        if training.optimizer_states is None:
            parts[stem("optimizer", i)] = encode(_state_of_optimizer(training, i), stem("optimizer", i))[1]
    index, count = training.process_index, training.num_processes
    return [write_shard(folder, part, held, index, count) for part, held in parts.items() if is_sharded(held)]


def _state_of_optimizer(training: Training, index: int) -> dict[str, Any]:
    packed = None if training.optimizer_states is None else training.optimizer_states[index]
    return named_state(training.parameters(), training.optimizers[index], packed)


def write_process(folder: Path, training: Training) -> None:
    """Write what this process has of its own; random generators last, after all that may draw from them."""
    gradients = {}
    if training.is_inside_window() and not training.keeps_gradients:
        gradients = {name: p.grad for name, p in training.parameters().items() if p.grad is not None}
    loaders = [loader_state(loader) for loader in training.loaders]
    own = {"loaders": loaders, "gradients": gradients, "rng": capture_rng()}
    write_part(folder, f"process_{training.process_index}", own)


def loader_state(loader: Any) -> Any:
    """Where a loader stands; None for one that keeps no state (torchdata's StatefulDataLoader does)."""
    if not hasattr(getattr(loader, "loader", loader), "state_dict"):
        return None
    return loader.state_dict()


def state_of(name: str, owner: Any) -> Any:
    """The state of a scheduler or registered object, with its class, which a resume compares."""
    kind = type(getattr(owner, "scheduler", owner)).__qualname__
    state = owner.state_dict()
    try:
        encode(state, "state")
    except CheckpointError as error:
        raise CheckpointError(f"{name}, a {kind}, cannot be saved: {error}") from None
    return {"type": kind, "state": state}


def _write_state(folder: Path, training: Training, models: list[dict[str, Any]]) -> None:
    window = training.window
    state = {
        "format_version": STATE_VERSION,
        "mixed_precision": training.mixed_precision,
        "steps": training.clock.ticks,
        "stepped": sorted(training.clock.stepped),
        "window": {
            "num_steps": window.num_steps,
            "micro_batch": window.micro_batch,
            "sync_gradients": window.sync_gradients,
            "has_gradients": not training.keeps_gradients,
        },
        "num_processes": training.num_processes,
        "models": models,
        "optimizers": len(training.optimizers),
        "schedulers": len(training.schedulers),
        "loaders": len(training.loaders),
        "custom": len(training.custom),
        "has_scaler": training.scaler is not None,
        "configuration": dict(training.configuration),
        "is_deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    write_json(folder / STATE, encode(state, STATE)[0])
