"""Reading a whole training: everything is read, verified and compared; only then is anything changed.

What may differ from the saved run (precision, recipe, backend, schedule, number of processes) is taken over as far as
it fits, and the report says what starts afresh. What must not differ raises.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from acceler8.checkpoint.fp8 import drop_codes, fit_fp8
from acceler8.checkpoint.load import Checkpoint
from acceler8.checkpoint.model import check_fit, load_state
from acceler8.checkpoint.optimizer import load_named_state, place_state, unwrapped
from acceler8.checkpoint.rng import capture_rng, check_rng, restore_rng
from acceler8.checkpoint.schedule import wrong_state
from acceler8.checkpoint.sharded import local
from acceler8.checkpoint.shards import has_model
from acceler8.checkpoint.state_file import read_state
from acceler8.checkpoint.training import Training, check_finite, loader_state, prefix, stem
from acceler8.errors import CheckpointError

Action = Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What ``load_state`` did; ``str()`` is a line for each point."""

    folder: Path
    """The checkpoint."""
    steps: int
    """Optimizer steps that the saved training had made."""
    progress: dict[str, Any]
    """What ``save_state(progress=)`` was given."""
    reset: tuple[str, ...]
    """What differs from the saved training, and so starts afresh, has no use now, or goes on otherwise."""
    notes: tuple[str, ...]
    """What was let pass with ``strict=False``."""

    def __str__(self) -> str:
        lines = [f"resumed at step {self.steps} from {self.folder}"]
        return "\n".join([*lines, *(f"  reset: {line}" for line in self.reset), *(f"  note: {n}" for n in self.notes)])


@dataclass(frozen=True, kw_only=True)
class Engine:
    """What of a training an engine keeps for itself, and takes from process 0 whole."""

    models: Sequence[Mapping[str, Any]]
    """Whole state_dicts as they are now; empty but on process 0."""
    load_model: Callable[[int, Mapping[str, Any]], None]
    """Called in every process, with a model's number and its whole state."""
    load_optimizer: Callable[[int, Mapping[str, Any]], None]
    """The same for an optimizer."""


