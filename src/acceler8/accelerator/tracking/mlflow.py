"""MLflow, through its fluent interface: one run is active in the process."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from acceler8.accelerator.tracking.base import GeneralTracker
from acceler8.config.environment import current_environment

_log = logging.getLogger("acceler8")
# Limits of MLflow's REST interface (runs/log-batch, params).
_PARAMS_A_CALL, _LONGEST_PARAM = 100, 6000


class MLflowTracker(GeneralTracker):
    """A run in the experiment ``experiment_name``, or the one that MLFLOW_EXPERIMENT_NAME names, which wins.

    The other arguments are those of ``mlflow.start_run``, which reads MLFLOW_RUN_ID itself; ``nested_run`` is its
    ``nested``, and ``logging_dir`` where a new experiment keeps its artifacts.
    """

    name = "mlflow"
    requires_logging_directory = False

    def __init__(
        self,
        experiment_name: str | None = None,
        logging_dir: str | os.PathLike[str] | None = None,
        run_id: str | None = None,
        tags: Mapping[str, Any] | None = None,
        nested_run: bool = False,
        run_name: str | None = None,
        description: str | None = None,
    ) -> None:
        super().__init__()
        self.experiment_name = current_environment().get("MLFLOW_EXPERIMENT_NAME") or experiment_name
        self.logging_dir = logging_dir
        self.run_options = {
            "run_id": run_id,
            "run_name": run_name,
            "nested": nested_run,
            "tags": tags,
            "description": description,
        }
        self.active_run: Any = None
        self._left_out: set[str] = set()

    @property
    def tracker(self) -> Any:
        """The active run."""
        return self.active_run

    def start(self) -> None:
        """Find or make the experiment, and start a run in it."""
        import mlflow

        known = mlflow.get_experiment_by_name(self.experiment_name)
        if known is None and self.logging_dir is not None:
            mlflow.create_experiment(self.experiment_name, artifact_location=os.fspath(self.logging_dir))
        mlflow.set_experiment(self.experiment_name)
        self.active_run = mlflow.start_run(**self.run_options)

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Store the hyperparameters as params, those that are too long for one left out with a warning."""
        import mlflow

        params = {key: v for key, v in values.items() if len(str(v)) <= _LONGEST_PARAM}
        if left_out := sorted(set(values) - set(params)):
            _log.warning(
                "mlflow: left out %s, longer than %d characters as a param", ", ".join(left_out), _LONGEST_PARAM
            )
        items = list(params.items())
        for start in range(0, len(items), _PARAMS_A_CALL):
            mlflow.log_params(dict(items[start : start + _PARAMS_A_CALL]))

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log the numbers; what is none is left out, with a warning at the first time. ``kwargs``: ``log_metrics``'."""
        import mlflow

        numbers = {key: v for key, v in values.items() if isinstance(v, int | float)}
        if new := sorted(set(values) - set(numbers) - self._left_out):
            self._left_out.update(new)
            _log.warning("mlflow: left out %s, for its metrics are numbers", ", ".join(new))
        mlflow.log_metrics(numbers, step=step, **kwargs)

    def log_figure(self, figure: Any, artifact_file: str, **save_kwargs: Any) -> None:
        """Store a figure as an artifact."""
        import mlflow

        mlflow.log_figure(figure, artifact_file, save_kwargs=save_kwargs or None)

    def log_artifact(self, local_path: str, artifact_path: str | None = None) -> None:
        """Store a file as an artifact."""
        import mlflow

        mlflow.log_artifact(local_path, artifact_path)

    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        """Store a folder's files as artifacts."""
        import mlflow

        mlflow.log_artifacts(local_dir, artifact_path)

    def finish(self) -> None:
        """End the run."""
        import mlflow

        mlflow.end_run()
