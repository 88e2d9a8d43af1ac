"""The small members of ``Accelerator`` that scripts read, set or call now and then; names are Accelerate's.

Which members there are, and what takes the place of those that are not, is the table in ``acceler8.compat``.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from acceler8 import levels
from acceler8.accelerator.loader import AcceleratedLoader, LoaderContext
from acceler8.accelerator.loss_scaler import LossScaler
from acceler8.accelerator.optimizer import AcceleratedOptimizer
from acceler8.accelerator.precision import PRECISIONS, wrap_forward
from acceler8.accelerator.processes import Processes
from acceler8.accelerator.state import State
from acceler8.config.enums import FP8BackendType, PrecisionType
from acceler8.config.profile import ProfileKwargs
from acceler8.config.run_handlers import DataLoaderConfiguration
from acceler8.errors import ConfigError, NotInThisVersionError, RecipeError, unknown_name
from acceler8.levels.clip import has_stored
from acceler8.parallel import Strategy
from acceler8.recipes import LayerRecipes, Recipe
from acceler8.scaling import StepClock

OUTPUT_DTYPES = ("fp32", "compute")
# Constructor arguments of Accelerate that must be None, and what to do instead.
REFUSED = {
    "megatron_lm_plugin": "use distributed_type FSDP or DEEPSPEED for models that do not fit one GPU",
    "torch_tp_plugin": "use distributed_type FSDP; tensor parallelism is not offered",
    "parallelism_config": "use distributed_type FSDP or several processes that each hold the model",
    "deepspeed_plugins": "give one deepspeed_plugin",
}

_RANK = "data is split over all processes, and no model by layer or row; use process_index"
# Members of Accelerate's class that are not here, and what to do instead.
ABSENT = {
    "context_parallel_rank": _RANK,
    "data_parallel_rank": _RANK,
    "data_parallel_shard_rank": _RANK,
    "deepspeed_ulysses_dl_adapter": "sequence parallelism is not offered; use prepare for the loader",
    "flag_tensor": "use set_trigger and check_trigger",
    "has_lomo_optimizer": "LOMO is not offered; use an optimizer of torch.optim",
    "lomo_backward": "LOMO is not offered; use backward and an optimizer of torch.optim",
    "maybe_context_parallel": "context parallelism is not offered; leave it out",
    "pipeline_parallel_rank": _RANK,
    "tensor_parallel_rank": _RANK,
    "trigger_sync_in_backward": "leave no_sync before the backward that averages gradients, or use accumulate",
}


def refuse_arguments(**arguments: Any) -> None:
    """Raise NotInThisVersionError for an argument in ``REFUSED`` that is not None."""
    for name, value in arguments.items():
        if value is not None:
            raise NotInThisVersionError(f"Accelerator got {name}, which this version cannot run; {REFUSED[name]}")


class Surface:
    """One part of ``Accelerator``."""

    processes: Processes
    clock: StepClock
    gradients: Any
    scaler: LossScaler | None
    recipe: Recipe | LayerRecipes | None
    backend: str
    dataloader_config: DataLoaderConfiguration
    profile_handler: ProfileKwargs | None
    output_dtype: str
    strategy: Strategy
    _fp8_backend: FP8BackendType
    _gemms: str | None
    level: levels.Level | None
    _models: list[nn.Module]
    _optimizers: list[AcceleratedOptimizer]
    _schedulers: list[Any]
    _dataloaders: list[AcceleratedLoader]
    _loader_context: LoaderContext
    _native_amp: bool = True

    if not TYPE_CHECKING:  # a type checker reports unknown members itself

        def __getattr__(self, name: str) -> Any:
            """Say what takes the place of a member of Accelerate's that is not here."""
            if name in ABSENT:
                raise AttributeError(f"Accelerator has no {name}: {ABSENT[name]}")
            return object.__getattribute__(self, name)  # raises, as without this method

    def _start_surface(self, output_dtype: str, profile_handler: ProfileKwargs | None) -> None:
        """Take the constructor's arguments."""
        if output_dtype not in OUTPUT_DTYPES:
            raise ConfigError(unknown_name("output_dtype", output_dtype, OUTPUT_DTYPES))
        self.output_dtype, self.profile_handler = output_dtype, profile_handler

    @property
    def mixed_precision(self) -> str:
        """``no``, ``fp16``, ``bf16`` or ``fp8``. May be set to another word but ``fp8`` before anything is prepared.

        Raises: RecipeError for an unknown word; ConfigError for a change that comes too late, or to ``fp8``.
        """
        return self._mixed_precision

    @mixed_precision.setter
    def mixed_precision(self, value: str) -> None:
        if value not in PrecisionType:
            raise RecipeError(unknown_name("mixed_precision", value, PRECISIONS))
        word = PrecisionType(value).value
        before: str | None = self.__dict__.get("_mixed_precision")
        if before is not None and word != before:
            if word == "fp8":
                raise ConfigError(
                    f"mixed_precision was set to 'fp8' on an Accelerator made for {before!r}; allowed: no, fp16, bf16;"
                    " write Accelerator(mixed_precision='fp8'), which picks recipe and backend"
                )
            strategy = self.__dict__.get("strategy")
            if strategy is not None and strategy.is_engine:
                raise ConfigError(
                    f"mixed_precision was set to {word!r} under DeepSpeed, whose configuration was made for {before!r};"
                    f" write Accelerator(mixed_precision={word!r})"
                )
            if self._models or self._optimizers:
                raise ConfigError(
                    f"mixed_precision was set to {word!r} after prepare, which used {before!r}; set it before, or in"
                    " the constructor"
                )
        self._mixed_precision = word
        if before is not None and word != before:
            self.recipe, self._fp8_backend, self.backend = None, FP8BackendType.NO, FP8BackendType.NO.value.lower()
            self._gemms = self.level = None
            self.scaler = self._loss_scaler()  # type: ignore[attr-defined]

    @property
    def native_amp(self) -> bool:
        """True if prepared models run under ``torch.autocast``. Set to False, before ``prepare``, to leave it out."""
        return self._native_amp and self.mixed_precision != "no"

    @native_amp.setter
    def native_amp(self, value: bool) -> None:
        self._native_amp = bool(value)

    @property
    def _autocast_dtype(self) -> torch.dtype | None:
        return PRECISIONS[self.mixed_precision] if self.native_amp else None

    def _wrap_forward(self, model: nn.Module) -> None:
        options = self._autocast_options(None)  # type: ignore[attr-defined]
        raises = self.output_dtype == "fp32"
        wrap_forward(model, self.processes.device.type, self._autocast_dtype, options, raises_outputs=raises)

    @property
    def state(self) -> State:
        """Processes, device and precision in one object to print."""
        return State(self)

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches a step; set it between two steps. Raises: ConfigError for what is no integer from 1."""
        steps: int = self.gradients.num_steps
        return steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, value: int) -> None:
        if type(value) is not int or value < 1:
            raise ConfigError(f"gradient_accumulation_steps={value!r}; allowed: an integer from 1")
        self.gradients.num_steps = value

    @property
    def even_batches(self) -> bool:
        """True if a short tail is completed; set it before loaders are prepared."""
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self.dataloader_config.even_batches = bool(value)

    @property
    def step(self) -> int:
        """Micro-batches since the accumulation windows were last aligned."""
        count: int = self.gradients.micro_batch
        return count

    @step.setter
    def step(self, value: int) -> None:
        self.gradients.micro_batch = value

    @property
    def non_blocking(self) -> bool:
        """True if batches are copied to the device without waiting."""
        return self.dataloader_config.non_blocking

    @property
    def use_seedable_sampler(self) -> bool:
        """True if loaders shuffle by a seed and the epoch's number."""
        return self.dataloader_config.use_seedable_sampler

    @property
    def use_stateful_dataloader(self) -> bool:
        """What the configuration says; prepared loaders are resumable either way."""
        return self.dataloader_config.use_stateful_dataloader

    @property
    def rng_types(self) -> tuple[str, ...]:
        """The random states that become rank 0's when an epoch begins."""
        return tuple(self._loader_context.rng_types)

    @property
    def multi_device(self) -> bool:
        """True if several processes train, each on a GPU."""
        return self.processes.num_processes > 1 and self.processes.device.type == "cuda"

    @property
    def should_save_model(self) -> bool:
        """True in the process of each machine that writes models."""
        return self.processes.local_process_index == 0

    @property
    def is_fsdp2(self) -> bool:
        """True if models are sharded by FSDP2."""
        return self.strategy.name == "fsdp2"

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """True if models are sharded by FSDP2."""
        return self.is_fsdp2

    @property
    def parallelism_config(self) -> None:
        """None: no mesh of several kinds of parallelism."""
        return None

    @property
    def torch_device_mesh(self) -> None:
        """None: no mesh of several kinds of parallelism."""
        return None

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Bring gradients of this optimizer, or list, or of all, to their own units, once a step (FP16 only)."""
        if optimizer is None:
            asked = list(self._optimizers)
        else:
            asked = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
        for one in asked:
            known = [mine for mine in self._optimizers if one is mine or one is mine.optimizer]
            if not known:
                raise ConfigError(f"unscale_gradients got a {type(one).__name__} that was not prepared; prepare it")
            known[0].unscale()

    def clip_grad_norm_(self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the global norm of gradients to ``max_norm``; returns the norm before clipping, also under FP16.

        Inside an accumulation window it clips what has added up so far, in every precision alike: FP16's gradients stay
        scaled there, for more are added, and are compared with ``max_norm`` times the scale.
        """
        scale = self._gradient_scale()
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if has_stored(parameters):
            return levels.clip_grad_norm_(parameters, max_norm, norm_type)
        return self.strategy.clip_grad_norm(parameters, max_norm * scale, norm_type) / scale

    def clip_grad_value_(self, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
        """Clip each gradient element to ±``clip_value``; under FP16 and inside a window as ``clip_grad_norm_``."""
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if has_stored(parameters):
            levels.clip_grad_value_(parameters, clip_value)
            return
        self.strategy.clip_grad_value(parameters, clip_value * self._gradient_scale())

    def _gradient_scale(self) -> float:
        """What gradients are multiplied by: 1 but in the middle of an FP16 window; where it ends they are unscaled."""
        if self.scaler is None:
            return 1.0
        asked = [one.optimizer for one in self._optimizers]
        if self.gradients.sync_gradients or any(map(self.scaler.is_unscaled, asked)):
            self.unscale_gradients()
            return 1.0
        return self.scaler.current_scale()

    @contextmanager
    def profile(self, profile_handler: ProfileKwargs | None = None) -> Iterator[torch.profiler.profile]:
        """Record what runs inside with ``torch.profiler``; yields the profiler.

        Settings are the argument's, else those of a ``ProfileKwargs`` in ``kwargs_handlers``, else its defaults. With
        an ``output_trace_dir`` each process writes its trace there and waits for the others.
        """
        handler = profile_handler or self.profile_handler or ProfileKwargs()
        with handler.build() as profiler:
            yield profiler
        if handler.output_trace_dir is not None:
            folder = Path(handler.output_trace_dir).expanduser()
            folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(folder / f"profile_{self.processes.process_index}.json"))
            self.processes.wait()

    def free_memory(self, *objects: Any) -> list[None]:
        """Forget everything that was prepared, and empty the GPU's cache: between two trainings in one process.

        Returns a None for each object: ``model, optimizer = accelerator.free_memory(model, optimizer)``. Memory is free
        once no name of the script's holds an object any more. Registered objects and hooks stay.
        """
        count = len(objects)
        del objects
        for kept in (self._models, self._optimizers, self._schedulers, self._dataloaders):
            kept.clear()
        self.strategy.free()
        clock, self.clock = self.clock, StepClock()  # a clock holds those that it calls
        self.clock.ticks = clock.ticks
        self.gradients.micro_batch, self.gradients.sync_gradients = 0, True
        gc.collect()
        if self.processes.device.type == "cuda":
            torch.cuda.empty_cache()
        return [None] * count

    def clear(self, *objects: Any) -> list[None]:
        """``free_memory``."""
        return self.free_memory(*objects)
