"""Which layers stay in high precision by default, and why.

The first and last matrix of a model and everything tied to them are where FP8 costs accuracy and gains least
(one layer of many, or a lookup); DeepSeek-V3, Llama-3.1-405B and torchao's defaults leave them too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase

from torch import nn

HEAD_NAMES = ("lm_head", "embed_out", "output_projection", "classifier", "score", "head", "qa_outputs")
Filter = Callable[[str, nn.Module], bool]


def matches(name: str, pattern: str) -> bool:
    """True if ``pattern`` is the name, a dotted suffix or prefix of it, or a glob that fits it."""
    if any(c in pattern for c in "*?["):
        return fnmatchcase(name, pattern)
    return name == pattern or name.endswith("." + pattern) or name.startswith(pattern + ".")


def first_match(name: str, patterns: Iterable[str]) -> str | None:
    """The first pattern that fits ``name``."""
    return next((p for p in patterns if matches(name, p)), None)


def output_heads(model: nn.Module) -> dict[int, str]:
    """Id of each output-head layer -> how it was recognised.

    Asked of the model (``get_output_embeddings``, as in transformers), else by name, else by shape: as many
    outputs as an embedding of the model has entries.
    """
    heads: dict[int, str] = {}
    asked = getattr(model, "get_output_embeddings", None)
    if callable(asked):
        head = asked()
        if isinstance(head, nn.Module):
            heads[id(head)] = "output head (get_output_embeddings)"
    vocabularies = {m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)}
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or id(module) in heads:
            continue
        if name.rpartition(".")[2] in HEAD_NAMES:
            heads[id(module)] = "output head (by its name)"
        elif module.out_features in vocabularies and module.out_features > module.in_features:
            heads[id(module)] = "output head (as wide as the vocabulary)"
    return heads


def tied_names(model: nn.Module) -> list[tuple[str, ...]]:
    """Groups of parameter names that share one Parameter."""
    by_id: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_id.setdefault(id(parameter), []).append(name)
    return [tuple(names) for names in by_id.values() if len(names) > 1]
