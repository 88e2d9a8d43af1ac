"""TensorBoard, through PyTorch's own writer."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from acceler8.accelerator.tracking.base import GeneralTracker

_HPARAMS = (bool, int, float, str)


class TensorBoardTracker(GeneralTracker):
    """Event files in ``LOGGING_DIR/RUN_NAME``. ``kwargs`` go to ``torch.utils.tensorboard.SummaryWriter``."""

    name = "tensorboard"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike[str], **kwargs: Any) -> None:
        super().__init__()
        self.run_name, self.init_kwargs = run_name, kwargs
        self.logging_dir = os.fspath(Path(logging_dir).expanduser() / run_name)
        self.writer: Any = None

    @property
    def tracker(self) -> Any:
        """The SummaryWriter."""
        return self.writer

    def start(self) -> None:
        """Open the writer."""
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(self.logging_dir, **self.init_kwargs)

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Write the hyperparameters; those that TensorBoard has no type for, such as lists, as their text."""
        hparams = {key: v if isinstance(v, _HPARAMS) else str(v) for key, v in values.items()}
        self.writer.add_hparams(hparams, {}, run_name=".")
        self.writer.flush()

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Numbers become scalars, text is text, a dict of numbers is one chart of several lines; the rest is left out.

        ``kwargs`` go to ``add_scalar``, ``add_text`` or ``add_scalars``.
        """
        for key, value in values.items():
            if isinstance(value, int | float):
                self.writer.add_scalar(key, value, global_step=step, **kwargs)
            elif isinstance(value, str):
                self.writer.add_text(key, value, global_step=step, **kwargs)
            elif isinstance(value, Mapping):
                self.writer.add_scalars(key, dict(value), global_step=step, **kwargs)
        self.writer.flush()

    def log_images(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Write batches of images; ``kwargs`` (``dataformats``) go to ``add_images``."""
        for key, images in values.items():
            self.writer.add_images(key, images, global_step=step, **kwargs)
        self.writer.flush()

    def finish(self) -> None:
        """Close the writer."""
        self.writer.close()
