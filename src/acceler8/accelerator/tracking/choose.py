"""From ``log_with`` to trackers: which words there are, whether their libraries are, and whether they have a folder."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from enum import EnumMeta
from importlib import util
from typing import Any

from acceler8.accelerator.tracking.base import GeneralTracker
from acceler8.accelerator.tracking.jsonl import JsonlTracker
from acceler8.accelerator.tracking.mlflow import MLflowTracker
from acceler8.accelerator.tracking.tensorboard import TensorBoardTracker
from acceler8.accelerator.tracking.trackio import TrackioTracker
from acceler8.accelerator.tracking.wandb import WandBTracker
from acceler8.config.enums import LoggerType
from acceler8.errors import ConfigError, MissingLibraryError, NotInThisVersionError, unknown_name

_log = logging.getLogger("acceler8")

TRACKERS: dict[LoggerType, type[GeneralTracker]] = {
    LoggerType.TENSORBOARD: TensorBoardTracker,
    LoggerType.WANDB: WandBTracker,
    LoggerType.TRACKIO: TrackioTracker,
    LoggerType.MLFLOW: MLflowTracker,
    LoggerType.JSONL: JsonlTracker,
}
# Accelerate has these too.
_NOT_BUILT = ("aim", "comet_ml", "clearml", "dvclive", "swanlab")


def choose(log_with: Any, logging_dir: str | None) -> list[LoggerType | GeneralTracker]:
    """The trackers that ``log_with`` asks for, in its order, each once; ``all`` is every one that can be used here.

    Raises: MissingLibraryError with the command that installs one; ConfigError for an unknown word, an object that is
        no tracker, and a tracker that writes files without a ``logging_dir``; NotInThisVersionError for Accelerate's
        others.
    """
    if log_with is None:
        return []
    is_several = isinstance(log_with, Iterable) and not isinstance(log_with, str | EnumMeta)
    chosen: list[LoggerType | GeneralTracker] = []
    for asked in log_with if is_several else [log_with]:
        found = asked if _is_tracker(asked) else _word(asked)
        if found is LoggerType.ALL:
            chosen += [kind for kind in TRACKERS if kind not in chosen and _is_usable(kind, logging_dir)]
        elif not any(found is known for known in chosen):
            _check(found, logging_dir)
            chosen.append(found)
    return chosen


def _is_tracker(asked: Any) -> bool:
    """An object of ours, of Accelerate's base class, or any that answers to the same calls; not a class of them."""
    if isinstance(asked, type):
        raise ConfigError(f"log_with got the class {asked.__name__}; allowed: an object: {asked.__name__}(...)")
    return isinstance(asked, GeneralTracker) or (callable(getattr(asked, "log", None)) and hasattr(asked, "name"))


def _word(asked: Any) -> LoggerType:
    word = getattr(asked, "value", asked)  # an enum of Accelerate's counts as its word
    if not isinstance(word, str):
        raise ConfigError(
            f"log_with got a {type(asked).__name__}; allowed: {', '.join(LoggerType.list())}, an object of"
            " GeneralTracker, or a list of them"
        )
    if word.lower() in _NOT_BUILT:
        raise NotInThisVersionError(
            f"log_with={word!r} is not in this version; allowed: {', '.join(LoggerType.list())}; or pass an object of a"
            " GeneralTracker subclass of your own"
        )
    if word not in LoggerType:
        raise ConfigError(unknown_name("log_with", word, LoggerType.list()))
    return LoggerType(word)


def _check(found: LoggerType | GeneralTracker, logging_dir: str | None) -> None:
    if isinstance(found, LoggerType) and not _has_library(found):
        raise MissingLibraryError(f"log_with={found.value!r} needs {found.value}; pip install {found.value}")
    if logging_dir is None and getattr(_kind(found), "requires_logging_directory", False):
        raise ConfigError(
            f"log_with={_kind(found).name!r} writes files and got no folder; give project_dir, or a project_config with"
            " logging_dir"
        )


def _kind(found: Any) -> Any:
    return TRACKERS[found] if isinstance(found, LoggerType) else found


def _is_usable(kind: LoggerType, logging_dir: str | None) -> bool:
    if not _has_library(kind):
        return False
    if TRACKERS[kind].requires_logging_directory and logging_dir is None:
        _log.info("log_with='all' leaves out %s, which needs a project_dir", kind.value)
        return False
    return True


def _has_library(kind: LoggerType) -> bool:
    if kind is LoggerType.JSONL:
        return True
    try:
        return util.find_spec(kind.value) is not None
    except (ImportError, ValueError):  # a half-removed package, or a stub without a spec
        return False
