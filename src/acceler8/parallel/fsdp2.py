"""Each process holds a shard of every weight, gradient and optimizer state: PyTorch's FSDP2 (``fully_shard``).

A unit's weights are gathered in front of its forward and its backward and freed behind them (``fsdp2_units`` says what
a unit is). Modules stay the same objects under the same names; Parameters do not, so optimizers get the new ones
(``fsdp2_optimizer``), and acceler8's FP8 layers, which read ``self.weight`` at each call, need nothing.

Precision: parameters, gradients and optimizer states are FP32; weights are gathered in the 16-bit dtype that the model
computes in, and gradients are reduced in FP32, unlike Accelerate's BF16: the sum of N gradients then rounds once, not N
times, as under DDP. Layers cast what was gathered, whole, so scales do not depend on how many processes there are; with
``gathers_fp8`` shards are cast before they travel (``fp8_all_gather``). Codes of whole weights are not kept between the
micro-batches of a step: they would be most of what sharding frees.

With delayed scaling the amaxes of all processes become their maximum at each step boundary, as under DDP.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.optim import Optimizer

from acceler8.backends.torchao import all_gather
from acceler8.backends.torchao.backend import gathers_in_fp8
from acceler8.errors import ConfigError
from acceler8.nn import ModelState, find_states
from acceler8.parallel import fsdp2_gradients as gradients
from acceler8.parallel import fsdp2_whole as whole
from acceler8.parallel.activation_checkpoint import checkpoint_blocks
from acceler8.parallel.ddp import share_amaxes
from acceler8.parallel.fp8_all_gather import gather_in_fp8
from acceler8.parallel.fsdp2_load import Place, fill_from_first, make_empty, places_of, take_from_first
from acceler8.parallel.fsdp2_optimizer import ReplacedParameters, StepGuard
from acceler8.parallel.fsdp2_reshard import gathered_parameters, reshard_without_backward
from acceler8.parallel.fsdp2_units import WrapPolicy, find_blocks_of, find_units
from acceler8.parallel.protocol import Strategy

_log = logging.getLogger("acceler8")


@dataclass(frozen=True, kw_only=True)
class ShardingOptions:
    """How models are sharded."""

    reshard_after_forward: bool = True
    """Free gathered weights behind forward and gather them again for backward; False keeps them until then."""
    shard_size: int | None = None
    """Processes that share one copy of the model; others hold the same shards. None: all."""
    policy: WrapPolicy = field(default_factory=WrapPolicy)
    """What is gathered at once."""
    mixed_precision: MixedPrecisionPolicy | None = None
    """None: parameters in the dtype that the model computes in, gradients reduced in FP32."""
    offloads: bool = False
    """Keep shards, gradients and optimizer states in main memory."""
    ignored: Callable[[nn.Module], list[nn.Module]] | None = None
    """Given a model: its modules that are not sharded."""
    checkpoints_activations: bool = False
    """Units compute their activations again in backward."""
    offloads_activations: bool = False
    """Keep the inputs that they are computed again from in main memory."""
    loads_in_first: bool = False
    """Only process 0 holds the model's weights when it is prepared; the others get theirs from it."""
    gathers_fp8: bool = False
    """Gather weights of the native backend as FP8 codes."""
    saves_whole: bool = False
    """Checkpoints hold whole tensors, gathered in process 0; else each process writes its shards."""


class _Loading(NamedTuple):
    """A model that is on the meta device until it is sharded."""

    before: list[tuple[nn.Parameter, list[Place]]]
    values: list[Tensor | None]