class Resume:
    """A checkpoint that fits ``training``: made without changing anything; then ``attempt`` and ``finish`` do.

    Raises: CheckpointError, with every object as it was, if the checkpoint is damaged or does not fit.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        training: Training,
        *,
        strict: bool = True,
        force: bool = False,
        engine: Engine | None = None,
    ) -> None:
        self.checkpoint, self.training, self.engine = checkpoint, training, engine
        self.strict, self.force = strict, force
        self.reset: list[str] = []
        self.notes: list[str] = []
        self.state = read_state(checkpoint)
        self._check_counts()
        self._keeps_window = self._compare_window()
        self._models = self._fit_models()  # first: what is wrong with a model shows in all that hangs on it
        self._own = self._read_process()
        self._gradients = self._check_gradients()
        self._extras = self._read_extras()
        self._optimizers = [self._fit_optimizer(i, one) for i, one in enumerate(training.optimizers)]
        self._fp8 = self._fit_fp8()
        self._undo: list[Action] = []

    def lacks(self, index: int) -> bool:
        """True if the checkpoint has no weights of model ``index``, for a hook took them when it was saved."""
        return index not in self._models

    def attempt(self, models: Collection[int]) -> None:
        """Change what may still reject its state: registered objects, schedulers, loaders, optimizers.

        ``models`` are those that ``finish`` is to load; a hook may have loaded the others.
        Raises: CheckpointError if a model has no weights here or an object rejects its state; all is as before then.
        """
        if missing := [i for i in models if self.lacks(i)]:
            kind = type(self.training.models[missing[0]]).__qualname__
            raise CheckpointError(
                f"{self.checkpoint.folder} has no weights of model {missing[0]} ({kind}): a save hook took them;"
                " register the load hook that reads them and removes the model from its list"
            )
        rng = capture_rng()
        self._undo.append(lambda: restore_rng(rng))
        for name, change in self._risky():
            try:
                change()
            except Exception as error:
                unsure = self.undo()
                raise CheckpointError(
                    f"{name} rejects its saved state ({error}); everything is as before"
                    + (f", but {name} took neither its old state back" if unsure else "")
                    + "; build it as it was saved"
                ) from error

    def undo(self) -> bool:
        """Take ``attempt`` back; True if an object rejects its own state of before."""
        unsure = False
        while self._undo:
            try:
                self._undo.pop()()
            except Exception:
                unsure = True
        return unsure

    def exchanges(self, models: Collection[int]) -> list[Action]:
        """What an engine loads, each in all processes together; call the next when all are through the one before.

        One that fails in a process does so behind what it exchanges: then the others learn it, and do not wait for that
        process in the next one.
        """
        return [] if self.engine is None else [*(self._models[i] for i in models), *self._optimizers]

    def finish(self, models: Collection[int]) -> LoadReport:
        """Change the rest, after ``attempt`` and ``exchanges``."""
        for i in models if self.engine is None else ():
            self._models[i]()
        for action in self._fp8:
            action()
        for model in self.training.models:
            drop_codes(model)
        self._set_loop()
        if "rng" in self._own:
            restore_rng(self._own["rng"])
        return LoadReport(
            folder=self.checkpoint.folder,
            steps=self.state["steps"],
            progress=self.checkpoint.progress,
            reset=tuple(self.reset),
            notes=tuple(self.notes),
        )

    def _check_counts(self) -> None:
        for kind in ("models", "optimizers", "schedulers", "custom"):
            saved = self.state[kind]
            was, now = saved if isinstance(saved, int) else len(saved), len(getattr(self.training, kind))
            if was != now:
                what = "objects registered for checkpointing" if kind == "custom" else f"prepared {kind}"
                raise CheckpointError(
                    f"{self.checkpoint.folder} holds the state of {was} {what}, this training has {now}; prepare or"
                    " register the same ones, in the same order, before load_state"
                )

    def _compare_window(self) -> bool:
        """True if the unfinished accumulation window can go on."""
        saved, now = self.state["window"], self.training.window
        if saved["sync_gradients"] or saved["micro_batch"] == 0:
            return bool(saved["num_steps"] == now.num_steps)
        if self.training.keeps_gradients or not saved["has_gradients"]:
            whose = "present" if saved["has_gradients"] else "saved"
            self.reset.append(
                f"gradient accumulation: the {whose} strategy keeps gradients of an unfinished step to itself, so it"
                " starts anew"
            )
            return False
        if saved["num_steps"] != now.num_steps:
            self.reset.append(
                f"gradient accumulation: was {saved['num_steps']} micro-batches a step, now {now.num_steps}; the"
                " unfinished step starts anew"
            )
            return False
        if self.state["num_processes"] != self.training.num_processes:
            self.reset.append("gradient accumulation: another number of processes, so the unfinished step starts anew")
            return False
        return True

    def _read_process(self) -> dict[str, Any]:
        index, was, now = self.training.process_index, self.state["num_processes"], self.training.num_processes
        if f"process_{index}.json" not in self.checkpoint.files:
            if index < was:
                raise CheckpointError(f"{self.checkpoint.folder} holds no part of process {index}; use another one")
            self.reset.append(f"random generators: none were saved for process {index}, so they go on as they are")
            return {"loaders": self._read_own(0)["loaders"]}
        own = self._read_own(index)
        if differs := check_rng(own["rng"]):
            self.reset.append(differs)
        # Another number of processes goes on where all of them stood, as the first one tells it.
        return own if was == now else {"rng": own["rng"], "loaders": self._read_own(0)["loaders"]}

    def _read_own(self, index: int) -> dict[str, Any]:
        own = self.checkpoint.part(f"process_{index}")
        kinds = {"loaders": list, "gradients": dict, "rng": dict}
        if set(own) != set(kinds) or not all(isinstance(own[key], kind) for key, kind in kinds.items()):
            raise CheckpointError(f"{self.checkpoint.folder}/process_{index}.json is damaged; use another checkpoint")
        return own

    def _check_gradients(self) -> dict[str, Tensor]:
        gradients = self._own.get("gradients", {}) if self._keeps_window else {}
        parameters = self.training.parameters()
        for name, gradient in gradients.items():
            p = parameters.get(name)
            if p is None or not isinstance(gradient, Tensor) or (gradient.shape, gradient.dtype) != (p.shape, p.dtype):
                raise CheckpointError(
                    f"{self.checkpoint.folder}: the gradient of {name!r} fits no parameter; prepare the models that"
                    " were saved"
                )
            # With a loss scaler such gradients are part of the game: it skips their step.
            if not self.force and not self.state["has_scaler"] and not bool(gradient.isfinite().all()):
                raise CheckpointError(
                    f"{self.checkpoint.folder}: the gradient of {name!r} holds NaN or inf; use an earlier"
                    " checkpoint, or pass force=True"
                )
        window = self.state["window"]
        is_open = "gradients" in self._own and self._keeps_window and not window["sync_gradients"]
        if is_open and window["micro_batch"] and parameters and not gradients and not self.force:
            raise CheckpointError(
                f"{self.checkpoint.folder} holds no gradients of its unfinished step, which has had"
                f" {window['micro_batch']} micro-batches; it is damaged: use another one, or pass force=True"
            )
        return gradients

    def _read_extras(self) -> list[tuple[str, Any, Any]]:
        """``(name, owner, state)`` of schedulers, scaler and registered objects."""
        saved = self.checkpoint.part("extra") if "extra.json" in self.checkpoint.files else {}
        owners = self.training.extras()
        if self.state["has_scaler"] and "scaler" not in owners:
            self.reset.append("loss scaler: the saved one has no use without fp16")
        if not self.state["has_scaler"] and owners.pop("scaler", None) is not None:
            self.reset.append("loss scaler: none was saved, so it starts afresh")
        found = []
        for name, owner in owners.items():
            entry = saved.get(name)
            if not isinstance(entry, dict) or set(entry) != {"type", "state"}:
                raise CheckpointError(f"{self.checkpoint.folder} holds no state of {name}; use another checkpoint")
            found.append((name, owner, self._check_extra(name, owner, entry)))
        return found

    def _check_extra(self, name: str, owner: Any, entry: dict[str, Any]) -> Any:
        kind = type(getattr(owner, "scheduler", owner)).__qualname__
        if entry["type"] != kind and self.strict:
            raise CheckpointError(
                f"{name} is a {kind}, saved was a {entry['type']}; build the one that was saved, or pass strict=False"
            )
        state = entry["state"]
        if name == "scaler":
            numbers = [state.get(key) for key in ("scale", "growth_factor", "backoff_factor")] if state else [1.0]
            if not all(isinstance(n, float) and 0 < n < float("inf") for n in numbers):
                raise CheckpointError(f"the loss scaler's saved numbers are {numbers}; allowed: finite and above 0")
        if name.startswith("scheduler_"):
            state = self._check_scheduler(name, owner, state)
        return state

    def _check_scheduler(self, name: str, owner: Any, state: Any) -> dict[str, Any]:
        """Its ``load_state_dict`` would take any attribute; only those that it has itself are let in."""
        own = owner.state_dict()
        if not isinstance(state, dict):
            raise CheckpointError(f"{name}: the saved state is a {type(state).__name__}; use another checkpoint")
        is_same_torch = self.checkpoint.versions["torch"] == torch.__version__ and self.strict
        extra = sorted(str(key) for key in state.keys() - own.keys())
        if extra and is_same_torch:
            raise CheckpointError(f"{name} has no {extra[0]!r}, which the checkpoint sets; use another checkpoint")
        inner = getattr(owner, "scheduler", owner)
        if isinstance(inner, LRScheduler):
            is_torchs = type(inner).__module__.startswith("torch.optim.")
            lacks = sorted(str(key) for key in own.keys() - state.keys())
            if lacks and is_torchs and is_same_torch:
                raise CheckpointError(f"{name}: the saved state lacks {lacks[0]!r}; use another checkpoint")
            if wrong := wrong_state(state, own, is_torchs=is_torchs):
                raise CheckpointError(f"{name}: the saved {wrong}; the checkpoint is damaged: use another one")
        return {key: value for key, value in state.items() if key in own}

    def _fit_optimizer(self, index: int, optimizer: Optimizer) -> Action:
        parameters = self.training.parameters()
        part = self._optimizer_part(index, optimizer, parameters)
        version = self.checkpoint.versions["torch"]
        load = None if self.engine is None else partial(self.engine.load_optimizer, index)
        action = load_named_state(part, parameters, optimizer, strict=self.strict, torch_version=version, load=load)
        if not self.force:
            knows_all = type(unwrapped(optimizer)).__module__.startswith(
                "torch.optim."
            )  # others may keep a mask of inf
            for name, values in part["state"].items():
                for key, value in values.items() if isinstance(values, dict) else ():
                    if not isinstance(value, Tensor) or not value.is_floating_point():
                        continue
                    numbers = local(value).float()
                    bad = ~numbers.isfinite() if knows_all else numbers.isnan()
                    if bool(bad.any()):
                        raise CheckpointError(
                            f"{self.checkpoint.folder}: the optimizer's {key} of {name} holds NaN or inf; use an"
                            " earlier checkpoint, or pass force=True"
                        )
        return action

    def _optimizer_part(self, index: int, optimizer: Optimizer, parameters: Mapping[str, Any]) -> dict[str, Any]:
        part = self.checkpoint.part(stem("optimizer", index), stored=True)
        try:
            return place_state(part, parameters, optimizer)
        except (KeyError, TypeError, AttributeError, ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"{self.checkpoint.folder}: the state of optimizer {index} is damaged ({error!r}); use another"
                " checkpoint"
            ) from error

    def _fit_fp8(self) -> list[Action]:
        saved = self.checkpoint.fp8_state()
        listed = {name: shape for entry in self.state["models"] for name, shape in entry["histories"].items()}
        if listed != {name: list(tensor.shape) for name, tensor in saved.items()}:
            raise CheckpointError(
                f"{self.checkpoint.folder}: acceler8_state.json and its tensors disagree; use another checkpoint"
            )
        actions: list[Action] = []
        for i, (model, entry) in enumerate(zip(self.training.models, self.state["models"], strict=True)):
            before = prefix(i)
            own = {name.removeprefix(before): saved[name] for name in entry["histories"]}
            made, reset = fit_fp8(model, entry["fp8"], own, type(model).__qualname__)
            actions += made
            self.reset += reset
        return actions

    def _fit_models(self) -> dict[int, Action]:
        extra = self.checkpoint.part("module_extra") if "module_extra.json" in self.checkpoint.files else {}
        actions = {}
        for i, (model, entry) in enumerate(zip(self.training.models, self.state["models"], strict=True)):
            if not has_model(self.checkpoint.files, stem("model", i)):
                continue
            current: Mapping[str, Any] = model.state_dict() if self.engine is None else self.engine.models[i]
            state: dict[str, Any] = {
                name: stored.like(current[name]) if isinstance(current.get(name), Tensor) else stored.whole()
                for name, stored in self.checkpoint.stored(stem("model", i), entry["tied"]).items()
            }
            before = prefix(i)
            state |= {
                name.removeprefix(before): value
                for name, value in extra.items()
                if (name.startswith(before) if before else not name.startswith("model_"))
            }
            try:
                if current:  # what an engine gathers is on process 0 alone
                    self.notes += check_fit(state, entry["tied"], current, strict=self.strict)
            except CheckpointError as error:
                if len(self.training.models) == 1:
                    raise
                raise CheckpointError(
                    f"model {i}, a {type(model).__qualname__}: {error}; prepare models in the same order as when saved"
                ) from None
            if not self.force:
                check_finite(model, state, str(self.checkpoint.folder), "use an earlier checkpoint, or pass force=True")
            actions[i] = load_state(model, state)
            if self.engine is not None:
                actions[i] = partial(self.engine.load_model, i, state)
        return actions

    def _risky(self) -> Iterator[tuple[str, Action]]:
        """``(name, change)``; how to take it back is noted before each."""
        for name, owner, state in self._extras:
            self._undo.append(_undo_stateful(owner, owner.state_dict()))
            yield name, partial(owner.load_state_dict, state)
        for i, (loader, state) in enumerate(self._loaders()):
            self._undo.append(_undo_stateful(loader, loader.state_dict()))
            yield f"loader {i}", partial(_load_loader, loader, state)
        for i, (optimizer, action) in enumerate(zip(self.training.optimizers, self._optimizers, strict=True)):
            if self.engine is not None:  # asked in ``finish``, when every process got as far
                continue
            self._undo.append(_undo_optimizer(unwrapped(optimizer)))
            yield f"optimizer {i}", action

    def _loaders(self) -> list[tuple[Any, Any]]:
        if "loaders" not in self._own:
            return []
        saved, now = self._own["loaders"], self.training.loaders
        if len(saved) != len(now):
            self.reset.append(
                f"loaders: {len(saved)} were saved, {len(now)} are prepared, so all start from their beginning"
            )
            return []
        found = []
        for i, (loader, state) in enumerate(zip(now, saved, strict=True)):
            if state is None or loader_state(loader) is None:
                self.reset.append(
                    f"loader {i}: keeps no position, so it starts from its beginning; skip batches yourself, or use"
                    " torchdata's StatefulDataLoader"
                )
                continue
            if hasattr(loader, "fit"):
                state, differs = loader.fit(state, self._lost_batches())
                if differs:
                    self.reset.append(f"loader {i}: {differs}")
            elif self.state["num_processes"] != self.training.num_processes:
                self.reset.append(f"loader {i}: saved by another number of processes, so it starts from its beginning")
                continue
            found.append((loader, state))
        return found

    def _lost_batches(self) -> int:
        """Micro-batches of an unfinished step that starts anew: their samples count as not used.

        With several loaders nobody knows whose they were.
        """
        window = self.state["window"]
        if self._keeps_window or window["sync_gradients"] or len(self.training.loaders) != 1:
            return 0
        return int(window["micro_batch"] % window["num_steps"])

    def _set_loop(self) -> None:
        self.training.clock.ticks = self.state["steps"]
        self.training.clock.stepped = set(self.state["stepped"])
        window, saved = self.training.window, self.state["window"]
        window.micro_batch = saved["micro_batch"] if self._keeps_window else 0
        window.sync_gradients = saved["sync_gradients"] if self._keeps_window else True
        for name, p in self.training.parameters().items():
            gradient = self._gradients.get(name)
            p.grad = None if gradient is None else gradient.to(p.device)


def _load_loader(loader: Any, state: Any) -> None:
    loader.load_state_dict(state)
    loader_state(loader)  # makes the iterator now, whose making draws random numbers


def _undo_stateful(owner: Any, state: Mapping[str, Any]) -> Action:
    before = copy.deepcopy(state)
    return lambda: owner.load_state_dict(before)


def _undo_optimizer(optimizer: Optimizer) -> Action:
    """``load_state_dict`` puts new dicts in the place of the old ones, which hold what was."""
    state, groups = optimizer.state, optimizer.param_groups

    def undo() -> None:
        optimizer.state, optimizer.param_groups = state, groups

    return undo
