"""What tests of fused MLPs share: why one did not run as one, what compiled code holds, and copies."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd


def why_not(model: nn.Module) -> str | None:
    return model.mlp._acceler8_fusion.why_not


def near(got: dict[str, Tensor], want: dict[str, Tensor], limit: float = 0.02) -> None:
    for name in want:
        assert (got[name] - want[name]).norm() <= limit * want[name].norm(), name


def operations(model: nn.Module, **options: object) -> tuple[Callable[[Tensor], Tensor], list[str]]:
    """``model`` compiled, and the names of acceler8's operations in the forward graphs that were made of it."""
    found: list[str] = []

    def note(module: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        found.extend(str(node.target) for node in module.graph.nodes if "acceler8" in str(node.target))
        return make_boxed_func(module)

    return torch.compile(
        model, backend=aot_autograd(fw_compiler=note, bw_compiler=lambda m, _: make_boxed_func(m)), **options
    ), found


def copied(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


def pickled(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)
