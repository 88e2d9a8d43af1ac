"""Trackio: Hugging Face's local tracker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from acceler8.accelerator.tracking.base import GeneralTracker


class TrackioTracker(GeneralTracker):
    """A run in the project ``run_name``. ``kwargs`` go to ``trackio.init``."""

    name = "trackio"
    requires_logging_directory = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name, self.init_kwargs = run_name, kwargs
        self.run: Any = None

    @property
    def tracker(self) -> Any:
        """The ``trackio`` run."""
        return self.run

    def start(self) -> None:
        """Open the run."""
        import trackio

        self.run = trackio.init(project=self.run_name, **self.init_kwargs)

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Add the hyperparameters to the run's config, which is a dict."""
        self.run.config.update(values)

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log values; ``kwargs`` go to ``run.log``."""
        self.run.log(dict(values), step=step, **kwargs)

    def finish(self) -> None:
        """Close the run."""
        self.run.finish()
