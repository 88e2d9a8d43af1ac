"""The optimizer of a DeepSpeed engine, as the one that the script made: groups of the model's Parameters, whole states.

DeepSpeed puts flat parts of FP32 masters into the script's optimizer, in the place of the Parameters. Its groups stay
the objects that they were, so a learning rate that a scheduler sets there counts; here they are shown with the model's
Parameters in them. States are read and written whole, in the form of torch's ``state_dict``: a checkpoint does not know
how many processes wrote it, nor at which stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from acceler8.errors import CheckpointError, ConfigError
from acceler8.parallel.deepspeed_parts import Parts, shape_of
from acceler8.parallel.first_process import from_process_0

_NUMBERS = frozenset({"step", "eta", "mu", "mu_product"})
"""What torch's optimizers keep of a whole Parameter as one number."""


class _Skeleton(NamedTuple):
    """An optimizer's state without the tensors that are as large as weights."""

    options: list[dict[str, Any]]
    """Of each group."""
    whole: tuple[str, ...]
    """Keys of tensors like the weight."""
    shared: dict[int, dict[str, Any]]
    """The others, by group."""
    keys: list[tuple[str, ...]]
    """For each Parameter those of ``whole`` that travel."""


class GroupView(MutableMapping[str, Any]):
    """A group of another optimizer, with other Parameters in it."""

    def __init__(self, group: MutableMapping[str, Any], params: list[Any]) -> None:
        self._group, self._params = group, params

    def __getitem__(self, key: str) -> Any:
        return self._params if key == "params" else self._group[key]

    def __setitem__(self, key: str, value: Any) -> None:
        if key == "params":
            raise ConfigError("a group got other params; DeepSpeed's engine keeps those it has; build it anew")
        self._group[key] = value

    def __delitem__(self, key: str) -> None:
        del self._group[key]

    def __or__(self, other: Mapping[str, Any]) -> dict[str, Any]:
        return {**self, **other}

    def __ror__(self, other: Mapping[str, Any]) -> dict[str, Any]:
        return {**other, **self}

    def __iter__(self) -> Iterator[str]:
        return iter(self._group)

    def __len__(self) -> int:
        return len(self._group)


