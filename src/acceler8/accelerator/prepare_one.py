"""``prepare`` for one object of a known kind, and the check of models that a device map has spread out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from acceler8.accelerator.loader import AcceleratedLoader, LoaderContext
from acceler8.accelerator.optimizer import AcceleratedOptimizer
from acceler8.accelerator.processes import Processes
from acceler8.errors import ConfigError, NotInThisVersionError
from acceler8.parallel import Strategy


class PrepareOne:
    """One part of ``Accelerator``; names are Hugging Face Accelerate's."""

    processes: Processes
    strategy: Strategy
    device_placement: bool
    _loader_context: LoaderContext

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """``prepare`` for one model. ``device_placement`` False leaves it where it is.

        ``evaluation_mode`` is for a model that is not trained, such as a reference: it is placed and run under
        autocast, without FP8 and without being kept equal between processes, and is no part of checkpoints.
        """
        if evaluation_mode:
            self.verify_device_map(model)
            if self.device_placement if device_placement is None else device_placement:
                self.strategy.place_whole(model)
            self._wrap_forward(model)  # type: ignore[attr-defined]
            return model
        with self._placement(device_placement):
            prepared: nn.Module = self.prepare(model)  # type: ignore[attr-defined]
        return prepared

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> AcceleratedOptimizer:
        """``prepare`` for one optimizer; its state follows its Parameters, whatever ``device_placement`` says."""
        prepared: AcceleratedOptimizer = self.prepare(optimizer)  # type: ignore[attr-defined]
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """``prepare`` for one scheduler."""
        return self.prepare(scheduler)  # type: ignore[attr-defined]

    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> AcceleratedLoader:
        """``prepare`` for one DataLoader. ``device_placement`` False leaves batches on the CPU.

        Raises: NotInThisVersionError for a ``slice_fn_for_dispatch``.
        """
        if slice_fn_for_dispatch is not None:
            raise NotInThisVersionError(
                "prepare_data_loader got slice_fn_for_dispatch, which is not in this version; allowed: None; batches of"
                " nested lists, tuples and dicts of tensors are divided along dim 0"
            )
        with self._placement(device_placement):
            prepared: AcceleratedLoader = self.prepare(data_loader)  # type: ignore[attr-defined]
        return prepared

    def _check_placements(self, objects: Sequence[Any], device_placement: Iterable[bool] | None) -> dict[int, bool]:
        """What ``prepare`` was told of each object, by id. Raises: ConfigError if it is not one for each."""
        if device_placement is None:
            return {}
        places = [bool(place) for place in device_placement]
        if len(places) != len(objects):
            raise ConfigError(
                f"prepare got {len(objects)} objects and {len(places)} of device_placement; allowed: one for each"
            )
        return {id(obj): place for obj, place in zip(objects, places, strict=True)}

    @contextmanager
    def _placement(self, is_placed: bool | None) -> Iterator[None]:
        """Inside, objects that are prepared go to the device or stay; None: as the constructor says."""
        before = self.device_placement, self._loader_context
        if is_placed is not None:
            self.device_placement = is_placed
            self._loader_context = replace(before[1], device=self.processes.device if is_placed else None)
        try:
            yield
        finally:
            self.device_placement, self._loader_context = before

    def verify_device_map(self, model: nn.Module) -> bool:
        """False: ``model`` lies on one device, or was not placed by a device map.

        Raises: NotInThisVersionError for a model that ``device_map`` has spread over several; ``prepare`` asks this.
        """
        for name, module in model.named_modules():
            places = {str(place) for place in (getattr(module, "hf_device_map", None) or {}).values()}
            if len(places) > 1:
                raise NotInThisVersionError(
                    f"{name or type(module).__name__}: device_map spread the model over {', '.join(sorted(places))},"
                    " and training needs it on one device a process; load it without device_map (prepare places it),"
                    " or with device_map={'': accelerator.device}"
                )
        return False
