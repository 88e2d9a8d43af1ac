"""Modules over functional: what a converted layer is."""

from __future__ import annotations

from acceler8.nn.deferred_logits import DeferredLogits
from acceler8.nn.gated_mlp import (
    FusedGatedMLP,
    GatedMLPState,
    fuse,
    fused_mlps,
    run_as_one,
    run_one_by_one,
    unfuse,
)
from acceler8.nn.group import LinearGroup
from acceler8.nn.head_loss import FusedHeadLoss, HeadLossState, fused_heads
from acceler8.nn.linear import Fp8Linear, LayerState
from acceler8.nn.model_state import (
    ModelState,
    find_state,
    find_states,
    fp8_layers,
    fp8_state_dict,
    load_fp8_state_dict,
    state_of,
)

__all__ = [
    "DeferredLogits",
    "Fp8Linear",
    "FusedGatedMLP",
    "FusedHeadLoss",
    "GatedMLPState",
    "HeadLossState",
    "LayerState",
    "LinearGroup",
    "ModelState",
    "find_state",
    "find_states",
    "fp8_layers",
    "fp8_state_dict",
    "fuse",
    "fused_heads",
    "fused_mlps",
    "load_fp8_state_dict",
    "run_as_one",
    "run_one_by_one",
    "state_of",
    "unfuse",
]