class ShardedProcesses(Strategy):
    """The strategy of several processes that each hold a shard of the model. The process group runs already."""

    name = "fsdp2"
    is_sharded = True
    has_dtensors = True
    keeps_gradients = True  # whole ones of micro-batches that are not reduced yet
    keeps_weight_codes = False

    def __init__(
        self, device: torch.device, process_index: int, num_processes: int, options: ShardingOptions | None = None
    ) -> None:
        super().__init__(device)
        self.process_index, self.num_processes = process_index, num_processes
        self.options = options or ShardingOptions()
        self.saves_whole = self.options.saves_whole
        self._mesh: DeviceMesh | None = None
        self._replaced = ReplacedParameters()
        self._loading: weakref.WeakKeyDictionary[nn.Module, _Loading] = weakref.WeakKeyDictionary()
        self._models: list[weakref.ref[nn.Module]] = []

    @property
    def mesh(self) -> DeviceMesh:
        """The processes as ``("shard",)``, or as ``("replicate", "shard")`` of several copies."""
        if self._mesh is None:
            size = self.options.shard_size or self.num_processes
            if self.num_processes % size:
                raise ConfigError(
                    f"{self.num_processes} processes cannot be divided into copies of {size}; allowed: as many"
                    " processes on each machine; start that many, or shard over all of them (FULL_SHARD)"
                )
            copies = self.num_processes // size
            shape, names = ((size,), ("shard",)) if copies == 1 else ((copies, size), ("replicate", "shard"))
            self._mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=names)
        return self._mesh

    def place(self, model: nn.Module) -> None:
        """To the device. Of a model that only process 0 holds, to the meta device until it is sharded, on all alike, so
        that it is converted as one whose device is not known.
        """
        if isinstance(model, FSDPModule):
            return
        if self.options.loads_in_first:
            self._empty(model)
        else:
            model.to(self.device)

    def place_whole(self, model: nn.Module) -> None:
        """To the device; of a model that only process 0 holds, its values on all."""
        if self.options.loads_in_first:
            fill_from_first(model, [p.detach() for p, _ in places_of(model)], self.device)
        else:
            model.to(self.device)

    def _empty(self, model: nn.Module) -> _Loading:
        """The model without values; its Parameters as they were, and process 0's values."""
        if model not in self._loading:
            before = places_of(model)
            self._loading[model] = _Loading(before, make_empty(model, self.process_index == 0))
        return self._loading[model]

    def checkpoint_activations(self, model: nn.Module) -> None:
        """As the options say; the blocks are the policy's."""
        if not self.options.checkpoints_activations or isinstance(model, FSDPModule):
            return
        blocks = [model.get_submodule(name) for name in find_blocks_of(model, self.options.policy)]
        if not checkpoint_blocks(model, blocks, offloads=self.options.offloads_activations):
            raise ConfigError(
                f"fsdp_activation_checkpointing: {type(model).__name__} has no blocks that could be computed again;"
                " allowed: with a wrap policy that finds some; name their class in fsdp_transformer_layer_cls_to_wrap,"
                " or leave activation checkpointing out"
            )

    # -- sharding

    def wrap(self, model: nn.Module, optimizers: Sequence[Optimizer] = ()) -> nn.Module:
        """Shard ``model`` in place and return it. Parameters and buffers are process 0's on all.

        One that was sharded by hand stays as it is.
        Raises: ConfigError if the processes have different models, or for options that do not fit it.
        """
        if not isinstance(model, FSDPModule):
            loading = self._empty(model) if self.options.loads_in_first else None
            before = places_of(model) if loading is None else loading.before
            self._shard(model, None if loading is None else loading.values)
            self._loading.pop(model, None)
            for old, places in before:
                new = places[0].module._parameters[places[0].key]
                assert new is not None
                self._replaced.note(old, new, places[0].name)
        reshard_without_backward(model)
        self._replaced.add_model(model)
        self._models.append(weakref.ref(model))
        for optimizer in optimizers:
            self._replaced.put_into(optimizer)
        for state in find_states(model):
            share_amaxes(state)
        return model

    def _shard(self, model: nn.Module, held: list[Tensor | None] | None) -> None:
        """held: process 0's values, of a model that is on the meta device."""
        whole.check_same_on_all(model)
        self._raise_to_fp32(model)
        ignored = self._ignored_parameters(model)
        if held is None:
            take_from_first(model)
        ahead = [self._wrap_weights(state, model, ignored) for state in find_states(model)]
        units = find_units(model, self.options.policy, ignored)
        options: dict[str, Any] = {
            "mesh": self.mesh,
            "mp_policy": self._precision(),
            "offload_policy": self._offloading(),
            "ignored_params": ignored,
        }
        reshards = self.options.reshard_after_forward
        for unit in units:
            modules = [model.get_submodule(name) for name in unit.names]
            fully_shard(modules, reshard_after_forward=reshards and not unit.is_tail, **options)
        fully_shard(model, reshard_after_forward=None if reshards else False, **options)
        if held is not None:
            fill_from_first(model, held, self.device)
        for state in find_states(model):
            if self.options.gathers_fp8 and state.backend == "native":
                gather_in_fp8(model)
        for make_scales in filter(None, ahead):
            model.register_forward_pre_hook(make_scales, prepend=True)  # ahead of FSDP2's own, which gathers
        _log.debug("%s: %d units beside the root", type(model).__name__, len(units))

    def _wrap_weights(
        self, state: ModelState, model: nn.Module, ignored: set[nn.Parameter]
    ) -> Callable[..., None] | None:
        """Prepare torchao's all-gather, if its options ask for it; returns what runs ahead of each forward."""
        if state.backend != "torchao" or not gathers_in_fp8(state.plan.options):
            return None
        all_gather.wrap_weights(model, self.mesh.size(-1), ignored)
        return all_gather.make_scales

    def _raise_to_fp32(self, model: nn.Module) -> None:
        """Master weights of a model that computes in 16 bit. FSDP2 wants one dtype for what is trained in a unit."""
        if self.compute_dtype is None:
            return
        raised = {}
        for p, places in places_of(model):
            if p.requires_grad and p.is_floating_point() and p.dtype is not torch.float32:
                p.data = p.data.float()
                raised.update({place.name: torch.float32 for place in places})
        for state in find_states(model):
            state.dtypes.update({name: dtype for name, dtype in raised.items() if name in state.dtypes})
        if raised and self.process_index == 0:
            _log.info("%s: %d parameters were raised to FP32 to be trained", type(model).__name__, len(raised))

    def _precision(self) -> MixedPrecisionPolicy:
        if self.options.mixed_precision is not None:
            return self.options.mixed_precision
        if self.compute_dtype is None:
            return MixedPrecisionPolicy()
        return MixedPrecisionPolicy(param_dtype=self.compute_dtype, reduce_dtype=torch.float32)

    def _offloading(self) -> OffloadPolicy:
        return CPUOffloadPolicy(pin_memory=self.device.type != "cpu") if self.options.offloads else OffloadPolicy()

    def _ignored_parameters(self, model: nn.Module) -> set[nn.Parameter]:
        modules = self.options.ignored(model) if self.options.ignored is not None else []
        return {p for module in modules for p in module.parameters()}

    # -- optimizers

    def take(self, optimizer: Optimizer) -> Optimizer:
        """The same optimizer, holding the Parameters that took the place of those that were sharded. Each step frees
        what is still gathered.
        """
        self._replaced.put_into(optimizer)
        optimizer.register_step_pre_hook(StepGuard(self._replaced))
        return optimizer

    # -- a step

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Inside, gradients add up whole on this process; the first backward outside reduces and shards them."""
        return _without_sync(model) if isinstance(model, FSDPModule) else nullcontext()

    def backward(self, loss: Tensor, *, is_last: bool, **options: Any) -> None:
        """Backward; where it completes a step, gradients that FSDP2 does not manage are averaged too."""
        loss.backward(**options)
        if is_last:
            models = [model for ref in self._models if (model := ref()) is not None]
            managed = {number for model in models for number in gathered_parameters(model)}
            own = {id(p): p for model in models for p in model.parameters()}
            gradients.average_plain(p for number, p in own.items() if number not in managed)

    def clip_grad_norm(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float) -> Tensor:
        """The norm over all shards; the same on every process, which all call this."""
        return gradients.clip_grad_norm(parameters, max_norm, norm_type, self.device)

    def clip_grad_value(self, parameters: Iterable[Tensor], clip_value: float) -> None:
        """Each element of this process's shards."""
        gradients.clip_grad_value(parameters, clip_value)

    def agree(self, flag: Tensor) -> None:
        """A MAX over processes, in place."""
        dist.all_reduce(flag, dist.ReduceOp.MAX)

    # -- state

    def model_state(self, model: nn.Module) -> dict[str, Any]:
        """Whole tensors under plain names, on the CPU in process 0; elsewhere empty."""
        return whole.model_state(model)

    def load_model_state(
        self, model: nn.Module, state: Mapping[str, Any], load: Callable[[nn.Module, Mapping[str, Any]], None]
    ) -> None:
        """Process 0's ``state`` into the shards of all. Raises: CheckpointError on all if it does not fit."""
        whole.load_model_state(model, state)
        for own in find_states(model):
            own.drop_codes()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The form of torch, with whole tensors, on the CPU in process 0; elsewhere empty."""
        return whole.optimizer_state(optimizer)

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Process 0's ``state``, sharded as the Parameters are."""
        whole.load_optimizer_state(optimizer, state)


@contextmanager
def _without_sync(model: FSDPModule) -> Iterator[None]:
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


__all__ = ["ShardedProcesses", "ShardingOptions"]
