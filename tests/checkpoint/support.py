"""Small models, optimizers and comparisons for the checkpoint tests."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


def assert_same(got, expected):
    """Equal to the bit, type by type: tensors with dtype and bits (NaN included), containers item by item."""
    assert type(got) is type(expected)
    if isinstance(expected, Tensor):
        assert got.dtype == expected.dtype
        assert got.shape == expected.shape
        assert got.device == expected.device
        assert torch.equal(in_bytes(got), in_bytes(expected)), (got, expected)
    elif isinstance(expected, dict):
        assert list(got) == list(expected)
        for key in expected:
            assert_same(got[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert len(got) == len(expected)
        for one, other in zip(got, expected, strict=True):
            assert_same(one, other)
    else:
        assert repr(got) == repr(expected)


def bits(tensor: Tensor) -> list[int]:
    return in_bytes(tensor).tolist()


def in_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


class Net(nn.Module):
    """An embedding tied to the head, a norm, dropout, a bias and a buffer: one of each kind of entry."""

    def __init__(self, generator: torch.Generator, dtype: torch.dtype = torch.float32, tie: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.inner = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.drop = nn.Dropout(0.25)
        self.head = nn.Linear(16, 11, bias=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
        if tie:
            self.head.weight = self.embed.weight
        self.to(dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        self.seen += 1
        return self.head(self.drop(self.norm(self.inner(self.embed(tokens)).relu())))


class Factored(Optimizer):
    """Adafactor's shape of state: row and column moments in FP32, whatever the weight is, and values of every
    kind.
    """

    def __init__(self, params, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.5, 0.75), "mask": None, "relative": True})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad = p.grad.float()
                state = self.state[p]
                if not state:
                    rows = torch.zeros(grad.shape[:1])
                    columns = torch.zeros(grad.shape[1:]) if grad.ndim > 1 else None
                    codes = torch.zeros(grad.shape, dtype=torch.float8_e4m3fn)
                    state.update(step=0, factors=[rows, columns], codes=codes, meta={"kind": "row", "n": (1, None)})
                state["step"] += 1
                rows, columns = state["factors"]
                rows.mul_(0.5).add_(grad.square().flatten(1).mean(1) if grad.ndim > 1 else grad.square(), alpha=0.5)
                if columns is not None:
                    columns.mul_(0.5).add_(grad.square().mean(0), alpha=0.5)
                state["codes"] = grad.to(torch.float8_e4m3fn)
                scale = (rows + 1e-8).rsqrt().reshape(-1, *[1] * (grad.ndim - 1))
                p.add_((grad * scale).to(p.dtype), alpha=-group["lr"])


OPTIMIZERS = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95)),
    "adamw_fused": lambda groups: torch.optim.AdamW(groups, lr=1e-2, fused=True),
    "adamw_amsgrad_tensor_lr": lambda groups: torch.optim.AdamW(groups, lr=torch.tensor(1e-2), amsgrad=True),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True),
    "sgd_plain": lambda groups: torch.optim.SGD(groups, lr=0.05),
    "adafactor": lambda groups: torch.optim.Adafactor(groups, lr=1e-2),
    "factored": lambda groups: Factored(groups),
}


def two_groups(model: nn.Module) -> list[dict]:
    """Matrices with decay, vectors without, as training scripts do."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]


def train_step(model: nn.Module, optimizer: Optimizer, step: int) -> float:
    """One step on data that depends on ``step`` alone; dropout draws from torch's own generator."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(11, (8, 5), generator=generator)
    targets = torch.randint(11, (8, 5), generator=generator)
    loss = nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()
