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

The interface is Hugging Face Accelerate's, so a script changes one import. What the script leaves open comes from the
environment (as a launcher writes it) and from a YAML file; code wins, and ``fp8_report`` says who decided each value.
The state is this object's own: no process-wide singleton, no environment variable is written (but LOCAL_RANK under
DeepSpeed, where no launcher set it).
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from acceler8 import backends
from acceler8.accelerator.accumulation import Accumulation, make_gradient_state, make_loader_config
from acceler8.accelerator.at_level import AtLevel
from acceler8.accelerator.backend_settings import filter_of, options_of
from acceler8.accelerator.checkpoints import Checkpoints
from acceler8.accelerator.collectives import Collectives
from acceler8.accelerator.compile import compile_model, is_compiled
from acceler8.accelerator.deepspeed_settings import plugin_of, precision_of_file, steps_of_file
from acceler8.accelerator.loader import RNG_TYPES, AcceleratedLoader, LoaderContext, prepare_loader
from acceler8.accelerator.loss_scaler import LossScaler
from acceler8.accelerator.optimizer import AcceleratedOptimizer
from acceler8.accelerator.precision import PRECISIONS, unwrap_forward
from acceler8.accelerator.prepare_one import PrepareOne
from acceler8.accelerator.processes import join_processes
from acceler8.accelerator.properties import Properties
from acceler8.accelerator.report import Fp8Report
from acceler8.accelerator.scheduler import AcceleratedScheduler
from acceler8.accelerator.strategies import make_strategy
from acceler8.accelerator.surface import Surface, refuse_arguments
from acceler8.accelerator.tracking import Tracking
from acceler8.accelerator.unwrap import plain_model
from acceler8.backends.torchao import TorchaoOptions
from acceler8.checkpoint.project import ProjectConfiguration
from acceler8.config import backend_choice
from acceler8.config import resolve as configuration
from acceler8.config.backend_choice import choose_backend, fp8_values, gemm_backend, level_of, recipe_of
from acceler8.config.code import gather, sort_handlers, values_from_code
from acceler8.config.enums import FP8BackendType, PrecisionType
from acceler8.config.environment import current_environment
from acceler8.config.handlers import KwargsHandler, recipe_object, recipe_values
from acceler8.config.plugins import DeepSpeedPlugin, FullyShardedDataParallelPlugin, TorchDynamoPlugin
from acceler8.config.profile import ProfileKwargs
from acceler8.config.run_handlers import (
    HANDLERS,
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
)
from acceler8.config.sources import DEFAULT, NOT_FP8, Precedence, Source, Value
from acceler8.conversion import Attachment, Plan, convert, plan
from acceler8.costs import CostTable, gpu_of
from acceler8.errors import (
    ConfigError,
    MissingLibraryError,
    NotInThisVersionError,
    PlanError,
    RecipeError,
    unknown_name,
)
from acceler8.nn import find_states
from acceler8.nn.gradients import set_windows
from acceler8.parallel import DeepSpeedProcesses, Strategy
from acceler8.recipes import LayerRecipes, Recipe
from acceler8.recipes import get as recipe_named
from acceler8.recipes import names as recipe_names
from acceler8.recipes.layers import resolve_layers
from acceler8.scaling import StepClock

_T = TypeVar("_T")
_log = logging.getLogger("acceler8")
_HANDLERS: dict[type[KwargsHandler], str] = {**HANDLERS, ProfileKwargs: "profile_handler"}


