"""Checkpoints of a whole training: ``save_state`` and ``load_state``, and what a script does around them.

The names are Hugging Face Accelerate's. What differs: a folder is whole or absent, nothing in it is a pickle, the model
file holds exactly the plain model's keys, and a resume continues bit for bit (on a GPU with ``deterministic=True``).
"""

from __future__ import annotations

import logging
import os
import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from acceler8.accelerator.gradients import GradientState
from acceler8.accelerator.loader import AcceleratedLoader
from acceler8.accelerator.loss_scaler import LossScaler
from acceler8.accelerator.optimizer import AcceleratedOptimizer
from acceler8.accelerator.processes import Processes
from acceler8.accelerator.scheduler import AcceleratedScheduler
from acceler8.accelerator.unwrap import plain_model
from acceler8.checkpoint.export import export_model, replace_file
from acceler8.checkpoint.folder import building_path, named_folder, target_folder, whole_folder
from acceler8.checkpoint.load import load
from acceler8.checkpoint.manifest import file_entry, write_manifest
from acceler8.checkpoint.model import load_state, share_ties
from acceler8.checkpoint.project import ProjectConfiguration, drop_oldest, free_number, newest_whole, numbered
from acceler8.checkpoint.resume import Engine, LoadReport, Resume
from acceler8.checkpoint.save import OWNED, plain_values
from acceler8.checkpoint.shards import DEFAULT_SHARD_SIZE, parse_size
from acceler8.checkpoint.together import Together
from acceler8.checkpoint.training import Training, check_finite, write_common, write_process, write_shards
from acceler8.config.environment import current_environment
from acceler8.config.sources import Effective
from acceler8.errors import CheckpointError, ConfigError
from acceler8.parallel import Strategy
from acceler8.scaling import StepClock

_log = logging.getLogger("acceler8")
_PATHS = (str, os.PathLike)


