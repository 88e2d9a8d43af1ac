"""The loop's side of ``Accelerator``: loaders, accumulation, and inputs that run out on some processes first."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import nn
from torch.distributed.algorithms.join import Join
from torch.utils.data import DataLoader

from acceler8.accelerator.gradients import GradientState
from acceler8.accelerator.loader import AcceleratedLoader, LoaderContext, prepare_loader
from acceler8.accelerator.loss_scaler import LossScaler
from acceler8.accelerator.optimizer import AcceleratedOptimizer
from acceler8.accelerator.processes import Processes
from acceler8.config.run_handlers import DataLoaderConfiguration, GradientAccumulationPlugin
from acceler8.errors import ConfigError, NotInThisVersionError
from acceler8.nn import keeps_history
from acceler8.nn.gradients import GradientWindow, set_windows
from acceler8.parallel import Strategy

_log = logging.getLogger("acceler8")


class Accumulation:
    """Names are Hugging Face Accelerate's."""

    processes: Processes
    gradients: GradientState
    strategy: Strategy
    scaler: LossScaler | None
    dataloader_config: DataLoaderConfiguration
    """How ``prepare`` spreads loaders over processes; read when a loader is prepared."""
    _optimizers: list[AcceleratedOptimizer]
    _loader_context: LoaderContext
    _dataloaders: list[AcceleratedLoader]
    _windows: list[GradientWindow]

    @property
    def gradient_state(self) -> GradientState:
        """Where the loop stands in its accumulation window, and in its loader."""
        return self.gradients

    @property
    def sync_gradients(self) -> bool:
        """True in the micro-batch whose backward completes a step."""
        return self.gradients.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self.gradients.sync_gradients = value

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """True if an optimizer did not make its last step, for a gradient was NaN or inf (FP16 only)."""
        return any(optimizer.step_was_skipped for optimizer in self._optimizers)

    @property
    def split_batches(self) -> bool:
        """True if each process takes its part of every batch."""
        return self.dataloader_config.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """True if rank 0 reads for all; None: for iterable datasets only."""
        return self.dataloader_config.dispatch_batches

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Inside, backward does not exchange gradients between processes; FP8 gradients add up before they are some."""
        opened = [window for window in self._windows if not window.is_open]
        set_windows(opened, is_open=True)
        try:
            with self.strategy.no_sync(model):
                yield
        finally:
            set_windows(opened, is_open=False)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> AcceleratedLoader:
        """A loader of the same batches without this process's first ``num_batches``, for an epoch that is resumed.

        Indices are skipped without loading samples; streams are read and dropped. ``dataloader`` itself stays whole.
        A loader that was not prepared is not divided, nor moved to a device.
        """
        if isinstance(dataloader, DataLoader):
            alone = LoaderContext(
                processes=Processes(self.processes.device),
                gradients=self.gradients,
                config=DataLoaderConfiguration(),
                device=None,
            )
            dataloader = prepare_loader(dataloader, alone)
        other: AcceleratedLoader = dataloader.skipping(num_batches)
        return other

    @contextmanager
    def join_uneven_inputs(self, joinables: Iterable[Any], even_batches: bool | None = None) -> Iterator[None]:
        """Inside, a process that runs out of batches first takes part in the others' exchanges until all are done.

        joinables: prepared models. ``even_batches`` overrides the loaders' inside; where they are even nothing has
        to be joined. With one process the block just runs.
        Raises: NotInThisVersionError for delayed scaling and FP16, whose own exchanges a process that ended would miss,
            and for FSDP2 and DeepSpeed.
        """
        joinables = list(joinables)
        if self.processes.num_processes == 1:
            yield
            return
        is_even = self.dataloader_config.even_batches if even_batches is None else even_batches
        if not is_even:
            self._check_can_join(joinables)
        elif self.strategy.is_sharded or self.strategy.is_engine:
            _log.warning(
                "join_uneven_inputs joins nothing under %s: every process must make as many steps", self.strategy.name
            )
        changed = []
        for loader in self._dataloaders:
            batches = loader.batches
            if even_batches is not None and batches is not None:
                changed.append((batches, batches.even_batches))
                batches.even_batches = even_batches
        try:
            with Join(joinables, throw_on_early_termination=False) if joinables and not is_even else nullcontext():
                yield
        finally:
            for batches, before in changed:
                batches.even_batches = before

    def _check_can_join(self, joinables: list[Any]) -> None:
        if self.strategy.is_sharded or self.strategy.is_engine:
            raise NotInThisVersionError(
                f"join_uneven_inputs got uneven batches and the strategy {self.strategy.name!r}, whose every forward"
                " and backward needs all processes; allowed: even batches, or the strategy 'ddp'; keep"
                " even_batches=True, and gather_for_metrics drops the copies, or set drop_last=True"
            )
        models = [model for model in joinables if isinstance(model, nn.Module)]
        delayed = any(keeps_history(model) for model in models)
        if delayed or self.scaler is not None:
            what = "the recipe 'delayed'" if delayed else "mixed_precision='fp16'"
            raise NotInThisVersionError(
                f"join_uneven_inputs got uneven batches and {what}, which exchanges numbers of its own at every step;"
                " allowed: recipes of current scaling, and bf16; or keep even_batches=True, and gather_for_metrics"
                " drops the copies"
            )


def make_loader_config(
    config: DataLoaderConfiguration | None, split_batches: bool | None, even_batches: bool | None
) -> DataLoaderConfiguration:
    """The object or the arguments that are short for it. Raises: ConfigError if both are given, or it is another."""
    short = {name: v for name, v in (("split_batches", split_batches), ("even_batches", even_batches)) if v is not None}
    if config is None:
        return DataLoaderConfiguration(**short)
    if not isinstance(config, DataLoaderConfiguration):
        raise ConfigError(
            f"dataloader_config got a {type(config).__name__}; allowed: acceler8.utils.DataLoaderConfiguration"
        )
    if short:
        name = next(iter(short))
        raise ConfigError(f"Accelerator got dataloader_config and {name}=; allowed: one of them; move {name} into it")
    return config


def make_gradient_state(plugin: GradientAccumulationPlugin | None, num_steps: int) -> GradientState:
    """From the plugin, if it is given."""
    if plugin is None:
        return GradientState(num_steps=num_steps)
    return GradientState(
        num_steps=num_steps,
        sync_with_dataloader=plugin.sync_with_dataloader,
        sync_each_batch=plugin.sync_each_batch,
    )
