"""What Python decides in a training step, as values that a captured graph of it was made with and is compared by."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import TensorWeakRef

from acceler8.errors import PlanError
from acceler8.nn import find_states, fp8_layers, fused_norms

_PLAIN = frozenset({type(None), bool, int, float, str, bytes, torch.dtype, torch.device})
_LISTS = ("params", "param_names")  # of a parameter group; what lies in them is compared by itself


class Guards:
    """All on which the Python of a step of ``model`` with ``optimizers`` depends, beside its arguments.

    Modules are found once: to look through a model at each step costs more than a replay.
    """

    def __init__(self, model: nn.Module, optimizers: Iterable[Optimizer]) -> None:
        self._optimizers = tuple(optimizers)
        self._states = find_states(model)
        self._layers = [layer for _, layer in fp8_layers(model)]
        self._norms = [norm for _, norm in fused_norms(model)]
        self._modules = list(model.modules())
        self._parameters = [(module._parameters, name) for module in self._modules for name in module._parameters]

    def decisions(self) -> dict[str, Hashable]:
        """Each decision as it is now, by the name that a message gives it."""
        layers = [layer._acceler8_layer for layer in self._layers]
        return {
            "the set of FP8 layers": tuple((state.recipe, state.slots) for state in layers),
            "the schedule's stage": tuple(state.is_fp8(True) for state in layers),
            "what norms know of their readers": tuple(
                (norm._acceler8_norm.reader, norm._acceler8_norm.groups) for norm in self._norms
            ),
            "the mode of a layer": (
                tuple([module.training for module in self._modules]), tuple(s.evaluates_in_fp8 for s in layers)
            ),
            "a module's hooks": self._hooks(),
            "a parameter's memory or requires_grad": tuple(
                (p.data_ptr(), p.dtype, p.requires_grad) for p in self.parameters()
            ),
            "the amax state's memory": tuple(
                None if state.amax is None else state.amax.data.data_ptr() for state in self._states
            ),
            "a number of the optimizer (make lr a tensor if it changes)": tuple(
                (name, len(group[name]) if name in _LISTS else _comparable(group[name]))
                for optimizer in self._optimizers
                for group in optimizer.param_groups
                for name in sorted(group)  # load_state_dict orders them anew
            ),
            "the optimizer's state": tuple(
                # as numbers: a graph reads and writes where the state lay
                [
                    value.data_ptr() if isinstance(value, Tensor) else _comparable(value)
                    for optimizer in self._optimizers
                    for state in optimizer.state.values()
                    for value in state.values()
                ]
            ),
            "autocast": (
                torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"), torch.is_grad_enabled()
            ),
        }  # fmt: skip

    def parameters(self) -> list[nn.Parameter]:
        """The parameters as they are now, in modules' order."""
        return [p for own, name in self._parameters if (p := own.get(name)) is not None]

    def have_gradients(self) -> tuple[bool, ...]:
        """For each parameter whether there is a gradient to add to."""
        return tuple([p.grad is not None for p in self.parameters()])

    def _hooks(self) -> Hashable:
        """By their numbers, which are never given twice."""
        return tuple(
            [
                (place, *hooks)
                for place, module in enumerate(self._modules)
                for hooks in (
                    module._forward_hooks, module._forward_pre_hooks,
                    module._backward_hooks, module._backward_pre_hooks,
                )
                if hooks
            ]
        )  # fmt: skip


class Gradients:
    """The gradients around a capture: which are the graph's own, and which lie where it found them."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        # weak, so that a capture can have the memory of gradients that it drops
        self._before = [
            (p, None if (grad := p.grad) is None else (TensorWeakRef(grad), grad.data_ptr())) for p in parameters
        ]
        self._found: list[tuple[nn.Parameter, int]] = []
        self._left: list[tuple[nn.Parameter, Tensor | None]] = []

    def captured(self) -> None:
        """Note what the capture found and left."""
        for p, before in self._before:
            if before is None:
                if p.grad is not None:
                    self._left.append((p, p.grad))
            elif p.grad is None:  # perhaps used first
                self._found.append((p, before[1]))
                self._left.append((p, None))
            elif before[0]() is p.grad:
                self._found.append((p, before[1]))
        self._before = []

    def undo(self) -> None:
        """Drop those that a capture made which failed: nothing ever wrote them."""
        for p, before in self._before:
            if p.grad is not None and (before is None or before[0]() is not p.grad):
                p.grad = None

    def fit(self) -> bool:
        """Whether the gradients to which the graph adds are still those that lie there."""
        return all(p.grad is not None and p.grad.data_ptr() == at for p, at in self._found)

    def leave(self) -> None:
        """As the Python of the step does: gradients where there were none, or none where there were some."""
        for p, grad in self._left:
            if p.grad is not grad:
                p.grad = grad


def argument(leaf: Any) -> Hashable:
    """What an argument's graph is found by: a tensor's layout, or a plain value with its type.

    Raises: PlanError for what a graph could neither be fed with nor be told by.
    """
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad
    if type(leaf) in _PLAIN:
        return _comparable(leaf)
    raise PlanError(
        f"GraphedStep got an argument of type {type(leaf).__module__}.{type(leaf).__qualname__}; allowed: tensors,"
        " None, bool, int, float, str, bytes, torch.dtype and torch.device, in tuples, lists and dicts; pass"
        " dict(batch) for a batch that behaves as a dict, torch.from_numpy(array) for an array, and the tensors of any"
        " other object"
    )


def _comparable(value: Any) -> Hashable:
    """A value that is equal only where a step would do the same: 1 is not True, and 0.0 is not -0.0."""
    if isinstance(value, Tensor):
        return value.data_ptr()
    if isinstance(value, tuple | list):
        return tuple(map(_comparable, value))
    if isinstance(value, float):
        return float, value.hex()
    return (type(value), value) if type(value) in _PLAIN else (type(value), id(value))
