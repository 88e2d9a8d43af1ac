"""Gradients in high precision behind an FP8 forward: ``override_linear_precision``, dropped by TransformerEngine 2.0.

TransformerEngine is not asked for the gradient that is not to be in FP8 (it sees a detached operand), and this function
behind the layer computes it from the operands as they are: dx = dy @ w, dw = dy.T @ x, db = sum of dy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class _Gradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        wants_dx, wants_dw = ctx.needs_input_grad[1:3]
        ctx.save_for_backward(x if wants_dw else None, weight if wants_dx else None)
        ctx.shape = x.shape
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = dy.reshape(-1, dy.shape[-1])
        dx = None if weight is None else (rows @ weight.to(dy.dtype)).view(ctx.shape)
        dw = None if x is None else rows.t() @ x.reshape(-1, x.shape[-1]).to(dy.dtype)
        db = rows.sum(0) if ctx.needs_input_grad[3] else None
        return dy, dx, dw, db


def with_gradients(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``y`` with gradients for those of ``x``, ``weight`` and ``bias`` that want one, by GEMMs in the dtype of ``dy``.

    Shape: y [..., N], x [..., K], weight [N, K], bias [N]. Detach what is not to get its gradient from here; ``y``'s
        own history stays. No second derivative.
    """
    made: Tensor = _Gradients.apply(y, x, weight, bias)  # type: ignore[no-untyped-call]
    return made
