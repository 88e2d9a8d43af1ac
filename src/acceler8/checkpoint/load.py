"""Reading a checkpoint: all that is asked for is read, verified and compared before anything is changed."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from acceler8.checkpoint.compare import compare_config
from acceler8.checkpoint.folder import MANIFEST, named_folder, readable
from acceler8.checkpoint.manifest import Manifest, check_hash, is_checkpoint_folder, read_json, read_manifest
from acceler8.checkpoint.model import check_fit, load_state
from acceler8.checkpoint.optimizer import load_named_state
from acceler8.checkpoint.rng import check_rng, restore_rng
from acceler8.checkpoint.save import FP8, Stateful
from acceler8.checkpoint.sharded import SHARDS, Stored, index_file, read_shards
from acceler8.checkpoint.shards import read_model
from acceler8.checkpoint.tensorfile import read_tensors
from acceler8.checkpoint.tree import decode
from acceler8.errors import CheckpointError, unknown_name

Action = Callable[[], None]
_T = TypeVar("_T")


def is_checkpoint(folder: str | os.PathLike[str]) -> bool:
    """True if ``folder`` is a checkpoint that was written to its end. Reads ``checkpoint.json`` only."""
    return is_checkpoint_folder(readable(Path(os.path.realpath(folder))))


def load(folder: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint; ``checkpoint.json`` is read now, other files are hashed and read when first needed.

    Raises: CheckpointError if the folder is none, lacks a file, has one of another size, or is of a newer
    format.
    """
    path = readable(Path(os.path.realpath(named_folder(folder, "load: folder"))))
    return Checkpoint(path, read_manifest(path))


