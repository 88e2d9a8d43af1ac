"""The parts of a recipe.

A linear layer has three GEMMs, each of two operands:

    fprop   y[M, N]  = x[M, K]   @ w[N, K].T        contracts K (in_features)
    dgrad   dx[M, K] = dy[M, N]  @ w[N, K]          contracts N (out_features)
    wgrad   dw[N, K] = dy[M, N].T @ x[M, K]         contracts M (tokens)

A recipe names a format for each of the six operands, or None for high precision. A GEMM runs in FP8 if both
of its operands are FP8. If only one is, the GEMM runs in high precision on that operand's dequantised values:
this is how activations are kept for backward in FP8 while every GEMM stays in 16 bit. What wgrad reads of
``x`` is what is saved for backward.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from acceler8.errors import RecipeError, unknown_name
from acceler8.formats import E4M3, E5M2, FORMATS, Format
from acceler8.scaling import (
    GRANULARITIES,
    ROWWISE,
    TENSORWISE,
    BLOCK_1x128,
    BLOCK_128x128,
    Granularity,
    MX_1x32,
)

Role = Literal["x", "w", "dy"]
_GEMM_ROLES: dict[str, tuple[Role, Role]] = {"fprop": ("x", "w"), "dgrad": ("dy", "w"), "wgrad": ("dy", "x")}
SAVE_POLICIES = ("fp8", "fp8_compressed", "bf16")
_COMPRESSED = "inputs of norms and MLPs' activations in FP8 (1x128), with what follows made again; other FP8 codes"
_GRANULARITY_PAIRS = {
    "x": (TENSORWISE, ROWWISE, BLOCK_1x128, MX_1x32),
    "dy": (TENSORWISE, ROWWISE, BLOCK_1x128, MX_1x32),
    "w": (TENSORWISE, ROWWISE, BLOCK_128x128, MX_1x32),
}


@dataclass(frozen=True, kw_only=True)
class Operand:
    """One operand of a GEMM: ``format`` None keeps it in high precision."""

    format: Format | None = None
    granularity: Granularity = TENSORWISE

    @property
    def is_fp8(self) -> bool:
        """True if the operand is quantised."""
        return self.format is not None

    def __str__(self) -> str:
        return f"{self.format} {self.granularity}" if self.format else "high precision"


@dataclass(frozen=True, kw_only=True)
class Gemm:
    """One GEMM: its two operands in the order of the formulas above."""

    a: Operand
    b: Operand
    fast_accum: bool = False
    """Accumulate in Hopper's ~14-bit tensor-core registers: faster, less exact."""

    @property
    def is_fp8(self) -> bool:
        """True if the GEMM itself runs on FP8 operands."""
        return self.a.is_fp8 and self.b.is_fp8


@dataclass(frozen=True, kw_only=True)
class CurrentScaling:
    """Each scale comes from the amax of the tensor that it scales."""