class Accelerator(Surface, PrepareOne, AtLevel, Tracking, Properties, Accumulation, Collectives, Checkpoints):
    """Prepares models, optimizers, loaders and schedulers for one precision, and runs the parts of a loop that differ.

    An argument that is None, and ``cpu=False``, leaves the setting to the environment, then to the file.

    mixed_precision: ``no``, ``fp16`` (with a loss scaler), ``bf16`` or ``fp8`` (FP8 layers in a BF16 model), in any
        case; default ``no``.
    kwargs_handlers: recipe objects, such as ``TERecipeKwargs``, and ``DistributedDataParallelKwargs``,
        ``GradScalerKwargs``, ``InitProcessGroupKwargs``, ``AutocastKwargs``; ``kwarg_handlers`` is the same argument.
    recipe, skip: short for ``NativeRecipeKwargs``: a name or a Recipe (default ``rowwise``), or a mapping of patterns
        of layer names to such (None: high precision), and layers that stay in high precision beside the default ones.
        backend: who computes FP8; default: the first that is available of ``fp8_backend_order`` (``NATIVE, AO, TE,
        MSAMP``). In code it may also be one that another package registers (``acceler8.backends``). MSAMP is training
        level O1, O2 or O3 on the native GEMMs (docs/levels.md); ``MSAMPRecipeKwargs`` beside another recipe on its.
    cpu: stay on the CPU even if there is a GPU. device: an explicit device; default the GPU of this process, else CPU.
    gradient_accumulation_steps: micro-batches a step, default 1; the loss is divided by it. Or
        gradient_accumulation_plugin, which says more.
    dataloader_config: how loaders are spread over processes; split_batches and even_batches are short for it.
    device_placement: False leaves models and batches where they are. rng_types: random states that become rank 0's on
        all ranks when an epoch begins, of ``generator`` (the sampler's; the default), ``torch`` and ``cuda``.
    step_scheduler_with_optimizer: False lets schedulers move at every call, once.
    config_file: a YAML file as ``acceler8 launch`` takes; default the one that ACCELER8_CONFIG_FILE names.
    dynamo_plugin (or dynamo_backend): ``prepare`` compiles models in place, whole or (use_regional_compilation) each of
        their repeated blocks. fsdp_plugin: several processes each hold a shard (docs/parallel.md). deepspeed_plugin:
        DeepSpeed's ZeRO (docs/deepspeed.md).
    project_dir, project_config: where checkpoints go, and how they are named; ``save_state`` says more.
    log_with: where ``log`` reports to beside ``metrics.jsonl``: ``tensorboard``, ``wandb``, ``trackio``, ``mlflow``,
        ``jsonl``, ``all``, a ``GeneralTracker``, or a list of them.
    output_dtype: ``fp32`` raises 16-bit outputs of prepared models, as Accelerate does; ``compute`` leaves them, which
        saves at least batch x sequence x vocabulary x 2 bytes in a language model.
    deterministic: have torch choose deterministic kernels, in the whole process, so that a resume on a GPU is bit for
        bit; on a GPU set CUBLAS_WORKSPACE_CONFIG=:4096:8 before the start.
    Raises: RecipeError and ConfigError, both ValueErrors, for unknown words, values that contradict each other and a
        recipe without ``fp8``; ImportError for a backend whose library is missing.
    """

    def __init__(
        self,
        mixed_precision: PrecisionType | str | None = None,
        *,
        recipe: str | Recipe | LayerRecipes | Mapping[str, str | Recipe | None] | None = None,
        backend: str | None = None,
        skip: Iterable[str] | None = None,
        cpu: bool = False,
        device: torch.device | str | None = None,
        gradient_accumulation_steps: int | None = None,
        kwargs_handlers: Iterable[Any] | None = None,
        kwarg_handlers: Iterable[Any] | None = None,
        config_file: Path | str | None = None,
        fp8_backend_order: Iterable[str] | str | None = None,
        fsdp_plugin: FullyShardedDataParallelPlugin | None = None,
        deepspeed_plugin: DeepSpeedPlugin | None = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        dynamo_backend: str | None = None,
        dataloader_config: DataLoaderConfiguration | None = None,
        split_batches: bool | None = None,
        even_batches: bool | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        device_placement: bool = True,
        rng_types: Iterable[str] | None = None,
        project_dir: str | Path | None = None,
        project_config: ProjectConfiguration | None = None,
        deterministic: bool = False,
        log_with: Any = None,
        output_dtype: str = "fp32",
        megatron_lm_plugin: None = None,
        torch_tp_plugin: None = None,
        parallelism_config: None = None,
        deepspeed_plugins: None = None,
    ) -> None:
        refuse_arguments(
            megatron_lm_plugin=megatron_lm_plugin,
            torch_tp_plugin=torch_tp_plugin,
            parallelism_config=parallelism_config,
            deepspeed_plugins=deepspeed_plugins,
        )
        if kwargs_handlers is not None and kwarg_handlers is not None:
            raise ConfigError("Accelerator got kwargs_handlers and kwarg_handlers, two spellings; give one of them")
        if dynamo_plugin is not None and dynamo_backend is not None:
            raise ConfigError("Accelerator got dynamo_plugin and dynamo_backend; give one of them")
        if dynamo_backend is not None:
            dynamo_plugin = TorchDynamoPlugin(backend=dynamo_backend)
        if gradient_accumulation_plugin is not None and gradient_accumulation_plugin.num_steps is not None:
            if gradient_accumulation_steps not in (None, 1):
                raise ConfigError(
                    "Accelerator got gradient_accumulation_steps and a gradient_accumulation_plugin with num_steps;"
                    " give one of them"
                )
            gradient_accumulation_steps = gradient_accumulation_plugin.num_steps
        _check_words(mixed_precision, gradient_accumulation_steps, recipe, backend)
        registered = backend if backend in backends.registered() else None
        if registered is not None:
            backend = FP8BackendType.NATIVE.value  # whose settings it is described by
        if isinstance(rng_types, str) or not isinstance(rng_types, Iterable | None):
            rng_types = (rng_types,)
        rng_types = ("generator",) if rng_types is None else tuple(str(kind) for kind in rng_types)
        for kind in rng_types:
            if kind not in RNG_TYPES:
                raise ConfigError(unknown_name("rng_types", kind, RNG_TYPES))
        self.dataloader_config = make_loader_config(dataloader_config, split_batches, even_batches)
        self.device_placement, self.step_scheduler_with_optimizer = device_placement, step_scheduler_with_optimizer
        self.handlers = sort_handlers(kwargs_handlers if kwargs_handlers is not None else kwarg_handlers, _HANDLERS)
        others = self.handlers.others
        self.ddp_handler: DistributedDataParallelKwargs | None = others.get("ddp_handler")
        self.scaler_handler: GradScalerKwargs | None = others.get("scaler_handler")
        self.init_handler: InitProcessGroupKwargs | None = others.get("init_handler")
        self.autocast_handler: AutocastKwargs | None = others.get("autocast_handler")
        self.fsdp_plugin, self.deepspeed_plugin, self.dynamo_plugin = fsdp_plugin, deepspeed_plugin, dynamo_plugin
        code = values_from_code(
            mixed_precision=mixed_precision,
            cpu=cpu,
            gradient_accumulation_steps=gradient_accumulation_steps,
            recipe=_lower(recipe),
            backend=backend,
            skip=skip,
            fp8_backend_order=fp8_backend_order,
            handlers=self.handlers,
            fsdp_plugin=fsdp_plugin,
            deepspeed_plugin=deepspeed_plugin,
            dynamo_plugin=dynamo_plugin,
        )
        self.effective = gather(code, config_file)
        of_file = precision_of_file(self.effective, deepspeed_plugin)
        self.mixed_precision = self.effective["mixed_precision"] or of_file or "no"
        self._check_recipe_is_for_fp8(recipe)
        for note in (*self.effective.notes, *configuration.check(self.effective)):
            _log.log(logging.WARNING if note.endswith(NOT_FP8) else logging.INFO, note)
        self._fp8_backend = choose_backend(self.effective)
        self._gemms = gemm_backend(self.effective) if self.mixed_precision == "fp8" else None
        self.backend = registered or (self._gemms or self._fp8_backend.value).lower()
        self._check_backend_works()
        self.level = self._level()
        native = self.handlers.native
        self._recipe_object = recipe_object(_lower(recipe) if native is None else native.recipe)
        self.recipe = self._recipe()
        self.skip = self.effective["fp8_config.skip"]
        self.gradients = make_gradient_state(
            gradient_accumulation_plugin,
            self.effective["deepspeed_config.gradient_accumulation_steps"]
            or steps_of_file(self.effective, deepspeed_plugin)
            or 1,
        )
        self.clock = StepClock()
        self.processes = join_processes(current_environment(), device, self.effective.uses_cpu, self.init_handler)
        self.strategy: Strategy = make_strategy(
            self.effective, self.processes, self.ddp_handler, self.fsdp_plugin, self.deepspeed_plugin
        )
        if isinstance(self.strategy, DeepSpeedProcesses):
            self.deepspeed_plugin = plugin_of(self.effective, deepspeed_plugin, self.strategy)
        self._check_backend_runs_there()
        self._check_level_runs_there()
        self.scaler = self._loss_scaler()
        self._loader_context = LoaderContext(
            processes=self.processes,
            gradients=self.gradients,
            config=self.dataloader_config,
            device=self.device if device_placement else None,
            rng_types=rng_types,
            strategy=self.strategy.name if self.strategy.is_sharded or self.strategy.is_engine else "",
        )
        self._start_checkpoints(project_dir, project_config, deterministic)
        self._start_tracking(log_with)
        self._start_surface(output_dtype, others.get("profile_handler"))
        self._said_slow = False
        self._models: list[nn.Module] = []
        self._optimizers: list[AcceleratedOptimizer] = []
        self._start_level()

    def _loss_scaler(self) -> LossScaler | None:
        handler = self.scaler_handler
        if self.mixed_precision != "fp16" or self.strategy.scales_loss or (handler is not None and not handler.enabled):
            return None
        return LossScaler(self.device.type, None if handler is None else handler.to_dict(), self.strategy.agree)

    def _check_recipe_is_for_fp8(self, recipe: Any) -> None:
        if self.mixed_precision == "fp8" or (recipe is None and not self.handlers.found):
            return
        given = f"recipe={recipe!r}" if recipe is not None else type(self.handlers.found[-1]).__name__
        source = self.effective.source("mixed_precision")
        raise RecipeError(
            f"got {given} with mixed_precision={self.mixed_precision!r} ({source}); allowed: a recipe only with 'fp8';"
            " set mixed_precision='fp8' or leave the recipe out"
        )

    def _check_backend_works(self) -> None:
        """A library that is installed and does not load is said now, not when the first model is prepared."""
        if self._gemms is None:
            return
        if (problem := backends.find(self.backend).unavailable()) is not None:
            source = self.effective.source("fp8_config.backend")
            raise MissingLibraryError(
                f"{source}: FP8 backend {self.backend} cannot be used: {problem}; or name backend NATIVE, which needs"
                " no library"
            )

    def _check_backend_runs_there(self) -> None:
        """A recipe that the backend does not run under this strategy is said now; its device, when a model is there."""
        if self.recipe is None or self.strategy.name == "single":
            return
        own = [self.recipe] if isinstance(self.recipe, Recipe) else [made for _, made in self.recipe.patterns if made]
        for recipe in own:
            why = backends.find(self.backend).lacks(recipe, torch.device("meta"), self.strategy.name)
            if why is not None:
                raise PlanError(why)

    def _recipe(self) -> Recipe | LayerRecipes | None:
        """What the backend runs; a Recipe object as it is, for settings may not say all of it."""
        if self._gemms is None:
            return None
        skip = self.effective["fp8_config.skip"] or ()
        made = self._recipe_object
        if isinstance(made, LayerRecipes):
            return made.and_skip(skip)
        if made is not None:
            renamed: Recipe = made.replace(skip=skip)
            return renamed
        is_own = backends.full_name(self._gemms) == backends.full_name(self.backend)
        default = None if is_own else backends.find(self.backend).default_recipe
        return recipe_of(self.effective, self._gemms, default)

    @property
    def plan(self) -> Plan | None:
        """The FP8 plan of the first prepared model; None before there is one, or without ``fp8``."""
        plans = self.fp8_report().plans
        return plans[0] if plans else None

    def prepare(self, *objects: Any, device_placement: Iterable[bool] | None = None) -> Any:
        """Prepare models, optimizers, DataLoaders and schedulers, in any order and in one call or several.

        Returns them in the order given (one object if one was given). Models come back as the same object, in several
        processes in DistributedDataParallel, or sharded in place; an optimizer made before or after its model is
        prepared holds the right Parameters either way. Anything else is returned unchanged. Preparing an object twice
        changes nothing.
        device_placement: for each object, whether it (a loader: its batches) goes to the device; None: as the
        constructor says.
        """
        for obj in objects:
            self._refuse_what_cannot_run(obj)
        places = self._check_placements(objects, device_placement)
        given = [obj.optimizer if isinstance(obj, AcceleratedOptimizer) else obj for obj in objects]
        optimizers = [obj for obj in given if isinstance(obj, Optimizer)]
        self.strategy.expect(given)
        wrapped = {}
        for obj in objects:  # models first: the others may depend on what becomes of their Parameters
            if isinstance(obj, nn.Module):
                with self._placement(places.get(id(obj))):
                    wrapped[id(obj)] = self._prepare_model(obj, optimizers)
        prepared = []
        for obj in objects:
            with self._placement(places.get(id(obj))):
                prepared.append(wrapped[id(obj)] if id(obj) in wrapped else self._prepare_one(obj))
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def _refuse_what_cannot_run(self, obj: Any) -> None:
        """Raise NotInThisVersionError for what is configured and would silently not be done."""
        if isinstance(obj, nn.Module):
            self.verify_device_map(obj)
        if isinstance(obj, nn.Module | DataLoader):
            for limit in backend_choice.cannot_run(self.effective):
                raise NotInThisVersionError(limit)

    def _prepare_model(self, model: nn.Module, optimizers: Sequence[Optimizer] = ()) -> nn.Module:
        for known in self._models:
            if model is known or model is self.strategy.unwrap(known):
                return known
        given, model = model, self.strategy.unwrap(model)  # a script may have wrapped it itself
        self.strategy.compute_dtype = PRECISIONS[self.mixed_precision]
        if self.device_placement:
            self.strategy.place(model)
        for optimizer in self._optimizers:
            _move_state(optimizer.optimizer)
        states = find_states(model)
        for state in states:  # converted by hand: its clock follows ours
            if state.clock is not self.clock:
                self.clock.lead(state.clock)
        if not states and self.recipe is not None:
            schedule = {key: self.effective["fp8_config." + key] for key in ("fp8_steps", "fp8_last_layers")}
            with self.strategy.shown_whole(model):
                options = {**self._recipe_options(), **schedule, **self._speed_options(model)}
                made = plan(model, backend=self.backend, **options)
            for warning in (*made.warnings, *self._slow_in_eager(model)):
                warnings.warn(warning, stacklevel=3)
            for note in made.notes:
                _log.info("%s: %s", made.model, note)
            with self.strategy.shown_whole(model):
                convert(model, made, clock=self.clock)
        elif states and self.recipe is not None:
            _log.warning(
                "%s was converted before prepare and keeps its own recipe (%s), not the Accelerator's",
                type(model).__name__,
                ", ".join(sorted({state.plan.recipe.name for state in states})),
            )
        self._bring_to_level(model)
        self._wrap_forward(model)
        self.strategy.checkpoint_activations(model)
        compile_model(model, self.effective, self.dynamo_plugin)
        self.strategy.num_steps = self.gradients.num_steps
        known_optimizers = [known.given for known in self._optimizers]
        self._complete_optimizers()
        model = self.strategy.wrap(given, [*known_optimizers, *(o for o in optimizers if o not in known_optimizers)])
        self._models.append(model)
        self._take_over_attachments()
        return model

    def _recipe_options(self) -> dict[str, Any]:
        """What ``plan`` is told of the recipe and of the backend's own settings. A torchao config says the recipe."""
        word, handler = self._gemms or FP8BackendType.NO.value, self.handlers.ao
        options = options_of(self.effective, word, handler)
        has_config = isinstance(options, TorchaoOptions) and options.config is not None
        return {
            "recipe": None if has_config else self.recipe,
            "skip": self.effective["fp8_config.skip"] if has_config else None,
            "filter_fn": filter_of(self.effective, word, handler),
            "options": options,
            "strategy": self.strategy.name,
        }

    def _slow_in_eager(self, model: nn.Module) -> list[str]:
        """Once: that the backend needs a compiler on a GPU, and there is none."""
        slow = backends.find(self.backend).slow_in_eager
        first = next(model.parameters(), None)
        on_gpu = first is not None and first.device.type == "cuda"
        if slow is None or not on_gpu or self._said_slow or is_compiled(self.effective, self.dynamo_plugin):
            return []
        self._said_slow = True
        return [slow]

    def _speed_options(self, model: nn.Module) -> dict[str, Any]:
        """What ``plan`` is told of speed; of several processes the first one's table is for all, so plans agree."""
        tokens, never_slower = (self.effective["fp8_config." + key] for key in ("tokens", "never_slower"))
        options: dict[str, Any] = {"tokens": tokens, "never_slower": never_slower is not False}
        first = next(model.parameters(), None)
        gpu = None if first is None else gpu_of(first.device)
        if self.num_processes == 1 or tokens is None or gpu is None:
            return options
        table = self._of_first_process(CostTable.for_this_gpu(gpu))
        if table is None:  # another process may have one, for itself; nothing is left out by it
            return options | {"never_slower": False}
        return options | {"costs": table}

    def _prepare_one(self, obj: Any) -> Any:
        if isinstance(obj, AcceleratedScheduler | AcceleratedLoader):  # of another Accelerator, or skip_first_batches
            known: list[Any] = self._schedulers if isinstance(obj, AcceleratedScheduler) else self._dataloaders
            return _remembered(obj, known)
        if isinstance(obj, AcceleratedOptimizer):
            return obj
        if isinstance(obj, Optimizer):
            for optimizer in self._optimizers:
                if obj is optimizer.given or obj is optimizer.optimizer:
                    return optimizer
            stepped = self._at_level(self.strategy.take(obj))
            _move_state(stepped)
            number = len(self._optimizers)
            made = AcceleratedOptimizer(stepped, self.gradients, self.clock, self.scaler, number, given=obj)
            self._optimizers.append(made)
            self._take_over_attachments()
            return self._optimizers[-1]
        if isinstance(obj, LRScheduler):
            known_schedule = next((one for one in self._schedulers if one.scheduler is obj), None)
            return known_schedule or _remembered(self._wrap_scheduler(obj), self._schedulers)
        if isinstance(obj, DataLoader):
            for loader in self._dataloaders:
                if obj is loader.given or obj is loader.loader:
                    return loader
            return _remembered(prepare_loader(obj, self._loader_context), self._dataloaders)
        return obj

    def _wrap_scheduler(self, scheduler: LRScheduler) -> AcceleratedScheduler:
        return AcceleratedScheduler(
            scheduler,
            self.gradients,
            self._optimizers,
            moves=1 if self.split_batches else self.num_processes,
            with_optimizer=self.step_scheduler_with_optimizer,
        )

    def _take_over_attachments(self) -> None:
        """A prepared optimizer marks step boundaries itself; hooked by ``attach`` too it would mark each twice."""
        prepared = [optimizer.optimizer for optimizer in self._optimizers]
        for state in (state for model in self._models for state in find_states(model)):
            for attachment in [a for a in state.attached if isinstance(a, Attachment)]:
                if any(attachment.optimizer() is known for known in prepared):
                    attachment.remove()

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """``loss.backward()`` with the loss divided by the micro-batches of a step (and scaled, under FP16)."""
        if not self.strategy.divides_loss:
            loss = loss / self.gradients.num_steps
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        self.strategy.backward(loss, is_last=self.gradients.sync_gradients, **kwargs)

    @contextmanager
    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> Iterator[None]:
        """Compute in the 16-bit dtype of ``mixed_precision`` inside; for code outside a prepared model's forward."""
        dtype = self._autocast_dtype
        options = self._autocast_options(autocast_handler)
        options["enabled"] = dtype is not None and options.get("enabled", True)
        with torch.autocast(self.device.type, dtype or torch.bfloat16, **options):
            yield

    def _autocast_options(self, handler: AutocastKwargs | None) -> dict[str, Any]:
        handler = handler or self.autocast_handler
        return {} if handler is None else handler.to_dict()

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """One micro-batch. Inside, ``optimizer.step()`` and ``zero_grad()`` act only where a step completes.

        Weight codes of FP8 layers are reused between the micro-batches of a step, and only inside these blocks: what
        runs between two of them casts the weights as they then are.
        """
        self.gradients.begin_micro_batch()
        set_windows(self._windows, is_open=not self.gradients.sync_gradients)
        targets = models or tuple(self._models)
        codes = []
        if self.gradients.num_steps > 1 and self.strategy.keeps_weight_codes:
            codes = [c for m in targets for state in find_states(m) for c in state.codes if not c.is_open]
        with ExitStack() as stack:
            if not (self.gradients.sync_gradients or self.gradients.sync_each_batch):
                for model in targets:
                    stack.enter_context(self.strategy.no_sync(model))
            try:
                for c in codes:
                    c.open()
                yield
            finally:
                for c in codes:
                    c.close() if self.gradients.sync_gradients else c.pause()

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """The model behind what a strategy put around it. Its FP8 layers stay; ``acceler8.restore`` undoes those.

        ``keep_fp32_wrapper=False`` also takes autocast off its forward, for use after training;
        ``keep_torch_compile=False`` what ``torch.compile`` put around it.
        """
        plain = plain_model(model, keep_torch_compile=keep_torch_compile)
        if not keep_fp32_wrapper:
            unwrap_forward(plain)
            self._models = [known for known in self._models if plain_model(known) is not plain_model(plain)]
        return plain

    def fp8_report(self) -> Fp8Report:
        """Which layers are FP8, how far the run went, and each setting with the source that decided; print it."""
        states = [state for model in self._models for state in find_states(model)]
        return Fp8Report(
            mixed_precision=self.mixed_precision,
            plans=[state.plan for state in states],
            steps=self.clock.ticks,
            values=self._fp8_values(),
        )

    def _fp8_values(self) -> dict[str, Value]:
        values = {"mixed_precision": Value(self.mixed_precision, self.effective.source("mixed_precision"))}
        if not self.fp8_enabled:
            return values
        path = "fp8_config.backend"
        source = self.effective.source(path) if self.effective[path] not in (None, "NO") else DEFAULT
        is_own = backends.full_name(self._gemms or "") == backends.full_name(self.backend)
        values[path] = Value(self._fp8_backend.value if is_own else self.backend, source)
        values |= fp8_values(self.effective, self._gemms)
        values.pop("fp8_config.opt_level", None)
        if self.level is not None and (asked := level_of(self.effective)) is not None:
            values["fp8_config.opt_level"] = asked
        if isinstance(self._recipe_object, LayerRecipes):  # of which settings say no more
            told = (
                "mixed_precision",
                *("fp8_config." + key for key in ("backend", "layer_recipes", "fp8_steps", "fp8_last_layers")),
                *("fp8_config." + key for key in ("tokens", "never_slower", "skip", "opt_level")),
            )
            return {path: value for path, value in values.items() if path in told}
        if isinstance(self.recipe, Recipe) and "fp8_config.fp8_format" not in values:
            own = Source(Precedence.DEFAULT, f"of recipe {self.recipe.name}")
            named = recipe_named(self.recipe.name) if self.recipe.name in recipe_names() else self.recipe
            values["fp8_config.fp8_format"] = Value(recipe_values(named)[0]["fp8_format"], own)
        return values

    def end_training(self) -> None:
        """Finish the trackers and end the process group that this object started; a second call does nothing."""
        self._finish_trackers()
        self.processes.end()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """``print`` in the main process only."""
        if self.is_main_process:
            print(*args, **kwargs)


