"""Blocks that keep only their input in forward and compute again in backward.

A model of transformers knows itself where it can (it also turns off its key-value cache, which a second forward would
fill twice), so it is asked. Of any other model each block's forward is wrapped on the instance: no module is replaced,
so names, hooks and ``state_dict`` keys stay, and ``torch.compile`` sees ``torch.utils.checkpoint``, which it knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class CheckpointedForward:
    """A module's forward whose activations are recomputed in backward (non-reentrant).

    An object, not a closure, so that a model can be copied and pickled. ``own`` is a forward that was set on the
    instance before; without one the class's is asked at each call.
    """

    def __init__(self, module: nn.Module, offloads: bool = False) -> None:
        self.module, self.offloads = module, offloads
        self.own: Callable[..., Any] | None = module.__dict__.get("forward")

    @property
    def forward(self) -> Callable[..., Any]:
        """What is wrapped."""
        return self.own if self.own is not None else MethodType(type(self.module).forward, self.module)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if self.own is not None:
            return self.own(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)  # the compiler cannot make a bound method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward; in training with gradients its activations are not kept."""
        if not (self.module.training and torch.is_grad_enabled()):
            return self._run(*args, **kwargs)
        with torch.autograd.graph.save_on_cpu() if self.offloads else nullcontext():
            return checkpoint(self._run, *args, use_reentrant=False, **kwargs)


def checkpoint_blocks(model: nn.Module, blocks: Iterable[nn.Module], *, offloads: bool = False) -> int:
    """Let ``blocks`` of ``model`` recompute in backward; returns how many do. A second call changes nothing.

    offloads: keep the inputs that blocks are computed again from on the CPU.
    """
    blocks = list(blocks)
    if not offloads and (count := _asks_model(model, blocks)):
        return count
    for block in blocks:
        if not isinstance(block.__dict__.get("forward"), CheckpointedForward):
            block.__dict__["forward"] = CheckpointedForward(block, offloads)
    return len(blocks)


def _asks_model(model: nn.Module, blocks: list[nn.Module]) -> int:
    """Blocks that transformers' own switch reaches, once it is on; 0 if it does not reach all."""
    own = [
        block for block in blocks if any(kind.__name__ == "GradientCheckpointingLayer" for kind in type(block).__mro__)
    ]
    enable = getattr(model, "gradient_checkpointing_enable", None)
    if not blocks or len(own) != len(blocks) or not callable(enable):
        return 0
    enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return sum(bool(getattr(block, "gradient_checkpointing", False)) for block in own)


__all__ = ["CheckpointedForward", "checkpoint_blocks"]
