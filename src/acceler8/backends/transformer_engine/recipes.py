"""acceler8's recipes as TransformerEngine's: which class, with which fields. Pure decisions; nothing is imported.

    delayed     DelayedScaling          tensorwise  Float8CurrentScaling
    blockwise   Float8BlockScaling      mxfp8       MXFP8BlockScaling

``rowwise`` has no counterpart there. GEMMs that a recipe keeps in high precision are dgrad and wgrad: they are computed
outside of TransformerEngine, which dropped ``override_linear_precision`` in 2.0 (``_modules``). ``interval``, dropped
in 2.2, is counted by the amax histories of this package.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from acceler8.backends.capability import STRATEGIES, Capability, kind_of
from acceler8.errors import PlanError
from acceler8.formats import E4M3, E5M2
from acceler8.recipes import DelayedScaling, Recipe, get
from acceler8.scaling import BLOCK_128x128, MX_1x32

CLASSES = {
    "delayed": "DelayedScaling",
    "tensorwise": "Float8CurrentScaling",
    "blockwise": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
}
# Blocks of 1x128 are GEMMs from Hopper on; MXFP8's are those of Blackwell's data-centre GPUs, not of sm_120.
_WHY_NOT = dict.fromkeys(
    STRATEGIES, "TransformerEngine under it was not yet tested on GPUs; use DDP, or backend native or torchao"
)
CAPABILITIES = (
    Capability(recipe="delayed", compute=(8, 9), why_not=_WHY_NOT),
    Capability(recipe="tensorwise", compute=(8, 9), why_not=_WHY_NOT),
    Capability(recipe="blockwise", compute=(9, 0), why_not=_WHY_NOT),
    Capability(recipe="mxfp8", compute=(10, 0), below=(12, 0), why_not=_WHY_NOT),
)
# Of tokens and features. Forward needs 8 tokens, but they are the K of wgrad's GEMM, which needs 16.
_MULTIPLES = {"delayed": 16, "tensorwise": 16, "blockwise": 128, "mxfp8": 32}


@dataclass(frozen=True, kw_only=True)
class TeRecipe:
    """A recipe of TransformerEngine, described."""

    name: str
    """Of its class."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments; ``fp8_format`` is a name."""
    pow2_scales: bool | None = None
    """What the quantisers' parameters are to say; None: the class's own. It is no keyword of every version's."""
    fast_accum: bool | None = None
    """Of fprop; None: the class's own."""
    multiple: int = 16
    """Tokens are padded to this, and features must be multiples of it."""
    dgrad: bool = True
    wgrad: bool = True
    """False: that GEMM runs in high precision."""
    interval: int = 1
    """Steps between two updates of the scales of delayed scaling."""


def describe(recipe: Recipe) -> TeRecipe:
    """What ``recipe`` is in TransformerEngine. Raises PlanError if it is nothing there, with the reason."""
    if reason := unsupported(recipe):
        raise PlanError(reason)
    kind = kind_of(recipe)
    fields: dict[str, Any] = {"fp8_format": _format_of(recipe)}
    interval, fast, pow2 = 1, None, None
    if isinstance(scaling := recipe.scaling, DelayedScaling):
        fields |= {
            "margin": scaling.margin,
            "amax_history_len": scaling.amax_history_len,
            "amax_compute_algo": scaling.amax_compute_algo,
        }
        interval = scaling.interval
    elif kind in ("tensorwise", "blockwise"):
        pow2 = recipe.pow2_scales
        fast = recipe.fprop.fast_accum if kind == "tensorwise" else None
    return TeRecipe(
        name=CLASSES[kind],
        fields=fields,
        pow2_scales=pow2,
        fast_accum=fast,
        multiple=_MULTIPLES[kind],
        dgrad=recipe.dgrad.is_fp8,
        wgrad=recipe.wgrad.is_fp8,
        interval=interval,
    )


def _format_of(recipe: Recipe) -> str:
    gradients = [gemm.a.format for gemm in (recipe.dgrad, recipe.wgrad) if gemm.is_fp8]
    return "HYBRID" if E5M2 in gradients else "E4M3"