class Checkpoints:
    """The part of an ``Accelerator`` that saves and resumes."""

    processes: Processes
    effective: Effective
    mixed_precision: str
    gradients: GradientState
    strategy: Strategy
    clock: StepClock
    scaler: LossScaler | None
    project_configuration: ProjectConfiguration
    _models: list[nn.Module]
    _optimizers: list[AcceleratedOptimizer]

    def _start_checkpoints(
        self, project_dir: str | os.PathLike[str] | None, config: ProjectConfiguration | None, deterministic: bool
    ) -> None:
        """Take the constructor's arguments."""
        self.project_configuration = config if config is not None else ProjectConfiguration()
        if project_dir is not None and self.project_configuration.project_dir is None:
            self.project_configuration.set_directories(os.fspath(project_dir))
        self._schedulers: list[AcceleratedScheduler] = []
        self._dataloaders: list[AcceleratedLoader] = []
        self._custom_objects: list[Any] = []
        self._damaged: set[Path] = set()
        self._save_hooks: dict[int, Callable[..., None]] = OrderedDict()
        self._load_hooks: dict[int, Callable[..., None]] = OrderedDict()
        if deterministic:
            _make_deterministic(self.processes.device, current_environment())

    @property
    def project_dir(self) -> str | None:
        """The project's folder."""
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> str | None:
        """Where trackers write."""
        return self.project_configuration.logging_dir

    @property
    def save_iteration(self) -> int:
        """Number of the next ``checkpoint_N``."""
        return self.project_configuration.iteration

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        max_shard_size: int | str = DEFAULT_SHARD_SIZE,
        progress: Mapping[str, Any] | None = None,
        force: bool = False,
    ) -> str:
        """Write models, optimizers, schedulers, loaders, scaler, steps, random generators and registered objects.

        The folder appears whole or not at all, and replaces one of the same name the same way. Every process calls
        this. With ``automatic_checkpoint_naming`` the folder is ``PROJECT_DIR/checkpoints/checkpoint_N``, whatever
        ``output_dir`` says, and the oldest above ``total_limit`` go once it is whole. ``progress`` holds plain values
        that come back in ``load_state``'s report. Between two micro-batches of a step the gradients are saved too; call
        it between iterations of the loop. Returns the folder.
        Raises: CheckpointError for a model with NaN or inf (``force=True`` saves it all the same), a part that cannot
            be stored without pickle, a disk that fails, or a name that is taken. Nothing is left behind then.
        """
        _refuse_pickle(safe_serialization)
        parse_size(max_shard_size)
        progress_json = plain_values(progress, "progress")
        config = self.project_configuration
        if config.automatic_checkpoint_naming:
            folder = config.checkpoints().resolve()
            config.iteration = self._group.agree(lambda: free_number(folder, config.iteration))
            target = folder / f"checkpoint_{config.iteration}"
        elif output_dir is None:
            raise CheckpointError("save_state got no output_dir; give one, or set automatic_checkpoint_naming")
        else:
            target = target_folder(output_dir, "save_state: output_dir")
        self._write(target, max_shard_size, progress_json, force)
        if config.automatic_checkpoint_naming:
            config.iteration += 1
            limit = config.total_limit
            if limit is not None:
                self._group.run(
                    lambda: drop_oldest(target.parent, limit, target, self._damaged) if self._is_writer else None
                )
        _log.info("saved step %d to %s", self.clock.ticks, target)
        return str(target)

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        *,
        strict: bool = True,
        force: bool = False,
        map_location: Any = None,
    ) -> LoadReport:
        """Resume what ``save_state`` wrote, into the objects that are prepared and registered now.

        ``input_dir`` None takes the newest whole ``checkpoint_N``, with a warning for each newer one that is not whole.
        Every file is verified and compared before anything changes. Precision, recipe, backend, schedule of FP8 steps
        and number of processes may differ from the saved run; the report, which is logged too, lists what that resets.
        ``strict=False`` also lets names, dtypes and ties of models differ. ``load_kwargs`` and ``map_location`` have no
        effect: values go to where each object is.
        Raises: CheckpointError, with every object unchanged (but for what a load hook did), for a checkpoint that is
            damaged, newer or does not fit, or a model with NaN or inf unless ``force=True``.
        """
        config = self.project_configuration
        if input_dir is None and not config.automatic_checkpoint_naming:
            raise CheckpointError("load_state got no input_dir; give one, or set automatic_checkpoint_naming")
        if input_dir is None:
            newest = self._group.agree(lambda: newest_whole(config.checkpoints().resolve(), self._damaged))
            input_dir = config.checkpoints() / f"checkpoint_{newest}"
        folder = named_folder(input_dir, "load_state: input_dir")
        models = [plain_model(model) for model in self._models]
        resume = self._open(folder, strict, force)
        left = list(self._models)
        self._group.run(lambda: self._run_hooks(self._load_hooks, left, str(resume.checkpoint.folder)))
        kept = {id(plain_model(model)) for model in left}
        wanted = [i for i, model in enumerate(models) if id(model) in kept]
        try:
            self._group.run(lambda: resume.attempt(wanted))
        except BaseException:
            resume.undo()  # where this process could and another could not
            raise
        for exchange in resume.exchanges(wanted):
            self._group.run(exchange)
        report = self._group.run(lambda: resume.finish(wanted))
        if config.automatic_checkpoint_naming:
            config.iteration = 1 + max(numbered(config.checkpoints()), default=-1)
        _log.log(logging.WARNING if report.reset else logging.INFO, "%s", report)
        return report

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and load these objects too, through their ``state_dict`` and ``load_state_dict``.

        Their states hold None, numbers, text, tensors, and lists, tuples and dicts of them; no pickle is made of more.
        Raises: CheckpointError for an object without the two methods, or a class.
        """
        for i, obj in enumerate(objects):
            if isinstance(obj, type):
                raise CheckpointError(
                    f"register_for_checkpointing: argument {i} is the class {obj.__qualname__}; allowed: objects;"
                    " register the one that you made of it"
                )
            if lacks := [n for n in ("state_dict", "load_state_dict") if not callable(getattr(obj, n, None))]:
                raise CheckpointError(
                    f"register_for_checkpointing: argument {i}, a {type(obj).__qualname__}, has no"
                    f" {' and no '.join(lacks)}; give it both, or save it yourself"
                )
        self._custom_objects.extend(o for o in objects if not any(o is known for known in self._custom_objects))

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call ``hook(models, weights, output_dir)`` before ``save_state`` writes; returns a handle with ``remove()``.

        ``weights`` are the state_dicts, one a model; those that the hook removes from the list are left to it. What it
        writes into ``output_dir`` becomes part of the checkpoint, whole or not at all like the rest.
        """
        return _register(self._save_hooks, hook)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call ``hook(models, input_dir)`` before ``load_state`` changes anything; returns a handle with ``remove()``.

        Models that the hook removes from the list are not loaded; it has loaded them.
        """
        return _register(self._load_hooks, hook)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The state_dict in high precision; with ``unwrap`` under the plain model's names.

        Of a sharded model it is gathered: every process calls this, process 0 gets it, whole and on the CPU, the others
        an empty one.
        """
        if self.strategy.is_sharded or self.strategy.is_engine:
            return share_ties(plain_model(model), self.strategy.model_state(model))
        state: dict[str, Any] = (plain_model(model) if unwrap else model).state_dict()
        return state

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = DEFAULT_SHARD_SIZE,
        safe_serialization: bool = True,
        *,
        force: bool = False,
    ) -> None:
        """Write the plain weights as ``transformers`` reads them: one file, or shards with an index above the limit.

        Other files in the folder stay; shards of an earlier save go. Every process calls this, one writes.
        Raises: CheckpointError for a model with NaN or inf (unless ``force``), and a disk that fails.
        """
        _refuse_pickle(safe_serialization)
        state = self.get_state_dict(model)
        plain, advice = plain_model(model), "pass force=True to save it all the same"
        if not force:
            self._group.run(lambda: check_finite(plain, state, type(model).__qualname__, advice))
        aliases = getattr(plain, "_tied_weights_keys", None)
        folder = named_folder(save_directory, "save_model: save_directory")
        self._check_one_writer()
        self._group.run(lambda: export_model(folder, state, aliases, max_shard_size) if self._is_writer else None)

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Save ``obj`` once, in the main process (once a machine with ``save_on_each_node``); a path is written whole.

        With ``safe_serialization``, or a name that ends in ``.safetensors``, ``obj`` is a dict of tensors. Else it is
        ``torch.save``'s pickle; ``load_state`` never reads one.
        """
        if not self._is_writer:
            return
        if not isinstance(f, _PATHS):
            torch.save(obj, f)
            return
        path = Path(f)
        as_tensors = safe_serialization or path.suffix == ".safetensors"
        if as_tensors and not (isinstance(obj, Mapping) and all(isinstance(v, Tensor) for v in obj.values())):
            raise CheckpointError(f"{path.name} as safetensors holds a dict of tensors, got a {type(obj).__qualname__}")
        replace_file(path, obj, as_tensors=as_tensors)

    def _write(self, target: Path, max_shard_size: int | str, progress: Any, force: bool) -> None:
        self._check_one_writer()
        states = [self._state_to_write(model) for model in self._models]  # first: it brings shards back in their place
        training = self._training(with_optimizer_states=True)
        if training.keeps_gradients and training.is_inside_window():
            _log.warning(
                "saving between two micro-batches of a step: the strategy %r keeps their gradients to itself, so a"
                " resume starts the step anew; save where sync_gradients is True",
                self.strategy.name,
            )
        if not force:
            self._group.run(lambda: _check_models(training, states))
        hashes: dict[str, dict[str, Any]] = {}
        token = f"{self._group.agree(lambda: secrets.randbits(62)):x}"
        own_token = token if self._is_writer else None

        def open_folder() -> Path:
            return (
                stack.enter_context(whole_folder(target, OWNED, own_token))
                if own_token
                else building_path(target, token)
            )

        def write(building: Path, weights: dict[int, Any]) -> dict[str, str]:
            if not building.is_dir():
                raise CheckpointError(
                    f"process {self.processes.process_index} cannot see {building.parent}, where the main process"
                    " writes; use a shared file system, or save_on_each_node=True"
                )
            tied = write_common(building, training, weights, max_shard_size) if self._is_writer else {}
            shards = write_shards(building, training, weights) if self._saves_shards else []
            hashes.update({name: file_entry(building / name) for name in shards})
            write_process(building, training)
            return tied

        with ExitStack() as stack:
            building = self._group.run(open_folder, target)
            weights = list(states)
            self._group.run(
                lambda: self._run_hooks(self._save_hooks, list(self._models), weights, str(building)), target
            )
            tied = self._group.run(lambda: write(building, _by_model(states, weights)), target)
            known = {name: entry for own in self._group.gather(hashes) for name, entry in own.items()}

            def describe() -> None:
                if self._is_writer:
                    write_manifest(building, tied=tied, progress=progress, config={}, known=known)

            self._group.run(describe, target)
            self._group.run(stack.close, target)

    @property
    def _saves_shards(self) -> bool:
        return self.strategy.has_dtensors and not self.strategy.saves_whole

    def _state_to_write(self, model: nn.Module) -> dict[str, Any]:
        return plain_model(model).state_dict() if self._saves_shards else self.get_state_dict(model)

    def _check_one_writer(self) -> None:
        """Raise ConfigError where each machine would write, and none has all."""
        if self.strategy.is_sharded and self.project_configuration.save_on_each_node:
            raise ConfigError(
                f"save_on_each_node=True got the strategy {self.strategy.name!r}, where no machine holds the whole"
                " model; allowed: False, and a folder that all machines see"
            )

    def _open(self, folder: Path, strict: bool, force: bool) -> Resume:
        """A checkpoint that fits, in every process; nothing has changed yet."""
        group = self._group
        checkpoint = group.run(lambda: load(folder))
        group.run(lambda: checkpoint.verify_shards(group.index, group.count))
        checkpoint.trust_shards()
        engine = None
        if self.strategy.is_engine:
            engine = Engine(
                models=[self.strategy.model_state(model) for model in self._models],
                load_model=self._load_into_engine,
                load_optimizer=lambda i, state: self.strategy.load_optimizer_state(
                    self._optimizers[i].optimizer, state
                ),
            )

        def fit() -> Resume:
            if self._load_hooks:
                checkpoint.verify()  # a hook reads its files without looking at their hashes
            resume = Resume(checkpoint, self._training(), strict=strict, force=force, engine=engine)
            if not self._load_hooks and any(map(resume.lacks, range(len(self._models)))):
                resume.attempt(range(len(self._models)))  # raises, and says what is missing
            return resume

        return group.run(fit)

    def _load_into_engine(self, index: int, state: Mapping[str, Any]) -> None:
        self.strategy.load_model_state(self._models[index], state, lambda model, values: load_state(model, values)())

    def _training(self, *, with_optimizer_states: bool = False) -> Training:
        states = None
        is_gathered = self.strategy.is_engine or (self.strategy.is_sharded and not self._saves_shards)
        if with_optimizer_states and is_gathered:
            states = [self.strategy.optimizer_state(one.optimizer) for one in self._optimizers]
        return Training(
            optimizer_states=states,
            keeps_gradients=self.strategy.keeps_gradients,
            models=[plain_model(model) for model in self._models],
            optimizers=self._optimizers,
            schedulers=self._schedulers,
            loaders=self._dataloaders,
            scaler=self.scaler,
            custom=self._custom_objects,
            window=self.gradients,
            clock=self.clock,
            mixed_precision=self.mixed_precision,
            configuration={path: str(value) for path, value in self._configured().items()},
            process_index=self.processes.process_index,
            num_processes=self.processes.num_processes,
        )

    def _configured(self) -> dict[str, Any]:
        report = self.fp8_report()  # type: ignore[attr-defined]
        return {path: value.value for path, value in report.values.items()}

    @property
    def _is_writer(self) -> bool:
        """True in the process that writes what all share."""
        each_node = self.project_configuration.save_on_each_node
        return (self.processes.local_process_index if each_node else self.processes.process_index) == 0

    def _run_hooks(self, hooks: Mapping[int, Callable[..., None]], *args: Any) -> None:
        for hook in list(hooks.values()):
            hook(*args)

    @property
    def _group(self) -> Together:
        here = self.processes
        return Together(here.process_index, here.num_processes, here.device)


def _check_models(training: Training, states: list[dict[str, Any]]) -> None:
    for model, state in zip(training.models, states, strict=True):
        check_finite(model, state, type(model).__qualname__, "it is not saved; pass force=True to save it all the same")


def _by_model(states: list[dict[str, Any]], left: list[Any]) -> dict[int, Any]:
    """The state_dicts that hooks left, by number of the model; one that a hook made stands for its own place."""
    number = {id(state): i for i, state in enumerate(states)}
    return {number.get(id(state), place): state for place, state in enumerate(left)}


def _register(hooks: dict[int, Callable[..., None]], hook: Callable[..., None]) -> RemovableHandle:
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def _refuse_pickle(safe_serialization: bool) -> None:
    if not safe_serialization:
        raise CheckpointError(
            "safe_serialization=False would write a pickle, which runs code when it is loaded; allowed: True, which any"
            " reader of safetensors opens"
        )


def _make_deterministic(device: torch.device, environ: Mapping[str, str]) -> None:
    """Let torch choose kernels that give the same bits each time; for the whole process, as torch has it."""
    allowed = (":4096:8", ":16:8")
    if device.type == "cuda" and (got := environ.get("CUBLAS_WORKSPACE_CONFIG")) not in allowed:
        raise ConfigError(
            f"deterministic=True: CUBLAS_WORKSPACE_CONFIG is {got!r}; allowed: {' or '.join(allowed)}; set it before"
            " the script starts, for cuBLAS reads it once"
        )
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
