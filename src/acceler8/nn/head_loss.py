"""``FusedHeadLoss``: a Hugging Face causal language model whose class was changed, so that with labels its loss is
computed without the logits.

The author's own forward runs, whatever it does around its head, on a stand-in for the model: the same attributes, but
the head gives ``DeferredLogits`` and ``loss_function`` computes the loss from those. Nothing of the model itself
changes during a call, so calls may nest or run in several threads. Whether it can be done is asked anew at each
call; where it cannot, the author's forward runs on the model, the reason is kept, and a warning says it once.
"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from acceler8.functional.head_loss import head_loss
from acceler8.nn.class_change import is_to_be_called, plain_type, swap_class
from acceler8.nn.deferred_logits import DeferredLogits

_STATE = "_acceler8_head_loss"
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_OWN_LOSS = "_loss_function"  # where PreTrainedModel keeps a loss that was set


@dataclass
class HeadLossState:
    """What a model whose head and loss are one knows. Plain data."""

    author: type[nn.Module]
    """The class that the model had."""
    head: str
    """Name of the output head among its children."""
    labels_at: int
    """Place of ``labels`` among the positional arguments of its forward."""
    why_not: str | None = None
    """Why the last forward with labels computed all logits; None if it did not, or there was none."""
    reasons: list[str] = field(default_factory=list)
    """Every such reason so far, once each."""

    def note(self, why: str) -> None:
        """Keep a reason, and warn of it the first time."""
        self.why_not = why
        if why not in self.reasons:
            self.reasons.append(why)
            message = f"fused_head_loss: {why}, so all logits are computed as without it"
            warnings.warn(message, UserWarning, stacklevel=2)


class FusedHeadLoss(nn.Module):
    """Mixin in front of the author's class. Made by ``fused_head_loss``, not constructed."""

    _acceler8_head_loss: HeadLossState

    @property
    def head_loss_reasons(self) -> tuple[str, ...]:
        """Why forwards with labels computed all logits, each reason once; empty if none did."""
        return tuple(self._acceler8_head_loss.reasons)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _rebuild, (self._acceler8_head_loss.author,), self.__getstate__()  # type: ignore[no-untyped-call]


