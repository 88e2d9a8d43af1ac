"""FP8 by NVIDIA's TransformerEngine."""

from __future__ import annotations

from acceler8.backends.transformer_engine.backend import TransformerEngineBackend
from acceler8.backends.transformer_engine.options import TransformerEngineOptions, recipe_of_kwargs

__all__ = ["TransformerEngineBackend", "TransformerEngineOptions", "recipe_of_kwargs"]
