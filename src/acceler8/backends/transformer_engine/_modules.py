"""TransformerEngine's modules as classes that a plain module can be changed to.

Importing this file imports TransformerEngine, so only functions of this package that run with it do. What is added to
its classes: the policy of acceler8's layers (FP8 in training, in their window of steps, by their own recipe, whoever
calls), padding of tokens, weight codes that last over micro-batches, gradients in high precision where the recipe wants
them, and nothing in ``state_dict``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import transformer_engine.pytorch as te
from torch import Tensor, nn
from torch.nn import functional as F

from acceler8.backends.transformer_engine.high_precision import with_gradients
from acceler8.backends.transformer_engine.histories import AmaxHistories, keep_out
from acceler8.backends.transformer_engine.region import Region
from acceler8.backends.transformer_engine.weight_cache import WeightCache
from acceler8.errors import HardwareError
from acceler8.nn import LayerState, NormKind
from acceler8.nn.class_change import AuthorsClass
from acceler8.scaling import Schedule

_EXTRA = "_extra_state"
_SIDES = ("scaling_fwd", "scaling_bwd")
MULTIPLE = 16  # of tokens, in every per-tensor recipe: the K of wgrad's GEMM


@dataclass
class TeLayerState(LayerState):
    """State of one layer that TransformerEngine computes."""

    te_recipe: Any = None
    """TransformerEngine's recipe object, one for all layers that share a recipe."""
    region: Region | None = None
    multiple: int = MULTIPLE
    """Tokens are padded to this."""
    dgrad: bool = True
    wgrad: bool = True
    """False: that gradient is computed in high precision."""
    cache: WeightCache = field(default_factory=WeightCache)
    histories: AmaxHistories | None = None
    """Of the model, under delayed scaling."""

    @property
    def keeps_history(self) -> bool:
        """True under delayed scaling."""
        return self.histories is not None


