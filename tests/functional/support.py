"""A linear layer's three GEMMs in float64, from a table of formats that is written down here a second time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from acceler8 import recipes
from acceler8.formats import FORMATS, decode
from acceler8.functional import LinearSlots, linear
from acceler8.kernels import quantize_ref
from acceler8.recipes import Recipe
from acceler8.scaling import GRANULARITIES, AmaxSlot, AmaxState, expand_groups

NAMES = ("tensorwise", "rowwise", "blockwise", "mxfp8", "delayed")  # all three GEMMs in FP8
POLICIES = ("E4M3", "HYBRID", "E5M2")
# granularity of activations and gradients, of weights
GRANULARITY = {
    "tensorwise": ("tensorwise", "tensorwise"),
    "rowwise": ("rowwise", "rowwise"),
    "blockwise": ("1x128", "128x128"),
    "mxfp8": ("mx1x32", "mx1x32"),
    "delayed": ("tensorwise", "tensorwise"),
}
# formats of the two operands: fprop x w, dgrad dy w, wgrad dy x
FORMAT = {
    "E4M3": {"fprop": ("E4M3", "E4M3"), "dgrad": ("E4M3", "E4M3"), "wgrad": ("E4M3", "E4M3")},
    "HYBRID": {"fprop": ("E4M3", "E4M3"), "dgrad": ("E5M2", "E4M3"), "wgrad": ("E5M2", "E4M3")},
    "E5M2": {"fprop": ("E5M2", "E4M3"), "dgrad": ("E5M2", "E4M3"), "wgrad": ("E5M2", "E4M3")},
}


@dataclass
class Data:
    """Operands of one layer; ``leaves()`` are fresh copies that require grad."""

    x: Tensor
    w: Tensor
    bias: Tensor
    dy: Tensor

    def leaves(self) -> list[Tensor]:
        return [t.detach().clone().requires_grad_() for t in (self.x, self.w, self.bias)]


def make_data(
    m: int, k: int, n: int, *, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0
) -> Data:
    """Gaussian operands; the gradient is small, as gradients are."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((m, k), (n, k), (n,), (m, n))
    x, w, bias, dy = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    return Data(x, w * 0.05, bias, dy * 1e-3)


def slots_for(recipe: Recipe, device: str = "cpu") -> LinearSlots | None:
    """Fresh delayed-scaling state if the recipe needs it."""
    if not recipe.is_delayed:
        return None
    state = AmaxState(["x", "w", "dy"], 4, "max", 1, torch.device(device))
    return LinearSlots(*(AmaxSlot(state, i) for i in range(3)))


def run(recipe: Recipe | str, data: Data, **options: object) -> dict[str, Tensor]:
    """``y, dx, dw, dbias`` of one forward and backward."""
    recipe = recipes.resolve(recipe)
    x, w, bias = data.leaves()
    options.setdefault("slots", slots_for(recipe, data.x.device.type))
    y = linear(x, w, bias, recipe=recipe, **options)
    y.backward(data.dy.to(y.dtype))
    return {"y": y.detach(), "dx": x.grad, "dw": w.grad, "dbias": bias.grad}


def plain(data: Data) -> dict[str, Tensor]:
    """The same in ``nn.functional.linear``."""
    x, w, bias = data.leaves()
    y = torch.nn.functional.linear(x, w, bias)
    y.backward(data.dy.to(y.dtype))
    return {"y": y.detach(), "dx": x.grad, "dw": w.grad, "dbias": bias.grad}


def quantized(t: Tensor, fmt: str, granularity: str, *, pow2: bool = False) -> Tensor:
    """Float64 value of ``t`` [R, C] after a cast whose groups run along C."""
    group = GRANULARITIES[granularity]
    codes, scale_inv, _ = quantize_ref(t, FORMATS[fmt], group, pow2=pow2)
    values = decode(codes.cpu()).to(t.device).double()
    return (values * expand_groups(scale_inv.double(), group, *values.shape))[:, : t.shape[1]]


def operands(name: str, policy: str, data: Data, *, pow2: bool = False) -> dict[str, tuple[Tensor, Tensor]]:
    """For each GEMM its two operands, quantised along the contraction, float64: result is ``a @ b.T``."""
    act, weight = GRANULARITY[name]
    f = FORMAT[policy]
    return {
        "y": (quantized(data.x, f["fprop"][0], act, pow2=pow2), quantized(data.w, f["fprop"][1], weight, pow2=pow2)),
        "dx": (
            quantized(data.dy, f["dgrad"][0], act, pow2=pow2),
            quantized(data.w.t(), f["dgrad"][1], weight, pow2=pow2),
        ),
        "dw": (
            quantized(data.dy.t(), f["wgrad"][0], act, pow2=pow2),
            quantized(data.x.t(), f["wgrad"][1], act, pow2=pow2),
        ),
    }


def float64(data: Data) -> dict[str, Tensor]:
    """The three GEMMs of the operands as they are."""
    x, w, dy = (t.double() for t in (data.x, data.w, data.dy))
    return {"y": x @ w.t(), "dx": dy @ w, "dw": dy.t() @ x}


def sqnr_db(got: Tensor, want: Tensor, dim: int | None = None) -> Tensor:
    """Signal to noise in dB, of the whole or along ``dim``, on the CPU."""
    got, want = got.double().cpu(), want.double().cpu()
    return 10 * torch.log10(want.square().sum(dim) / (got - want).square().sum(dim))


class Largest(TorchDispatchMode):
    """The most elements of a tensor that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, Tensor):
                self.elements = max(self.elements, t.numel())
        return out
