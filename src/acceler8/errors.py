"""Typed errors. Every message says what was got, what is allowed and what to do next."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class Acceler8Error(Exception):
    """Base class of every error that acceler8 raises on purpose."""


class ShapeError(Acceler8Error, ValueError):
    """A tensor has a shape, stride or layout that the operation cannot take."""


class DtypeError(Acceler8Error, ValueError):
    """A tensor has a dtype, or a pair of dtypes, that the operation cannot take."""


class LabelError(Acceler8Error, IndexError):
    """A label is no index into the vocabulary."""


class RecipeError(Acceler8Error, ValueError):
    """A recipe, format or granularity is unknown or contradicts itself."""


class ConfigError(Acceler8Error, ValueError):
    """A setting is unknown, has a value that is not allowed, or contradicts another; the message names where."""


class PlanError(Acceler8Error, ValueError):
    """A plan does not fit the model that it is applied to, or a model cannot be planned."""


class VerifyError(Acceler8Error, ValueError):
    """An invariant of a converted model does not hold."""


class CheckpointError(Acceler8Error, ValueError):
    """A checkpoint cannot be written or is not what it claims to be."""


class RunError(Acceler8Error, ValueError):
    """A run folder, or an input of a run, is unusable."""


class LaunchError(Acceler8Error, ValueError):
    """A launch is described wrongly, or its workers cannot be started."""


class NonFiniteError(Acceler8Error, ValueError):
    """NaN or infinity reached an FP8 operand; the message names layer and operand."""


class GradientError(Acceler8Error, RuntimeError):
    """Gradients are not in the state that a step needs."""


class ProcessesDisagreeError(Acceler8Error, RuntimeError):
    """A collective of all processes failed; the message names what they did differently."""


class DoubleBackwardError(Acceler8Error, RuntimeError):
    """A second derivative was asked of an FP8 layer, whose quantisation has none."""


class HardwareError(Acceler8Error, RuntimeError):
    """The device cannot do what was asked."""


class MissingLibraryError(Acceler8Error, ImportError):
    """A library that was asked for is not installed; the message has the command that installs it."""


class NotInThisVersionError(Acceler8Error, NotImplementedError):
    """Something is configured that this version cannot run yet; the message says what to do instead."""


_LONG_LIST = 20


def unknown_name(kind: str, got: object, valid: Iterable[str]) -> str:
    """Message for a name that is not in a registry: what was got, the nearest valid name, all valid names.

    Of a long list only the nearest, if there is one that is near; case does not count.
    """
    names = sorted(valid)
    lower = {name.lower(): name for name in names}
    near = difflib.get_close_matches(str(got).lower(), lower, n=1, cutoff=0.6)
    hint = f"; did you mean {lower[near[0]]!r}?" if near else ";"
    if near and len(names) > _LONG_LIST:
        return f"unknown {kind} {got!r}{hint}"
    return f"unknown {kind} {got!r}{hint} valid: {', '.join(names)}"
