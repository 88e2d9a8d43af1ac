"""Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from acceler8.accelerator.tracking.base import GeneralTracker


class WandBTracker(GeneralTracker):
    """A run in the project ``run_name``. ``kwargs`` go to ``wandb.init``."""

    name = "wandb"
    requires_logging_directory = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name, self.init_kwargs = run_name, kwargs
        self.run: Any = None

    @property
    def tracker(self) -> Any:
        """The ``wandb`` run."""
        return self.run

    def start(self) -> None:
        """Open the run."""
        import wandb

        self.run = wandb.init(project=self.run_name, **self.init_kwargs)

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Add the hyperparameters to the run's config; a resumed run's may change."""
        self.run.config.update(dict(values), allow_val_change=True)

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log values, and any objects that ``wandb`` has types for; ``kwargs`` (``commit``) go to ``run.log``."""
        self.run.log(dict(values), step=step, **kwargs)

    def log_images(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log lists of images."""
        import wandb

        self.run.log({key: [wandb.Image(image) for image in v] for key, v in values.items()}, step=step, **kwargs)

    def log_table(
        self,
        table_name: str,
        columns: list[str] | None = None,
        data: list[list[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Log a table, given by columns and rows or as a dataframe."""
        import wandb

        table = wandb.Table(columns=columns, data=data, dataframe=dataframe)
        self.run.log({table_name: table}, step=step, **kwargs)

    def finish(self) -> None:
        """Close the run."""
        self.run.finish()