def _run(model: FusedHeadLoss, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The forward of a model whose class was changed."""
    state = model._acceler8_head_loss
    labels = args[state.labels_at] if len(args) > state.labels_at else kwargs.get("labels")
    if labels is None or torch.compiler.is_compiling():
        return state.author.forward(model, *args, **kwargs)
    if why := _why_not(model):
        state.note(why)
        return state.author.forward(model, *args, **kwargs)
    state.why_not = None
    stand_in = _StandIn(model)
    try:
        return state.author.forward(stand_in.model, *args, **kwargs)
    finally:
        stand_in.close()


def _why_not(model: FusedHeadLoss) -> str | None:
    """Why the model's head must compute all logits now; None if it need not."""
    name = model._acceler8_head_loss.head
    head = model._modules.get(name)
    if not isinstance(head, nn.Linear) or plain_type(head) is not nn.Linear:
        return f"{name} is a {type(head).__name__}, not nn.Linear itself"
    if why := is_to_be_called(head, gathers=True):
        return f"{name} {why}"
    if any(type(p) is not nn.Parameter for p in head._parameters.values() if p is not None):
        return f"{name} has a parameter that is no plain Parameter"
    if not has_causal_loss(model):
        return "the model's loss_function is not that of Hugging Face's causal language models"
    return None


def has_causal_loss(model: nn.Module) -> bool:
    """True if ``model.loss_function`` is transformers' own ForCausalLMLoss."""
    known = getattr(sys.modules.get("transformers.loss.loss_utils"), "ForCausalLMLoss", None)
    return known is not None and getattr(model, "loss_function", None) is known


class _StandIn:
    """The model for one call: its attributes, with another head and another loss."""

    def __init__(self, model: FusedHeadLoss) -> None:
        state = model._acceler8_head_loss
        self._original, self._state, self._is_running = model, state, True
        self._loss = cast(Callable[..., Tensor], model.loss_function)
        self.model = object.__new__(type(model))  # FSDP2's mixin has a __new__ that constructs
        self._head = cast(nn.Linear, model._modules[state.head])
        modules = {**model._modules, state.head: cast(nn.Module, _Head(self._head, self._on_read))}
        self._before = {**model.__dict__, "_modules": modules, _OWN_LOSS: self._loss_of}
        self.model.__dict__.update(self._before)

    def close(self) -> None:
        """Carry over what the author's forward set on the model."""
        self._is_running = False
        for name, value in self.model.__dict__.items():
            if name not in self._before or value is not self._before[name]:
                self._original.__dict__[name] = value

    def _on_read(self, what: str) -> None:
        if self._is_running:
            self._state.note(f"the model's forward reads the logits ({what.strip('_')})")
        elif self._original.training:
            self._state.note(f"the logits of a forward with labels were read ({what.strip('_')})")

    def _loss_of(self, *args: Any, **kwargs: Any) -> Tensor:
        """``loss_function`` of one call."""
        given = inspect.signature(self._loss).bind(*args, **kwargs)
        options = given.arguments
        logits = options["logits"]
        if isinstance(logits, DeferredLogits):
            labels, why = _shifted(logits, options)
            if labels is not None:
                scale = logits.scale()
                assert scale is not None
                return head_loss(
                    logits.hidden.reshape(-1, logits.hidden.shape[-1]),
                    self._head.weight,
                    labels,
                    bias=self._head.bias,
                    ignore_index=options.get("ignore_index", -100),
                    logit_scale=scale.scale,
                    softcap=scale.cap,
                    num_items=options.get("num_items_in_batch"),
                )
            self._state.note(why)
            logits._on_read = None
            options["logits"] = logits.compute()
        return self._loss(*given.args, **given.kwargs)


def _shifted(logits: DeferredLogits, options: dict[str, Any]) -> tuple[Tensor | None, str]:
    """Labels a token, as ForCausalLMLoss shifts them; None and why if it is not for ``head_loss``."""
    ignored = options.get("ignore_index", -100)
    labels = options.get("shift_labels")
    if labels is None:
        labels = F.pad(options["labels"], (0, 1), value=ignored)[..., 1:]
    if logits.scale() is None:
        return None, "the model does more to its logits than to scale and cap them"
    if options.get("vocab_size") != logits.shape[-1]:
        return None, f"vocab_size={options.get('vocab_size')} is not the head's width {logits.shape[-1]}"
    if labels.numel() != logits.shape.numel() // logits.shape[-1]:
        return None, f"labels {tuple(labels.shape)} do not fit logits {tuple(logits.shape)}"
    return labels.reshape(-1), ""


class _Head:
    """The output head for one call; what it is not called for goes to the head itself."""

    def __init__(self, head: nn.Linear, on_read: Callable[[str], None]) -> None:
        self._own, self._on_read = head, on_read

    def __call__(self, hidden: Tensor) -> Tensor | DeferredLogits:
        device = hidden.device.type
        autocast, weight = torch.is_autocast_enabled(device), self._own.weight
        if hidden.dtype in _DTYPES and weight.dtype in _DTYPES and hidden.device == weight.device:
            if autocast:
                return DeferredLogits(hidden, self._own, torch.get_autocast_dtype(device), (), self._on_read)
            if hidden.dtype is weight.dtype:
                return DeferredLogits(hidden, self._own, weight.dtype, (), self._on_read)
        self._on_read("dtypes or devices differ")
        return cast(Tensor, self._own(hidden))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


_classes: dict[type[nn.Module], type[FusedHeadLoss]] = {}


def fused_head_class(author: type[nn.Module]) -> type[FusedHeadLoss]:
    """The class of models of the author's class, the same one each time. It has that class's name, which configs and
    trainers read, and its forward's signature.
    """
    made = _classes.get(author)
    if made is None:

        @functools.wraps(author.forward)
        def forward(self: FusedHeadLoss, *args: Any, **kwargs: Any) -> Any:
            return _run(self, args, kwargs)

        names = {"__module__": author.__module__, "__qualname__": author.__qualname__, "__doc__": author.__doc__}
        made = type(author.__name__, (FusedHeadLoss, author), {**names, "forward": forward})
        _classes[author] = made
    return made


def _rebuild(author: type[nn.Module]) -> FusedHeadLoss:
    cls = fused_head_class(author)
    return cls.__new__(cls)


def fuse_head(model: nn.Module, head: str) -> None:
    """Change the class of a model; ``head`` is the name of its output head among its children."""
    author = plain_type(model)
    labels_at = list(inspect.signature(author.forward).parameters).index("labels") - 1
    model.__dict__[_STATE] = HeadLossState(author, head, labels_at)
    swap_class(model, author, fused_head_class(author))


def unfuse_head(model: nn.Module) -> None:
    """Give a model its author's class back."""
    state: HeadLossState = model.__dict__.pop(_STATE)
    swap_class(model, fused_head_class(state.author), state.author)


def fused_heads(model: nn.Module) -> Iterator[tuple[str, FusedHeadLoss]]:
    """``(name, module)`` of every model inside ``model`` whose head and loss are one."""
    for name, module in model.named_modules():
        if isinstance(module, FusedHeadLoss):
            yield name, module
