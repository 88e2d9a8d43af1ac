"""The random generators that this process draws from: Python, NumPy, torch on the CPU and on its own GPU.

A process's own GPU is the current device. Of the other GPUs that it sees it draws nothing, and their states are for
their own processes to save: so a checkpoint can go on where there are more GPUs, fewer, or none.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch
from torch import Tensor

from acceler8.errors import CheckpointError


def capture_rng() -> dict[str, Any]:
    """The states now; NumPy's if it is imported and the own GPU's if CUDA is awake, since else none was drawn."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        import numpy

        name, keys, *rest = numpy.random.get_state(legacy=True)
        state["numpy"] = [name, numpy.asarray(keys).tolist(), *rest]
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def check_rng(state: dict[str, Any]) -> str | None:
    """What ``restore_rng`` has to leave as it is, in a line for the report; None if it has nothing to leave.

    Raises: CheckpointError for states that no generator takes.
    """
    _check_states(state)
    return gpu_difference(
        was_saved="cuda" in state, has_gpu=torch.cuda.is_available(), is_in_use=torch.cuda.is_initialized()
    )


def gpu_difference(*, was_saved: bool, has_gpu: bool, is_in_use: bool) -> str | None:
    """What a process with or without a GPU cannot take over from one that drew from a GPU's generator, or did not."""
    if was_saved and not has_gpu:
        return "random generators: a GPU's was saved and this process has no GPU, so its state has no use"
    if is_in_use and not was_saved:
        return "random generators: none was saved for a GPU, so this process's GPU draws on from where it is"
    return None


def _check_states(state: dict[str, Any]) -> None:
    gpu = state.get("cuda", torch.empty(0, dtype=torch.uint8))
    if not isinstance(gpu, Tensor) or gpu.dtype is not torch.uint8:
        raise CheckpointError(
            f"the random state of cuda is {repr(gpu)[:80]}, allowed: a tensor of bytes; the checkpoint is damaged: use"
            " another one"
        )
    kind = "python"
    try:
        random.Random().setstate(state["python"])
        kind = "torch"
        torch.Generator().set_state(state["torch"])
        if "cuda" in state and torch.cuda.is_available():
            kind = "cuda"
            torch.Generator("cuda").set_state(state["cuda"])
        if kind := "numpy" if "numpy" in state else "":
            import numpy

            numpy.random.RandomState().set_state(_numpy_state(state))
    except Exception as error:
        raise CheckpointError(
            f"the random state of {kind} is none that it takes ({error!r}); the checkpoint is damaged: use another one"
        ) from error


def _numpy_state(state: dict[str, Any]) -> tuple[Any, ...]:
    import numpy

    name, keys, *rest = state["numpy"]
    return name, numpy.array(keys, dtype=numpy.uint32), *rest


def restore_rng(state: dict[str, Any]) -> None:
    """Set every generator that ``state`` names and this process has; the others go on as they are."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy

        numpy.random.set_state(_numpy_state(state))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