@dataclass(frozen=True, kw_only=True)
class DelayedScaling:
    """Each scale comes from amaxes of earlier steps. Tensorwise only."""

    amax_history_len: int = 1024
    """Steps that the history holds."""
    amax_compute_algo: Literal["max", "most_recent"] = "max"
    """How the history becomes one amax."""
    margin: int = 0
    """Powers of two of headroom: scale = fmt.max * 2**-margin / amax."""
    interval: int = 1
    """Steps between two updates of the amax in use."""

    def __post_init__(self) -> None:
        for name in ("amax_history_len", "interval"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise RecipeError(f"{name}={value!r}; allowed: an integer of 1 or more")
        if not isinstance(self.margin, int) or not -16 <= self.margin <= 16:
            raise RecipeError(f"margin={self.margin!r}; allowed: an integer from -16 to 16")
        if self.amax_compute_algo not in ("max", "most_recent"):
            raise RecipeError(unknown_name("amax_compute_algo", self.amax_compute_algo, ("max", "most_recent")))


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A complete, checked description of FP8 training for linear layers.

    Derive variants with ``recipe.replace(...)`` or ``recipe.with_gemms(wgrad=False)``. Raises RecipeError for
    parts that contradict each other.
    """

    name: str
    fprop: Gemm
    dgrad: Gemm
    wgrad: Gemm
    scaling: CurrentScaling | DelayedScaling = field(default_factory=CurrentScaling)
    pow2_scales: bool = False
    """Round scales down to powers of two."""
    eval: Literal["high_precision", "fp8"] = "high_precision"
    """What a layer in eval() mode computes in."""
    save_for_backward: Literal["fp8", "fp8_compressed", "bf16"] = "fp8"
    """What stays between forward and backward: ``fp8``, the codes that wgrad multiplies, or an input that its maker
    keeps anyway; ``fp8_compressed``, also the inputs of MLPs' activations and of norms in FP8, with a scale for 128
    elements of a row, and what follows them made again; ``bf16``, inputs as they are, cast in backward."""
    skip: tuple[str, ...] = ()
    """Layers that stay in high precision: a name, a dotted prefix or suffix of one, or a glob (``layers.0.*``)."""

    def __post_init__(self) -> None:
        if self.eval not in ("high_precision", "fp8"):
            raise RecipeError(unknown_name("eval policy", self.eval, ("high_precision", "fp8")))
        if self.save_for_backward not in SAVE_POLICIES:
            raise RecipeError(unknown_name("save_for_backward", self.save_for_backward, SAVE_POLICIES))
        if self.save_for_backward == "bf16" and self.wgrad.b.is_fp8 and not self.wgrad.is_fp8:
            raise RecipeError(
                f"save_for_backward='bf16' with recipe {self.name!r}, whose wgrad reads x from FP8 in high precision;"
                " allowed: fp8, fp8_compressed"
            )
        if not isinstance(self.pow2_scales, bool):
            raise RecipeError(f"pow2_scales={self.pow2_scales!r}; allowed: True, False")
        if isinstance(self.skip, str):
            raise RecipeError(f"skip={self.skip!r}; allowed: a tuple of layer names; write skip=({self.skip!r},)")
        if not all(isinstance(s, str) for s in self.skip):
            raise RecipeError(f"skip={self.skip!r}; allowed: a tuple of layer names, such as ('lm_head', 'layers.0.*')")
        object.__setattr__(self, "skip", tuple(self.skip))
        for gemm_name, roles in _GEMM_ROLES.items():
            gemm: Gemm = getattr(self, gemm_name)
            for role, operand in zip(roles, (gemm.a, gemm.b), strict=True):
                self._check_operand(gemm_name, role, operand)
            if gemm.is_fp8 and gemm.a.granularity is BLOCK_1x128 and E5M2 in (gemm.a.format, gemm.b.format):
                raise RecipeError(f"{gemm_name} got E5M2 with 1x128 scales; allowed: E4M3, all that GPUs multiply so")
            if gemm.is_fp8 and gemm.a.format is gemm.b.format is E5M2:
                raise RecipeError(f"{gemm_name} got E5M2 x E5M2, which no GPU multiplies; give one operand E4M3")
        self._check_shared_casts()

    def _check_operand(self, gemm: str, role: Role, operand: Operand) -> None:
        if not operand.is_fp8:
            return
        if operand.granularity not in _GRANULARITY_PAIRS[role]:
            allowed = ", ".join(map(str, _GRANULARITY_PAIRS[role]))
            raise RecipeError(f"{gemm}: {role} has granularity {operand.granularity}; allowed for {role}: {allowed}")
        if self.is_delayed and operand.granularity is not TENSORWISE:
            raise RecipeError(
                f"{gemm}: {role} has granularity {operand.granularity} with delayed scaling; allowed: tensorwise"
            )

    def _check_shared_casts(self) -> None:
        """Both uses of x, w and dy are made by one cast, so they share a granularity."""
        for role, first, second in (
            ("x", self.fprop.a, self.wgrad.b),
            ("w", self.fprop.b, self.dgrad.b),
            ("dy", self.dgrad.a, self.wgrad.a),
        ):
            if first.is_fp8 and second.is_fp8 and first.granularity is not second.granularity:
                raise RecipeError(
                    f"{role} has granularities {first.granularity} and {second.granularity}; allowed: one for both"
                )
        for gemm_name in _GEMM_ROLES:
            gemm: Gemm = getattr(self, gemm_name)
            kinds = gemm.a.granularity, gemm.b.granularity
            if gemm.is_fp8 and kinds[0] is not kinds[1] and kinds != (BLOCK_1x128, BLOCK_128x128):
                raise RecipeError(f"{gemm_name} pairs granularities {gemm.a.granularity} and {gemm.b.granularity}")

    @property
    def is_delayed(self) -> bool:
        """True if scales come from earlier steps."""
        return isinstance(self.scaling, DelayedScaling)

    @property
    def margin(self) -> int:
        """Powers of two of headroom in the scales."""
        return self.scaling.margin if isinstance(self.scaling, DelayedScaling) else 0

    @property
    def granularity(self) -> Granularity:
        """Granularity of the activations, for tables."""
        return next((o.granularity for o in (self.fprop.a, self.wgrad.b, self.dgrad.a) if o.is_fp8), TENSORWISE)

    @property
    def fp8_gemms(self) -> tuple[str, ...]:
        """Names of the GEMMs that run in FP8."""
        return tuple(name for name in _GEMM_ROLES if getattr(self, name).is_fp8)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a plan should say about this recipe."""
        notes = []
        if self.fprop.a.format is E5M2 and self.wgrad.b.format is E4M3:
            notes.append("wgrad re-quantises x in E4M3: no GPU multiplies E5M2 x E5M2")
        saved = self.wgrad.b
        if saved.is_fp8 and not self.wgrad.is_fp8:
            notes.append(f"x is kept for backward in {saved}; wgrad runs in high precision on its dequantised values")
        if self.save_for_backward == "fp8_compressed":
            notes.append(f"kept for backward: {_COMPRESSED}")
        elif self.save_for_backward == "bf16":
            notes.append("kept for backward: inputs as they are, cast again for wgrad")
        return tuple(notes)

    def replace(self, **changes: Any) -> Recipe:
        """A copy with fields changed. Raises RecipeError for an unknown field; the nearest valid one is named."""
        valid = [f.name for f in dataclasses.fields(self)]
        for key in changes:
            if key not in valid:
                raise RecipeError(unknown_name("recipe field", key, valid))
        return dataclasses.replace(self, **changes)

    def with_gemms(self, *, fprop: bool = True, dgrad: bool = True, wgrad: bool = True) -> Recipe:
        """A copy with the GEMMs given as False in high precision, on operands that are not quantised."""
        plain = Gemm(a=Operand(), b=Operand())
        for name, on in (("fprop", fprop), ("dgrad", dgrad), ("wgrad", wgrad)):
            if not isinstance(on, bool):
                raise RecipeError(f"{name}={on!r}; allowed: True, False")
        off = {n: plain for n, on in (("fprop", fprop), ("dgrad", dgrad), ("wgrad", wgrad)) if not on}
        return self.replace(**off)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able description; ``from_dict`` restores an equal recipe."""
        gemms = {}
        for name in _GEMM_ROLES:
            gemm: Gemm = getattr(self, name)
            gemms[name] = {
                side: {"format": o.format.name, "granularity": o.granularity.name} if o.format else None
                for side, o in (("a", gemm.a), ("b", gemm.b))
            } | {"fast_accum": gemm.fast_accum}
        scaling = {"time": "delayed", **dataclasses.asdict(self.scaling)} if self.is_delayed else {"time": "current"}
        rest: dict[str, Any] = {"pow2_scales": self.pow2_scales, "eval": self.eval, "skip": list(self.skip)}
        rest["save_for_backward"] = self.save_for_backward
        return {"name": self.name, **gemms, "scaling": scaling, **rest}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Recipe:
        """Inverse of ``to_dict``. Raises RecipeError for an unknown key, format or granularity."""
        fields = {f.name: f.default for f in dataclasses.fields(cls)}
        required = [*(n for n, default in fields.items() if default is dataclasses.MISSING), "scaling"]
        _check_keys("recipe", data, required, [n for n in fields if n not in required])
        data = dict(data)
        for name in _GEMM_ROLES:
            gemm = data[name]
            _check_keys(f"{name} of the recipe", gemm, ("a", "b"), ("fast_accum",))
            sides = {side: _operand_from_dict(f"{name}.{side}", gemm[side]) for side in ("a", "b")}
            data[name] = Gemm(**sides, fast_accum=gemm.get("fast_accum", False))
        data["scaling"] = _scaling_from_dict(data["scaling"])
        return cls(**data)


def _check_keys(what: str, data: Any, required: Iterable[str], optional: Iterable[str]) -> None:
    required = tuple(required)
    valid = (*required, *optional)
    if not isinstance(data, dict):
        raise RecipeError(f"{what} is a {type(data).__name__}; allowed: a mapping with {', '.join(valid)}")
    for key in data:
        if key not in valid:
            raise RecipeError(unknown_name(f"key in {what}", key, valid))
    if missing := [key for key in required if key not in data]:
        raise RecipeError(f"{what} lacks {', '.join(missing)}; write it with Recipe.to_dict()")


def _scaling_from_dict(data: Any) -> CurrentScaling | DelayedScaling:
    _check_keys("scaling of the recipe", data, ("time",), DelayedScaling.__dataclass_fields__)
    time, rest = data["time"], {key: value for key, value in data.items() if key != "time"}
    if time not in ("current", "delayed"):
        raise RecipeError(unknown_name("time of scaling", time, ("current", "delayed")))
    if time == "current" and rest:
        raise RecipeError(f"current scaling got {', '.join(rest)}; allowed with delayed scaling only")
    return DelayedScaling(**rest) if time == "delayed" else CurrentScaling()


def _operand_from_dict(what: str, data: Any) -> Operand:
    if data is None:
        return Operand()
    _check_keys(f"{what} of the recipe", data, ("format", "granularity"), ())
    if data["format"] not in FORMATS:
        raise RecipeError(unknown_name("format", data["format"], FORMATS))
    if data["granularity"] not in GRANULARITIES:
        raise RecipeError(unknown_name("granularity", data["granularity"], GRANULARITIES))
    return Operand(format=FORMATS[data["format"]], granularity=GRANULARITIES[data["granularity"]])


__all__ = ["E4M3", "CurrentScaling", "DelayedScaling", "Gemm", "Operand", "Recipe"]
