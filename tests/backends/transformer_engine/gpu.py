"""What the tests that need TransformerEngine and its GPU share."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import acceler8
from acceler8 import backends, recipes
from acceler8.backends.transformer_engine import library
from acceler8.recipes import Recipe

_REASON = library.unavailable()
# what the library and transformers warn of, some of it in their callers' name, is no fault of ours
MARKS = [
    pytest.mark.requires(sm=89),
    pytest.mark.skipif(_REASON is not None, reason=str(_REASON)),
    *(
        pytest.mark.filterwarnings(f"ignore::{kind}")
        for kind in ("DeprecationWarning", "FutureWarning", "UserWarning", "SyntaxWarning")
    ),
]
RECIPES = ("tensorwise", "delayed", "blockwise", "mxfp8")
TENSORWISE = recipes.get("tensorwise")
# the relative error of one FP8 GEMM on Gaussian data: above, something is wrong; below, it is no FP8
LEAST_DB, MOST_DB = 18.0, 36.0


def recipe(name: str) -> Recipe:
    """The recipe, or a skip with the reason why this GPU does not run it. Delayed with a short history."""
    found = recipes.get(name, amax_history_len=4) if name == "delayed" else recipes.get(name)
    if reason := backends.find("transformer_engine").lacks(found, torch.device("cuda", 0)):
        pytest.skip(reason)
    return found


def convert(model: nn.Module, recipe: object, **settings: object) -> nn.Module:
    """Converted by the TransformerEngine backend."""
    return acceler8.convert(model, acceler8.plan(model, recipe, "transformer_engine", **settings))


def sqnr_db(got: Tensor, want: Tensor) -> float:
    """Signal to quantisation noise."""
    got, want = got.detach().double(), want.detach().double()
    noise = float((got - want).square().sum())
    return math.inf if noise == 0 else 10 * math.log10(float(want.square().sum()) / noise)


def is_fp8(got: Tensor, want: Tensor) -> bool:
    """True if ``got`` is as far from the exact ``want`` as an FP8 GEMM is: neither wrong nor in 16 bit."""
    return LEAST_DB < sqnr_db(got, want) < MOST_DB


def gaussian(*shape: int, seed: int = 0, std: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """On the GPU."""
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(*shape, generator=generator, device="cuda") * std).to(dtype)


class Pair(nn.Module):
    """Two layers, the first without a bias; 128 divides every dimension."""

    def __init__(self, width: int = 256, hidden: int = 384, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        with torch.random.fork_rng([0]):
            torch.manual_seed(3)
            self.up = nn.Linear(width, hidden, bias=False, device="cuda", dtype=dtype)
            self.down = nn.Linear(hidden, width, device="cuda", dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.nn.functional.gelu(self.up(x)))


def one_layer(width: int = 256, out: int = 384, dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    """A linear layer alone in a model, its weights Gaussian of a size that E4M3 holds without a scale."""
    model = nn.Sequential(nn.Linear(width, out, device="cuda", dtype=dtype))
    with torch.no_grad():
        model[0].weight.copy_(gaussian(out, width, seed=5, dtype=dtype))
        model[0].bias.copy_(gaussian(out, seed=6, dtype=dtype))
    return model
