"""Trackers of an ``Accelerator``: one call to ``log`` goes to every dashboard, and to a file of lines always.

Only the main process talks to trackers. A tracker that cannot start raises, for that is known before anything is
trained. One that fails later does not end the training: the first failure is a warning in the log, it is tried again at
the next call, and the values are in ``metrics.jsonl`` either way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from acceler8.accelerator.processes import Processes
from acceler8.accelerator.tracking.base import BlankTracker, GeneralTracker
from acceler8.accelerator.tracking.choose import TRACKERS, choose
from acceler8.accelerator.tracking.jsonl import JsonlTracker
from acceler8.accelerator.tracking.values import plain
from acceler8.checkpoint.project import ProjectConfiguration
from acceler8.config.enums import LoggerType
from acceler8.errors import ConfigError, unknown_name

_log = logging.getLogger("acceler8")


class Tracking:
    """The part of ``Accelerator`` that reports; the names are Hugging Face Accelerate's."""

    processes: Processes
    project_configuration: ProjectConfiguration
    log_with: list[LoggerType | GeneralTracker]
    """What the constructor's argument of that name asked for."""
    trackers: list[GeneralTracker]
    """Those that run, in the main process; the file of lines is among them only if ``jsonl`` was asked for."""

    def _start_tracking(self, log_with: Any) -> None:
        """Take the constructor's argument."""
        self.log_with = choose(log_with, self.project_configuration.logging_dir)
        self.trackers = []
        self._lines: JsonlTracker | None = None
        self._is_tracking = False
        self._said: set[tuple[int, str]] = set()

    def init_trackers(
        self,
        project_name: str,
        config: Mapping[str, Any] | None = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Start a run in every tracker of ``log_with``, and ``metrics.jsonl`` where there is a ``logging_dir``.

        config: hyperparameters, kept by each. init_kwargs: more arguments for a tracker's constructor, by its name.
        Raises: what a tracker raises when it starts, with those that had started finished; ConfigError for a name in
            ``init_kwargs`` that is no tracker's, and if trackers run already.
        """
        if self.processes.process_index != 0:
            return
        if self._is_tracking:
            raise ConfigError("init_trackers was called before, and its trackers run; call end_training() first")
        options = {str(name): dict(kwargs) for name, kwargs in (init_kwargs or {}).items()}
        for name in options:
            if name not in TRACKERS and name not in {getattr(found, "name", None) for found in self.log_with}:
                raise ConfigError(unknown_name("tracker in init_kwargs", name, TRACKERS))
        self.trackers = [self._make(found, project_name, options) for found in self.log_with]
        self._lines = next((tracker for tracker in self.trackers if isinstance(tracker, JsonlTracker)), None)
        if self._lines is None and self.project_configuration.logging_dir is not None:
            self._lines = JsonlTracker(project_name, self.project_configuration.logging_dir)
        self._is_tracking = True
        self._said.clear()
        self._start_all()
        if config is not None:
            values = dict(config)
            self._tell("store_init_configuration", lambda tracker: tracker.store_init_configuration(values))

    def _make(
        self, found: LoggerType | GeneralTracker, project_name: str, options: Mapping[str, dict[str, Any]]
    ) -> GeneralTracker:
        if not isinstance(found, LoggerType):
            return found
        kind: Any = TRACKERS[found]
        kwargs = options.get(found.value, {})
        if kind.requires_logging_directory:
            return kind(project_name, self.project_configuration.logging_dir, **kwargs)  # type: ignore[no-any-return]
        return kind(project_name, **kwargs)  # type: ignore[no-any-return]

    def _start_all(self) -> None:
        started: list[GeneralTracker] = []
        try:
            for tracker in self._all:
                start = getattr(tracker, "start", None)  # an object that only looks like a tracker may have none
                if start is not None:
                    start()
                started.append(tracker)
        except BaseException:
            for tracker in started:
                self._guarded("finish", tracker, _finish)
            self.trackers, self._lines, self._is_tracking = [], None, False
            raise

    @property
    def _all(self) -> list[GeneralTracker]:
        """Those that run; the lines come first, so that they are written whatever the others do."""
        if self._lines is None:
            return list(self.trackers)
        return [self._lines, *(tracker for tracker in self.trackers if tracker is not self._lines)]

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Give values to every tracker: names -> number, one-element tensor, str, or dict of numbers.

        step: number of the step. log_kwargs: more arguments for a tracker's ``log``, by its name. Tensors are turned
        into numbers once, which waits for the GPU. Never raises for what a tracker does.
        """
        if self.processes.process_index != 0:
            return
        if not self._is_tracking:
            if self.log_with:
                self._warn_once(self, "log", "log was called without running trackers; call init_trackers first")
            return
        numbers = {str(key): plain(value) for key, value in values.items()}
        more = log_kwargs or {}
        at = plain(step)
        self._tell("log", lambda tracker: tracker.log(numbers, step=at, **more.get(tracker.name, {})))

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """The running tracker of that name, or its SDK's own object (``unwrap``).

        Where none runs, as in all but the main process, one that takes calls and does nothing.
        Raises: ConfigError if others run and this does not.
        """
        running: dict[str, Any] = {getattr(tracker, "name", ""): tracker for tracker in self._all}
        if not running:
            return BlankTracker()
        if name not in running:
            raise ConfigError(unknown_name("tracker", name, running))
        return running[name].tracker if unwrap else running[name]

    def _finish_trackers(self) -> None:
        """Close every run, once; one that fails does not keep the others open."""
        if self._is_tracking:
            self._is_tracking = False
            self._tell("finish", _finish)

    def _tell(self, what: str, call: Callable[[GeneralTracker], None]) -> None:
        for tracker in self._all:
            self._guarded(what, tracker, call)

    def _guarded(self, what: str, tracker: GeneralTracker, call: Callable[[GeneralTracker], None]) -> None:
        try:
            call(tracker)
        except Exception as error:
            name = getattr(tracker, "name", type(tracker).__name__)
            kept = "" if self._lines is None or tracker is self._lines else f"; {self._lines.path} has all values"
            self._warn_once(
                tracker,
                what,
                f"tracker {name} failed in {what} and the run goes on ({type(error).__name__}: {error}); its next"
                f" failures are not reported{kept}",
            )

    def _warn_once(self, who: object, what: str, text: str) -> None:
        if (id(who), what) not in self._said:
            self._said.add((id(who), what))
            _log.warning("%s", text)


def _finish(tracker: GeneralTracker) -> None:
    finish = getattr(tracker, "finish", None)
    if finish is not None:
        finish()
