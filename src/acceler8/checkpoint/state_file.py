"""``acceler8_state.json``, read as the foreign input that it is: every key, every type, every number in range."""

from __future__ import annotations

from typing import Any

from acceler8.checkpoint.load import Checkpoint
from acceler8.checkpoint.training import STATE, STATE_VERSION
from acceler8.errors import CheckpointError

_LARGEST = 2**53
_PART = {"path": str, "recipe": dict, "backend": str, "layers": [str], "fp8_steps": str, "fp8_last_layers": str}
_MODEL = {"type": str, "tied": (str,), "fp8": [_PART], "histories": dict}
_SHAPE: dict[str, Any] = {
    "format_version": int,
    "mixed_precision": str,
    "steps": int,
    "stepped": [int],
    "window": {"num_steps": int, "micro_batch": int, "sync_gradients": bool, "has_gradients": bool},
    "num_processes": int,
    "models": [_MODEL],
    "optimizers": int,
    "schedulers": int,
    "loaders": int,
    "custom": int,
    "has_scaler": bool,
    "configuration": dict,
    "is_deterministic": bool,
}


def read_state(checkpoint: Checkpoint) -> dict[str, Any]:
    """The state of a checkpoint that ``save_state`` wrote.

    Raises: CheckpointError for one that ``checkpoint.save`` wrote, a newer format, or what no training writes.
    """
    if STATE not in checkpoint.files:
        raise CheckpointError(
            f"{checkpoint.folder} holds no {STATE}: save_state did not write it; read it with checkpoint.load(folder)"
        )
    state = checkpoint.part(STATE.removesuffix(".json"))
    version = state.get("format_version")
    if type(version) is int and version > STATE_VERSION:
        raise CheckpointError(
            f"{checkpoint.folder / STATE} has format_version {version}, this acceler8 reads up to {STATE_VERSION}; it"
            f" was written by acceler8 {checkpoint.versions['acceler8']}: install that or a newer one"
        )
    if wrong := _wrong(state, _SHAPE, ""):
        raise CheckpointError(f"{checkpoint.folder / STATE} is damaged: {wrong}; use another checkpoint")
    if wrong := _contradiction(state):
        raise CheckpointError(f"{checkpoint.folder / STATE} is damaged: {wrong}; use another checkpoint")
    return state


def _contradiction(state: dict[str, Any]) -> str | None:
    """Numbers that no training has, each of the right type."""
    window = state["window"]
    for name, number in (
        ("format_version", state["format_version"]),
        ("num_processes", state["num_processes"]),
        ("window.num_steps", window["num_steps"]),
    ):
        if number < 1:
            return f"{name} is {number}, not from 1"
    # micro_batch counts on from step to step; a multiple of num_steps is the end of one.
    if not window["sync_gradients"] and window["micro_batch"] and window["micro_batch"] % window["num_steps"] == 0:
        return f"window.micro_batch is {window['micro_batch']} of {window['num_steps']} in an unfinished step"
    return None


def _wrong(value: Any, shape: Any, where: str) -> str | None:
    """What is wrong with ``value``, in words; None if it has the shape."""
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return f"{where or 'the whole'} is a {type(value).__name__}, not an object"
        if differ := sorted(map(str, value.keys() ^ shape.keys())):
            return f"{where or 'the whole'} lacks or must not have {differ[0][:80]!r}"
        found = (_wrong(value[key], inner, f"{where}.{key}".lstrip(".")) for key, inner in shape.items())
        return next((text for text in found if text), None)
    if isinstance(shape, tuple):  # any names, values of one type
        if not isinstance(value, dict):
            return f"{where} is a {type(value).__name__}, not an object"
        return next((text for key in value if (text := _wrong(value[key], shape[0], f"{where}.{key[:80]}"))), None)
    if isinstance(shape, list):
        if not isinstance(value, list):
            return f"{where} is a {type(value).__name__}, not a list"
        found = (_wrong(item, shape[0], f"{where}.{i}") for i, item in enumerate(value))
        return next((text for text in found if text), None)
    if type(value) is not shape:
        return f"{where} is a {type(value).__name__}, not a {shape.__name__}"
    if shape is int and not 0 <= value <= _LARGEST:
        return f"{where} is {str(value)[:40]}, not between 0 and 2**53"
    return None