class ZeroOptimizer(Optimizer):
    """Steps the engine. ``state`` is empty, for each process keeps a part; ``state_dict`` gathers it.

    parts: of the engine, whose script's optimizer this stands for. groups: that one's Parameters, group by group, as
        they were before the engine took them.
    """

    def __init__(self, parts: Parts, groups: list[list[Any]]) -> None:
        super().__init__([{"params": params} for params in groups], {})
        self.parts = parts
        self.defaults = parts.given.defaults
        views = zip(parts.given.param_groups, [params for params in groups if params], strict=True)
        self.param_groups = [GroupView(group, params) for group, params in views]  # type: ignore[misc]
        self._clip = float(parts.engine.gradient_clipping() or 0.0)
        self._has_gradients = self.is_complete = False

    def note_backward(self, is_last: bool) -> None:
        """A backward has run; ``is_last``: gradients are exchanged and a step may follow."""
        self._has_gradients, self.is_complete = True, is_last

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """The engine's step: clip, update the masters, gather the weights, clear gradients."""
        if closure is not None:
            raise ConfigError("optimizer.step got a closure; allowed under DeepSpeed: None; run backward before step")
        self.parts.engine.step()
        self.parts.set_clip(self._clip)
        self._has_gradients = self.is_complete = False

    @property
    def step_was_skipped(self) -> bool:
        """True if the last step was left out, for a gradient was NaN or inf."""
        return not self.parts.engine.was_step_applied()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients; behind a step there are none."""
        if self._has_gradients:
            self.parts.forget_gradients()
            self._has_gradients = self.is_complete = False

    def clip(self, max_norm: float) -> Tensor:
        """Have the next step clip to this norm; returns the norm as it is. Raises: ConfigError before all is added."""
        if not self.is_complete:
            raise ConfigError(
                "clip_grad_norm_ was called where no step is complete; allowed under DeepSpeed: behind the backward"
                " that completes one; guard it with `if accelerator.sync_gradients:`"
            )
        norm = self.parts.gradient_norm()
        self.parts.set_clip(max_norm)
        return norm

    def master_of(self, parameter: Any) -> Tensor:
        """The whole FP32 weight that a step changes. Every process calls this."""
        return self.parts.weight(parameter)

    def value_of(self, parameter: Any) -> Tensor:
        """A copy of the whole Parameter, as forward reads it. Every process calls this."""
        return self.parts.value(parameter)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only while it is built. Raises: ConfigError."""
        if "parts" in self.__dict__:
            raise ConfigError(
                "add_param_group got a group; allowed under DeepSpeed: none, for its engine was built of the groups"
                " that there were; add it before prepare"
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Torch's form with whole FP32 tensors, on process 0 and on the CPU; elsewhere without states.

        Every process calls this.
        """
        is_writer = dist.get_rank() == 0
        self.parts.link_states()
        state: dict[int, dict[str, Any]] = {}
        number, groups = 0, []
        for group in self.param_groups:
            numbers = []
            for p in group["params"]:
                kept = {key: _to_cpu(value) if is_writer else None for key, value in self.parts.state_of(p)}
                if kept and is_writer:
                    state[number] = kept
                numbers.append(number)
                number += 1
            groups.append({**{k: v for k, v in group.items() if k != "params"}, "params": numbers})
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take process 0's ``state_dict`` on all. Every process calls this; what others pass does not count.

        Raises: CheckpointError if it does not fit, on every process.
        """
        skeleton = from_process_0(lambda: self._skeleton(state_dict), "the state of the optimizer")
        for group, options in zip(self.param_groups, skeleton.options, strict=True):
            group.update(options)
        self.parts.begin_state(skeleton.whole, skeleton.shared)
        for number, (p, keys) in enumerate(zip(self._parameters(), skeleton.keys, strict=True)):
            for key in keys:
                value = torch.empty(shape_of(p), dtype=torch.float32, device=self.parts.engine.device)
                if dist.get_rank() == 0:
                    value.copy_(state_dict["state"][number][key])
                dist.broadcast(value, 0)
                self.parts.set_state(p, key, value)

    def _parameters(self) -> list[Any]:
        return [p for group in self.param_groups for p in group["params"]]

    def _skeleton(self, state_dict: dict[str, Any]) -> _Skeleton:
        """What all have to know before the tensors travel. Raises: CheckpointError if these do not fit."""
        state, saved = state_dict["state"], state_dict["param_groups"]
        self._check(state, saved)
        parameters = self._parameters()
        whole = _whole_keys({number: (shape_of(parameters[number]), values) for number, values in state.items()})
        shared: dict[int, dict[str, Any]] = {}
        keys: list[tuple[str, ...]] = []
        for i, group in enumerate(self.param_groups):
            for p in group["params"]:
                values = state.get(len(keys), {})
                if values:
                    shared[i] = {key: value for key, value in values.items() if key not in whole}
                held = (key for key in whole if p.requires_grad and values.get(key) is not None)  # else it stays zero
                keys.append(tuple(held))
        options = [{k: v for k, v in group.items() if k != "params"} for group in saved]
        return _Skeleton(options, whole, shared, keys)

    def _check(self, state: dict[Any, Any], saved: list[dict[str, Any]]) -> None:
        """Raise CheckpointError if a state cannot be loaded."""
        own = [len(group["params"]) for group in self.param_groups]
        theirs = [len(group["params"]) for group in saved]
        if own != theirs:
            raise CheckpointError(
                f"it has groups of {theirs} parameters, this one of {own}; allowed: the same groups; build it as it was"
                " saved"
            )
        parameters = self._parameters()
        for number, values in state.items():
            shape = shape_of(parameters[number])
            for key, value in values.items():
                if isinstance(value, Tensor) and value.ndim and value.shape != shape:
                    raise CheckpointError(
                        f"{key} of parameter {number} has shape {list(value.shape)}, the parameter {list(shape)}; under"
                        " DeepSpeed states have the weights' shapes"
                    )


def _whole_keys(states: Mapping[int, tuple[torch.Size, Mapping[str, Any]]]) -> tuple[str, ...]:
    """Keys of tensors that have an element for each of the weight's, from each Parameter's shape and values.

    A Parameter without dimensions has a number under every key, so the others tell; where there are none, the name.
    Raises: CheckpointError for a key under which some Parameters have a tensor like theirs, and others one number.
    """
    found: dict[str, set[bool]] = {}
    for shape, values in states.values():
        for key, value in values.items():
            if isinstance(value, Tensor):
                found.setdefault(key, set()).update([value.shape == shape] if shape else ())
    if mixed := next((key for key, is_whole in found.items() if len(is_whole) == 2), None):
        raise CheckpointError(
            f"{mixed} has the shape of some parameters and is one number for others; allowed: one of them for all; the"
            " state is damaged, load another one"
        )
    return tuple(key for key, is_whole in found.items() if (True in is_whole if is_whole else key not in _NUMBERS))


def make_optimizer(parts: Parts, groups: list[list[Any]]) -> ZeroOptimizer:
    """A ``ZeroOptimizer`` under the name of the script's optimizer, whose states these are: checkpoints note it."""
    author = type(parts.given)
    names = {"__module__": author.__module__, "__qualname__": author.__qualname__, "__doc__": ZeroOptimizer.__doc__}
    made: ZeroOptimizer = type(author.__name__, (ZeroOptimizer,), names)(parts, groups)
    return made


def _to_cpu(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
