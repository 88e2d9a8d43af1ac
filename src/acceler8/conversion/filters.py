"""Which layers stay in high precision by default, and why.

The first and last matrix of a model and everything tied to them are where FP8 costs accuracy and gains least
(one layer of many, or a lookup); DeepSeek-V3, Llama-3.1-405B and torchao's defaults leave them too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn

from acceler8.recipes.layers import matches

HEAD_NAMES = ("lm_head", "embed_out", "output_projection", "classifier", "score", "head", "qa_outputs")
Filter = Callable[[str, nn.Module], bool]


def first_match(name: str, patterns: Iterable[str]) -> str | None:
    """The first pattern that fits ``name``."""
    return next((p for p in patterns if matches(name, p)), None)


def output_heads(model: nn.Module) -> dict[int, str]:
    """For the ``id`` of each output-head layer, how it was recognised.

    Asked of the model (``get_output_embeddings``, as in transformers), or by name; if neither finds one, by shape:
    the one layer with as many outputs as an embedding of the model has entries. (Several such layers are the MLPs
    of a model whose vocabulary happens to be as wide.)
    """
    heads: dict[int, str] = {}
    linear = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.Linear)]
    for module in model.modules():
        if hasattr(type(module), "get_output_embeddings"):
            heads[id(module.get_output_embeddings())] = "output head (get_output_embeddings)"  # type: ignore[operator]
    for name, module in linear:
        if name.rpartition(".")[2] in HEAD_NAMES:
            heads.setdefault(id(module), "output head (by its name)")
    if not any(id(module) in heads for _, module in linear):
        vocabularies = {m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)}
        wide = [m for _, m in linear if m.out_features in vocabularies and m.out_features > m.in_features]
        if len(wide) == 1:
            heads[id(wide[0])] = "output head (as wide as the vocabulary)"
    return heads


def tied_names(model: nn.Module) -> list[tuple[str, ...]]:
    """Groups of parameter names that share one Parameter."""
    by_id: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_id.setdefault(id(parameter), []).append(name)
    return [tuple(names) for names in by_id.values() if len(names) > 1]
