"""Freeing gathered weights that FSDP2 would keep: what was gathered before a change is not what the next forward reads.

FSDP2 keeps the root's weights behind forward, a tail's too, and with ``reshard_after_forward=False`` all, until their
backward frees them. Where none follows, they outlive the step (an evaluation between backward and step) or an edit
behind an evaluation (an average that is swapped in), and the next forward computes with what they were. So they are
freed behind each forward that ran without gradients, and in front of each step of an optimizer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule


def reshard(model: nn.Module) -> None:
    """Free what is gathered of ``model``; a backward that still needs it gathers it again. No collective."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def gathered_parameters(model: nn.Module) -> set[int]:
    """Ids of whole Parameters that stand in the model in the place of sharded ones, for a backward to come."""
    units = (module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule))
    groups = (group for unit in units for group in unit._fsdp_param_groups if group.is_unsharded)
    return {id(p._unsharded_param) for group in groups for p in group.fsdp_params}


def reshard_without_backward(model: nn.Module) -> None:
    """Free gathered weights behind each forward of the root ``model`` that no backward can follow."""
    if isinstance(model, FSDPModule) and _reshard_behind not in model._forward_hooks.values():
        model.register_forward_hook(_reshard_behind)  # behind FSDP2's own, which leaves forward


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _reshard_behind(module: nn.Module, args: Any, output: Any) -> None:
    if not torch.is_grad_enabled():
        reshard(module)


__all__ = ["gathered_parameters", "reshard", "reshard_without_backward"]
