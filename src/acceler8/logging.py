"""Loggers that speak once for all processes. The names are Hugging Face Accelerate's."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any

from torch import distributed

from acceler8.accelerator.processes import place_of_this_process

Adapter = logging.LoggerAdapter[logging.Logger]


class MultiProcessAdapter(Adapter):
    """Logs in the main process, with ``main_process_only=False`` in each, with ``in_order=True`` one after the other.

    ``in_order`` must then be given by every process.
    """

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        """As ``logging.Logger.log``, in the processes that are to speak."""
        main_process_only, in_order = kwargs.pop("main_process_only", True), kwargs.pop("in_order", False)
        if not self.isEnabledFor(level):
            return
        kwargs.setdefault("stacklevel", 2)
        rank, world = place_of_this_process()
        if not in_order:
            if rank == 0 or not main_process_only:
                super().log(level, msg, *args, **kwargs)
            return
        for turn in range(world):
            if turn == rank:
                super().log(level, msg, *args, **kwargs)
            if distributed.is_available() and distributed.is_initialized():
                distributed.barrier()

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """The message as it is, and what the caller gave beside it."""
        return msg, kwargs

    def warning_once(self, msg: object, *args: Any, **kwargs: Any) -> None:
        """A warning, the first time that this logger is given these words."""
        said: set[str] = self.logger.__dict__.setdefault("_acceler8_said", set())
        if str(msg) not in said:
            said.add(str(msg))
            self.warning(msg, *args, **kwargs)


def get_logger(name: str, log_level: str | int | None = None) -> MultiProcessAdapter:
    """The logger of this name for code that runs in several processes; an Accelerator is not needed first.

    ``log_level``, such as ``"INFO"``, is set on it and on the root logger, as Accelerate does.
    """
    logger = logging.getLogger(name)
    if log_level is not None:
        level = log_level.upper() if isinstance(log_level, str) else log_level
        logger.setLevel(level)
        logger.root.setLevel(level)
    return MultiProcessAdapter(logger, {})
