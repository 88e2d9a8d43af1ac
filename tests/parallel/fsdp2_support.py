"""The model, data and recorders of the FSDP2 tests' worker."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from acceler8.conversion import convert, plan
from acceler8.errors import Acceler8Error
from acceler8.kernels import quantize
from acceler8.nn import fp8_layers
from acceler8.recipes import Recipe

WIDTH, OUTPUTS, TOKENS, STEPS = 48, 13, 40, 5
Facts = dict[str, Any]

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13


class Block(nn.Module):
    """A norm and two FP8 layers, one with a bias."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=False) if self.checkpointed else self.body(x)

    def body(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Two blocks, a head with an odd number of rows, and a skip connection that FSDP2 does not manage."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(checkpointed) for _ in range(2))
        self.head = nn.Linear(WIDTH, OUTPUTS)
        self.skip = nn.Linear(WIDTH, OUTPUTS, bias=False)
        generator = torch.Generator().manual_seed(1)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for block in self.blocks:
            y = block(y)
        return self.head(y) + self.skip(x)


def make_model(recipe: str | Recipe, checkpointed: bool = False, fuse: bool = True) -> Model:
    model = Model(checkpointed)
    convert(model, plan(model, recipe, fuse=fuse))
    assert [name for name, _ in fp8_layers(model)] == [f"blocks.{i}.{n}" for i in range(2) for n in ("up", "down")]
    return model


def shard(model: Model, mesh: DeviceMesh, **policy: Any) -> Model:
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=True, **policy)
    return fully_shard(model, mesh=mesh, ignored_params=set(model.skip.parameters()), **policy)


def make_data(ranks: int) -> tuple[Tensor, Tensor]:
    """Different tokens for each rank: inputs and targets ``[ranks, steps, tokens, features]``."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(ranks, STEPS, TOKENS, WIDTH, generator=generator)
    return x, torch.randn(ranks, STEPS, TOKENS, OUTPUTS, generator=generator)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def full(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def cast(weight: Tensor, recipe: Recipe) -> Facts:
    """Codes of a whole weight, as one process makes them."""
    operand = recipe.fprop.b
    rows, cols, _ = quantize(weight, operand.format, operand.format, operand.granularity)
    return {"rows": raw(rows), "cols": raw(cols)}


def raw(q: Any) -> tuple[Tensor, Tensor]:
    return q.codes.view(torch.uint8).clone(), q.scale_inv.clone()


class Watch:
    """What a layer's forward reads, and whether its codes are in memory then and later."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer, self.seen = layer, []
        layer.register_forward_hook(self)

    def __call__(self, layer: nn.Module, args: Any, output: Tensor) -> None:
        self.weight = layer.weight
        codes = layer._acceler8_layer.codes
        self.seen.append({"rows": raw(codes.get("rows")), "cols": raw(codes.get("cols")), "bytes": self.held()})

    def held(self) -> int:
        """Bytes that the codes occupy now."""
        return self.weight.untyped_storage().size()


class RecordingAllGather:
    """FSDP2's all-gather, noting what each rank sends."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, int]] = []

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        self.sent.append((str(input_tensor.dtype), input_tensor.numel() * input_tensor.element_size()))
        return _all_gather(output_tensor, input_tensor, group=group, async_op=async_op)


class RecordingAllReduce:
    """``dist.all_reduce``, noting what it was called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.real = dist.all_reduce

    def __enter__(self) -> RecordingAllReduce:
        dist.all_reduce = self
        return self

    def __exit__(self, *exc: object) -> None:
        dist.all_reduce = self.real

    def __call__(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((str(tensor.dtype), tensor.numel()))
        return self.real(tensor, *args, **kwargs)


def message_of(call: Any) -> str:
    try:
        call()
    except Acceler8Error as error:
        return f"{type(error).__name__}: {error}"
    return ""
