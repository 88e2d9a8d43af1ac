"""What acceler8 asks of a strategy: how a model is spread over processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class Strategy:
    """One process on one device. A strategy of several processes overrides what differs.

    An engine may replace the model's Parameters when it wraps it (shards, flat buffers), and the optimizer. ``wrap``
    is told of the optimizers that are known then, and ``take`` of each one, before it is first used, whichever came
    first; what they return is used from there on.
    """

    name = "single"
    """One of ``acceler8.backends.STRATEGIES``."""
    process_index = 0
    num_processes = 1
    divides_loss = False
    """True if ``backward`` itself divides the loss by the micro-batches of a step."""
    scales_loss = False
    """True if the engine has its own loss scaler, under FP16."""
    is_sharded = False
    """True if no process holds all of the model and its optimizer; ``model_state`` gathers it then."""
    has_dtensors = False
    """True if shards are DTensors, of optimizer state too: checkpoints read and write them shard by shard."""
    is_engine = False
    """True if weights and optimizer state are in an engine's own buffers, and go in and out whole through this."""
    saves_whole = False
    """True if checkpoints shall hold whole tensors though there are DTensors, gathered on process 0."""
    keeps_gradients = False
    """True if gradients of an unfinished step are the engine's, not ``.grad``: checkpoints cannot hold them."""
    keeps_weight_codes = True
    """Whether FP8 codes of whole weights may stay in memory between the micro-batches of a step."""
    compute_dtype: torch.dtype | None = None
    """What 16-bit work runs in; None: full precision. Set before a model is wrapped."""
    num_steps = 1
    """Micro-batches of a step; the Accelerator tells it before it wraps a model."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def expect(self, objects: Sequence[Any]) -> None:
        """Told of all objects of a call of ``prepare`` before any is prepared; may refuse them."""

    def place(self, model: nn.Module) -> None:
        """Bring the model to this process's device, before it is converted. Its Parameters stay the same objects."""
        model.to(self.device)

    def shown_whole(self, model: nn.Module) -> AbstractContextManager[None]:
        """Inside, Parameters have their whole shapes, if not their values: for planning and converting a model."""
        return nullcontext()

    def place_whole(self, model: nn.Module) -> None:
        """Bring a model that is not trained, and so not wrapped, to this process's device."""
        model.to(self.device)

    def checkpoint_activations(self, model: nn.Module) -> None:
        """Let blocks of a converted model recompute their activations in backward, if that is asked of the strategy.
        Before the model is compiled and wrapped.
        """

    def wrap(self, model: nn.Module, optimizers: Sequence[Optimizer] = ()) -> nn.Module:
        """Put around a converted model what keeps replicas or shards in step; returns what the script then calls.

        optimizers: those that were prepared before, and those of the same call of ``prepare``.
        """
        return model

    def take(self, optimizer: Optimizer) -> Optimizer:
        """The optimizer to step in the place of ``optimizer``; it holds the models' Parameters as they now are."""
        return optimizer

    def free(self) -> None:
        """Forget the models and optimizers that were wrapped."""

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The model behind what ``wrap`` put around it; a model that was not wrapped, as it is."""
        return model

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Inside, backward does not exchange gradients."""
        return nullcontext()

    def backward(self, loss: Tensor, *, is_last: bool, **options: Any) -> None:
        """Backward of one micro-batch. ``is_last``: it completes the gradients of a step."""
        loss.backward(**options)

    def clip_grad_norm(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float) -> Tensor:
        """Clip the global gradient norm; returns the norm before clipping."""
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_grad_value(self, parameters: Iterable[Tensor], clip_value: float) -> None:
        """Clip each element of the gradients to ±``clip_value``."""
        torch.nn.utils.clip_grad_value_(parameters, clip_value)

    def agree(self, flag: Tensor) -> None:
        """Make ``flag`` (one number) in place the largest of all processes: what one met, all act on."""

    # State is exchanged with whole tensors, under plain names, whatever the engine keeps. Every process calls these.

    def model_state(self, model: nn.Module) -> dict[str, Any]:
        """The plain ``state_dict``, whole; of a sharded model on process 0 only and on the CPU, elsewhere empty."""
        return self.unwrap(model).state_dict()

    def load_model_state(
        self, model: nn.Module, state: Mapping[str, Any], load: Callable[[nn.Module, Mapping[str, Any]], None]
    ) -> None:
        """Put process 0's ``state`` into the model on all. ``load`` does it for a model that is not sharded."""
        load(self.unwrap(model), state)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The ``state_dict`` of what ``take`` returned, in torch's form; of a sharded model as ``model_state``."""
        return optimizer.state_dict()

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Put process 0's ``state`` into the optimizer on all."""
        optimizer.load_state_dict(dict(state))
