"""Whether the installed torchao can be used, found out once, and its import without what it prints."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module, metadata
from types import ModuleType
from typing import Any

LEAST = (0, 13, 0)
"""The oldest version that was tried (0.13, 0.16, 0.17 and 0.18 with PyTorch 2.13: equal numbers)."""
INSTALL = f"pip install 'torchao>={LEAST[0]}.{LEAST[1]}'"
# loggers that tell of extensions which are not used here, and of registrations inside torchao
_CHATTY = ("torchao", "torch.utils._pytree")
_NEEDED = ("Float8LinearConfig", "CastConfig", "Float8GemmConfig", "ScalingType", "convert_to_float8_training")


def unavailable() -> str | None:
    """Why torchao cannot be used, in one sentence with the versions found and needed; None if it can."""
    try:
        found = metadata.version("torchao")
    except metadata.PackageNotFoundError:
        return f"torchao is not installed; {INSTALL}"
    return _problem_of(found)


@functools.cache
def _problem_of(found: str) -> str | None:
    needed = f"needed: {'.'.join(map(str, LEAST[:2]))} or newer; {INSTALL}"
    if tuple(int(part) for part in re.findall(r"\d+", found)[:3]) < LEAST:
        return f"torchao {found} is installed; {needed}"
    try:
        float8, linear = library(), module("float8.float8_linear")
    except Exception as error:  # a library that does not fit torch fails in any way, at its import
        lines = str(error).strip().splitlines()
        what = f"{type(error).__name__}: {lines[0]:.200}" if lines else type(error).__name__
        return f"torchao {found} is installed and cannot be imported with torch {_torch()} ({what}); {needed}"
    missing = [name for name in _NEEDED if not hasattr(float8, name)]
    missing += [] if hasattr(linear, "Float8Linear") else ["Float8Linear"]
    if missing:
        return f"torchao {found} is installed and has no {', '.join(missing)}; {needed}"
    return None


def library() -> Any:
    """``torchao.float8``."""
    return module("float8")


def module(name: str) -> ModuleType:
    """A module of torchao, such as ``float8.config``, imported on use."""
    with _quiet():
        return import_module(f"torchao.{name}")


def _torch() -> str:
    return metadata.version("torch")


@contextmanager
def _quiet() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in _CHATTY]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
