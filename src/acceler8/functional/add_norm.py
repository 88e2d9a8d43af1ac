"""A residual and a norm in one, for models that are written with it: ``h = x + residual``, ``y = norm(h)``.

Each block of a transformer adds what a layer gave to its residual stream and normalises the sum. Two operations write
h, read it, and write y; here one kernel reads x and the residual and writes h, y and the codes of y. In backward one
kernel reads dy, h, and the gradient that h got from its other readers, and writes the gradient of both addends, where
autograd has a norm's backward and an addition.

Conversion does not use it: in a model of somebody else the addition is a line of the block's own forward, which
a change of the norm's class does not reach.
"""

from __future__ import annotations

from torch import Tensor

from acceler8.functional.input_codes import InputCodes
from acceler8.functional.norm import norm_and_sum
from acceler8.kernels.norm import Kind
from acceler8.recipes import Recipe
from acceler8.scaling import AmaxSlot


def add_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None = None,
    eps: float | None = 1e-6,
    *,
    kind: Kind = "rms",
    weight_offset: float = 0.0,
    cast_before_weight: bool = False,
    recipe: Recipe | None = None,
    slot: AmaxSlot | None = None,
    records: bool = True,
    column_amax: bool = True,
    autocasts: bool | None = None,
    compressed: bool = False,
) -> tuple[Tensor, Tensor, InputCodes | None]:
    """``(h, y, codes)``: ``h = x + residual``, normalised along its last dimension, and the codes of y.

    Shape: x and residual [..., D], each bf16, fp16 or fp32 -> h and y [..., D]. h has the dtype to which the two
        promote and the bits of ``x + residual``; y and codes are those of ``norm(h, ...)``.
    All other arguments: as ``norm``. ``compressed`` keeps h in FP8 for backward.
    Gradients: dx and dresidual are the gradient of h, of its own readers and of the norm, added in FP32 and rounded
        once to the dtype of h (autograd rounds the norm's part, then the sum), then to their own.
    Raises: ShapeError for unlike shapes; else as ``norm``.

    >>> import torch
    >>> from acceler8 import recipes
    >>> from acceler8.functional import add_norm, hand_on, linear
    >>> recipe = recipes.get("rowwise")
    >>> stream = torch.randn(4, 64, requires_grad=True)
    >>> out, up = torch.randn(64, 64, requires_grad=True), torch.randn(128, 64, requires_grad=True)
    >>> branch = linear(stream, out, recipe=recipe)
    >>> stream, y, codes = add_norm(branch, stream, torch.ones(64), recipe=recipe)
    >>> hand_on(y, codes, recipe)  # linear finds them on y, and casts only what wgrad reads; readers=2 for two layers
    >>> hidden = linear(y, up, recipe=recipe)
    >>> (hidden.sum() + stream.sum()).backward()
    """
    y, h, codes = norm_and_sum(
        x, residual, weight, bias, eps, kind, weight_offset, cast_before_weight, recipe, slot, records, column_amax,
        autocasts, compressed,
    )  # fmt: skip
    assert h is not None
    return h, y, codes


__all__ = ["add_norm"]
