"""The random generators that training draws from: Python, NumPy, torch on the CPU and on each GPU."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch
from torch import Tensor

from acceler8.errors import CheckpointError


def capture_rng() -> dict[str, Any]:
    """The states now; NumPy's if it is imported and the GPUs' if CUDA is awake, since else none was drawn."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        import numpy

        name, keys, *rest = numpy.random.get_state(legacy=True)
        state["numpy"] = [name, numpy.asarray(keys).tolist(), *rest]
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def check_rng(state: dict[str, Any]) -> None:
    """Raise CheckpointError for states that no generator takes, or fewer GPUs than saved ones; more do no harm."""
    gpus = state.get("cuda", [])
    if not isinstance(gpus, list) or not all(isinstance(g, Tensor) and g.dtype is torch.uint8 for g in gpus):
        raise CheckpointError(
            f"the random state of cuda is {repr(gpus)[:80]}, allowed: a list of tensors of bytes, one a GPU; the"
            " checkpoint is damaged: use another one"
        )
    saved = len(gpus)
    if saved and saved > (found := torch.cuda.device_count()):
        raise CheckpointError(
            f"the checkpoint holds random states of {saved} GPUs, this machine has {found}; resume on "
            f"{saved}, or pass rng=False to go on with other random numbers"
        )
    kind = "python"
    try:
        random.Random().setstate(state["python"])
        kind = "torch"
        torch.Generator().set_state(state["torch"])
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
    """Set every generator that ``state`` names; the others go on as they are."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy

        numpy.random.set_state(_numpy_state(state))
    for index, generator in enumerate(state.get("cuda", ())):
        torch.cuda.set_rng_state(generator, index)
