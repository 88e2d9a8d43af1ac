"""What an ``Accelerator`` says about itself: processes, precision, and the configuration that holds."""

from __future__ import annotations

import torch

from acceler8.accelerator.precision import PRECISIONS
from acceler8.accelerator.processes import Processes
from acceler8.config.code import RecipeHandlers
from acceler8.config.enums import DistributedType, FP8BackendType
from acceler8.config.handlers import (
    AORecipeKwargs,
    FP8RecipeKwargs,
    MSAMPRecipeKwargs,
    NativeRecipeKwargs,
    TERecipeKwargs,
)
from acceler8.config.sources import Effective
from acceler8.parallel import Strategy


class Properties:
    """The read-only attributes; the names are Hugging Face Accelerate's."""

    effective: Effective
    """The values that hold, each with the source that won."""
    mixed_precision: str
    processes: Processes
    strategy: Strategy
    handlers: RecipeHandlers
    _fp8_backend: FP8BackendType

    @property
    def device(self) -> torch.device:
        """Where this process's models and batches are."""
        return self.processes.device

    @property
    def num_processes(self) -> int:
        """Processes that train together."""
        return self.processes.num_processes

    @property
    def process_index(self) -> int:
        """Number of this process, from 0."""
        return self.processes.process_index

    @property
    def local_process_index(self) -> int:
        """Number of this process on its machine, from 0."""
        return self.processes.local_process_index

    @property
    def is_main_process(self) -> bool:
        """True in the process that prints and writes."""
        return self.processes.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """True in the first process of each machine."""
        return self.processes.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        """True in the process with the highest number."""
        return self.processes.process_index == self.processes.num_processes - 1

    @property
    def use_distributed(self) -> bool:
        """True if there are several processes."""
        return self.processes.num_processes > 1

    @property
    def distributed_type(self) -> DistributedType:
        """How processes train together."""
        engine = self.effective["distributed_type"]
        if engine == "DEEPSPEED" or self.strategy.name == "fsdp2":
            return DistributedType(engine)
        if self.num_processes == 1:
            return DistributedType.NO
        return DistributedType.MULTI_GPU if self.device.type == "cuda" else DistributedType.MULTI_CPU

    @property
    def compute_dtype(self) -> torch.dtype:
        """What 16-bit work runs in, and what a frozen model should be cast to: bf16 under ``fp8``."""
        return PRECISIONS[self.mixed_precision] or torch.float32

    @property
    def fp8_enabled(self) -> bool:
        """True if models are trained in FP8."""
        return self.mixed_precision == "fp8"

    @property
    def fp8_backend(self) -> FP8BackendType:
        """Who computes FP8; NO without ``fp8``."""
        return self._fp8_backend

    @property
    def has_fp8_handler(self) -> bool:
        """True if a recipe object was given in ``kwargs_handlers``."""
        return bool(self.handlers.found)

    @property
    def fp8_recipe_handler(self) -> FP8RecipeKwargs | None:
        """The deprecated recipe object, if it was given."""
        return self.handlers.fp8

    @property
    def ao_recipe_handler(self) -> AORecipeKwargs | None:
        """The torchao recipe object, if it was given."""
        return self.handlers.ao

    @property
    def te_recipe_handler(self) -> TERecipeKwargs | None:
        """The TransformerEngine recipe object, if it was given."""
        return self.handlers.te

    @property
    def msamp_recipe_handler(self) -> MSAMPRecipeKwargs | None:
        """The MS-AMP recipe object, if it was given."""
        return self.handlers.msamp

    @property
    def native_recipe_handler(self) -> NativeRecipeKwargs | None:
        """The native recipe object, if it was given."""
        return self.handlers.native

    @property
    def delayed_fp8_autocast(self) -> bool:
        """True if FP8 is entered around a model that DDP or FSDP has wrapped already, as TransformerEngine needs."""
        spread = (DistributedType.MULTI_GPU, DistributedType.FSDP)
        return self.fp8_backend is FP8BackendType.TE and self.distributed_type in spread
