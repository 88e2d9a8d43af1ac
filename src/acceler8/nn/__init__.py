"""Modules over functional: what a converted layer is."""

from __future__ import annotations

from acceler8.nn.deferred_logits import DeferredLogits
from acceler8.nn.group import LinearGroup
from acceler8.nn.head_loss import FusedHeadLoss, HeadLossState, fused_heads
from acceler8.nn.linear import Fp8Linear, LayerState
from acceler8.nn.mlp import (
    FusedMLP,
    MLPState,
    fuse,
    fused_mlps,
    run_as_one,
    run_one_by_one,
    unfuse,
)
from acceler8.nn.model_state import (
    ModelState,
    check_is_module,
    converted_layers,
    find_state,
    find_states,
    fp8_layers,
    fp8_state_dict,
    keeps_history,
    load_fp8_state_dict,
    state_of,
)
from acceler8.nn.norm import FusedNorm, NormKind, NormState, fuse_norm, fused_norms, neighbourhood, unfuse_norm

__all__ = [
    "DeferredLogits",
    "Fp8Linear",
    "FusedHeadLoss",
    "FusedMLP",
    "FusedNorm",
    "HeadLossState",
    "LayerState",
    "LinearGroup",
    "MLPState",
    "ModelState",
    "NormKind",
    "NormState",
    "check_is_module",
    "converted_layers",
    "find_state",
    "find_states",
    "fp8_layers",
    "fp8_state_dict",
    "fuse",
    "fuse_norm",
    "fused_heads",
    "fused_mlps",
    "fused_norms",
    "keeps_history",
    "load_fp8_state_dict",
    "neighbourhood",
    "run_as_one",
    "run_one_by_one",
    "state_of",
    "unfuse",
    "unfuse_norm",
]
