"""A model's forward under autocast, set on the model itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from acceler8.nn.deferred_logits import DeferredLogits


class PreparedForward:
    """A model's forward under autocast, its floating outputs raised to FP32 (scripts call ``.numpy()`` on them) or not.

    An object, not a closure, so that a prepared model can be copied and pickled. ``own`` is a forward that was set on
    the instance before; without one the class's is asked at each call, for conversion and restoring change the class.
    """

    def __init__(
        self,
        model: nn.Module,
        device_type: str,
        dtype: torch.dtype,
        options: Mapping[str, Any] | None = None,
        raises_outputs: bool = True,
    ) -> None:
        self.model, self.device_type, self.dtype = model, device_type, dtype
        self.options, self.raises_outputs = dict(options or {}), raises_outputs
        self.own: Callable[..., Any] | None = model.__dict__.get("forward")

    @property
    def forward(self) -> Callable[..., Any]:
        """What is wrapped."""
        return self.own if self.own is not None else MethodType(type(self.model).forward, self.model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward under autocast."""
        with torch.autocast(self.device_type, self.dtype, **self.options):
            out = self.forward(*args, **kwargs)
        return tree_map_only((Tensor, DeferredLogits), _raise_to_fp32, out) if self.raises_outputs else out


def _raise_to_fp32(t: Tensor | DeferredLogits) -> Tensor | DeferredLogits:
    return t.float() if t.dtype in (torch.float16, torch.bfloat16) else t


def wrap_forward(
    model: nn.Module,
    device_type: str,
    dtype: torch.dtype | None,
    options: Mapping[str, Any] | None = None,
    *,
    raises_outputs: bool = True,
) -> None:
    """Let ``model`` run under autocast to ``dtype``, with these options; a second call changes nothing.

    ``raises_outputs`` False leaves 16-bit outputs as they are.
    """
    if dtype is not None and not isinstance(model.__dict__.get("forward"), PreparedForward):
        model.__dict__["forward"] = PreparedForward(model, device_type, dtype, options, raises_outputs)


def unwrap_forward(model: nn.Module) -> None:
    """Undo ``wrap_forward``."""
    wrapper = model.__dict__.get("forward")
    if isinstance(wrapper, PreparedForward):
        del model.__dict__["forward"]
        if wrapper.own is not None:
            model.__dict__["forward"] = wrapper.own
