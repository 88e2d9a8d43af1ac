"""What a tracker is: the interface that every sink, ours or a script's own, answers to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from acceler8.errors import ConfigError


class GeneralTracker:
    """Base of trackers; attributes and methods are Hugging Face Accelerate's.

    A subclass has ``name``, ``requires_logging_directory`` and ``tracker`` (the SDK's own object), and overrides what
    it needs of the methods; each does nothing here. Methods are called in the main process only.
    Raises: ConfigError, when it is made, for a subclass without one of the three.
    """

    name: str
    requires_logging_directory: bool
    main_process_only = True
    """Kept for scripts that read it: methods are called in the main process only, whatever it says."""

    def __init__(self, _blank: bool = False) -> None:
        needed = () if _blank else ("name", "requires_logging_directory", "tracker")
        present = dir(self)
        if lacks := [name for name in needed if name not in present]:
            raise ConfigError(
                f"tracker class {type(self).__name__} has no {', '.join(lacks)}; allowed: all of name,"
                " requires_logging_directory and tracker, as class attributes or properties"
            )

    def start(self) -> None:
        """Open the run; called once, by ``init_trackers``."""

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Keep the run's hyperparameters: names -> bool, str, number or None."""

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record values of a step: names -> number, str, or dict of numbers. ``kwargs`` go to the SDK."""

    def log_images(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Record images: names -> a list or batch of arrays or PIL images. Not every sink has them."""

    def finish(self) -> None:
        """Close the run; called once, by ``end_training``."""


class BlankTracker(GeneralTracker):
    """Stands for a tracker where there is none, as in all processes but the main one: takes calls and does nothing."""

    name = "blank"
    requires_logging_directory = False
    tracker: Any = None

    def __init__(self) -> None:
        super().__init__(_blank=True)