def _remembered(prepared: _T, known: list[_T]) -> _T:
    """``prepared``, noted for checkpoints."""
    if not any(prepared is one for one in known):
        known.append(prepared)
    return prepared


def _move_state(optimizer: Optimizer) -> None:
    """Bring an optimizer's state to where its Parameters went: ``model.to`` moves these and not that."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            for key, value in optimizer.state.get(p, {}).items():
                if isinstance(value, Tensor) and key != "step" and value.device != p.device:
                    optimizer.state[p][key] = value.to(p.device)


def _lower(recipe: Any) -> Any:
    """Names of recipes in any case."""
    if isinstance(recipe, Mapping):
        return {pattern: _lower(own) for pattern, own in recipe.items()}
    return recipe.lower() if isinstance(recipe, str) else recipe


def _check_words(precision: Any, steps: Any, recipe: Any, backend: Any) -> None:
    """The arguments that people mistype, before anything is read. Raises RecipeError naming the nearest word."""
    if precision is not None and precision not in PrecisionType:
        raise RecipeError(unknown_name("mixed_precision", precision, PRECISIONS))
    if steps is not None and (type(steps) is not int or steps < 1):
        raise RecipeError(f"gradient_accumulation_steps={steps!r}; allowed: an integer from 1")
    if recipe is not None:
        resolve_layers(_lower(recipe))
    if backend is not None and backend not in FP8BackendType:
        backends.get(backend)
