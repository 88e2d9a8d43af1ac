"""Gradients between processes in FP8: quantise once, exchange bytes, sum in FP32."""

from __future__ import annotations

from acceler8.comm.ddp_hook import GradientReduction
from acceler8.comm.exchange import Exchange, Groups
from acceler8.comm.fsdp2 import ShardedGradientReduction
from acceler8.comm.layout import Layout, Span

__all__ = ["Exchange", "GradientReduction", "Groups", "Layout", "ShardedGradientReduction", "Span"]