class Checkpoint:
    """One checkpoint, open for reading; every access to a damaged file raises CheckpointError naming it."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self._manifest = manifest
        self._verified: set[str] = set()

    @property
    def progress(self) -> dict[str, Any]:
        """How far the run was: what ``save`` was given."""
        return self._decode(self._manifest.progress, {}, MANIFEST)

    @property
    def config(self) -> dict[str, Any]:
        """The run's configuration: what ``save`` was given."""
        return self._decode(self._manifest.config, {}, MANIFEST)

    @property
    def versions(self) -> dict[str, str]:
        """Versions of ``acceler8`` and ``torch`` that wrote it."""
        return {"acceler8": self._manifest.acceler8, "torch": self._manifest.torch}

    @property
    def contents(self) -> tuple[str, ...]:
        """What is inside: some of model, acceler8_state, optimizer, extra, module_extra, rng."""
        shards = {name: match["stem"] for name in self._manifest.files if (match := SHARDS.fullmatch(name))}
        return tuple(dict.fromkeys(shards.get(name, name.rsplit(".", 1)[0]) for name in self._manifest.files))

    @property
    def files(self) -> tuple[str, ...]:
        """Names of its files, with ``/`` where one lies in a folder of a hook's."""
        return tuple(self._manifest.files)

    def verify(self) -> None:
        """Hash every file against ``checkpoint.json``; raises CheckpointError for the first that differs."""
        for name in self._manifest.files:
            self.verified_path(name)

    def verify_shards(self, index: int, count: int) -> None:
        """Hash every file of shards whose turn it is if ``count`` readers, of which this is ``index``, take turns.

        ``trust_shards`` once all of them are through.
        """
        for name in self._shards()[index::count]:
            self.verified_path(name)

    def trust_shards(self) -> None:
        """Every file of shards was hashed, here or by another reader of the same folder."""
        self._verified.update(self._shards())

    def _shards(self) -> list[str]:
        return sorted(name for name in self._manifest.files if SHARDS.fullmatch(name))

    def model_state(self) -> dict[str, Any]:
        """The model's state_dict, on the CPU; tied names share one tensor, as they did."""
        return self._model_state(mapped=False)

    def fp8_state(self) -> dict[str, Tensor]:
        """The FP8 state that was saved, on the CPU; empty if there was none."""
        return read_tensors(self.verified_path(FP8)) if FP8 in self._manifest.files else {}

    def check_config(self, current: Mapping[str, Any], ignore: frozenset[str] = frozenset()) -> None:
        """Raise CheckpointError that says what differs between ``current`` and the saved configuration.

        ``ignore`` holds dotted keys that may differ; a key covers all below it.
        """
        covered = [(*key.split("."),) for key in ignore]
        differences = [
            difference
            for difference in compare_config(self.config, current)
            if not any((*difference.key.split("."),)[: len(key)] == key for key in covered)
        ]
        if differences:
            raise CheckpointError(
                f"{self.folder} was written with a different configuration: "
                + "; ".join(map(str, differences))
                + "; resume with the saved values, or start a new run"
            )

    def restore(
        self,
        *,
        model: nn.Module | None = None,
        optimizer: Optimizer | None = None,
        extra: Mapping[str, Stateful] | None = None,
        rng: bool = True,
        strict: bool = True,
    ) -> tuple[str, ...]:
        """Load into the objects given; whatever does not fit raises before any of them is changed.

        With ``strict`` names, shapes, dtypes, ties and the optimizer's class must be as saved. Without it,
        names, dtypes and ties of the model may differ (values are cast), the class may, and a checkpoint may
        lack random states; the result lists, a line each, what was let pass, and a GPU's random state that has no
        use without one, or is not there. The order is extra, optimizer,
        model, random generators: an ``extra`` object that rejects its state does so while model and optimizer
        are untouched. ``optimizer`` needs ``model``, which names its parameters. FP8 state is the caller's to
        load, from ``fp8_state()``.
        Raises: CheckpointError.
        """
        notes: list[str] = []
        actions = self._prepare_extra(extra or {})
        if optimizer is not None:
            actions.append(self._prepare_optimizer(model, optimizer, strict))
        if model is not None:
            actions.append(self._prepare_model(model, strict, notes))
        if rng:
            actions.extend(self._prepare_rng(strict, notes))
        for action in actions:
            action()
        return tuple(notes)

    def _prepare_model(self, model: nn.Module, strict: bool, notes: list[str]) -> Action:
        state = self._model_state(mapped=True)
        notes.extend(check_fit(state, self._manifest.tied, model.state_dict(), strict=strict))
        return load_state(model, state)

    def _prepare_optimizer(self, model: nn.Module | None, optimizer: Optimizer, strict: bool) -> Action:
        if model is None:
            raise CheckpointError("restore(optimizer=) needs model= too: it names the optimizer's parameters")
        part, version = self.part("optimizer"), self.versions["torch"]
        return load_named_state(part, model, optimizer, strict=strict, torch_version=version)

    def _prepare_extra(self, extra: Mapping[str, Stateful]) -> list[Action]:
        saved = self.part("extra") if extra else {}
        for name, owner in extra.items():
            if name not in saved:
                raise CheckpointError(f"{unknown_name('extra', name, saved)}; restore only what was saved")
            if not callable(getattr(owner, "load_state_dict", None)):
                raise CheckpointError(
                    f"extra[{name!r}] is a {type(owner).__qualname__} without load_state_dict(); give it one"
                )
        return [self._extra_action(name, owner, saved[name]) for name, owner in extra.items()]

    def _extra_action(self, name: str, owner: Stateful, state: Any) -> Action:
        def apply() -> None:
            try:
                owner.load_state_dict(state)
            except Exception as error:
                raise CheckpointError(
                    f"extra[{name!r}] rejects its saved state: {error}; model and optimizer are unchanged; "
                    "build it as it was saved, or leave it out"
                ) from error

        return apply

    def _prepare_rng(self, strict: bool, notes: list[str]) -> list[Action]:
        if "rng.json" not in self._manifest.files and not strict:
            notes.append("no random states in the checkpoint")
            return []
        state = self.part("rng")
        if differs := check_rng(state):
            notes.append(differs)
        return [lambda: restore_rng(state)]

    def _model_state(self, *, mapped: bool) -> dict[str, Any]:
        state = self.weights("model", self._manifest.tied, mapped=mapped)
        if "module_extra.json" in self._manifest.files:
            state |= self.part("module_extra")
        return state

    def weights(self, stem: str, tied: Mapping[str, str], *, mapped: bool) -> dict[str, Any]:
        """The tensors of ``STEM.safetensors`` or of its shards, tied names filled in."""
        if index_file(stem) in self._manifest.files:
            pieces = read_shards(self.files, self.verified_path, stem)
            return self._with_ties({name: stored.whole() for name, stored in pieces.items()}, tied)
        return self._with_ties(read_model(self.files, self.verified_path, stem, mapped=mapped), tied)

    def stored(self, stem: str, tied: Mapping[str, str]) -> dict[str, Stored]:
        """The tensors of ``weights``, in the pieces in which they lie in the files; tied names share theirs."""
        if index_file(stem) in self._manifest.files:
            return self._with_ties(read_shards(self.files, self.verified_path, stem), tied)
        return {name: Stored.whole_of(tensor) for name, tensor in self.weights(stem, tied, mapped=True).items()}

    def _with_ties(self, state: dict[str, _T], tied: Mapping[str, str]) -> dict[str, _T]:
        for alias, kept in tied.items():
            if alias in state or kept not in state:
                raise CheckpointError(
                    f"{self.folder} ties {alias!r} to {kept!r}, but its model holds "
                    + ("both" if alias in state else "no such tensor")
                    + "; it is damaged: use another checkpoint"
                )
        return state | {alias: state[kept] for alias, kept in tied.items()}

    def part(self, part: str, *, stored: bool = False) -> dict[str, Any]:
        """The decoded tree of a part; its tensors whole, or ``stored`` in the pieces in which they lie in the files."""
        if f"{part}.json" not in self._manifest.files:
            hint = "; pass rng=False" if part == "rng" else "; restore without it"
            raise CheckpointError(f"{self.folder} holds no {part}, only {', '.join(self.contents)}{hint}")
        path = self.verified_path(f"{part}.json")
        tensors: Mapping[str, Any] = {}
        if index_file(part) in self._manifest.files:
            pieces = read_shards(self.files, self.verified_path, part)
            tensors = pieces if stored else {name: piece.whole() for name, piece in pieces.items()}
        elif f"{part}.safetensors" in self._manifest.files:
            whole = read_tensors(self.verified_path(f"{part}.safetensors"), mapped=stored)
            tensors = {name: Stored.whole_of(tensor) for name, tensor in whole.items()} if stored else whole
        return self._decode(read_json(path), tensors, path.name)

    def _decode(self, value: Any, tensors: Mapping[str, Any], source: str) -> dict[str, Any]:
        try:
            return dict(decode(value, tensors))
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise CheckpointError(f"{self.folder / source} is damaged ({error!r}); use another checkpoint") from error

    def verified_path(self, name: str) -> Path:
        """The path of a file whose bytes are known to be those that were written."""
        if name not in self._manifest.files:
            raise CheckpointError(f"{self.folder} lists no {name}; it is damaged: use another checkpoint")
        path = self.folder / name
        if name not in self._verified:
            check_hash(path, self._manifest.files[name]["sha256"])
            self._verified.add(name)
        return path