class TeLinear(te.Linear, nn.Linear):  # type: ignore[misc]
    """An ``nn.Linear`` that TransformerEngine computes. Made by conversion, not constructed.

    Shape: [..., in_features] -> [..., out_features] on a CUDA device; any number of tokens.
    Without a layer state (``acceler8.utils.convert_model``) it is ``te.Linear``, FP8 inside ``te.autocast`` alone.
    """

    _acceler8_layer: TeLayerState
    fp8_meta: dict[str, Any]
    fp8_initialized: bool
    init_fp8_metadata: Callable[[], None]
    _fp8_workspaces: dict[str, Any]

    # nothing of TransformerEngine in a state_dict, nor missed in one
    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state

    def forward(self, input: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        """``input @ weight.T + bias`` by the layer's recipe, in high precision where that is off now."""
        state: TeLayerState | None = self.__dict__.get("_acceler8_layer")
        if state is None:
            return self._padded(input, MULTIPLE, is_first_microbatch)
        training = self.training
        if training and not torch.compiler.is_compiling():
            state.count_unmarked_call()
        if not state.is_fp8(training):
            return F.linear(input, self.weight, self.bias)
        if not training:
            return self._without_trace(input, state)
        first = state.cache.is_first(cast(Tensor, self._parameters["weight"]), self._fp8_workspaces)
        return self._in_fp8(input, state, first)

    def _in_fp8(self, input: Tensor, state: TeLayerState, first: bool | None) -> Tensor:
        if not input.is_cuda:
            raise HardwareError(
                f"layer {state.name!r} got an input on {input.device}; TransformerEngine computes FP8 on CUDA devices"
                " alone; move model and input there, or call acceler8.restore(model)"
            )
        if "_acceler8_pending" in self.__dict__:
            self.initialise()
        assert state.region is not None
        with state.region:
            return self._padded(input, state.multiple, first)

    def _padded(self, input: Tensor, multiple: int, first: bool | None) -> Tensor:
        """With rows of zeros behind the tokens, which change no amax, get no gradient and are cut off again."""
        width = input.shape[-1]
        tokens = input.numel() // width if width else 0
        if not tokens:
            return F.linear(input, self.weight, self.bias)
        filler = -tokens % multiple
        if not filler:
            return self._gemms(input, first)
        y = self._gemms(F.pad(input.reshape(tokens, width), (0, 0, 0, filler)), first)
        return y[:tokens].view(*input.shape[:-1], y.shape[-1])

    def _gemms(self, x: Tensor, first: bool | None) -> Tensor:
        state: TeLayerState | None = self.__dict__.get("_acceler8_layer")
        if state is None or (state.dgrad and state.wgrad) or not torch.is_grad_enabled():
            return cast(Tensor, te.Linear.forward(self, x, is_first_microbatch=first))
        weight, bias = self.weight, self.bias
        if not state.dgrad and not state.wgrad:
            with torch.no_grad():
                y = te.Linear.forward(self, x, is_first_microbatch=first)
            return with_gradients(y, x, weight, bias)
        if state.dgrad:
            y = te.Linear.forward(self, x, is_first_microbatch=first)
            return with_gradients(y, x.detach(), weight)
        y = te.Linear.forward(self, x.detach(), is_first_microbatch=first)
        return with_gradients(y, x, weight.detach())

    def _get_weight_tensors(self) -> list[Tensor]:
        weights: list[Tensor] = super()._get_weight_tensors()
        state: TeLayerState | None = self.__dict__.get("_acceler8_layer")
        return weights if state is None or state.wgrad else [weight.detach() for weight in weights]

    def _without_trace(self, input: Tensor, state: TeLayerState) -> Tensor:
        """In FP8 with codes made for this call alone, and the amax that it sees not kept for training's scales."""
        row = None
        if state.histories is not None and self.fp8_initialized:
            row = self.fp8_meta["scaling_fwd"].amax_history[0]
            before = row.clone()
        y = self._in_fp8(input, state, None)
        if row is not None:
            row.copy_(before)
        elif state.histories is not None and self.fp8_initialized:
            self.fp8_meta["scaling_fwd"].amax_history[0].zero_()
        return y

    def expected_output(self, x: Tensor) -> Tensor:
        """What a forward in training gives for ``x`` with codes made afresh. Changes no state."""
        with torch.no_grad():
            return self._without_trace(x, self._acceler8_layer)

    def initialise(self) -> None:
        """Make the scales and amax histories now, which the first forward does otherwise."""
        weight, state = self.weight, self._acceler8_layer
        assert state.region is not None
        with torch.cuda.device(weight.device) if weight.is_cuda else nullcontext(), state.region:
            self.init_fp8_metadata()
        for key, tensors in self.__dict__.pop("_acceler8_pending", {}).items():
            for name, value in tensors.items():
                getattr(self.fp8_meta[key], name).copy_(value)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        out = super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]
        if (state := self.__dict__.get("_acceler8_layer")) is not None:
            state.cache.drop()
        return out

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        state_dict.pop(prefix + _EXTRA, None)  # of a checkpoint that TransformerEngine's own modules wrote
        if (state := self.__dict__.get("_acceler8_layer")) is not None:
            state.cache.drop()
        nn.Linear._load_from_state_dict(self, state_dict, prefix, *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        """A copy makes its quantisers anew, and goes on with copies of the histories."""
        kept = dict(self.__dict__)
        if "_acceler8_layer" not in kept:
            return kept
        if self._acceler8_layer.histories is not None and self.fp8_initialized:
            kept["_acceler8_pending"] = {
                key: {name: getattr(self.fp8_meta[key], name).clone() for name in ("amax_history", "scale")}
                for key in _SIDES
            }
        meta = {"fp8_checkpoint": False, "fp8_group": None}
        if self._acceler8_layer.histories is not None:
            keep_out(meta)
        kept |= {"_fp8_workspaces": {}, "fp8_meta": meta, "quantizers": {key: [] for key in _SIDES}}
        return kept | {"fp8_initialized": False, "fp8_meta_tensors_initialized": False}

    def extra_repr(self) -> str:
        """The plain layer's description and the recipe."""
        state = self.__dict__.get("_acceler8_layer")
        by = "" if state is None else f", fp8={state.recipe.name}"
        return f"{nn.Linear.extra_repr(self)}, transformer_engine{by}"


@dataclass
class TeNormState:
    """What a norm knows that TransformerEngine computes. Plain data."""

    name: str
    kind: NormKind | None
    author: type[nn.Module]
    """The class that the module had."""
    schedules: list[Schedule] = field(default_factory=list)
    """Of the FP8 layers of the model; if all of them are off, the author's forward runs."""
    always: bool = False
    """TransformerEngine's forward runs in evaluation too (``acceler8.utils.convert_model``)."""


class _Norm(nn.Module):
    """What both norms add: TransformerEngine's in training, in FP8's window; the author's own forward elsewhere."""

    _acceler8_te_norm: TeNormState

    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state

    def _is_on(self, x: Any) -> bool:
        state = self._acceler8_te_norm
        if not (self.training or state.always) or type(x) is not Tensor or not x.is_cuda or not x.numel():
            return False
        if state.schedules and not any(schedule.is_on for schedule in state.schedules):
            return False
        weight = self._parameters["weight"]
        return torch.is_autocast_enabled("cuda") or (weight is not None and x.dtype is weight.dtype)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        state_dict.pop(prefix + _EXTRA, None)
        self._acceler8_te_norm.author._load_from_state_dict(self, state_dict, prefix, *args, **kwargs)


class TeLayerNorm(_Norm, te.LayerNorm):  # type: ignore[misc]
    """Mixin in front of the author's LayerNorm."""

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """What the author's forward computes."""
        if args or kwargs or not self._is_on(input):
            return cast(Tensor, self._acceler8_te_norm.author.forward(self, input, *args, **kwargs))
        return cast(Tensor, te.LayerNorm.forward(self, input))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return layer_norms.rebuild, (self._acceler8_te_norm.author,), self.__dict__


class TeRMSNorm(_Norm, te.RMSNorm):  # type: ignore[misc]
    """Mixin in front of the author's RMSNorm."""

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """What the author's forward computes."""
        if args or kwargs or not self._is_on(input):
            return cast(Tensor, self._acceler8_te_norm.author.forward(self, input, *args, **kwargs))
        return cast(Tensor, te.RMSNorm.forward(self, input))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return rms_norms.rebuild, (self._acceler8_te_norm.author,), self.__dict__


layer_norms = AuthorsClass(TeLayerNorm, prefix="Te")
rms_norms = AuthorsClass(TeRMSNorm, prefix="Te")
