"""Optimizer states (ZeRO-1), gradients (2) and weights (3) spread over processes: DeepSpeed's own engine.

The model is converted first and handed to ``deepspeed.initialize`` afterwards, so every backend's layers run inside the
engine: their Parameters are the ones it partitions. ``bf16`` and ``fp8`` give the engine a BF16 model with FP32
masters; its forward still runs under autocast, as everywhere else, and FP8 layers cast the BF16 weights.

An accumulation window is the Accelerator's: it divides the loss, and says which backward ends a step. The engine steps
where ``optimizer.step()`` is called, which is behind the script's clipping of gradients.

Under ZeRO-3 a weight is whole only while its module runs: the engine's hooks gather it. A fused MLP reads its layers'
weights without calling them, and a fused head loss the head's; the engine gathers what is read inside a forward, and
with that module from then on. It wraps each module's input anew, so q, k and v do not find that they read one
activation, nor the codes that a norm made of it: each runs alone. (Leaf modules, gathered at once, would be another
way; DeepSpeed loses the gradients of those that are called by keyword.) Weight codes are made in each forward and not
kept between micro-batches, for they would hold whole weights on every process; those of ZeRO-1 and 2 are dropped at
each step, as ever.

Source: Rajbhandari et al. 2020, arXiv:1910.02054 (ZeRO); DeepSpeed 0.19's engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from acceler8.errors import ConfigError, GradientError, MissingLibraryError
from acceler8.nn import find_states
from acceler8.optim import StateFormatsOptimizer
from acceler8.parallel.ddp import share_amaxes
from acceler8.parallel.deepspeed_config import CLIPPING, MICRO_BATCH, STEPS, fill, is_on, sizes_of, stage_of, value_at
from acceler8.parallel.deepspeed_optimizer import ZeroOptimizer, make_optimizer
from acceler8.parallel.deepspeed_parts import Parts, is_partitioned, sent_numbers, shape_of
from acceler8.parallel.deepspeed_state import gather_model, scatter_model
from acceler8.parallel.protocol import Strategy

_CASTABLE = (torch.float32, torch.float16, torch.bfloat16)
_TOGETHER = "DeepSpeed builds its engine from one model and its optimizer"


def import_deepspeed(device: torch.device) -> ModuleType:
    """DeepSpeed, on this device. Raises: MissingLibraryError if it is not installed, or does not load."""
    try:
        import deepspeed
        from deepspeed.accelerator import get_accelerator, set_accelerator
    except Exception as error:
        raise MissingLibraryError(
            f"distributed_type DEEPSPEED needs DeepSpeed, which does not load ({error}); pip install"
            " 'acceler8[deepspeed]'"
        ) from error
    if device.type == "cpu":
        if get_accelerator().device_name() != "cpu":
            from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

            set_accelerator(CPU_Accelerator())
        # used for inference alone, and compiled at the start of every process group: minutes, and a compiler
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    found: ModuleType = deepspeed
    return found


class DeepSpeedProcesses(Strategy):
    """The strategy of processes that train with ZeRO. The process group runs already.

    config: DeepSpeed's own configuration, ``"auto"`` where the training decides. where: who gave it, for messages.
    leaf_classes: names of modules that ZeRO-3 gathers whole, mixtures of experts.
    """

    is_engine = True

    def __init__(
        self,
        device: torch.device,
        process_index: int,
        num_processes: int,
        config: Mapping[str, Any],
        *,
        where: str,
        leaf_classes: Sequence[str] = (),
    ) -> None:
        super().__init__(device)
        self.process_index, self.num_processes = process_index, num_processes
        self.config, self.where, self._leaf_classes = dict(config), where, tuple(leaf_classes)
        """``config`` becomes what DeepSpeed was told once the engine runs; a script may write into it before."""
        self._clip: Any = None
        self.stage = stage_of(config)
        self.name = f"zero{self.stage}"
        self.is_sharded = self.stage > 0
        self.keeps_weight_codes, self.keeps_gradients = self.stage < 3, True
        self.scales_loss = is_on(config, "fp16")
        self.engine: Any = None
        self.kept: list[Any] = []
        """What shall live as long as this."""
        self._deepspeed = import_deepspeed(device)
        self._given: Optimizer | None = None
        self._optimizer: ZeroOptimizer | None = None
        self._batch_size: int | None = None
        self._holds = 0

    @property
    def dtype(self) -> torch.dtype | None:
        """What the engine keeps the model's Parameters in; None: as they are."""
        if is_on(self.config, "bf16"):
            return torch.bfloat16
        return torch.float16 if is_on(self.config, "fp16") else None

    def expect(self, objects: Sequence[Any]) -> None:
        """Check that a call of ``prepare`` has what the engine is built from, and note the loaders' batch size."""
        models = [obj for obj in objects if isinstance(obj, nn.Module) and not self._is_known(obj)]
        optimizers = [obj for obj in objects if isinstance(obj, Optimizer) and not self._is_known(obj)]
        if models and self.engine is not None:
            raise ConfigError(
                f"prepare got a second model, a {type(models[0]).__name__}; allowed under DeepSpeed: one, for"
                f" {_TOGETHER}; run a model that is not trained with prepare_model(model, evaluation_mode=True)"
            )
        if (models or optimizers) and (len(models), len(optimizers)) != (1, 1):
            raise ConfigError(
                f"prepare got {len(models)} models and {len(optimizers)} optimizers; allowed under DeepSpeed: one of"
                f" each in the same call, for {_TOGETHER}; prepare them together"
            )
        if optimizers and isinstance(optimizers[0], StateFormatsOptimizer):
            raise ConfigError(
                f"prepare got acceler8.optim.{type(optimizers[0]).__name__}, whose states have formats and scales for"
                " each weight; allowed under DeepSpeed, which steps on flat parts of all weights: an optimizer that"
                " updates each element alone, such as torch.optim.AdamW"
            )
        sizes = [size for obj in objects if isinstance(size := getattr(obj, "batch_size", None), int)]
        self._batch_size = min(sizes, default=self._batch_size)

    def _is_known(self, obj: Any) -> bool:
        return self.engine is not None and (
            obj is self.engine or obj is self.engine.module or obj is self._given or obj is self._optimizer
        )

    def place(self, model: nn.Module) -> None:
        """To the device, and to the engine's dtype: FP8 layers are planned with the dtype that they will have."""
        super().place(model)
        self._cast(model)

    @contextmanager
    def shown_whole(self, model: nn.Module) -> Iterator[None]:
        """Parameters that ``deepspeed.zero.Init`` made have their shapes, of one element's memory each."""
        empty = [p for p in model.parameters() if is_partitioned(p) and p.numel() != shape_of(p).numel()]
        before = [p.data for p in empty]
        for p in empty:
            p.data = torch.zeros(1, dtype=p.dtype, device=p.device).expand(shape_of(p))
        try:
            yield
        finally:
            for p, own in zip(empty, before, strict=True):
                p.data = own

    def _cast(self, model: nn.Module) -> None:
        """Parameters to the engine's dtype, buffers as they are: what the engine does, too."""
        for p in model.parameters():
            if self.dtype is not None and p.dtype in _CASTABLE and p.dtype != self.dtype and not is_partitioned(p):
                p.data = p.data.to(self.dtype)

    def wrap(self, model: nn.Module, optimizers: Sequence[Optimizer] = ()) -> nn.Module:
        """The engine of ``model`` and its optimizer. Raises: ConfigError if there is not one of each."""
        if len(optimizers) != 1:
            raise ConfigError(
                f"DeepSpeed got a model and {len(optimizers)} optimizers; allowed: one of each, for {_TOGETHER};"
                " prepare them in one call"
            )
        self._cast(model)
        optimizer = optimizers[0]
        groups = [list(group["params"]) for group in optimizer.param_groups]
        if self.stage == 3:
            _refuse_numbers(model)
            self._set_leaves(model)
        self._clip = value_at(self.config, CLIPPING)
        filled = fill(self.config, self._known_values(model), self.where)
        self.config.clear()
        self.config.update(filled)
        with sent_numbers(model):
            self.engine, *_ = self._deepspeed.initialize(model=model, optimizer=optimizer, config=dict(filled))
        self._given, self._parts = optimizer, Parts(self.engine, optimizer)
        self._optimizer = make_optimizer(self._parts, groups)
        names = dict(model.named_parameters(remove_duplicate=False))
        for state in find_states(model):
            state.dtypes = {name: names[name].dtype if name in names else was for name, was in state.dtypes.items()}
            share_amaxes(state)
        made: nn.Module = self.engine
        return made

    def _known_values(self, model: nn.Module) -> dict[str, Any]:
        """What ``"auto"`` stands for. Clipping is what the script asks for, so none until it does."""
        micro = self._batch_size or 1
        return sizes_of(model) | {
            MICRO_BATCH: micro,
            STEPS: self.num_steps,
            "train_batch_size": micro * self.num_steps * self.num_processes,
            CLIPPING: 0.0,
            "zero_optimization.stage3_gather_16bit_weights_on_model_save": False,
        }

    def _set_leaves(self, model: nn.Module) -> None:
        """Have ZeRO-3 gather mixtures of experts whole: which experts run differs between processes."""
        for module in model.modules():
            if type(module).__name__ in self._leaf_classes:
                self._deepspeed.utils.set_z3_leaf_module(module, True)

    def take(self, optimizer: Optimizer) -> Optimizer:
        """The optimizer in terms of the model's Parameters. Raises: ConfigError for one without an engine."""
        if self._optimizer is None or optimizer is not self._given:
            raise ConfigError(
                f"prepare got a {type(optimizer).__name__} without its model; allowed under DeepSpeed: both in the same"
                f" call, for {_TOGETHER}"
            )
        return self._optimizer

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The model in the engine."""
        found: nn.Module = model.module if self.engine is not None and model is self.engine else model
        return found

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Inside, no backward ends a step. Stages 2 and 3 exchange gradients all the same: they keep parts only."""
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1

    def backward(self, loss: Tensor, *, is_last: bool, **options: Any) -> None:
        """The engine's backward; the loss is divided already, and scaled by the engine under FP16.

        Raises: GradientError behind a backward that completed a step which was not taken: stages 1 and 2 would forget
            that one's gradients.
        """
        optimizer, is_last = self._optimizer, is_last and not self._holds
        assert optimizer is not None
        if optimizer.is_complete and self.stage in (1, 2):
            raise GradientError(
                f"backward was called again before optimizer.step(); allowed under ZeRO-{self.stage}, which would"
                " forget the first one's gradients: one backward that completes a step; add the losses, or run all but"
                " the last backward under accelerator.no_sync(model) or accumulate"
            )
        self.engine.set_gradient_accumulation_boundary(is_last)
        self.engine.backward(loss, scale_wrt_gas=False, **options)
        optimizer.note_backward(is_last)

    def free(self) -> None:
        """Let go of the engine: another model may come."""
        if self.engine is not None:
            self.engine.destroy()
        self.engine = self._optimizer = self._given = None

    def clip_grad_norm(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float) -> Tensor:
        """Have the engine clip in this step; returns the norm. All parameters of the model count, whichever are given.

        Raises: ConfigError for another norm than the 2-norm, and where DeepSpeed's configuration says another limit.
        """
        said = self._clip
        if said not in (None, "auto", 0, 0.0) and float(said) != float(max_norm):
            raise ConfigError(
                f"clip_grad_norm_ got max_norm {max_norm} and {self.where} {CLIPPING} {said}; allowed: the same number,"
                f' or {CLIPPING} "auto", which leaves it to the script'
            )
        if norm_type != 2:
            raise ConfigError(f"clip_grad_norm_ got norm_type {norm_type}; allowed under DeepSpeed: 2; leave it out")
        assert self._optimizer is not None
        return self._optimizer.clip(float(max_norm))

    def clip_grad_value(self, parameters: Iterable[Tensor], clip_value: float) -> None:
        """Not with DeepSpeed. Raises: ConfigError."""
        raise ConfigError(
            f"clip_grad_value_ got {clip_value}; DeepSpeed keeps gradients in parts of its own and clips their norm"
            " only; use clip_grad_norm_"
        )

    def agree(self, flag: Tensor) -> None:
        """A MAX over ranks, in place."""
        dist.all_reduce(flag, dist.ReduceOp.MAX)

    def model_state(self, model: nn.Module) -> dict[str, Any]:
        """Masters of the weights, in FP32, and buffers, under plain names; on process 0, and at stage 0 on all."""
        return gather_model(self.unwrap(model), self._parts, on_all=not self.is_sharded)

    def load_model_state(
        self, model: nn.Module, state: Mapping[str, Any], load: Callable[[nn.Module, Mapping[str, Any]], None]
    ) -> None:
        """Put process 0's weights into masters and Parameters on all."""
        scatter_model(self.unwrap(model), self._parts, state)


def _refuse_numbers(model: nn.Module) -> None:
    """Raise ConfigError for a Parameter that ZeRO-3 cannot take apart (DeepSpeed 0.19.8 views it as bytes)."""
    if found := next((name for name, p in model.named_parameters() if p.ndim == 0 and not is_partitioned(p)), None):
        raise ConfigError(
            f"prepare got the parameter {found!r} without dimensions; allowed under DeepSpeed's ZeRO-3: one dimension"
            " or more; make it a tensor of shape [1], or choose stage 0, 1 or 2"
        )
