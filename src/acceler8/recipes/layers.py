"""One recipe per pattern of layer names: an ordered list of which the first pattern that fits a layer decides.

    {"*.mlp.*": "tensorwise", "layers.0": None, "*": "rowwise"}

A pattern is a name, a dotted prefix or suffix of one, or a glob, as in ``skip``. None is high precision, and so is a
layer that no pattern fits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from acceler8.errors import RecipeError
from acceler8.recipes.recipe import DelayedScaling, Recipe
from acceler8.recipes.registry import resolve

HIGH_PRECISION = "none"
"""How a pattern's recipe is written where None cannot be."""


def matches(name: str, pattern: str) -> bool:
    """True if ``pattern`` is the name, a dotted suffix or prefix of it, or a glob that fits it."""
    if any(c in pattern for c in "*?["):
        return fnmatchcase(name, pattern)
    return name == pattern or name.endswith("." + pattern) or name.startswith(pattern + ".")


@dataclass(frozen=True)
class LayerRecipes:
    """``(pattern, recipe)`` in the order in which they are asked; recipe None is high precision.

    Raises: RecipeError for no pattern, one that is empty or there twice, what is no recipe, and delayed recipes that
        differ in more than ``margin``: the amax histories of a model are one tensor.
    """

    patterns: tuple[tuple[str, Recipe | None], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "patterns", tuple((pattern, recipe) for pattern, recipe in self.patterns))
        if not self.patterns:
            raise RecipeError('recipe got no pattern; allowed: one or more, such as {"*.mlp.*": "tensorwise"}')
        seen: set[str] = set()
        for pattern, recipe in self.patterns:
            if not isinstance(pattern, str) or not pattern.strip():
                raise RecipeError(f"recipe got the pattern {pattern!r}; allowed: a layer name or a glob; '*' is all")
            if pattern in seen:
                raise RecipeError(f"recipe got the pattern {pattern!r} twice; the first would decide: leave one out")
            if recipe is not None and not isinstance(recipe, Recipe):
                raise RecipeError(f"pattern {pattern!r} got a {type(recipe).__name__}; allowed: a Recipe or None")
            seen.add(pattern)
        self._check_histories()

    def _check_histories(self) -> None:
        first: tuple[str, DelayedScaling] | None = None
        for pattern, recipe in self.patterns:
            if recipe is None or not isinstance(scaling := recipe.scaling, DelayedScaling):
                continue
            first = first or (pattern, scaling)
            for key in ("amax_history_len", "amax_compute_algo", "interval"):
                was, now = getattr(first[1], key), getattr(scaling, key)
                if was != now:
                    raise RecipeError(
                        f"{key} is {was!r} for {first[0]!r} and {now!r} for {pattern!r}; allowed: one for all delayed"
                        " recipes of a model, whose amax histories are one tensor; give both the same"
                    )

    @classmethod
    def of(cls, patterns: Mapping[str, str | Recipe | None]) -> LayerRecipes:
        """From a mapping of patterns to recipes, their names, or None (or ``"none"``)."""
        return cls(tuple((pattern, _resolve(pattern, recipe)) for pattern, recipe in patterns.items()))

    @property
    def name(self) -> str:
        """``*.mlp.*=tensorwise, *=rowwise``."""
        return ", ".join(f"{pattern}={recipe.name if recipe else HIGH_PRECISION}" for pattern, recipe in self.patterns)

    def find(self, layer: str) -> tuple[str | None, Recipe | None]:
        """The pattern that decides ``layer`` and its recipe; ``(None, None)`` if none fits."""
        return next((found for found in self.patterns if matches(layer, found[0])), (None, None))

    def and_skip(self, skip: tuple[str, ...]) -> LayerRecipes:
        """A copy in which every recipe also leaves out the layers in ``skip``."""
        return LayerRecipes(
            tuple((pattern, r.replace(skip=(*r.skip, *skip)) if r else None) for pattern, r in self.patterns)
        )

    def replace(self, **changes: Any) -> LayerRecipes:
        """A copy in which every recipe has these fields changed. Raises RecipeError naming the pattern."""
        changed = []
        for pattern, recipe in self.patterns:
            try:
                changed.append((pattern, recipe.replace(**changes) if recipe else None))
            except RecipeError as error:
                raise RecipeError(f"pattern {pattern!r}: {error}") from None
        return LayerRecipes(tuple(changed))

    def to_dict(self) -> dict[str, Any]:
        """JSON-able description; ``from_dict`` restores equal recipes."""
        layers = [[pattern, recipe.to_dict() if recipe else None] for pattern, recipe in self.patterns]
        return {"name": self.name, "layers": layers}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> LayerRecipes:
        """Inverse of ``to_dict``. Raises RecipeError."""
        layers = data.get("layers") if isinstance(data, dict) else None
        if not isinstance(layers, list) or not all(
            isinstance(pair, list | tuple) and len(pair) == 2 for pair in layers
        ):
            raise RecipeError("layers of the recipe are no list of [pattern, recipe]; write it with to_dict()")
        if extra := set(data) - {"name", "layers"}:
            raise RecipeError(f"the recipe got the key {min(extra)!r} beside layers; allowed: name, layers")
        return cls(tuple((pattern, None if recipe is None else Recipe.from_dict(recipe)) for pattern, recipe in layers))


def _resolve(pattern: str, recipe: Any) -> Recipe | None:
    if recipe is None or recipe == HIGH_PRECISION:
        return None
    try:
        return resolve(recipe)
    except RecipeError as error:
        raise RecipeError(f"pattern {pattern!r}: {error}") from None


def resolve_layers(recipe: Any) -> Recipe | LayerRecipes:
    """A recipe, or one per pattern, from a name, a Recipe, a mapping of patterns, or None for the default."""
    if isinstance(recipe, LayerRecipes):
        return recipe
    return LayerRecipes.of(recipe) if isinstance(recipe, Mapping) else resolve(recipe)


def recipe_of_layer(recipe: Recipe | LayerRecipes, layer: str) -> tuple[str | None, Recipe | None]:
    """The pattern (``*`` for a single recipe) that decides ``layer``, and its recipe; None is high precision."""
    return recipe.find(layer) if isinstance(recipe, LayerRecipes) else ("*", recipe)


def recipe_from_dict(data: dict[str, Any]) -> Recipe | LayerRecipes:
    """Inverse of ``to_dict`` of either. Raises RecipeError."""
    is_layers = isinstance(data, dict) and "layers" in data
    return LayerRecipes.from_dict(data) if is_layers else Recipe.from_dict(data)