def unsupported(recipe: Recipe) -> str | None:
    """Which setting of ``recipe`` TransformerEngine does not have, on any GPU, and what to do; None if it has all."""
    kind = kind_of(recipe)
    if kind not in CLASSES:
        return (
            f"backend 'transformer_engine' has no recipe {kind}; allowed: {', '.join(CLASSES)}; choose one of them, or"
            " backend 'native'"
        )
    if not recipe.fprop.is_fp8:
        return (
            f"recipe {recipe.name!r} keeps fprop in high precision, which TransformerEngine cannot with FP8 gradients;"
            " allowed: dgrad, wgrad or both in high precision; use backend 'native'"
        )
    for name, gemm in (("dgrad", recipe.dgrad), ("wgrad", recipe.wgrad)):
        if gemm.is_fp8 != (gemm.a.is_fp8 or gemm.b.is_fp8):
            return (
                f"recipe {recipe.name!r} has {name} with one FP8 operand, which TransformerEngine does not have;"
                " allowed: both or none; use backend 'native'"
            )
    forward = {recipe.fprop.a.format, recipe.fprop.b.format}
    if forward != {E4M3}:
        return (
            f"recipe {recipe.name!r} has E5M2 in the forward pass, which TransformerEngine does not train with;"
            " allowed: HYBRID (E4M3 forward, E5M2 for gradients), E4M3; write HYBRID"
        )
    if len({gemm.a.format for gemm in (recipe.dgrad, recipe.wgrad) if gemm.is_fp8}) > 1:
        return f"recipe {recipe.name!r} gives dy two formats; allowed: one for dgrad and wgrad; use backend 'native'"
    if recipe.save_for_backward != "fp8":
        return (
            f"save_for_backward={recipe.save_for_backward!r} with backend 'transformer_engine', which keeps FP8 codes;"
            " allowed: fp8; leave it out, or use backend 'native'"
        )
    if recipe.pow2_scales and recipe.is_delayed:
        return (
            "pow2_scales=True with delayed scaling, which TransformerEngine does not have; allowed: False, or recipes"
            " tensorwise and blockwise"
        )
    return _other_accumulation(recipe, kind)


def _other_accumulation(recipe: Recipe, kind: str) -> str | None:
    """Its classes fix how each GEMM accumulates, as the recipe of that name does, but for fprop of tensorwise."""
    own = get(kind)
    for name in ("fprop", "dgrad", "wgrad"):
        gemm, has = getattr(recipe, name), getattr(own, name).fast_accum
        if gemm.is_fp8 and gemm.fast_accum is not has and (kind, name) != ("tensorwise", "fprop"):
            return (
                f"recipe {recipe.name!r} has fast_accum={gemm.fast_accum} in {name}, which TransformerEngine computes"
                f" with {has} under {kind}; allowed: {has}; leave it out, or use backend 'native'"
            )
    return None


def odd_dimensions(shape: tuple[int, int], recipe: Recipe) -> str | None:
    """Why a weight of this shape does not fit the recipe's blocks; None if it does."""
    multiple = _MULTIPLES.get(kind_of(recipe), 16)
    odd = [n for n in reversed(shape) if n % multiple]
    if not odd:
        return None
    blocks = {128: f"{BLOCK_128x128} blocks", 32: f"{MX_1x32} blocks"}.get(multiple, "FP8 GEMM")
    return f"{' and '.join(map(str, odd))} not a multiple of {multiple}, which {blocks} of TransformerEngine need"


def build(described: TeRecipe) -> Any:
    """The recipe object. Imports TransformerEngine. Raises PlanError for a class that this version does not have."""
    from transformer_engine.common import recipe as te

    cls = getattr(te, described.name, None)
    if cls is None:
        raise PlanError(f"this TransformerEngine has no {described.name}; install a newer one: pip install -U")
    fields = {**described.fields, "fp8_format": te.Format[described.fields["fp8_format"]]}
    if described.name == "Float8BlockScaling" and described.pow2_scales is not None:
        fields["use_f32_scales"] = not described.pow2_scales
    if described.name == "Float8CurrentScaling" and described.fast_accum is not None:
        fields["fp8_gemm_fprop"] = te.MMParams(use_split_accumulator=not described.fast_accum)
    made = cls(**fields)
    if described.pow2_scales is not None:
        # The quantisers read these; the keyword only sets what they are by default, when the class is made.
        for name in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
            setattr(made, name, te.QParams(power_2_scale=described.pow2_scales))
    return made
