"""``Accelerator``: the object that a training script holds.

    accelerator = Accelerator(mixed_precision="fp8")
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

The interface is Hugging Face Accelerate's, so a script changes one import. The state is this object's own: no
process-wide singleton, no environment variable is written.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from acceler8.accelerator.gradients import GradientState
from acceler8.accelerator.loader import AcceleratedLoader
from acceler8.accelerator.loss_scaler import LossScaler
from acceler8.accelerator.optimizer import AcceleratedOptimizer
from acceler8.accelerator.precision import PRECISIONS, unwrap_forward, wrap_forward
from acceler8.accelerator.report import Fp8Report
from acceler8.accelerator.scheduler import AcceleratedScheduler
from acceler8.conversion import Attachment, Plan, convert, plan
from acceler8.errors import RecipeError, unknown_name
from acceler8.nn import find_states
from acceler8.parallel import SingleProcess, Strategy
from acceler8.recipes import Recipe, resolve
from acceler8.scaling import StepClock

_log = logging.getLogger("acceler8")


class Accelerator:
    """Prepares models, optimizers, loaders and schedulers for one precision, and runs the parts of a loop that differ.

    mixed_precision: ``no``, ``fp16`` (with a loss scaler), ``bf16`` or ``fp8`` (FP8 layers in a BF16 model).
    recipe: for ``fp8``: a name or a Recipe; default ``rowwise``. backend: who computes FP8; default ``native``.
    skip: layers that stay in high precision, beside the default ones.
    cpu: stay on the CPU even if there is a GPU. device: an explicit device; default the current GPU, else the CPU.
    gradient_accumulation_steps: micro-batches a step; the loss is divided by it.
    Raises: RecipeError for an unknown word or recipe, or a recipe without ``fp8``.
    """

    def __init__(
        self,
        mixed_precision: str = "no",
        *,
        recipe: str | Recipe | None = None,
        backend: str = "native",
        skip: Iterable[str] | None = None,
        cpu: bool = False,
        device: torch.device | str | None = None,
        gradient_accumulation_steps: int = 1,
    ) -> None:
        if mixed_precision not in PRECISIONS:
            raise RecipeError(unknown_name("mixed_precision", mixed_precision, PRECISIONS))
        if recipe is not None and mixed_precision != "fp8":
            raise RecipeError(
                f"got recipe={recipe!r} with mixed_precision={mixed_precision!r}; allowed: a recipe only with 'fp8';"
                " set mixed_precision='fp8' or leave the recipe out"
            )
        if type(gradient_accumulation_steps) is not int or gradient_accumulation_steps < 1:
            raise RecipeError(
                f"gradient_accumulation_steps={gradient_accumulation_steps!r}; allowed: an integer from 1"
            )
        self.mixed_precision = mixed_precision
        self.recipe = resolve(recipe) if mixed_precision == "fp8" else None
        self.backend, self.skip = backend, None if skip is None else tuple([skip] if isinstance(skip, str) else skip)
        self.gradients = GradientState(num_steps=gradient_accumulation_steps)
        self.clock = StepClock()
        self.strategy: Strategy = SingleProcess(_pick_device(device, cpu))
        self.scaler = LossScaler(self.device.type) if mixed_precision == "fp16" else None
        self._models: list[nn.Module] = []
        self._optimizers: list[AcceleratedOptimizer] = []

    @property
    def device(self) -> torch.device:
        """Where this process's models and batches are."""
        return self.strategy.device

    @property
    def compute_dtype(self) -> torch.dtype:
        """What 16-bit work runs in, and what a frozen model should be cast to: bf16 under ``fp8``."""
        return PRECISIONS[self.mixed_precision] or torch.float32

    @property
    def num_processes(self) -> int:
        """Processes that train together."""
        return self.strategy.num_processes

    @property
    def is_main_process(self) -> bool:
        """True in the process that prints and writes."""
        return self.strategy.process_index == 0

    @property
    def sync_gradients(self) -> bool:
        """True in the micro-batch whose backward completes a step."""
        return self.gradients.sync_gradients

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches a step."""
        return self.gradients.num_steps

    @property
    def plan(self) -> Plan | None:
        """The FP8 plan of the first prepared model; None before there is one, or without ``fp8``."""
        plans = self.fp8_report().plans
        return plans[0] if plans else None

    def prepare(self, *objects: Any) -> Any:
        """Prepare models, optimizers, DataLoaders and schedulers, in any order and in one call or several.

        Returns them in the order given (one object if one was given). Models come back as the same object; an optimizer
        made before or after its model is prepared holds the right Parameters either way. Anything else is returned
        unchanged. Preparing an object twice changes nothing.
        """
        wrapped = {}
        for obj in objects:  # models first: the others may depend on what becomes of their Parameters
            if isinstance(obj, nn.Module):
                wrapped[id(obj)] = self._prepare_model(obj)
        prepared = [wrapped[id(obj)] if id(obj) in wrapped else self._prepare_one(obj) for obj in objects]
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def _prepare_model(self, model: nn.Module) -> nn.Module:
        if any(model is known for known in self._models):
            return model
        self.strategy.place(model)
        for optimizer in self._optimizers:
            _move_state(optimizer.optimizer)
        states = find_states(model)
        for state in states:  # converted by hand: its clock follows ours
            if state.clock is not self.clock:
                self.clock.subscribe(state.clock.tick)
        if not states and self.recipe is not None:
            made = plan(model, self.recipe, self.backend, skip=self.skip)
            for warning in made.warnings:
                warnings.warn(warning, stacklevel=3)
            for note in made.notes:
                _log.info("%s: %s", made.model, note)
            convert(model, made, clock=self.clock)
        elif states and self.recipe is not None:
            _log.warning(
                "%s was converted before prepare and keeps its own recipe (%s), not the Accelerator's",
                type(model).__name__,
                ", ".join(sorted({state.plan.recipe.name for state in states})),
            )
        wrap_forward(model, self.device.type, PRECISIONS[self.mixed_precision])
        model = self.strategy.wrap(model)
        self._models.append(model)
        self._take_over_attachments()
        return model

    def _prepare_one(self, obj: Any) -> Any:
        if isinstance(obj, AcceleratedOptimizer | AcceleratedScheduler | AcceleratedLoader):
            return obj
        if isinstance(obj, Optimizer):
            for known in self._optimizers:
                if known.optimizer is obj:
                    return known
            _move_state(obj)
            self._optimizers.append(AcceleratedOptimizer(obj, self.gradients, self.clock, self.scaler))
            self._take_over_attachments()
            return self._optimizers[-1]
        if isinstance(obj, LRScheduler):
            return AcceleratedScheduler(obj, self.gradients, self._optimizers)
        if isinstance(obj, DataLoader):
            return AcceleratedLoader(obj, self.device, self.gradients)
        return obj

    def _take_over_attachments(self) -> None:
        """A prepared optimizer marks step boundaries itself; hooked by ``attach`` too it would mark each twice."""
        prepared = [optimizer.optimizer for optimizer in self._optimizers]
        for state in (state for model in self._models for state in find_states(model)):
            for attachment in [a for a in state.attached if isinstance(a, Attachment)]:
                if any(attachment.optimizer() is known for known in prepared):
                    attachment.remove()

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """``loss.backward()`` with the loss divided by the micro-batches of a step (and scaled, under FP16)."""
        loss = loss / self.gradients.num_steps
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        loss.backward(**kwargs)

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Compute in the 16-bit dtype of ``mixed_precision`` inside; for code outside a prepared model's forward."""
        dtype = PRECISIONS[self.mixed_precision]
        with torch.autocast(self.device.type, dtype or torch.bfloat16, enabled=dtype is not None):
            yield

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """One micro-batch. Inside, ``optimizer.step()`` and ``zero_grad()`` act only where a step completes.

        Weight codes of FP8 layers are reused between the micro-batches of a step, and only inside these blocks: what
        runs between two of them casts the weights as they then are.
        """
        self.gradients.begin_micro_batch()
        targets = models or tuple(self._models)
        codes = []
        if self.gradients.num_steps > 1:
            codes = [c for m in targets for state in find_states(m) for c in state.codes if not c.is_open]
        with ExitStack() as stack:
            if not self.gradients.sync_gradients:
                for model in targets:
                    stack.enter_context(self.strategy.no_sync(model))
            try:
                for c in codes:
                    c.open()
                yield
            finally:
                for c in codes:
                    c.close() if self.gradients.sync_gradients else c.pause()

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Inside, backward does not exchange gradients between processes."""
        return self.strategy.no_sync(model)

    def clip_grad_norm_(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the global norm of gradients (unscaled first, under FP16); returns the norm before clipping."""
        parameters = list(parameters)
        for optimizer in self._optimizers:
            if self.gradients.sync_gradients:
                optimizer.unscale()
        return self.strategy.clip_grad_norm(parameters, max_norm, norm_type)

    def unwrap_model(self, model: nn.Module, keep_fp32_wrapper: bool = True) -> nn.Module:
        """The model behind what a strategy put around it. Its FP8 layers stay; ``acceler8.restore`` undoes those.

        ``keep_fp32_wrapper=False`` also takes autocast off its forward, for use after training.
        """
        if not keep_fp32_wrapper:
            unwrap_forward(model)
            self._models = [known for known in self._models if known is not model]
        return model

    def fp8_report(self) -> Fp8Report:
        """Which layers are FP8 and how far the run went; print it."""
        states = [state for model in self._models for state in find_states(model)]
        return Fp8Report(
            mixed_precision=self.mixed_precision,
            plans=[state.plan for state in states],
            steps=self.clock.ticks,
        )

    def print(self, *args: Any, **kwargs: Any) -> None:
        """``print`` in the main process only."""
        if self.is_main_process:
            print(*args, **kwargs)


def _move_state(optimizer: Optimizer) -> None:
    """Bring an optimizer's state to where its Parameters went: ``model.to`` moves these and not that."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            for key, value in optimizer.state.get(p, {}).items():
                if isinstance(value, Tensor) and key != "step" and value.device != p.device:
                    optimizer.state[p][key] = value.to(p.device)


def _pick_device(device: torch.device | str | None, cpu: bool) -> torch.device:
    if device is not None:
        return torch.device(device)
    if not cpu and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
