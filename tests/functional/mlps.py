"""What tests of MLPs share, gated and not: activations by name, amax slots of two layers, and a counter of work."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from acceler8.functional import LinearSlots
from acceler8.recipes import Recipe
from acceler8.scaling import AmaxSlot, AmaxState

PLAIN = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda t: F.gelu(t, approximate="tanh"),
    "relu": F.relu,
    "quick_gelu": lambda t: t * torch.sigmoid(1.702 * t),
}


def slots_for(recipe: Recipe, device: str = "cpu") -> tuple[LinearSlots, LinearSlots] | None:
    if not recipe.is_delayed:
        return None
    state = AmaxState([str(i) for i in range(6)], 4, "max", 1, torch.device(device))
    places = [AmaxSlot(state, i) for i in range(6)]
    return LinearSlots(*places[:3]), LinearSlots(*places[3:])


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    for name in want:
        assert torch.equal(got[name], want[name]), name


class Work(TorchDispatchMode):
    """Counts GEMMs and the bytes of codes that casts write."""

    def __init__(self) -> None:
        super().__init__()
        self.gemms = self.codes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if str(func).startswith("acceler8."):
            if "matmul" in str(func):
                self.gemms += 1
            else:
                results = out if isinstance(out, (tuple, list)) else (out,)
                self.codes += sum(t.numel() for t in results if t.element_size() == 1)
        return out
