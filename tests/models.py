"""Small models and training steps that several folders' tests share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import acceler8
from acceler8.scaling import LINE, AmaxState

RECIPES = ("tensorwise", "rowwise", "blockwise", "mxfp8", "delayed", "activations_only")


class Mlp(nn.Module):
    """Two FP8-able layers with a norm and a nonlinearity around them; the first has no bias."""

    def __init__(self, seed: int = 0, *, width: int = 32, hidden: int = 64) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in (self.up.weight, self.down.weight, self.down.bias):
                p.copy_(torch.randn(p.shape, generator=generator) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def converted(
    recipe: object = "rowwise", seed: int = 0, *, device: str = "cpu", fuse: bool = True, **widths: int
) -> Mlp:
    """A converted Mlp; without ``fuse`` its norm runs as its author wrote it, as it does where it is compiled."""
    model = Mlp(seed, **widths).to(device)
    return acceler8.convert(model, acceler8.plan(model, recipe, fuse=fuse))


def operands(amax: AmaxState) -> Tensor:
    """The columns of an amax state that operands have: the last of a layer's line stays empty."""
    return amax.data[:, torch.arange(len(amax.names)) % LINE < LINE - 1]


def batch(tokens: int = 24, width: int = 32, seed: int = 1, *, device: str = "cpu") -> Tensor:
    """Gaussian input that requires no grad."""
    return torch.randn(tokens, width, generator=torch.Generator().manual_seed(seed)).to(device)


def outcome(model: nn.Module, x: Tensor, call: Callable[..., Tensor] | None = None) -> dict[str, Tensor]:
    """Output and every gradient of one forward and backward with a random dy; leaves no gradient behind."""
    x = x.detach().clone().requires_grad_()
    y = model(x) if call is None else call(x)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y) * 0.01
    leaves = {"x": x, **{name: p for name, p in model.named_parameters() if p.requires_grad}}
    gradients = torch.autograd.grad(y, tuple(leaves.values()), dy, allow_unused=True)
    return {"y": y.detach(), **{f"d{name}": g for name, g in zip(leaves, gradients, strict=True) if g is not None}}


def assert_equal(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """Bit for bit, name by name."""
    assert got.keys() == want.keys()
    for name in want:
        assert torch.equal(got[name], want[name]), name


def differs(got: dict[str, Tensor], want: dict[str, Tensor]) -> bool:
    """True if any tensor differs anywhere."""
    return any(not torch.equal(got[name], want[name]) for name in want)


def train(
    model: nn.Module, steps: int = 3, *, optimizer: torch.optim.Optimizer | None = None, device: str = "cpu"
) -> list[float]:
    """Losses of some steps on fixed data; the optimizer marks step boundaries if it was attached."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        x = batch(seed=10 + step, device=device)
        loss = (model(x) - x.flip(-1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
