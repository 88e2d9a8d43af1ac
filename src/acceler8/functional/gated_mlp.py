"""Gated MLP in FP8, as one operation: ``y = (f(x @ gate.T) * (x @ up.T)) @ down.T``.

Against three linear layers with the activation between them: ``x`` is cast once, gate and up are one GEMM over their
concatenated codes (and one dgrad in place of two and a sum), the activation goes into FP8 without having been stored in
high precision, and its gradient does too. Kept for backward are the codes of ``x`` that wgrad reads and the results of
gate and up; the activation is computed again from those, in the kernel that casts its gradient.

Gate and up may also be one layer, gate left (Phi-3 has it so): then that layer's GEMMs are those of the layer itself.

With scales for each row the GEMM of gate and up gives, bit for bit, what two give. Where a scale spans the tensor, gate
and up share one. The activation is FP32 until it is cast, where separate layers round it to 16 bit twice.

Source: Shazeer 2020, arXiv:2002.05202 (gated MLPs); Micikevicius et al. 2022, arXiv:2209.05433; NVIDIA
TransformerEngine's LayerNormMLP for what is worth fusing.
"""

from __future__ import annotations

from torch import Tensor

from acceler8.functional import mlp
from acceler8.functional.call import LinearSlots
from acceler8.functional.weight_codes import WeightCodes
from acceler8.kernels import ACTIVATIONS
from acceler8.recipes import Recipe
from acceler8.scaling import BLOCK_1x128, MX_1x32


def cannot_fuse(recipe: Recipe, features: int) -> str | None:
    """Why a gated MLP with ``features`` between gate and down cannot run as one operation; None if it can."""
    group = {BLOCK_1x128.name: 128, MX_1x32.name: 32}.get(recipe.granularity.name, 16)
    if (why := mlp.cannot_fuse(recipe)) is None and features % group:
        return f"{features} features are not a multiple of {group}: a block would span gate and up"
    return why


def gated_mlp(
    x: Tensor,
    gate: Tensor,
    up: Tensor | None,
    down: Tensor,
    *,
    activation: str,
    recipe: Recipe,
    slots: tuple[LinearSlots, LinearSlots] | None = None,
    codes: tuple[WeightCodes, WeightCodes] | None = None,
) -> Tensor:
    """``(f(x @ gate.T) * (x @ up.T)) @ down.T`` in the formats of ``recipe``, which computes all its GEMMs in FP8.

    Shape: x [..., K], gate and up [F, K], down [N, F] -> [..., N]; all widths multiples of 16 (of 128 and 32 for F with
        blocks and MX); any number of tokens, also 0. dtypes bf16, fp16, fp32, the same for x and the weights unless
        autocast is on; the result has autocast's dtype if it is on, else x's.
    ``up`` None: ``gate`` holds both, [2F, K], gate above up.
    ``activation`` f is one of ``ACTIVATIONS``. ``slots``, of gate and up together and of down, are needed by a delayed
        recipe. ``codes``, of gate and up together and of down, keep weight codes while their window is open.
    Gate and up either both want a gradient or neither. Second derivatives raise DoubleBackwardError. Shapes and dtypes
    are the callers' to check: this is what converted modules run.
    """
    return mlp.run(
        x,
        gate,
        up,
        down,
        None,
        None,
        activation=activation,
        is_gated=True,
        recipe=recipe,
        slots=slots,
        codes=codes,
    )


__all__ = ["ACTIVATIONS", "cannot_fuse", "gated_mlp"]
