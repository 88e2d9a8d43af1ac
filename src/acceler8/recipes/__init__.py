"""What to compute in FP8, and how: a frozen vocabulary, checked once."""

from __future__ import annotations

from acceler8.recipes.layers import LayerRecipes
from acceler8.recipes.recipe import CurrentScaling, DelayedScaling, Gemm, Operand, Recipe
from acceler8.recipes.registry import get, names, resolve

__all__ = ["CurrentScaling", "DelayedScaling", "Gemm", "LayerRecipes", "Operand", "Recipe", "get", "names", "resolve"]
